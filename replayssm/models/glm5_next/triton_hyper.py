"""`hyper.read` and `hyper.write` in three Triton kernels; PyTorch needs 144, nearly all for the matrix of the mixing.

The norm of the streams is one factor a token, so it multiplies the projection's result instead of its operand.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

CHUNKS = 32
"""Programs among which one block of tokens divides the projection; each leaves a partial sum."""
BLOCK_TOKENS = 64
"""Of decode steps and prompts alike, since another number would order a token's sums differently."""
BLOCK_HIDDEN = 1024


@triton.jit
def _project_kernel(
    streams,
    fn,
    partial,
    num_tokens,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    BT: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
):
    """Partial sums [chunks, tokens, BR] of streams fn^T; column ROWS takes the sum of squares."""
    i_chunk = tl.program_id(1)
    o_t, o_r = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64), tl.arange(0, BR)
    mask_t, mask_r = o_t < num_tokens, o_r < ROWS
    acc, square = tl.zeros([BT, BR], tl.float32), tl.zeros([BT], tl.float32)
    for start in range(i_chunk * CHUNK, min(i_chunk * CHUNK + CHUNK, WIDTH), BK):
        o_k = start + tl.arange(0, BK)
        mask_k = o_k < min(i_chunk * CHUNK + CHUNK, WIDTH)
        p_x, p_w = streams + o_t[:, None] * WIDTH + o_k[None, :], fn + o_r[None, :] * WIDTH + o_k[:, None]
        b_x = tl.load(p_x, mask=mask_t[:, None] & mask_k[None, :], other=0.0)
        b_w = tl.load(p_w, mask=mask_k[:, None] & mask_r[None, :], other=0.0)
        if b_x.dtype == tl.bfloat16:
            # bf16 streams are what tensor cores take, and three bf16 parts are all of a float32
            b_w0 = b_w.to(tl.bfloat16)
            b_w -= b_w0.to(tl.float32)
            b_w1 = b_w.to(tl.bfloat16)
            b_w2 = (b_w - b_w1.to(tl.float32)).to(tl.bfloat16)
            acc = tl.dot(b_x, b_w0, tl.dot(b_x, b_w1, tl.dot(b_x, b_w2, acc)))
        else:
            acc = tl.dot(b_x.to(tl.float32), b_w, acc, input_precision='tf32x3')
        square += tl.sum(b_x.to(tl.float32) * b_x.to(tl.float32), 1)
    acc = tl.where((o_r == ROWS)[None, :], square[:, None], acc)
    p_out = partial + (i_chunk * num_tokens + o_t)[:, None] * BR + o_r[None, :]
    tl.store(p_out, acc, mask=mask_t[:, None])


@triton.jit
def _mix_kernel(
    streams,
    partial,
    scale,
    base,
    collapsed,
    post,
    comb,
    num_tokens,
    eps,
    norm_eps,
    S: tl.constexpr,
    HIDDEN: tl.constexpr,
    CHUNKS: tl.constexpr,
    ITERATIONS: tl.constexpr,
    BR: tl.constexpr,
    BH: tl.constexpr,
):
    """Factors of one token, and its streams weighed to the block's input."""
    i_t = tl.program_id(0).to(tl.int64)
    o_s, o_c = tl.arange(0, S), tl.arange(0, CHUNKS)
    p_chunk = partial + (o_c * num_tokens + i_t) * BR
    mean_square = tl.sum(tl.load(p_chunk + (2 + S) * S), 0) / (S * HIDDEN)
    norm = tl.rsqrt(mean_square + norm_eps)
    to_pre = tl.sum(tl.load(p_chunk[:, None] + o_s[None, :]), 0) * norm
    to_post = tl.sum(tl.load(p_chunk[:, None] + (S + o_s)[None, :]), 0) * norm
    o_comb = 2 * S + o_s[:, None] * S + o_s[None, :]
    to_comb = tl.sum(tl.load(p_chunk[:, None, None] + o_comb[None, :, :]), 0) * norm
    b_pre = tl.sigmoid(to_pre * tl.load(scale) + tl.load(base + o_s)) + eps
    b_post = 2 * tl.sigmoid(to_post * tl.load(scale + 1) + tl.load(base + S + o_s))
    b_comb = to_comb * tl.load(scale + 2) + tl.load(base + o_comb)
    b_comb = tl.exp(b_comb - tl.max(b_comb, 1)[:, None])
    b_comb = b_comb / tl.sum(b_comb, 1)[:, None] + eps
    b_comb = b_comb / (tl.sum(b_comb, 0)[None, :] + eps)
    for _ in range(ITERATIONS - 1):
        b_comb = b_comb / (tl.sum(b_comb, 1)[:, None] + eps)
        b_comb = b_comb / (tl.sum(b_comb, 0)[None, :] + eps)
    tl.store(post + i_t * S + o_s, b_post)
    tl.store(comb + i_t * (S * S) + o_s[:, None] * S + o_s[None, :], b_comb)
    for start in range(0, HIDDEN, BH):
        o_h = start + tl.arange(0, BH)
        p_x = streams + (i_t * S + o_s)[:, None] * HIDDEN + o_h[None, :]
        b_x = tl.load(p_x, mask=(o_h < HIDDEN)[None, :], other=0.0).to(tl.float32)
        tl.store(collapsed + i_t * HIDDEN + o_h, tl.sum(b_x * b_pre[:, None], 0), mask=o_h < HIDDEN)


