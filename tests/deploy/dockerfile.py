"""Just enough of a Dockerfile's syntax for its tests."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / 'deploy/docker'
DOCKERFILES = (FOLDER / 'Dockerfile', FOLDER / 'Dockerfile.cpu')


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction, its lines joined.

    Attributes:
        stage: Number of the stage, from 0; -1 before the first.
    """

    name: str
    text: str
    stage: int


def instructions(path: Path) -> list[Instruction]:
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.lstrip().startswith('#')]
    found: list[Instruction] = []
    stage = -1
    for line in re.sub(r'\\\n\s*', ' ', '\n'.join(lines)).splitlines():
        name, _, text = line.partition(' ')
        stage += name == 'FROM'
        found.append(Instruction(name, text.strip(), stage))
    return found


def copied(path: Path) -> list[tuple[list[str], str]]:
    """Return the COPY instructions that read the build context, as sources and destination."""
    words = [one.text.split() for one in instructions(path) if one.name == 'COPY' and '--from=' not in one.text]
    return [(sources, destination) for *sources, destination in words]


def build_context(path: Path, target: Path) -> None:
    """Copy into `target` what the build stage, whose WORKDIR it stands for, gets from the build context."""
    for sources, destination in copied(path):
        if destination.startswith('/'):
            continue
        for source in sources:
            into = target / destination / (Path(source).name if destination.endswith('/') else '')
            into.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, into, ignore=shutil.ignore_patterns('__pycache__'))
            else:
                shutil.copy2(ROOT / source, into)
