"""Keep token ids and multimodal rotary (mrope) positions of a sequence aligned, row for row.

Three faults of LMDeploy's sequences are mended. Under speculative decoding new input is appended behind draft tokens
that were never accepted, and the count of input tokens forgets the last accepted token, so ids and positions fall out
of step. `set_step` cuts the ids but not the positions. And an image in a later turn is placed by its absolute token
index although the rows being appended start in mid-sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import numpy as np
import numpy.typing as npt
from lmdeploy.pytorch.messages import SchedulerSequence
from lmdeploy.pytorch.strategies.ar_spec.sequence import SchedulerSequenceARSpec
from lmdeploy.vl.constants import Modality

from replayssm.patching import Patches

Positions = npt.NDArray[np.int64]

MROPE_AXES = 3
"""Temporal, height and width."""


def install(patches: Patches) -> None:
    """Replace the methods of `SchedulerSequence` and `SchedulerSequenceARSpec` that lose the alignment."""
    patches.set(SchedulerSequence, '_update_mrope_pos_ids', append_missing_positions)
    spec = SchedulerSequenceARSpec
    patches.set(spec, '_update_token_ids_inputs', _append_behind_accepted(spec._update_token_ids_inputs))
    patches.set(spec, 'set_step', _realign_after(spec.set_step))


def mrope_positions(
    first_index: int, end_index: int, first_position: int, images: Iterable[tuple[int, Positions]]
) -> Positions:
    """Return the positions of tokens `first_index` to `end_index`, exclusive.

    Args:
        first_index: index in the sequence of the first token.
        end_index: index behind the last token.
        first_position: position of the first token, on all axes when it is text.
        images: (index of the first token, positions [tokens, 3] relative to that token) of each image or video.

    Returns:
        [end_index - first_index, 3] int64.
    """
    rows: list[Positions] = []
    index, position = first_index, first_position
    for start, relative in sorted(images, key=lambda image: image[0]):
        rows.append(_text_positions(position, start - index))
        position += start - index
        rows.append(relative + position)
        index = start + len(relative)
        position += int(relative[-1].max()) + 1
    rows.append(_text_positions(position, end_index - index))
    return np.concatenate(rows, axis=0)


def append_missing_positions(seq: Any) -> None:
    """Append the mrope rows that `seq` lacks for its tokens; rows of dropped draft tokens may stay behind the end."""
    if not seq._seq_meta.use_mrope:
        return
    history = seq.history_mrope_pos_ids
    first, end = len(history), int(seq.num_all_ids)
    if end <= first:
        return
    position = int(history[-1].max()) + 1 if first else 0
    history.append(mrope_positions(first, end, position, _images_between(seq, first, end)))


def _text_positions(first: int, count: int) -> Positions:
    return np.arange(first, first + count, dtype=np.int64)[:, None].repeat(MROPE_AXES, axis=1)


def _images_between(seq: Any, first: int, end: int) -> list[tuple[int, Positions]]:
    images = []
    for modal_datas in seq.history_multimodals.get_datas(first, end).values():
        for modal_data in modal_datas:
            # A time series is embedded at text positions.
            if modal_data.modality == Modality.TIME_SERIES:
                continue
            if modal_data.mrope_pos_ids is None:
                raise ValueError(f'mrope_pos_ids: expected positions for the {modal_data.modality} input, got None')
            images.append((int(modal_data.start), modal_data.mrope_pos_ids))
    return images


def _append_behind_accepted(append: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    @wraps(append)
    def wrapper(self: Any, token_ids: Any) -> None:
        accepted = int(self.num_valid_ids)
        self.history_cache.resize(accepted)
        _cut_positions(self, accepted)
        append(self, token_ids)
        self._num_token_ids = self.num_valid_ids - self.num_history_ids

    return wrapper


def _realign_after(set_step: Callable[[Any, int], None]) -> Callable[[Any, int], None]:
    @wraps(set_step)
    def wrapper(self: Any, step: int) -> None:
        set_step(self, step)
        _cut_positions(self, int(self.num_all_ids))
        append_missing_positions(self)

    return wrapper


def _cut_positions(seq: Any, count: int) -> None:
    history = seq.history_mrope_pos_ids
    history.resize(min(len(history), count))
