"""The checkpoint folder of a model in training, whole at every moment."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerFast

from replayssm.demo.model_config import build_config
from replayssm.demo.specs import DemoSpec
from replayssm.demo.tokenizer import END_OF_TEXT, END_OF_TURN, SPECIAL_TOKENS
from replayssm.demo.training.trainee import Trainee


def prepare(folder: Path, spec: DemoSpec, tokenizer: PreTrainedTokenizerFast) -> None:
    """Write everything but the weights into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    token_ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    config = build_config(spec, 'bfloat16', token_ids)
    (folder / 'config.json').write_text(json.dumps(config, indent=2) + '\n')
    # A document's end stops a completion as a turn's end stops a chat.
    ends = [token_ids[END_OF_TURN], token_ids[END_OF_TEXT]]
    generation = {'eos_token_id': ends, 'pad_token_id': token_ids[END_OF_TEXT]}
    (folder / 'generation_config.json').write_text(json.dumps(generation, indent=2) + '\n')


def save_weights(trainee: Trainee, folder: Path) -> None:
    """Write the weights in bfloat16 beside what `prepare` wrote; a reader sees the old file or the new one."""
    weights = {}
    for name, weight in trainee.published_weights().items():
        weight = weight.detach().to('cpu', torch.float32)
        if name in trainee.zero_centred_norms:
            # Some loaders, LMDeploy's among them, add the one in bfloat16: choose a weight for which that is exact.
            weight = (1 + weight).bfloat16().float() - 1
        weights[name] = weight.bfloat16().contiguous()
    scratch = folder / '.model.safetensors'
    save_file(weights, scratch, metadata={'format': 'pt'})
    scratch.replace(folder / 'model.safetensors')
