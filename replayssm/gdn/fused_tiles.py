"""Register-tile helpers of the Hopper kernel: exact splits, MMA fragment views and gate arithmetic, in Gluon."""

from __future__ import annotations

from functools import lru_cache

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2


@gluon.jit
def split3(x):
    """fp32 -> three bf16 whose sum is x exactly, as long as no part is subnormal."""
    return gl.inline_asm_elementwise(
        """{
            .reg .b32 h0, h1; .reg .f32 r0, r1;
            cvt.rn.bf16x2.f32 $0, $4, $3;
            shl.b32 h0, $0, 16;       and.b32 h1, $0, 0xffff0000;
            sub.f32 r0, $3, h0;       sub.f32 r1, $4, h1;
            cvt.rn.bf16x2.f32 $1, r1, r0;
            shl.b32 h0, $1, 16;       and.b32 h1, $1, 0xffff0000;
            sub.f32 r0, r0, h0;       sub.f32 r1, r1, h1;
            cvt.rn.bf16x2.f32 $2, r1, r0;
        }""",
        '=&r,=&r,=r,r,r',
        [x],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def tf32_mask(unknown):
    """Mask of the bits that tensor cores read of a tf32, out of any integer >= 0 that is not known when compiling.

    Given a constant, ptxas drops the mask before products, which ignore the other bits anyway, and then has to copy
    every number into the registers of its fragment; masking can write them there.
    """
    return -8192 ^ (unknown >> 31)


@gluon.jit
def split_tf32(x, mask):
    """fp32 -> tf32 head and remainder, in two instructions; rounding the head would take three to five.

    Tensor cores read 11 bits of the remainder's 13, which leaves x within 2^-22.
    """
    head = (x.to(gl.int32, bitcast=True) & mask).to(gl.float32, bitcast=True)
    return head, x - head


@gluon.jit
def dot_tf32x3(x, y, acc, mask):
    """acc + x y with fp32 operands, as three tf32 products; the product of the remainders is left out."""
    x_head, x_rest = split_tf32(x, mask)
    y_head, y_rest = split_tf32(y, mask)
    acc = mma_v2(x_head, y_head, acc, input_precision='tf32')
    acc = mma_v2(x_rest, y_head, acc, input_precision='tf32')
    return mma_v2(x_head, y_rest, acc, input_precision='tf32')


@gluon.jit
def log_gate(x, neg_exp_a):
    """neg_exp_a * softplus(x), log1p as the series of 2 artanh(u / (2 + u)): small gates keep all their digits."""
    u = gl.exp(-gl.abs(x))
    s = u / (2.0 + u)
    s2 = s * s
    series = 1.0 / 15
    for i in gl.static_range(6, -1, -1):
        series = series * s2 + 1.0 / (2 * i + 1)
    return neg_exp_a * (gl.maximum(x, 0.0) + 2.0 * s * series)


@gluon.jit
def sigmoid(x):
    return 1.0 / (1.0 + gl.exp(-x))


@gluon.jit
def wrap(row, R: gl.constexpr):
    """row mod R for 0 <= row < 2 R."""
    return gl.where(row >= R, row - R, row)


@gluon.jit
def as_rows(x):
    """B operand [K, N] as the A operand [16, K] that holds it in the same registers; rows past N are zero."""
    K: gl.constexpr = x.shape[0]
    rows = gl.permute(x, [1, 0])
    if x.shape[1] == 8:
        LAYOUT: gl.constexpr = rows.type.layout
        padding = gl.zeros([8, K], x.dtype, LAYOUT)
        rows = gl.permute(gl.join(rows, padding), [2, 0, 1]).reshape([16, K])
    return rows


@gluon.jit
def top_rows(x, N: gl.constexpr):
    """Rows 0..N-1 of an accumulator [16, M]; with N = 8 the others are the second half of every MMA fragment."""
    if N == 8:
        x, _ = gl.split(gl.permute(x.reshape([2, 8, x.shape[1]]), [1, 2, 0]))
    return x


@gluon.jit
def column(x, i: gl.constexpr):
    """Column i of a tile [M, N] whose rows lie each in one thread's registers: no data moves."""
    N: gl.constexpr = x.shape[1]
    M: gl.constexpr = x.shape[0]
    for bit in gl.static_range(5):
        if (N >> bit) > 1:
            even, odd = gl.split(x.reshape([M, N >> (bit + 1), 2]))
            if (i >> bit) & 1:
                x = odd
            else:
                x = even
    return x.reshape([M])


@gluon.jit
def to_fragment_columns(x):
    """Rename columns 16g + 4c + 2b + e of [M, N] to 16g + 8b + 2c + e.

    An accumulator of two n8 tiles owns columns 2c, 2c + 1 and 8 + 2c, 8 + 2c + 1. Under this renaming they are four
    neighbours, so that a thread reads and writes 16 bytes at once.
    """
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    return gl.permute(x.reshape([M, N // 16, 4, 2, 2]), [0, 1, 3, 2, 4]).reshape([M, N])


@gluon.jit
def from_fragment_columns(x):
    """Inverse of `to_fragment_columns`."""
    M: gl.constexpr = x.shape[0]
    N: gl.constexpr = x.shape[1]
    return gl.permute(x.reshape([M, N // 16, 2, 4, 2]), [0, 1, 3, 2, 4]).reshape([M, N])


@lru_cache
def row_layout(rows: int, columns: int, num_warps: int) -> gl.DistributedLinearLayout:
    """Layout of [rows, columns] with whole rows in a thread, each in the warp that owns it in an MMA accumulator.

    With 16 rows a warp two lanes hold the same row.
    """
    registers = [[0, 1 << i] for i in range((columns - 1).bit_length())]
    lanes = [[1 << i, 0] for i in range(4)]
    warps = [[16 << i, 0] for i in range((num_warps - 1).bit_length())]
    rest = [[bit, 0] for bit in (1 << i for i in range(4, 12)) if 16 * num_warps <= bit < rows]
    return gl.DistributedLinearLayout(
        registers + rest[1:], [*lanes, rest[0] if rest else [0, 0]], warps, [], [rows, columns]
    )