@triton.jit
def _write_kernel(output, streams, post, comb, out, S: tl.constexpr, HIDDEN: tl.constexpr, BH: tl.constexpr):
    """Stream i of one token: post_i output + sum_j comb_ji stream_j."""
    i_t = tl.program_id(0).to(tl.int64)
    o_h, o_s = tl.program_id(1) * BH + tl.arange(0, BH), tl.arange(0, S)
    mask = o_h < HIDDEN
    b_o = tl.load(output + i_t * HIDDEN + o_h, mask=mask, other=0.0).to(tl.float32)
    b_out = tl.load(post + i_t * S + o_s).to(tl.float32)[:, None] * b_o[None, :]
    for j in tl.static_range(S):
        b_x = tl.load(streams + (i_t * S + j) * HIDDEN + o_h, mask=mask, other=0.0).to(tl.float32)
        b_out += tl.load(comb + i_t * (S * S) + j * S + o_s).to(tl.float32)[:, None] * b_x[None, :]
    tl.store(out + (i_t * S + o_s)[:, None] * HIDDEN + o_h[None, :], b_out, mask=mask[None, :])


def project(streams: torch.Tensor, fn: torch.Tensor) -> torch.Tensor:
    """Partial sums of the projection of contiguous `streams` [..., S, hidden] by `fn` [rows, S hidden].

    The number of partial sums depends on the width alone, so that a token's result does not depend on the others.

    Returns:
        [`CHUNKS`, tokens, columns] float32: the first columns are the projection's rows, the next the sum of squares.
    """
    rows, width = fn.shape
    num_tokens, columns = streams.numel() // width, triton.next_power_of_2(max(rows + 1, 16))
    partial = torch.empty(CHUNKS, num_tokens, columns, dtype=torch.float32, device=streams.device)
    _project_kernel[(triton.cdiv(num_tokens, BLOCK_TOKENS), CHUNKS)](
        streams,
        fn,
        partial,
        num_tokens,
        WIDTH=width,
        ROWS=rows,
        CHUNK=triton.cdiv(width, CHUNKS),
        BT=BLOCK_TOKENS,
        BR=columns,
        BK=128,
        num_warps=4,
    )
    return partial


def read(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    iterations: int,
    eps: float,
    norm_eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`hyper.read`, of a power of two of streams."""
    num_streams, hidden = streams.shape[-2:]
    streams, leading = streams.contiguous(), streams.shape[:-2]
    partial = project(streams, fn)
    num_tokens, columns = partial.shape[1:]
    collapsed = streams.new_empty(*leading, hidden)
    post = streams.new_empty(*leading, num_streams)
    comb = streams.new_empty(*leading, num_streams, num_streams)
    _mix_kernel[(num_tokens,)](
        streams,
        partial,
        scale,
        base,
        collapsed,
        post,
        comb,
        num_tokens,
        eps,
        norm_eps,
        S=num_streams,
        HIDDEN=hidden,
        CHUNKS=CHUNKS,
        ITERATIONS=iterations,
        BR=columns,
        BH=min(BLOCK_HIDDEN, triton.next_power_of_2(hidden)),
        num_warps=4,
    )
    return collapsed, post, comb


def write(output: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    """`hyper.write`; sums are float32, and rounded once."""
    num_streams, hidden = streams.shape[-2:]
    streams = streams.contiguous()
    out = torch.empty_like(streams)
    block = min(BLOCK_HIDDEN, triton.next_power_of_2(hidden))
    _write_kernel[(streams.numel() // (num_streams * hidden), triton.cdiv(hidden, block))](
        output.contiguous(),
        streams,
        post,
        comb,
        out,
        S=num_streams,
        HIDDEN=hidden,
        BH=block,
        num_warps=4,
    )
    return out
