"""Names and shapes of a Qwen3.5 checkpoint, dense or with experts, text model and draft layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from replayssm.random_weights import Weight

_LAYERS = 'model.language_model.layers.'


def weights_of(config: Any) -> Iterator[Weight]:
    """Yield every tensor of a checkpoint."""
    shapes = weight_shapes(config)
    for name, shape in shapes.items():
        yield _weight(name, shape, is_draft=False)
    text = config.text_config
    if not getattr(text, 'mtp_num_hidden_layers', 0):
        return
    # The draft layer is a full-attention layer like those of the target.
    index = max(i for i, kind in enumerate(text.layer_types) if kind == 'full_attention')
    for name, shape in shapes.items():
        if name.startswith(f'{_LAYERS}{index}.'):
            yield _weight('mtp.layers.0.' + name.removeprefix(f'{_LAYERS}{index}.'), shape, is_draft=True)
    hidden = text.hidden_size
    for norm in ('norm', 'pre_fc_norm_hidden', 'pre_fc_norm_embedding'):
        yield Weight(f'mtp.{norm}.weight', (hidden,), is_draft=True, norm=0.0)
    yield Weight('mtp.fc.weight', (hidden, 2 * hidden), is_draft=True)


def _weight(name: str, shape: tuple[int, ...], is_draft: bool) -> Weight:
    norm = None
    if name.endswith('norm.weight'):
        # All but the gated one are stored less one.
        norm = 1.0 if name.endswith('linear_attn.norm.weight') or name.startswith('model.visual.') else 0.0
    return Weight(name, shape, is_draft, norm=norm)


def weight_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every weight that transformers expects for `config`, without the draft layer."""
    import torch
    from transformers import AutoModelForImageTextToText

    with torch.device('meta'):
        model = AutoModelForImageTextToText.from_config(config)
    return {name: parameter.shape for name, parameter in model.named_parameters()}
