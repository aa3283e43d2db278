"""What the repository's files may not contain, and how long they may be."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]

MACHINE_PATH = re.compile(r'(?<![\w.$}~-])/(?:work|root|Users)/[\w.-]+')
REGISTRY = re.compile(
    r'pypi\.org|pythonhosted|npmjs|debian\.org|ubuntu\.com|(?:extra-)?index-url\s*[=:]', re.IGNORECASE
)
MAX_LINES = 300


def tracked(*patterns: str) -> list[Path]:
    listing = subprocess.run(['git', 'ls-files', '-z', *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listing.stdout.split('\0') if name and (ROOT / name).is_file()]


def lines_that_match(pattern: re.Pattern[str]) -> list[str]:
    found = []
    for path in tracked():
        if path == Path(__file__):
            continue
        try:
            lines = path.read_text().splitlines()
        except UnicodeDecodeError:
            continue
        found += [f'{path.relative_to(ROOT)}:{i}: {line}' for i, line in enumerate(lines, 1) if pattern.search(line)]
    return found


@pytest.mark.parametrize('pattern', [MACHINE_PATH, REGISTRY], ids=['machine paths', 'registry hosts'])
def test_no_file_names_the_machine_it_was_written_on(pattern: re.Pattern[str]) -> None:
    assert lines_that_match(pattern) == []


def test_files_have_one_job() -> None:
    long = {path.relative_to(ROOT): len(path.read_text().splitlines()) for path in tracked('*.py')}
    assert {str(path): count for path, count in long.items() if count > MAX_LINES * 1.1} == {}


def test_every_requirement_is_pinned_with_a_hash() -> None:
    text = (ROOT / 'requirements.txt').read_text().replace('\\\n', ' ')
    entries = [line for line in text.splitlines() if line and not line.startswith('#')]
    for entry in entries:
        requirement, *hashes = re.split(r'\s+--hash=', entry)
        assert [specifier.operator for specifier in Requirement(requirement).specifier] == ['=='], entry
        assert hashes, requirement
    pins = {str(Requirement(entry.split(' --hash')[0].strip())).split(';')[0].strip() for entry in entries}
    assert {'lmdeploy==0.18.0', 'torch==2.12.1', 'triton==3.7.1', 'transformers==5.24.0', 'ray==2.60.0'} <= {
        re.sub(r'\[.*\]', '', pin) for pin in pins
    }


def test_every_make_target_is_described() -> None:
    targets = re.findall(r'^([a-z-]+):(.*)$', (ROOT / 'Makefile').read_text(), re.MULTILINE)
    assert targets
    assert [name for name, rest in targets if '## ' not in rest] == []


def test_make_lists_every_target() -> None:
    listing = subprocess.run(['make', '--silent'], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    listed = {line.split()[0] for line in listing.splitlines()}
    assert {'serve', 'test', 'lint', 'type', 'format', 'demo-model', 'doctor', 'docs', 'test-gpu', 'clean'} <= listed


def test_every_module_that_make_runs_exists() -> None:
    modules = re.findall(r'python -m ((?:actors|replayssm|tests)[\w.]*)', (ROOT / 'Makefile').read_text())
    assert modules
    paths = {name: ROOT / name.replace('.', '/') for name in modules}
    files = {name: (path.with_suffix('.py'), path / '__main__.py') for name, path in paths.items()}
    assert [name for name, candidates in files.items() if not any(file.is_file() for file in candidates)] == []
