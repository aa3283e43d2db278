"""The images: linted, and their install step run in a clean virtual environment. No test here builds them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.deploy.dockerfile import DOCKERFILES, FOLDER, ROOT, build_context, copied, instructions
from tests.patience import LIVENESS_S

BIN = Path(sys.executable).parent


@pytest.fixture(params=DOCKERFILES, ids=lambda path: path.name)
def dockerfile(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


def test_hadolint_finds_nothing(dockerfile: Path) -> None:
    done = subprocess.run(
        [BIN / 'hadolint', dockerfile], capture_output=True, text=True, timeout=LIVENESS_S, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, '')


def test_base_images_are_pinned(dockerfile: Path) -> None:
    bases = [one.text.split()[0] for one in instructions(dockerfile) if one.name == 'FROM']
    stages = {one.text.split()[-1] for one in instructions(dockerfile) if one.name == 'FROM' and ' AS ' in one.text}
    outside = [base for base in bases if base not in stages]
    assert outside
    arguments = dict(one.text.split('=') for one in instructions(dockerfile) if one.name == 'ARG' and '=' in one.text)
    for base in outside:
        tag = base.partition(':')[2].replace('${CUDA}', arguments.get('CUDA', ''))
        assert tag.split('-')[0].count('.') == 2, base


def test_cuda_is_the_one_that_torch_is_built_for() -> None:
    (cuda,) = [one.text for one in instructions(DOCKERFILES[0]) if one.name == 'ARG' and one.text.startswith('CUDA=')]
    major_minor = '.'.join(cuda.partition('=')[2].split('.')[:2])
    assert f'\ncuda-toolkit=={major_minor}.' in (ROOT / 'requirements.txt').read_text()


def test_it_runs_without_root_and_checks_itself_without_wget(dockerfile: Path) -> None:
    last = {one.name: one for one in instructions(dockerfile)}
    final_stage = max(one.stage for one in instructions(dockerfile))
    assert (last['USER'].text, last['USER'].stage) == ('1000', final_stage)
    assert last['HEALTHCHECK'].stage == final_stage
    command = json.loads(last['HEALTHCHECK'].text.partition('CMD ')[2])
    assert command[:2] == ['python', '-c']
    compile(command[2], 'healthcheck', 'exec')


def test_kuberay_finds_ray_in_a_login_shell(dockerfile: Path) -> None:
    (venv,) = {one.text.split()[-1] for one in instructions(dockerfile) if 'install.sh /' in one.text}
    (path,) = [target for sources, target in copied(dockerfile) if sources == ['deploy/docker/profile.sh']]
    assert path.startswith('/etc/profile.d/')
    found = subprocess.run(
        ['bash', '-c', f'. {FOLDER}/profile.sh && echo "$PATH"'],
        env={'PATH': '/bin'},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.startswith(f'{venv}/bin:')
    assert f'PATH={venv}/bin:' in ''.join(one.text for one in instructions(dockerfile) if one.name == 'ENV')


def test_what_is_copied_exists_and_is_in_the_build_context(dockerfile: Path) -> None:
    kept = {line[1:] for line in (ROOT / '.dockerignore').read_text().splitlines() if line.startswith('!')}
    for sources, _ in copied(dockerfile):
        for source in sources:
            assert (ROOT / source).exists()
            assert any(fnmatch(source.split('/')[0], pattern) for pattern in kept), source


def test_what_it_serves_by_default_is_in_it(dockerfile: Path) -> None:
    command = json.loads({one.name: one.text for one in instructions(dockerfile)}['CMD'])
    (target,) = [target for sources, target in copied(dockerfile) if sources == ['deploy']]
    assert command[:3] == ['python', '-m', 'actors.local']
    assert (ROOT / 'deploy' / Path(command[3]).relative_to(target)).is_file()


def make_wheel(folder: Path, module: str) -> None:
    """Write a wheel that stands for one built elsewhere."""
    info = f'{module}-1.0.dist-info'
    with zipfile.ZipFile(folder / f'{module}-1.0-py3-none-any.whl', 'w') as wheel:
        wheel.writestr(f'{module}.py', '')
        wheel.writestr(f'{info}/METADATA', f'Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n')
        wheel.writestr(f'{info}/WHEEL', 'Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n')
        wheel.writestr(f'{info}/RECORD', f'{module}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n')


def tracked(*folders: str) -> list[Path]:
    listing = subprocess.run(['git', 'ls-files', '-z', *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    return [Path(name) for name in listing.stdout.split('\0') if name]


def test_the_install_step_makes_a_working_environment(tmp_path: Path) -> None:
    """From what the Dockerfile copies and nothing else, with a wheel on top where FlashAttention-3 would be."""
    source, venv = tmp_path / 'src', tmp_path / 'venv'
    build_context(DOCKERFILES[0], source)
    make_wheel(source / 'deploy/docker/wheels', 'flash_attn_interface')
    environment = {name: value for name, value in os.environ.items() if not name.startswith(('PYTHON', 'VIRTUAL_ENV'))}
    environment['PATH'] = f'{BIN}{os.pathsep}{environment["PATH"]}'

    def run(*command: str | Path) -> str:
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIVENESS_S, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    try:
        run('bash', source / 'deploy/docker/install.sh', venv)
        shutil.rmtree(source)
        run(venv / 'bin/python', '-c', 'import actors.app')
        checks = {
            check['name']: check for check in json.loads(run(venv / 'bin/replayssm', 'doctor', '--json'))['checks']
        }
        assert checks['lmdeploy']['status'] == checks['ray']['status'] == checks['torch']['status'] == 'ok'
        assert checks['FlashAttention-3']['status'] == 'ok'
        site = Path(run(venv / 'bin/python', '-c', 'import actors; print(actors.__path__[0])').strip()).parent
        data = tracked('actors', 'replayssm')
        assert [str(path) for path in data if path.suffix != '.py' and not (site / path).is_file()] == []
        for program in ('ray', 'serve'):
            assert (venv / 'bin' / program).is_file()
        for tool in ('pytest', 'mypy', 'playwright'):
            assert not (venv / 'bin' / tool).exists(), 'tools for tests do not belong into an image'
    finally:
        shutil.rmtree(venv, ignore_errors=True)
