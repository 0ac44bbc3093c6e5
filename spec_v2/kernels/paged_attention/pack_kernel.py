"""A window's mask as bits: one program per word."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["num_queries", "window_len"])
@no_type_check
def pack_kernel(
    visible_ptr,  # [b, q, win]
    query_positions_ptr,  # [b, q]
    window_positions_ptr,  # [b, win]
    bits_ptr,  # [b, q, words], out
    visible_stride_b, visible_stride_q, visible_stride_w,
    query_stride_b, query_stride_q, window_stride_b, window_stride_w,
    num_queries, window_len,
    SLIDING_WINDOW: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) // num_queries
    query = tl.program_id(0) % num_queries
    bit = tl.arange(0, 64)
    node = tl.program_id(1) * 64 + bit
    row = visible_ptr + i * visible_stride_b + query * visible_stride_q
    seen = tl.load(row + node * visible_stride_w, mask=node < window_len, other=0) != 0
    if SLIDING_WINDOW > 0:
        position = tl.load(query_positions_ptr + i * query_stride_b + query * query_stride_q)
        positions = window_positions_ptr + i * window_stride_b + node * window_stride_w
        seen = seen & (position - tl.load(positions, mask=node < window_len, other=0) < SLIDING_WINDOW)
    word = tl.sum(tl.where(seen, tl.full([64], 1, tl.int64) << bit.to(tl.int64), 0), 0)
    tl.store(bits_ptr + tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1), word)


def pack_visible_triton(
    visible: Tensor, query_positions: Tensor, window_positions: Tensor, sliding_window: int | None = None
) -> Tensor:
    b, q, win = visible.shape
    words = -(-win // 64)
    bits = torch.empty(b, q, words, dtype=torch.int64, device=visible.device)
    pack_kernel[(b * q, words)](
        visible, query_positions, window_positions, bits,
        *visible.stride(), *query_positions.stride(), *window_positions.stride(), q, win,
        SLIDING_WINDOW=sliding_window or 0, num_warps=1,
    )  # fmt: skip
    return bits
