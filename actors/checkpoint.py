"""What a checkpoint says of its architecture, to tell whether its weights fit an engine that is already built."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_NOT_ARCHITECTURE = frozenset({'_name_or_path', 'transformers_version'})


class CheckpointMismatch(ValueError):
    """A checkpoint that cannot take another one's place; the message names what differs."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Configuration and tensor shapes of a checkpoint folder.

    Attributes:
        folder: Where it is.
        config: Fields of `config.json` by dotted path.
        shapes: Shape of every tensor; empty for a checkpoint without safetensors.
    """

    folder: str
    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def read(cls, folder: str) -> Checkpoint:
        """Read the configuration and the headers of the tensor files.

        Raises:
            CheckpointMismatch: `folder` holds no checkpoint.
        """
        try:
            config = json.loads((Path(folder) / 'config.json').read_text())
        except (OSError, ValueError) as error:
            raise CheckpointMismatch(f'path: got {folder!r}; no checkpoint there: {error}') from None
        return cls(folder, dict(_flat(config)), dict(_shapes(Path(folder))))

    def require_same_architecture(self, other: Checkpoint) -> None:
        """Check that the weights of `other` fit where these are.

        Raises:
            CheckpointMismatch: They do not.
        """
        for what, mine, theirs in (
            ('config.json', self.config, other.config),
            ('the shape of a tensor', self.shapes, other.shapes),
        ):
            for name in sorted(mine.keys() | theirs.keys()):
                here, there = mine.get(name), theirs.get(name)
                if here != there:
                    raise CheckpointMismatch(
                        f'path: got {other.folder!r}, which differs in {what}: {name} is {there}, expected {here}; '
                        'a checkpoint of another architecture needs a deployment of its own'
                    )


def _flat(config: Mapping[str, Any], path: str = '') -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if name in _NOT_ARCHITECTURE:
            continue
        if isinstance(value, dict):
            yield from _flat(value, f'{path}{name}.')
        else:
            yield f'{path}{name}', value


def _shapes(folder: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    for path in sorted(folder.glob('*.safetensors')):
        with path.open('rb') as file:
            # The format: eight bytes of length, then a JSON header.
            header = json.loads(file.read(int.from_bytes(file.read(8), 'little')))
        for name, tensor in header.items():
            if name != '__metadata__':
                yield name, tuple(tensor['shape'])
