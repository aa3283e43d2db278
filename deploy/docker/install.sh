#!/usr/bin/env bash
# Install the package and what it needs at run time, pinned and hashed, into a new virtual environment.
#   deploy/docker/install.sh VENV
# Wheels in deploy/docker/wheels/ are installed on top, FlashAttention-3 for one: see the README there.
set -euo pipefail
venv=$1
cd "$(dirname "$0")/../.."

python3 -m venv "$venv"
uv() { "$venv/bin/uv" "$@"; }
"$venv/bin/python" -m pip install --quiet --no-cache-dir --require-hashes -r requirements-uv.txt
# pyproject.toml says what is needed, requirements.txt which release of it; tools for tests stay out.
uv pip install --quiet --python "$venv/bin/python" --require-hashes --constraint requirements.txt -r pyproject.toml
uv pip install --quiet --python "$venv/bin/python" --no-deps --no-build-isolation .

shopt -s nullglob
wheels=(deploy/docker/wheels/*.whl)
if [ "${#wheels[@]}" -gt 0 ]; then
    uv pip install --quiet --python "$venv/bin/python" --no-deps "${wheels[@]}"
fi
