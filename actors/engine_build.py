"""From our configuration to LMDeploy's engine: device, patches and config objects."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from actors.config import EngineConfig, ModelConfig
from replayssm import environment


def model_path(model: ModelConfig) -> str:
    """Return the checkpoint's directory or hub id; a demo model that does not come with us is made."""
    if model.demo is None:
        assert model.path is not None
        return model.path
    from replayssm import demo

    path: Path = demo.ensure(model.demo)
    return str(path)


def build_engine(model: ModelConfig, config: EngineConfig) -> Any:
    """Load the model and return LMDeploy's `Engine`. Blocks; call it on the thread that will run the engine."""
    environment.set_defaults(float32_states=config.replay.checkpoint_dtype == 'float32')
    if config.device == 'cpu':
        from replayssm import cpu

        cpu.enable(replace(cpu.CpuSettings.from_env(), threads_per_rank=config.cpu_threads))
    from replayssm import patch

    patch.enable(replace(config.patch_settings(), random_weights=model.random_weights))

    from lmdeploy.messages import PytorchEngineConfig, SpeculativeConfig
    from lmdeploy.pytorch.engine import Engine
    from lmdeploy.utils import get_logger

    get_logger('lmdeploy').setLevel(config.log_level)
    engine_config = PytorchEngineConfig(
        device_type=config.device,
        tp=config.tp,
        dtype=config.dtype,
        session_len=config.session_len,
        max_batch_size=config.max_batch_size,
        num_gpu_blocks=config.num_gpu_blocks,
        block_size=config.block_size,
        max_prefill_token_num=config.max_prefill_token_num,
        cache_max_entry_count=config.cache_max_entry_count,
        enable_prefix_caching=config.enable_prefix_caching,
        prefix_cache_state_budget=config.prefix_cache_state_budget,
        eager_mode=config.eager_mode or config.device == 'cpu',
        logprobs_mode='raw_logprobs' if config.logprobs else None,
        distributed_executor_backend='ray' if config.tp > 1 else 'uni',
        language_model_only=True,
    )
    speculative = config.speculative and SpeculativeConfig(
        method=config.speculative.method, num_speculative_tokens=config.speculative.num_tokens
    )
    return Engine.from_pretrained(
        model_path(model),
        engine_config=engine_config,
        speculative_config=speculative,
        trust_remote_code=model.trust_remote_code,
    )
