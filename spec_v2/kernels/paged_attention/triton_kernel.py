"""The same function as `reference.py`: tiles of queries against blocks of keys, with an online softmax.

A program has one tile of one request and one KV head: `BLOCK_M` pairs (query token, query head of that KV head), all of
which read the same keys. Programs of axis 1 share a tile's keys between them; `merge.py` joins what they found.
"""

import math
from typing import TYPE_CHECKING, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from spec_v2.kernels.paged_attention.mask_bits import visible_keys
from spec_v2.kernels.paged_attention.merge import merge_splits, merge_tile, normalise, scratch
from spec_v2.kernels.paged_attention.tiling import Tiling, choose_splits, choose_tiling, num_sms
from spec_v2.kernels.pdl import after_kernel_ahead, pdl_options

if TYPE_CHECKING:
    from spec_v2.kernels.paged_attention import PagedView

LOG2E = tl.constexpr(math.log2(math.e))


@triton.jit
@no_type_check
def tanh(x):
    """By its series near 0, where exponentials would cancel."""
    y = x * x
    near = 62 / 2835 + y * (-1382 / 155925 + y * (21844 / 6081075 + y * (-929569 / 638512875)))
    near = x * (1 + y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * near))))
    e = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    far = 1 - 2 * e / (1 + e)
    return tl.where(y < 0.25, near, tl.where(x < 0, -far, far))


