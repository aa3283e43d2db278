"""Greedy answers by transformers, as a program: `python -m tests.patch.reference FOLDER NUM_TOKENS < prompts.json`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.patience import LIVENESS_S


def greedy_answers(checkpoint: Path, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """Run the program in a process of its own, where nothing of this project or of LMDeploy is loaded."""
    command = [sys.executable, '-m', __name__, str(checkpoint), str(num_tokens)]
    result = subprocess.run(
        command, input=json.dumps(prompts), capture_output=True, text=True, timeout=LIVENESS_S, check=False
    )
    if result.returncode:
        raise RuntimeError(result.stderr)
    answers: list[list[int]] = json.loads(result.stdout)
    return answers


def main() -> None:
    # With fla installed transformers takes its Triton kernels, which do not run on a CPU.
    sys.modules['fla'] = None  # type: ignore[assignment]
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
    answers = []
    for prompt in json.load(sys.stdin):
        tokens = list(prompt)
        for _ in range(int(sys.argv[2])):
            # No cache: each token is computed from the whole text, so no state can be wrong.
            with torch.inference_mode():
                logits = model(torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
        answers.append(tokens[len(prompt) :])
    print(json.dumps(answers))


if __name__ == '__main__':
    main()
