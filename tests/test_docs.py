"""Documentation: links lead somewhere, and the two languages say the same things in the same places."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EN, ZH = ROOT / 'docs/en', ROOT / 'docs/zh'
PAGES = (ROOT / 'README.md', *sorted((ROOT / 'docs').rglob('*.md')))
GUIDES = sorted(path.name for path in EN.glob('*.md'))

LINK = re.compile(r'\]\(([^)\s]+)\)')
HEADING = re.compile(r'(#+) ')
FENCE = '```'


def lines(page: Path, in_code: bool) -> Iterator[str]:
    """Yield the lines inside code blocks, or those outside."""
    inside = False
    for line in page.read_text().splitlines():
        if line.startswith(FENCE):
            inside = not inside
        elif inside == in_code:
            yield line
    assert not inside, f'{page}: a code block has no end'


def prose(page: Path) -> Iterator[str]:
    return lines(page, in_code=False)


def code(page: Path) -> list[str]:
    """Return the lines of code blocks, without comments."""
    return [line.partition('#')[0].rstrip() for line in lines(page, in_code=True)]


def levels(page: Path) -> list[int]:
    return [len(match[1]) for line in prose(page) if (match := HEADING.match(line))]


def rows(page: Path) -> list[int]:
    """Return the number of cells of every table row."""
    return [line.count('|') for line in prose(page) if line.startswith('|')]


@pytest.mark.parametrize('page', PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_resolve(page: Path) -> None:
    targets = [target for line in prose(page) for target in LINK.findall(line) if '://' not in target]
    files = [page.parent / target.partition('#')[0] for target in targets if not target.startswith('#')]
    assert [str(file) for file in files if not file.exists()] == []


def test_both_languages_have_the_same_pages() -> None:
    assert GUIDES
    assert sorted(path.name for path in ZH.glob('*.md')) == GUIDES


@pytest.mark.parametrize('name', GUIDES)
def test_both_languages_have_the_same_structure(name: str) -> None:
    assert levels(ZH / name) == levels(EN / name)
    assert rows(ZH / name) == rows(EN / name)
    assert code(ZH / name) == code(EN / name)


@pytest.mark.parametrize('name', GUIDES)
def test_each_language_links_to_the_other(name: str) -> None:
    assert f'English · [中文](../zh/{name})' in (EN / name).read_text().splitlines()[:4]
    assert f'[English](../en/{name}) · 中文' in (ZH / name).read_text().splitlines()[:4]


@pytest.mark.parametrize('name', sorted(set(GUIDES) - {'README.md'}))
def test_every_guide_is_in_the_index(name: str) -> None:
    for index in (EN / 'README.md', ZH / 'README.md'):
        assert f'({name})' in index.read_text()
