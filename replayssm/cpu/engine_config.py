"""LMDeploy's configuration seams: `device_type='cpu'` and true float32."""

from __future__ import annotations

from typing import Any

import torch
from lmdeploy import messages, utils
from lmdeploy.pytorch import config as pytorch_config
from lmdeploy.pytorch.backends.default import rotary_embedding
from lmdeploy.pytorch.configurations import qwen3_5
from lmdeploy.pytorch.engine import config_builder, engine_checker

from replayssm.patching import Patches

_DEFAULT_MAX_BATCH_SIZE = 16


def install(patches: Patches) -> None:
    """Let the engine's configuration classes accept the cpu device type until `patches` is undone."""
    _accept_engine_config(patches)
    _resolve_float32(patches)

    for module in (utils, pytorch_config, qwen3_5):
        patches.set(module, 'is_bf16_supported', _is_bf16_supported)

    stock_max_batch_size = utils.get_max_batch_size

    def get_max_batch_size(device_type: str) -> int:
        return _DEFAULT_MAX_BATCH_SIZE if device_type == 'cpu' else stock_max_batch_size(device_type)

    for module in (utils, config_builder):
        patches.set(module, 'get_max_batch_size', get_max_batch_size)

    # Compiling three operators costs a C++ compiler and several seconds, and saves nothing at this size.
    patches.set(rotary_embedding, '_rotary_embedding_fwd', rotary_embedding._rotary_embedding_fwd.__wrapped__)


def _accept_engine_config(patches: Patches) -> None:
    stock_post_init = messages.PytorchEngineConfig.__post_init__
    stock_handle = engine_checker.EngineChecker.handle

    def post_init(self: messages.PytorchEngineConfig) -> None:
        if self.device_type != 'cpu':
            stock_post_init(self)
            return
        if self.distributed_executor_backend == 'mp':
            raise ValueError(
                "device_type='cpu' does not support distributed_executor_backend='mp': its shared-memory ring "
                "deadlocks with blocking gloo collectives; use 'ray'"
            )
        if self.quant_policy:
            raise ValueError(f"device_type='cpu' does not quantise the KV cache, got quant_policy={self.quant_policy}")
        dtype = self.dtype
        # The stock checks know neither the device nor the dtype; all the others apply as they are.
        self.device_type, self.dtype = 'cuda', 'auto' if dtype == 'float32' else dtype
        try:
            stock_post_init(self)
        finally:
            self.device_type, self.dtype = 'cpu', dtype
        self.eager_mode = True

    def handle(self: engine_checker.EngineChecker) -> Any:
        # The environment checks look for a GPU or a vendor plug-in; the checks of the options still apply.
        return self.check() if self.engine_config.device_type == 'cpu' else stock_handle(self)

    patches.set(messages.PytorchEngineConfig, '__post_init__', post_init)
    patches.set(engine_checker.EngineChecker, 'handle', handle)


def _resolve_float32(patches: Patches) -> None:
    stock = pytorch_config._update_torch_dtype

    def update_torch_dtype(
        config: pytorch_config.ModelConfig, dtype: str, device_type: str = 'auto'
    ) -> pytorch_config.ModelConfig:
        if device_type == 'cpu' and dtype == 'auto' and _checkpoint_dtype(config.hf_config) == 'float32':
            dtype = 'float32'
        config = stock(config, dtype, device_type=device_type)
        if config.dtype == torch.float32:
            config.states_shapes = _float32_states(config.states_shapes)
        return config

    patches.set(pytorch_config, '_update_torch_dtype', update_torch_dtype)


def _checkpoint_dtype(hf_config: Any) -> str:
    dtype = getattr(hf_config, 'dtype', None) or getattr(getattr(hf_config, 'text_config', None), 'dtype', None)
    return str(dtype).removeprefix('torch.')


def _float32_states(
    states_shapes: list[tuple[tuple[int, ...], torch.dtype]],
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return the state declarations with LMDeploy's own conv and recurrent state in float32.

    LMDeploy chooses their dtype before it knows the model's. Whoever declares more than those two chooses every
    dtype but that of the conv state, which is a window of activations.
    """
    stock_count = 2 if len(states_shapes) == 2 else 1
    return [(shape, torch.float32) for shape, _ in states_shapes[:stock_count]] + states_shapes[stock_count:]


def _is_bf16_supported(device_type: str = 'cpu') -> bool:
    """Every device name means the CPU here, and torch computes bfloat16 on any CPU."""
    return True
