"""Draws with a seed: reproducible, independent of the batch, and of the distribution asked for."""

from __future__ import annotations

import torch

from replayssm.cpu.sampling import CpuMultinomialSamplingImpl


def draw(scores: torch.Tensor, seeds: list[int], offsets: list[int], indices: torch.Tensor | None = None) -> list[int]:
    sample = CpuMultinomialSamplingImpl()
    return sample.forward(scores, torch.tensor(seeds), torch.tensor(offsets), indices).tolist()


def test_the_same_seed_and_offset_draw_the_same_in_any_batch() -> None:
    scores = torch.full((3, 100), 0.01)
    alone = draw(scores[:1], [7], [3])
    assert draw(scores, [9, 7, 7], [3, 3, 4])[1] == alone[0]
    assert len({draw(scores[:1], [7], [offset])[0] for offset in range(50)}) > 20


def test_frequencies_follow_the_scores() -> None:
    scores = torch.tensor([0.5, 0.0, 1.5, 2.0]).expand(4000, -1)
    counts = torch.tensor(draw(scores, list(range(4000)), [0] * 4000)).bincount(minlength=4) / 4000
    torch.testing.assert_close(counts, torch.tensor([0.125, 0.0, 0.375, 0.5]), rtol=0, atol=0.03)


def test_candidates_are_mapped_to_their_tokens() -> None:
    indices = torch.tensor([[30, 10, 20]])
    assert draw(torch.tensor([[0.0, 1.0, 0.0]]), [1], [1], indices) == [10]