@triton.jit(do_not_specialize=["table_width", "num_queries", "window_len", "num_splits"])
@no_type_check
def attention_kernel(
    query_ptr,  # [t, KV_HEADS * GROUP, KEY_DIM]
    keys_ptr,  # [num_slots, KV_HEADS, KEY_DIM]
    values_ptr,  # [num_slots, KV_HEADS, VALUE_DIM]
    table_ptr,  # [num_rows, table_width]
    rows_ptr,  # [b]
    prefix_lens_ptr,  # [b]
    query_starts_ptr,  # [b + 1], or None: num_queries each
    bits_ptr,  # [b, q, WORDS], or None: causal
    positions_ptr,  # [b, q] with bits
    sinks_ptr,  # [KV_HEADS * GROUP] or None
    out_ptr,  # [t, KV_HEADS * GROUP, VALUE_DIM], out
    parts_ptr,  # [tiles, num_splits, BLOCK_M, BLOCK_DV] of a tile that is split, out
    stats_ptr,  # [tiles, num_splits, 2, BLOCK_M]: largest logit and sum of weights, out
    counts_ptr,  # [tiles]: splits in use, out; if FUSED splits done, 0 before and after
    query_stride_t, query_stride_h, key_stride_s, key_stride_h, value_stride_s, value_stride_h,
    table_stride, table_width, num_queries, window_len, num_splits,
    into_tanh,  # scaling / softcap, with SOFTCAP
    to_base_2,  # what a product, with SOFTCAP a tanh, is multiplied by for an exponent of 2; positive
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_DK: tl.constexpr, BLOCK_DV: tl.constexpr,
    WORDS: tl.constexpr,  # int64 words of a tree mask; 0: causal
    SLIDING_WINDOW: tl.constexpr,  # 0: none
    SOFTCAP: tl.constexpr, SPLIT: tl.constexpr, FUSED: tl.constexpr, MIN_SPLIT_BLOCKS: tl.constexpr,
    WIDE: tl.constexpr,  # slot * stride needs int64
    PDL: tl.constexpr,
):  # fmt: skip
    after_kernel_ahead(PDL)
    num_tiles = tl.num_programs(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS  # neighbours read neighbouring heads of the same slots
    tile = (
        num_tiles - 1 - tl.program_id(0) // KV_HEADS
    )  # of causal tiles the last has most to do: it starts first
    split = tl.program_id(1)
    i = tl.program_id(2)

    # the tile's pairs: which query token, which head
    if query_starts_ptr is None:
        first_query = i.to(tl.int64) * num_queries
    else:
        first_query = tl.load(query_starts_ptr + i).to(tl.int64)
        num_queries = (tl.load(query_starts_ptr + i + 1) - first_query).to(tl.int32)
    prefix = tl.load(prefix_lens_ptr + i).to(tl.int32)
    num_pairs = num_queries * GROUP
    if tile * BLOCK_M >= num_pairs:
        return
    pair = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = pair < num_pairs
    token = tl.minimum(pair, num_pairs - 1) // GROUP
    head = kv_head * GROUP + pair % GROUP
    pair_row = first_query + token

    # its keys: all pairs see those before all_see, none sees one before lo or from hi on
    if WORDS == 0:
        position = prefix + token
        lowest = prefix + tile * BLOCK_M // GROUP
        highest = prefix + tl.minimum(tile * BLOCK_M + BLOCK_M - 1, num_pairs - 1) // GROUP
        all_see = lowest + 1
        hi = highest + 1
    else:
        position = tl.load(positions_ptr + pair_row).to(tl.int32)
        lowest = tl.min(position, 0)
        highest = tl.max(position, 0)
        all_see = prefix
        hi = prefix + window_len
    lo = 0
    if SLIDING_WINDOW > 0:
        lo = tl.minimum(tl.maximum(lowest - SLIDING_WINDOW + 1, 0), prefix)
    words_ptr = bits_ptr
    word = position
    if WORDS > 0:
        words_ptr = bits_ptr + pair_row * WORDS
        if WORDS == 1:
            word = tl.load(words_ptr).to(tl.uint64, bitcast=True)

    # this split's share of them
    used = 1
    start = lo
    stop = hi
    if SPLIT:
        blocks = tl.cdiv(hi - lo, BLOCK_N)
        per_split = tl.maximum(tl.cdiv(blocks, num_splits), MIN_SPLIT_BLOCKS)
        per_split = tl.cdiv(blocks, tl.cdiv(blocks, per_split))  # of one length, not full ones and a rest
        used = tl.cdiv(blocks, per_split)
        if split >= used:
            return
        start = lo + split * per_split * BLOCK_N
        stop = tl.minimum(start + per_split * BLOCK_N, hi)

    dk = tl.arange(0, BLOCK_DK)[None, :]
    dv = tl.arange(0, BLOCK_DV)[None, :]
    query = tl.load(
        query_ptr + pair_row[:, None] * query_stride_t + head.to(tl.int64)[:, None] * query_stride_h + dk,
        mask=exists[:, None] & (dk < KEY_DIM),
        other=0.0,
    )
    head_keys = keys_ptr + kv_head.to(tl.int64) * key_stride_h + dk
    head_values = values_ptr + kv_head.to(tl.int64) * value_stride_h + dv
    row = table_ptr + tl.load(rows_ptr + i).to(tl.int64) * table_stride

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    at = start + tl.arange(0, BLOCK_N)
    # Slots are loaded one block ahead of their keys, so that a key's address is there when its load is due.
    next_slots = tl.load(row + tl.minimum(at, table_width - 1))
    for block_start in tl.range(start, stop, BLOCK_N):
        at = block_start + tl.arange(0, BLOCK_N)
        slots = next_slots
        next_slots = tl.load(row + tl.minimum(at + BLOCK_N, table_width - 1))
        slots = (slots.to(tl.int64) if WIDE else slots)[:, None]

        key = tl.load(head_keys + slots * key_stride_s, mask=dk < KEY_DIM, other=0.0)
        # Scaled behind the subtraction of the largest, where there is less to round.
        logits = tl.dot(query, tl.trans(key), input_precision="ieee")
        if SOFTCAP:
            logits = tanh(logits * into_tanh)
        partly_hidden = block_start + BLOCK_N > all_see
        if SLIDING_WINDOW > 0:
            partly_hidden = partly_hidden | (block_start <= highest - SLIDING_WINDOW)
        if partly_hidden:
            seen = visible_keys(
                block_start, prefix, position, word, words_ptr, BLOCK_N, WORDS, SLIDING_WINDOW
            )
            logits = tl.where(seen, logits, float("-inf"))

        new_top = tl.maximum(top, tl.max(logits, 1))
        finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2((logits - finite_top[:, None]) * to_base_2)
        fade = tl.exp2((top - finite_top) * to_base_2)
        top = new_top
        total = total * fade + tl.sum(weights, 1)
        # Beyond the keys lies unused KV: its weight is 0, and 0 * NaN is NaN.
        value = tl.load(
            head_values + slots * value_stride_s, mask=(at < hi)[:, None] & (dv < VALUE_DIM), other=0.0
        )
        acc = tl.dot(weights.to(value.dtype), value, acc * fade[:, None], input_precision="ieee")

    finished = used == 1
    if SPLIT:
        tile_index = (i * num_tiles + tile) * KV_HEADS + kv_head
        if used > 1:
            place = (tile_index * num_splits + split).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
            tl.store(parts_ptr + place[:, None] * BLOCK_DV + dv, acc, mask=exists[:, None])
            tl.store(stats_ptr + place * 2, top, mask=exists)
            tl.store(stats_ptr + place * 2 + 1, total, mask=exists)
            if FUSED:
                tl.debug_barrier()  # all threads have stored before one of them says so
                finished = tl.atomic_add(counts_ptr + tile_index, 1, sem="acq_rel") == used - 1
                if finished:
                    tl.store(counts_ptr + tile_index, 0)
                    acc, top, total = merge_tile(
                        parts_ptr,
                        stats_ptr,
                        tile_index,
                        num_splits,
                        used,
                        exists,
                        to_base_2,
                        BLOCK_M,
                        BLOCK_DV,
                    )
        if not FUSED and split == 0:
            tl.store(counts_ptr + tile_index, used)
    if finished:
        out = normalise(acc, top * to_base_2, total, sinks_ptr, head)
        out_row = pair_row * (KV_HEADS * GROUP) + head
        tl.store(
            out_ptr + out_row[:, None] * VALUE_DIM + dv,
            out.to(out_ptr.dtype.element_ty),
            mask=exists[:, None] & (dv < VALUE_DIM),
        )


def paged_attention_triton(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    view: "PagedView",
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    tiling: Tiling | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """`tiling` and `num_splits`: by default what `tiling.py` chooses."""
    t, heads, key_dim = query.shape
    kv_heads, value_dim = values.shape[1:]
    b, device = len(view.rows), query.device
    out = torch.empty(t, heads, value_dim, dtype=query.dtype, device=device)
    if t == 0:
        return out
    group = heads // kv_heads
    block_dk, block_dv = (max(16, triton.next_power_of_2(dim)) for dim in (key_dim, value_dim))
    pairs = view.max_queries * group
    if tiling is None:
        tiling = choose_tiling(pairs, block_dk, block_dv, query.element_size())
    block_m = tiling.block_m
    tiles_per_head = triton.cdiv(pairs, block_m)
    tiles = b * kv_heads * tiles_per_head
    if num_splits is None:
        max_keys = view.max_prefix_len + view.window_len
        max_keys = min(max_keys, (sliding_window or max_keys) + view.window_len)
        num_splits = choose_splits(tiles, max_keys, num_sms(device))
    shared = scratch(view, (tiles, num_splits, block_m, block_dv), tiling.fused) if num_splits > 1 else None
    parts, stats, counts = shared or (None, None, None)

    query = query if query.stride(2) == 1 else query.contiguous()
    rows, prefix_lens = view.rows.contiguous(), view.prefix_lens.contiguous()
    query_starts = None if view.query_starts is None else view.query_starts.contiguous()
    bits = positions = None
    if view.window is not None:
        bits, positions = view.window.bits(sliding_window), view.window.query_positions.contiguous()
    into_tanh = 0.0 if softcap is None else scaling / softcap
    to_base_2 = (scaling if softcap is None else softcap) * LOG2E.value
    farthest = max((keys.shape[0] - 1) * keys.stride(0), (values.shape[0] - 1) * values.stride(0))
    attention_kernel[(kv_heads * tiles_per_head, num_splits, b)](
        query, keys, values, view.table, rows, prefix_lens, query_starts, bits, positions, sinks,
        out, parts, stats, counts,
        query.stride(0), query.stride(1), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        view.table.stride(0), view.table.shape[1], view.max_queries, view.window_len, num_splits,
        into_tanh, to_base_2,
        KV_HEADS=kv_heads, GROUP=group, KEY_DIM=key_dim, VALUE_DIM=value_dim,
        BLOCK_M=block_m, BLOCK_N=tiling.block_n, BLOCK_DK=block_dk, BLOCK_DV=block_dv,
        WORDS=0 if bits is None else bits.shape[2], SLIDING_WINDOW=sliding_window or 0,
        SOFTCAP=softcap is not None, SPLIT=num_splits > 1, FUSED=tiling.fused,
        MIN_SPLIT_BLOCKS=tiling.min_split_blocks, WIDE=farthest >= 2**31,
        num_warps=tiling.num_warps, num_stages=tiling.num_stages, **pdl_options(query),
    )  # fmt: skip
    if shared and not tiling.fused:
        merge_splits(*shared, query_starts, sinks, out, view.max_queries, kv_heads, to_base_2)
    return out
