"""Logits by transformers, in a process of its own: `python -m tests.models.transformers_logits IN OUT`."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from tests.patience import LIVENESS_S


def main() -> None:
    # With fla importable transformers chooses its Triton kernels, which need a GPU.
    sys.modules |= dict.fromkeys(('fla', 'causal_conv1d'))  # type: ignore[dict-item]
    from transformers import AutoModelForImageTextToText, logging

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    request = json.loads(Path(sys.argv[1]).read_text())
    logits = {}
    for folder, sequences in request.items():
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation='eager')
        with torch.inference_mode():
            logits[folder] = [model.eval()(torch.tensor([tokens])).logits[0] for tokens in sequences]
    torch.save(logits, sys.argv[2])


def reference_logits(sequences: Mapping[str, Sequence[Sequence[int]]]) -> dict[str, list[torch.Tensor]]:
    """Logits [tokens, vocabulary] of every sequence, by checkpoint folder."""
    with tempfile.TemporaryDirectory() as folder:
        request, result = Path(folder) / 'request.json', Path(folder) / 'result.pt'
        request.write_text(json.dumps(sequences))
        subprocess.run([sys.executable, '-m', __name__, request, result], check=True, timeout=LIVENESS_S)
        logits: dict[str, list[torch.Tensor]] = torch.load(result)
    return logits


if __name__ == '__main__':
    main()
