"""Greedy answers of transformers' own Qwen3.5, run in a process of its own: `python greedy_reference.py IN OUT`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

# With fla importable transformers chooses its Triton kernels, which need a GPU.
sys.modules['fla'] = None  # type: ignore[assignment]
sys.modules['causal_conv1d'] = None  # type: ignore[assignment]

import torch  # noqa: E402
from transformers import AutoModelForImageTextToText, AutoTokenizer  # noqa: E402


def main() -> None:
    # More threads only wait for each other in models of this size.
    torch.set_num_threads(1)
    source, target = map(Path, sys.argv[1:])
    request = json.loads(source.read_text())
    answers = {name: _answers(folder, **request['generation']) for name, folder in request['checkpoints'].items()}
    target.write_text(json.dumps(answers))


@torch.inference_mode()
def _answers(folder: str, prompts: list[str], max_new_tokens: int) -> list[dict[str, Any]]:
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype='auto', attn_implementation='eager').eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    answers = []
    for prompt in prompts:
        tokens = tokenizer(prompt, return_tensors='pt')
        out = model.generate(
            tokens.input_ids,
            attention_mask=tokens.attention_mask,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            # The engine ignores the end token by never choosing it.
            suppress_tokens=[tokenizer.eos_token_id],
            eos_token_id=None,
            pad_token_id=tokenizer.pad_token_id,
            output_scores=True,
            return_dict_in_generate=True,
        )
        best = torch.stack(out.scores, dim=1)[0].topk(2).values
        answers.append(
            {
                'tokens': out.sequences[0, tokens.input_ids.size(1) :].tolist(),
                'margin': (best[:, 0] - best[:, 1]).min().item(),
            }
        )
    return answers


if __name__ == '__main__':
    main()
