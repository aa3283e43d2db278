"""ReplayConfig: the options of ReplaySSM as users meet them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

StateDtype = Literal['float32', 'bfloat16']

CPU_RANK_RESOURCE = 'REPLAYSSM_CPU_RANK'
"""Ray node resource that stands for room for one CPU rank, as "GPU" does for one GPU rank."""

MIN_BUFFER_LEN = 1
MAX_BUFFER_LEN = 32
"""Upper end of `buffer_len`: past it, reading the records costs more traffic than the checkpoint writes they avoid."""


@dataclass(frozen=True, slots=True)
class ReplayConfig:
    """How the recurrent state of a linear-attention layer is kept.

    Attributes:
        buffer_len: L, the most committed records that a decode step may find over the checkpoint (1..32). The
            checkpoint is rewritten about once in L tokens. L = 1 is the plain recurrence.
        checkpoint_dtype: dtype of the checkpoint state.
        record_dtype: dtype of the records' d, the delta-rule update vectors. Keys are kept in the model's
            activation dtype and gate sums in float32 whatever this says.

    Raises:
        ValueError: a field is out of range; the message names the field, the value and the remedy.
    """

    buffer_len: int = 16
    checkpoint_dtype: StateDtype = 'float32'
    record_dtype: StateDtype = 'float32'

    def __post_init__(self) -> None:
        if isinstance(self.buffer_len, bool) or not isinstance(self.buffer_len, int):
            raise ValueError(f'buffer_len: expected an integer, got {self.buffer_len!r}')
        if not MIN_BUFFER_LEN <= self.buffer_len <= MAX_BUFFER_LEN:
            raise ValueError(
                f'buffer_len: expected {MIN_BUFFER_LEN}..{MAX_BUFFER_LEN}, got {self.buffer_len}; 16 suits most models'
            )
        for name in ('checkpoint_dtype', 'record_dtype'):
            value = getattr(self, name)
            if value not in get_args(StateDtype):
                raise ValueError(f'{name}: expected one of {", ".join(get_args(StateDtype))}, got {value!r}')
