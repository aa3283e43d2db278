"""Text out of the files of packages."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from replayssm.demo.training import documents
from replayssm.demo.training.documents import Documents

LINE = 'Emma Woodhouse, handsome, clever, and rich, with a comfortable home and happy disposition.'


def r_database(chapters: int) -> bytes:
    """Return one vector of lines as R stores it: sizes, then strings behind a header, all deflated."""
    lines = ['EMMA', '']
    for chapter in range(chapters):
        lines += [f'CHAPTER {chapter + 1}', *[LINE] * 600]
    data = b'X\n' + struct.pack('>III', 3, 0x40201, 0x30500) + struct.pack('>I', 5) + b'UTF-8'
    data += struct.pack('>II', 16, len(lines))
    data += b''.join(struct.pack('>II', 0x40009, len(line)) + line.encode() for line in lines)
    return struct.pack('>I', len(data)) + zlib.compress(data)


def read(reader: Callable[[Path], Documents], path: Path, content: str | bytes) -> list[tuple[str, str]]:
    """Return the documents in a file of that content, alone in its folder."""
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return list(reader(path if path.suffix in ('.rdb', '.jsonl') else path.parent))


def test_pages_lose_their_navigation(tmp_path: Path) -> None:
    page = f'<head><title>x</title></head><nav><li>Up</nav><p>{LINE * 5}</p><pre>a = 1\n  b</pre><script>s()</script>'
    ((name, text),) = read(documents.html_pages, tmp_path / 'page.html', page)
    assert (name, text) == ('page.html', f'{LINE * 5}\n\na = 1\n  b')


def test_roles_become_their_text(tmp_path: Path) -> None:
    page = f'.. index:: print\n\nUse :func:`print` or :ref:`files <tut-files>`, :mod:`~os.path`. {LINE * 5}\n'
    ((_, text),) = read(documents.restructured_text, tmp_path / 'page.rst.txt', page)
    assert text.strip().startswith('Use print or files, os.path.')


def test_novels_are_cut_into_chapters(tmp_path: Path) -> None:
    chapters = read(documents.r_novels, tmp_path / 'Rdata.rdb', r_database(2) * 2)
    assert [name for name, _ in chapters] == ['Emma/1', 'Emma/2'] * 2
    assert chapters[0][1].startswith(f'CHAPTER 1\n{LINE}\n')


def test_verses_make_chapters(tmp_path: Path) -> None:
    verses = [{'book': 'Ruth', 'chapter': chapter, 'verse': 1, 'text': LINE} for chapter in (1, 1, 2)]
    content = '\n'.join(map(json.dumps, verses))
    chapters = read(documents.bible_chapters, tmp_path / 'kjv.jsonl', content)
    assert chapters == [('Ruth 1', f'Ruth 1\n\n{LINE}\n{LINE}'), ('Ruth 2', f'Ruth 2\n\n{LINE}')]


def test_definitions_that_hurt_are_left_out(tmp_path: Path) -> None:
    lines = (
        '00000001 04 n 01 interplay 0 001 @ 00039021 n 0000 | reciprocal action and reaction  ',
        '00000002 04 n 01 nastiness 0 001 @ 00039021 n 0000 | an offensive word  ',
        '  1 a licence',
    )
    assert read(documents.dictionary, tmp_path / 'data.noun', '\n'.join(lines)) == [
        ('data.noun/0', 'interplay (noun): reciprocal action and reaction')
    ]


@pytest.mark.parametrize('text', ['short', 'é' * 500, 'x' * 6000], ids=['short', 'not ASCII', 'one line'])
def test_what_nobody_reads_is_left_out(tmp_path: Path, text: str) -> None:
    assert read(documents.python_modules, tmp_path / 'module.py', text) == []
