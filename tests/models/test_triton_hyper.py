"""Fused hyper-connections against PyTorch's: in Triton's interpreter on a CPU, compiled with --device cuda."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from replayssm.models.glm5_next import hyper, triton_hyper
from replayssm.models.glm5_next.hyper import HyperConnection
from tests.replay.offline import compile_launch, stack_bytes

from .small_indexer import randomised

Call = Callable[..., Any]


def connection(hidden: int, streams: int, device: str) -> HyperConnection:
    config = SimpleNamespace(hidden_size=hidden, hc_mult=streams, hc_sinkhorn_iters=20, hc_eps=1e-6, rms_norm_eps=1e-5)
    made = randomised(HyperConnection(config, torch.device('cpu')))
    assert isinstance(made, HyperConnection)
    return made.to(device)


def parameters(module: HyperConnection) -> tuple[Any, ...]:
    return module.fn, module.base, module.scale, module.iterations, module.eps, module.norm_eps


@pytest.mark.parametrize(('tokens', 'hidden', 'streams'), [(1, 64, 4), (5, 24, 4), (37, 96, 2), (16, 1030, 4)], ids=str)
def test_it_equals_hyper_connections(tokens: int, hidden: int, streams: int, call: Call, device: str) -> None:
    module = connection(hidden, streams, device)
    # heads of a product come first, as any block may leave them
    x = torch.randn(streams, tokens, hidden, device=device).transpose(0, 1)[None]
    output = torch.randn(1, hidden, tokens, device=device).mT
    found, expected = call('triton_hyper.read', x, *parameters(module)), hyper.read(x, *parameters(module))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)
    written = call('triton_hyper.write', output, x, *expected[1:])
    torch.testing.assert_close(written, hyper.write(output, x, *expected[1:]), rtol=1e-5, atol=1e-5)


def test_a_token_does_not_depend_on_the_others(call: Call, device: str) -> None:
    module = connection(64, 4, device)
    x, others = torch.randn(1, 40, 4, 64, device=device), torch.randn(1, 71, 4, 64, device=device)
    others[:, 7] = x[:, 7]
    found = call('triton_hyper.read', x, *parameters(module)), call('triton_hyper.read', others, *parameters(module))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours[:, 7], theirs[:, 7])


@pytest.mark.cuda
@pytest.mark.parametrize('tokens', [1, 70, 3000])
def test_the_projection_of_bf16_is_as_exact_as_that_of_float32(tokens: int) -> None:
    module = connection(4096, 4, 'cuda')
    x = torch.randn(tokens, 4, 4096, device='cuda').bfloat16()
    sums = triton_hyper.project(x, module.fn).double().sum(0)
    rows, flat = module.fn.size(0), x.flatten(1).double()
    for found, expected in (
        (sums[:, :rows], flat @ module.fn.double().T),
        (sums[:, rows], flat.square().sum(-1)),
    ):
        assert (found - expected).norm() < 2e-6 * expected.norm()


@pytest.mark.cuda
def test_it_equals_hyper_connections_in_bf16() -> None:
    module = connection(4096, 4, 'cuda')
    torch.nn.init.normal_(module.fn, std=0.01)
    x, output = torch.randn(1, 70, 4, 4096).bfloat16().cuda(), torch.randn(1, 70, 4096).bfloat16().cuda()
    found, expected = module.read(x), hyper.read(x, *parameters(module))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)
    written = module.write(output, x, *expected[1:])
    torch.testing.assert_close(written, hyper.write(output, x, *expected[1:]), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize('capability', [80, 90, 100])
@pytest.mark.parametrize('kernel', ['_project_kernel', '_mix_kernel', '_write_kernel'])
def test_it_compiles(kernel: str, capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in {'_project_kernel', '_mix_kernel', '_write_kernel'} - {kernel}:
        monkeypatch.setattr(getattr(triton_hyper, other), 'run', lambda *_, **__: None)
    module, x = connection(4096, 4, 'cpu'), torch.empty(1, 64, 4, 4096, dtype=torch.bfloat16)
    post, comb = x.new_empty(1, 64, 4), x.new_empty(1, 64, 4, 4)

    def launch() -> None:
        if kernel == '_write_kernel':
            triton_hyper.write(x[:, :, 0], x, post, comb)
        else:
            triton_hyper.read(x, *parameters(module))

    assert stack_bytes(compile_launch(monkeypatch, getattr(triton_hyper, kernel), capability, launch)) == 0
