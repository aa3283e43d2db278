"""The kernels compile to machine code on a machine without a GPU."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch

from replayssm.gdn.fused_launch import Gpu
from replayssm.gdn.operands import Dims, kernel_arguments

from .kernels import ADA, AMPERE, HOPPER, KERNELS
from .offline import compile_launch, stack_bytes
from .trial import KdaShape, Shape, Trial

CASES = [
    (Shape(H=2, HV=4, K=128, V=128, L=16, T=1), 'float32', 'float32'),
    (Shape(H=2, HV=4, K=128, V=128, L=16, T=4), 'bfloat16', 'bfloat16'),
    (Shape(H=2, HV=4, K=64, V=256, L=32, T=8), 'float32', 'bfloat16'),
    (Shape(H=2, HV=2, K=256, V=64, L=32, T=2), 'bfloat16', 'float32'),
    (KdaShape(H=2, HV=2, K=128, V=128, L=16, T=1), 'float32', 'float32'),
    (KdaShape(H=2, HV=2, K=128, V=128, L=32, T=4), 'float32', 'float32'),
    (KdaShape(H=2, HV=2, K=128, V=128, L=16, T=4), 'bfloat16', 'bfloat16'),
    (KdaShape(H=2, HV=4, K=64, V=256, L=32, T=8, bound=None), 'float32', 'bfloat16'),
]


def prepare(shape: Shape, checkpoint: str, record: str) -> tuple[tuple[Any, ...], Dims, Trial]:
    trial = shape.trial(1, 'cpu', torch.bfloat16, checkpoint, record)
    q, k, v, a, b = trial.inputs()
    cursors, out = torch.zeros(1, 8, dtype=torch.int32), torch.empty_like(v)
    operands = (q, k, v, a, b, trial.neg_exp_a, trial.dt_bias, trial.state, cursors)
    dims = Dims(1, shape.T, shape.H, shape.HV, shape.K, shape.V, trial.layout.ring_rows)
    return kernel_arguments(*operands, 1.0, out), dims, trial


@pytest.mark.parametrize(
    ('capability', 'gpu'), [(90, HOPPER), (80, AMPERE), (89, ADA), (100, AMPERE), (120, ADA)], ids=str
)
@pytest.mark.parametrize(('shape', 'checkpoint', 'record'), CASES, ids=str)
def test_the_fused_kernel(
    shape: Shape, checkpoint: str, record: str, capability: int, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, dims, trial = prepare(shape, checkpoint, record)
    kernel, bound = KERNELS[shape.layer, 'fused'], shape.options[1:]
    launch = functools.partial(kernel.launch, gpu=gpu)
    binary = compile_launch(
        monkeypatch, kernel._replay_kernel, capability, launch, arguments, dims, trial.state, *bound
    )
    reserved = 1024
    programs = 2 if shape.K <= 128 and shape.L <= 16 else 1
    assert programs * (binary.metadata.shared + reserved) <= gpu.shared_bytes
    if gpu.tma:
        assert 'cp.async.bulk.tensor.3d' in binary.asm['ptx']
        assert binary.asm['ptx'].count('mbarrier.inval') == shape.K // 64 + 1, 'barriers keep their memory to the end'
        assert stack_bytes(binary) == 0 or shape.K > 128
    else:
        assert set(re.findall(r'cp\.async\.c[ag]\S* .*?, (0x[0-9a-f]+),', binary.asm['ptx'])) == {'0x10'}
        assert stack_bytes(binary) <= 16 or shape.K > 128


@pytest.mark.parametrize('capability', [80, 90, 100])
@pytest.mark.parametrize(('shape', 'checkpoint', 'record'), CASES, ids=str)
def test_the_portable_kernel(
    shape: Shape, checkpoint: str, record: str, capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, dims, _ = prepare(shape, checkpoint, record)
    kernel, bound = KERNELS[shape.layer, 'portable'], shape.options[1:]
    binary = compile_launch(monkeypatch, kernel._replay_kernel, capability, kernel.launch, arguments, dims, *bound)
    assert stack_bytes(binary) == 0 or capability != 90
