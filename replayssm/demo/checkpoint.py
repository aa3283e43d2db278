"""Demo checkpoints by name: those that come with the package, and those written into the user's cache."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from replayssm.demo.specs import SPECS, DemoSpec, Glm5NextSpec
from replayssm.demo.trained import TRAINED

CheckpointDtype = Literal['float32', 'bfloat16']
SHIPPED_DTYPE: CheckpointDtype = 'bfloat16'


def names() -> tuple[str, ...]:
    """Return the names of all demo models, the trained ones first."""
    return (*TRAINED, *SPECS)


def ensure(name: str, dtype: CheckpointDtype | None = None, cache_dir: Path | None = None) -> Path:
    """Return the folder of demo model `name`, written first when it is not there yet.

    Safe to call from several processes at once: the folder appears complete or not at all. It is to be read only: that
    of a trained model is part of this package.

    Args:
        dtype: of the weights in the files. An engine computes in the type that its own option says. `None` is
            bfloat16 for trained models, as which they come, and float32 for random ones.
        cache_dir: parent of folders that are written; `None` is `$XDG_CACHE_HOME/replayssm`, by default
            `~/.cache/replayssm`.

    Raises:
        ValueError: unknown name or dtype.
    """
    if name not in names():
        raise ValueError(f'name: expected one of {", ".join(names())}, got {name!r}')
    if dtype not in (None, *get_args(CheckpointDtype)):
        raise ValueError(f'dtype: expected one of {", ".join(get_args(CheckpointDtype))}, got {dtype!r}')
    if name in TRAINED:
        shipped = TRAINED[name]
        if dtype in (None, SHIPPED_DTYPE):
            return shipped
        return _written(f'{name}-{dtype}-{_digest(shipped)}', partial(convert, shipped, dtype), cache_dir)
    spec, chosen = SPECS[name], dtype or 'float32'
    return _written(f'{name}-{chosen}-{_version(spec)}', partial(write, spec, chosen), cache_dir)


def _written(label: str, write_into: Callable[[Path], None], cache_dir: Path | None) -> Path:
    """Return the folder `label` of the cache, filled by `write_into` when it is not there yet."""
    parent = cache_dir or default_cache_dir()
    folder = parent / label
    if folder.is_dir():
        return folder
    parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f'.{label}-', dir=parent))
    try:
        write_into(scratch)
        # Fails when another process was faster, whose folder is just as good.
        with contextlib.suppress(OSError):
            scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    if not folder.is_dir():
        raise OSError(f'cannot create {folder}')
    return folder


def default_cache_dir(env: Mapping[str, str] = os.environ) -> Path:
    """Return this project's folder in the user's cache.

    Raises:
        ValueError: `XDG_CACHE_HOME` is not an absolute path.
    """
    home = env.get('XDG_CACHE_HOME')
    if not home:
        return Path.home() / '.cache' / 'replayssm'
    if not Path(home).is_absolute():
        raise ValueError(f'XDG_CACHE_HOME: expected an absolute path, got {home!r}')
    return Path(home) / 'replayssm'


def _version(spec: DemoSpec | Glm5NextSpec) -> str:
    """Return a digest of everything that the files depend on: the spec and this package's code."""
    digest = hashlib.sha256(repr(spec).encode())
    for source in sorted(Path(__file__).parent.glob('*.py')):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:10]


def _digest(folder: Path) -> str:
    """Return a digest of the files of a checkpoint."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:10]


def convert(source: Path, dtype: CheckpointDtype, folder: Path) -> None:
    """Write the checkpoint in `source` with weights of another type into an existing folder."""
    import torch
    from safetensors.torch import load_file, save_file

    for file in source.iterdir():
        if file.suffix != '.safetensors':
            # Contents alone: an installed file may be read-only.
            shutil.copyfile(file, folder / file.name)
    path = folder / 'config.json'
    path.write_text(path.read_text().replace(f'"dtype": "{SHIPPED_DTYPE}"', f'"dtype": "{dtype}"'))
    tensors = {
        name: weight.to(getattr(torch, dtype)) for name, weight in load_file(source / 'model.safetensors').items()
    }
    save_file(tensors, folder / 'model.safetensors', metadata={'format': 'pt'})


def write(spec: DemoSpec | Glm5NextSpec, dtype: CheckpointDtype, folder: Path) -> None:
    """Write the checkpoint of `spec` into an existing folder."""
    import torch
    from safetensors.torch import save_file

    from replayssm.demo import glm5_next
    from replayssm.demo.model_config import build_config, weight_shapes
    from replayssm.demo.tokenizer import SPECIAL_TOKENS, build_tokenizer, readable_tokens
    from replayssm.demo.weights import build_weights

    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(folder)
    token_ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    if isinstance(spec, Glm5NextSpec):
        config = glm5_next.build_config(spec, dtype, token_ids)
    else:
        config = build_config(spec, dtype, token_ids)
    (folder / 'config.json').write_text(json.dumps(config, indent=2) + '\n')
    if isinstance(spec, Glm5NextSpec):
        weights = glm5_next.build_weights(spec, readable_tokens(tokenizer))
    else:
        weights = build_weights(spec, weight_shapes(folder), readable_tokens(tokenizer))
    tensors = {name: weight.to(getattr(torch, dtype)).contiguous() for name, weight in weights.items()}
    save_file(tensors, folder / 'model.safetensors', metadata={'format': 'pt'})
