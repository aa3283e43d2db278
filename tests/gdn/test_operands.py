"""What the launcher refuses, and which kernel it chooses; no kernel runs here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from replayssm.cursor import CURSOR_COLUMNS, FLUSH, LENGTH, SLOT, VALID, WRITE_ROW
from replayssm.gdn.decode import replay_decode, select_kernel
from replayssm.gdn.operands import Dims, check_cursors, token_rows, validate
from tests.replay.trial import Shape


def operands(shape: Shape) -> dict[str, Any]:
    trial = shape.trial(2)
    q, k, v, a, b = trial.inputs()
    cursors = torch.zeros(2, CURSOR_COLUMNS, dtype=torch.int32)
    names = ('q', 'k', 'v', 'a', 'b', 'neg_exp_a', 'dt_bias', 'state', 'cursors')
    return dict(zip(names, (q, k, v, a, b, trial.neg_exp_a, trial.dt_bias, trial.state, cursors), strict=True))


def test_views_of_one_projection_are_accepted() -> None:
    shape = Shape(H=2, HV=6, K=16, V=48, T=3)
    assert validate(**operands(shape)) == Dims(B=2, T=3, H=2, HV=6, K=16, V=48, R=11)


def test_a_transposed_window_is_copied_and_a_view_is_not() -> None:
    """What LMDeploy's convolution returns: [B, channels, T] turned round, of which B = 1 stays a view."""
    window = torch.randn(1, 96, 4).transpose(1, 2).flatten(0, 1).unflatten(-1, (3, 2, 16)).unbind(1)[1]
    assert token_rows(window).stride(-1) == 1
    assert torch.equal(token_rows(window), window)
    split = torch.randn(4, 96).unflatten(-1, (3, 2, 16)).unbind(1)[1]
    assert token_rows(split) is split


@pytest.mark.parametrize(
    ('name', 'change', 'message'),
    [
        ('q', lambda x: x[:, :, :1], r'q\.shape: expected \(2, 2, 2, 16\), got \(2, 2, 1, 16\)'),
        ('v', lambda x: x[..., 0], r'v\.ndim: expected 4, got 3'),
        ('v', lambda x: x[:, :, :3], r'v\.size\(2\): expected a multiple of 2 key heads, got 3'),
        ('a', lambda x: x[:1], r'a\.shape: expected'),
        ('q', lambda x: x.half(), r'q\.dtype: expected .*float32.*, got torch\.float16'),
        ('neg_exp_a', lambda x: x.bfloat16(), r'neg_exp_a\.dtype: expected .*float32'),
        ('cursors', lambda x: x.long(), r'cursors\.dtype: expected .*int32.*, got torch\.int64'),
        ('b', lambda x: x.to('meta'), r'b\.device: expected cpu, got meta'),
        ('k', lambda x: x.transpose(2, 3).contiguous().transpose(2, 3), r'k: expected dimensions 2\.\. contiguous'),
        ('state', lambda x: x._replace(delta=x.delta[..., :4]), r'state\.delta\.shape: expected'),
        ('state', lambda x: x._replace(gate=x.gate.double()), r'state\.gate\.dtype: expected'),
        ('state', lambda x: x._replace(checkpoint=x.checkpoint.mT), r'state\.checkpoint: expected .* contiguous'),
    ],
)
def test_bad_operands_are_named(name: str, change: Any, message: str) -> None:
    arguments = operands(Shape(H=2, HV=4, T=2))
    arguments[name] = change(arguments[name])
    with pytest.raises(ValueError, match=message):
        validate(**arguments)


def test_windows_past_eight_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match=r'window T: expected 1\.\.8, got 9'):
        validate(**operands(Shape(T=9, L=12)))


def test_buffers_past_thirty_two_records_are_refused() -> None:
    arguments = operands(Shape(L=32, T=2))
    for name in ('q', 'k', 'v', 'a', 'b'):
        arguments[name] = arguments[name][:, :1]
    with pytest.raises(ValueError, match=r'ring rows - window: expected a buffer of 1\.\.32 records, got 33'):
        validate(**arguments)


def test_a_cpu_without_the_interpreter_is_refused() -> None:
    with pytest.raises(ValueError, match=r'device: expected a GPU.*got cpu'):
        replay_decode(**operands(Shape()))


@pytest.mark.parametrize(
    ('capability', 'kernel'),
    [((7, 5), 'triton'), ((8, 0), 'fused'), ((8, 9), 'fused'), ((9, 0), 'fused'), ((12, 0), 'fused')],
    ids=str,
)
def test_gpus_since_ampere_get_the_fused_kernel(
    capability: tuple[int, int], kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda _: capability)
    dims = Dims(4, 1, 16, 32, 128, 128, 17)
    selection = select_kernel.__wrapped__(torch.device('cuda', 0), torch.bfloat16, dims, 2**20, True)
    assert selection.kernel == kernel
    assert str(capability) in selection.reason


@pytest.mark.cuda
@pytest.mark.parametrize(
    ('dtype', 'dims', 'stride_bytes', 'reason'),
    [
        (torch.bfloat16, Dims(4, 1, 16, 32, 128, 128, 17), 2**20, 'bfloat16 activations'),
        (torch.bfloat16, Dims(4, 8, 2, 6, 64, 256, 40), 2**20, 'bfloat16 activations'),
        (torch.float32, Dims(4, 1, 16, 32, 128, 128, 17), 2**20, 'activations are torch.float32'),
        (torch.bfloat16, Dims(4, 1, 16, 32, 96, 128, 17), 2**20, 'head dimensions 96, 128'),
        (torch.bfloat16, Dims(4, 1, 16, 32, 128, 128, 17), 2**20 + 16, 'aligned to 64 bytes'),
    ],
    ids=['decode', 'window of 8', 'float32', 'head dimension', 'alignment'],
)
def test_selection_says_why(dtype: torch.dtype, dims: Dims, stride_bytes: int, reason: str) -> None:
    device = torch.device('cuda', 0)
    if torch.cuda.get_device_capability(device) < (8, 0):
        pytest.skip('the fused kernel needs compute capability 8.0')
    selection = select_kernel(device, dtype, dims, stride_bytes, True)
    assert reason in selection.reason
    assert (selection.kernel == 'fused') == (reason == 'bfloat16 activations')


@pytest.mark.parametrize(
    ('column', 'value', 'message'),
    [
        (SLOT, 9, r'slot: expected 0\.\.4, got \[9\]'),
        (SLOT, 2, 'slot: expected each slot once'),
        (VALID, 9, r'valid: expected 0\.\.8, got \[9\]'),
        (WRITE_ROW, 10, r'write row: expected 0\.\.9'),
        (LENGTH, 3, r'length: expected 0\.\.2'),
        (FLUSH, 2, r'flush: expected 0\.\.1'),
    ],
)
def test_cursors_out_of_range_are_found_in_debug_mode(column: int, value: int, message: str) -> None:
    dims = Dims(B=3, T=2, H=1, HV=1, K=16, V=16, R=10)
    cursors = torch.zeros(3, CURSOR_COLUMNS, dtype=torch.int32)
    cursors[:, SLOT] = torch.tensor([-1, 1, 2])
    cursors[0, VALID] = 99
    check_cursors(cursors, dims, slots=5)
    cursors[1, column] = value
    with pytest.raises(ValueError, match=message):
        check_cursors(cursors, dims, slots=5)
