"""What ReplaySSM runs with. Anything else is refused by name, with the list of what is supported."""

from __future__ import annotations

from typing import Any

SUPPORTED_LMDEPLOY = ('0.18.0',)
SPECULATIVE_METHODS = {'qwen3_5': 'qwen3_5_mtp', 'qwen3_5_moe': 'qwen3_5_mtp', 'glm5_next': 'deepseek_mtp'}
"""LMDeploy's name of drafting by the model's own layer, by model type."""
SUPPORTED_MODEL_TYPES = tuple(SPECULATIVE_METHODS)
SUPPORTED_SPECULATIVE_METHODS = tuple(dict.fromkeys(SPECULATIVE_METHODS.values()))
_SHARDED_HEADS = {
    'qwen3_5': ('linear_num_key_heads', 'linear_num_value_heads'),
    'qwen3_5_moe': ('linear_num_key_heads', 'linear_num_value_heads'),
    'glm5_next': ('linear_num_heads', 'num_attention_heads'),
}


def check_version() -> None:
    """Raise RuntimeError unless LMDeploy's version is one whose seams are known."""
    import lmdeploy

    if lmdeploy.__version__ not in SUPPORTED_LMDEPLOY:
        raise RuntimeError(
            f'lmdeploy: expected version {" or ".join(SUPPORTED_LMDEPLOY)}, got {lmdeploy.__version__}; '
            f'install lmdeploy=={SUPPORTED_LMDEPLOY[-1]}'
        )


def check_model(hf_config: Any, tp: int, method: str | None = None) -> None:
    """Raise ValueError unless the model can run ReplaySSM on `tp` ranks with drafts by speculative `method`."""
    model_type = hf_config.model_type
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise ValueError(
            f'replay: model type {model_type!r} is not supported; '
            f'supported: {", ".join(SUPPORTED_MODEL_TYPES)}; disable replay for this model'
        )
    if method not in (None, SPECULATIVE_METHODS[model_type]):
        raise ValueError(f'speculative method: {model_type} needs {SPECULATIVE_METHODS[model_type]!r}, got {method!r}')
    text = hf_config.text_config
    for name in _SHARDED_HEADS[model_type]:
        heads = getattr(text, name)
        if heads % tp:
            raise ValueError(f'tp: expected a divisor of {name}={heads}, got {tp}')


def check_engine(engine_config: Any, speculative_config: Any) -> None:
    """Raise ValueError for engine options that ReplaySSM has no answer for."""
    if engine_config is None:
        return
    method = speculative_config.method if speculative_config is not None else None
    refused = [
        (engine_config.dp > 1, f'dp={engine_config.dp}', 'data parallelism shares prefill plans between ranks'),
        (engine_config.role.name != 'Hybrid', f'role={engine_config.role.name}', 'state slots cannot be migrated'),
        (engine_config.enable_microbatch, 'enable_microbatch=True', 'cursors advance once per forward'),
        (engine_config.enable_mp_engine, 'enable_mp_engine=True', 'the engine would run outside this process'),
        (
            method is not None and method not in SUPPORTED_SPECULATIVE_METHODS,
            f'speculative method {method!r}',
            f'supported: {", ".join(SUPPORTED_SPECULATIVE_METHODS)}',
        ),
    ]
    for is_refused, option, reason in refused:
        if is_refused:
            raise ValueError(f'replay: {option} is not supported with ReplaySSM ({reason}); disable one of the two')
