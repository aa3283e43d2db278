"""Writing demo checkpoints into the user's cache."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

from replayssm.demo.specs import SPECS, DemoSpec, Glm5NextSpec

CheckpointDtype = Literal['float32', 'bfloat16']


def ensure(name: str, dtype: CheckpointDtype = 'float32', cache_dir: Path | None = None) -> Path:
    """Return the folder of demo model `name`, written first when it is not there yet.

    Safe to call from several processes at once: the folder appears complete or not at all.

    Args:
        cache_dir: parent of the folder; `None` is `$XDG_CACHE_HOME/replayssm`, by default `~/.cache/replayssm`.

    Raises:
        ValueError: unknown name or dtype.
    """
    if name not in SPECS:
        raise ValueError(f'name: expected one of {", ".join(SPECS)}, got {name!r}')
    if dtype not in get_args(CheckpointDtype):
        raise ValueError(f'dtype: expected one of {", ".join(get_args(CheckpointDtype))}, got {dtype!r}')
    parent = cache_dir or default_cache_dir()
    folder = parent / f'{name}-{dtype}-{_version(SPECS[name])}'
    if folder.is_dir():
        return folder
    parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f'.{name}-', dir=parent))
    try:
        write(SPECS[name], dtype, scratch)
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
