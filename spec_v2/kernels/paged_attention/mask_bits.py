"""A window's mask as bits: packed here once per forward, one program per word, and read here by every layer's tiles."""

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


@triton.jit
@no_type_check
def one_word(words_ptr, index, WORDS: tl.constexpr):
    inside = (index >= 0) & (index < WORDS)
    word = tl.load(words_ptr + tl.minimum(tl.maximum(index, 0), WORDS - 1))
    return tl.where(inside, word, 0).to(tl.uint64, bitcast=True)


@triton.jit
@no_type_check
def window_bits(word, words_ptr, offset, WORDS: tl.constexpr):
    """[BLOCK_M], 32 bits: bit `c` is window token `offset + c`; 0 before the window and behind it."""
    if WORDS == 1:  # loaded already
        shift = tl.minimum(tl.abs(offset), 63).to(tl.uint64)
        moved = tl.where(offset >= 0, word >> shift, word << shift)
        moved = tl.where(tl.abs(offset) < 64, moved, 0)
    else:
        index = offset >> 6  # rounds down
        shift = (offset & 63).to(tl.uint64)
        high = one_word(words_ptr, index + 1, WORDS)
        # by 1 and then by the rest: no shift is as wide as the word
        moved = (one_word(words_ptr, index, WORDS) >> shift) | ((high << 1) << (63 - shift))
    return moved.to(tl.uint32)


@triton.jit
@no_type_check
def visible_keys(
    block_start, prefix, position, word, words_ptr,
    BLOCK_N: tl.constexpr, WORDS: tl.constexpr, SLIDING_WINDOW: tl.constexpr,
):  # fmt: skip
    """[BLOCK_M, BLOCK_N]: does the pair see the key? Only for blocks that not all of the tile sees whole."""
    column = tl.arange(0, BLOCK_N)[None, :]
    key = block_start + column
    seen = key <= position[:, None]
    if SLIDING_WINDOW > 0:
        seen = seen & (key > position[:, None] - SLIDING_WINDOW)
    if WORDS > 0:
        bits = window_bits(word, words_ptr, block_start - prefix, WORDS)[:, None]
        for first in tl.static_range(32, BLOCK_N, 32):
            more_bits = window_bits(word, words_ptr, block_start - prefix + first, WORDS)[:, None]
            bits = tl.where(column < first, bits, more_bits)
        in_tree = (bits >> (column & 31).to(tl.uint32)) & 1 != 0
        seen = ((key < prefix) & seen) | in_tree
    return seen
