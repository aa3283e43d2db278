from __future__ import annotations

import pytest
import torch

from replayssm.gpu import open_gpu


def test_a_cpu_has_nothing_to_read() -> None:
    assert open_gpu(torch.device('cpu')) is None


@pytest.mark.cuda
def test_memory_of_the_gpu_behind_a_device() -> None:
    reader = open_gpu(torch.device('cuda', 0))
    assert reader is not None
    before = reader.read()
    block = torch.zeros(1 << 30, dtype=torch.uint8, device='cuda:0')
    held = reader.read()
    del block
    torch.cuda.empty_cache()
    after = reader.read()
    for gpu in (before, held, after):
        assert gpu.memory_used_bytes is not None
        assert gpu.memory_peak_bytes is not None
        assert gpu.memory_total_bytes is not None
        assert 0 < gpu.memory_used_bytes <= gpu.memory_peak_bytes <= gpu.memory_total_bytes
        assert gpu.utilization_ratio is None or 0 <= gpu.utilization_ratio <= 1
    assert after.memory_peak_bytes == held.memory_peak_bytes
    assert held.memory_peak_bytes - before.memory_used_bytes >= 1 << 30
    _, total_bytes = torch.cuda.mem_get_info(0)
    assert after.memory_total_bytes == pytest.approx(total_bytes, rel=0.05)
