"""Two launches: each split of a row keeps its own `k` best, then one program per row merges the splits."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from spec_v2.kernels.dispatch import ceil_div, next_power_of_2, refuse_beyond

BLOCK = 4096  # numbers that a program holds at once
PROGRAMS = 1024  # enough to fill a GPU of 132 multiprocessors several times
LARGEST_ID = tl.constexpr(1 << 30)  # ids from here on stand for places of the list that are still free


@triton.jit
@no_type_check
def order_key(x):
    """A signed integer as wide as `x`, in the order of torch.argmax: -0 equals 0, NaN is largest. Never the least one."""
    if x.dtype == tl.float64:
        bits = tl.where(x == 0, 0.0, x).to(tl.int64, bitcast=True)
        key = tl.where(x != x, 0x7FFFFFFFFFFFFFFF, bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF))
    elif x.dtype == tl.float32:
        bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
        key = tl.where(x != x, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    else:  # 16 bits, in an int32
        wide = x.to(tl.float32)
        bits = tl.where(wide == 0, 0.0, wide).to(x.dtype).to(tl.int16, bitcast=True).to(tl.int32)
        key = tl.where(wide != wide, 0x7FFF, bits ^ ((bits >> 31) & 0x7FFF))
    return key


@triton.jit
@no_type_check
def _top_k_of_split(
    values_ptr,  # [r, v], any strides
    keys_ptr,  # [r, splits, K], out: order keys of the best of each split, in no order
    ids_ptr,  # [r, splits, K], out
    block_max_ptr,  # [r, blocks], out with PROBS
    block_sum_ptr,  # [r, blocks], out with PROBS: sum of exp(x - block_max)
    stride_r,
    stride_v,
    V,
    num_blocks,
    blocks_per_split,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    PROBS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    place = tl.arange(0, K)
    # places differ in their id, so that the worst of the list is always exactly one of them
    kept_id = LARGEST_ID + place
    is_double: tl.constexpr = values_ptr.dtype.element_ty == tl.float64 and not PROBS
    key_type: tl.constexpr = tl.int64 if is_double else tl.int32
    lowest: tl.constexpr = -0x8000000000000000 if is_double else -0x80000000
    kept_key = tl.full([K], lowest, key_type)

    block = split * blocks_per_split
    end = tl.minimum(block + blocks_per_split, num_blocks)
    while block < end:
        ids = block * BLOCK + lane
        in_row = ids < V
        x = tl.load(
            values_ptr + row * stride_r + ids.to(tl.int64) * stride_v, mask=in_row, other=-float("inf")
        )
        if not is_double:
            x = x.to(tl.float32)
        if PROBS:
            block_max = tl.max(x, 0)
            # a block of -inf alone weighs nothing, where exp(-inf - -inf) would be NaN
            block_sum = tl.sum(tl.exp(x - tl.where(block_max == -float("inf"), 0.0, block_max)), 0)
            tl.store(block_max_ptr + row * num_blocks + block, block_max)
            tl.store(block_sum_ptr + row * num_blocks + block, block_sum)
        key = tl.where(in_row, order_key(x), lowest)
        best = tl.max(key, 0)
        worst = tl.min(kept_key, 0)
        # ids rise from block to block, so of equal numbers the one that is kept already is the right one
        while best > worst:
            best_id = tl.min(tl.where(key == best, ids, LARGEST_ID), 0)
            worst_id = tl.max(tl.where(kept_key == worst, kept_id, -1), 0)
            here = kept_id == worst_id
            kept_key = tl.where(here, best, kept_key)
            kept_id = tl.where(here, best_id, kept_id)
            key = tl.where(ids == best_id, lowest, key)
            best = tl.max(key, 0)
            worst = tl.min(kept_key, 0)
        block += 1

    out = (row * tl.num_programs(1) + split) * K + place
    tl.store(keys_ptr + out, kept_key)
    tl.store(ids_ptr + out, kept_id)


@triton.jit
@no_type_check
def _merge_splits(
    keys_ptr,  # [r, C]
    ids_ptr,  # [r, C]
    values_ptr,  # [r, v], any strides
    block_max_ptr,  # [r, blocks], read with PROBS
    block_sum_ptr,
    id_map_ptr,  # [v], read with HAS_MAP
    out_values_ptr,  # [r, k], out
    out_ids_ptr,  # [r, k], out
    stride_r,
    stride_v,
    num_candidates,
    num_blocks,
    K: tl.constexpr,
    CANDIDATES: tl.constexpr,
    BLOCKS: tl.constexpr,
    PROBS: tl.constexpr,
    HAS_MAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, CANDIDATES)
    is_candidate = c < num_candidates
    lowest: tl.constexpr = -0x8000000000000000 if keys_ptr.dtype.element_ty == tl.int64 else -0x80000000
    key = tl.load(keys_ptr + row * num_candidates + c, mask=is_candidate, other=lowest)
    ids = tl.load(ids_ptr + row * num_candidates + c, mask=is_candidate, other=LARGEST_ID)

    row_max, total = 0.0, 1.0
    if PROBS:
        b = tl.arange(0, BLOCKS)
        is_block = b < num_blocks
        block_max = tl.load(block_max_ptr + row * num_blocks + b, mask=is_block, other=-float("inf"))
        block_sum = tl.load(block_sum_ptr + row * num_blocks + b, mask=is_block, other=0.0)
        row_max = tl.max(block_max, 0)
        # where the row has no softmax, this is NaN
        total = tl.sum(tl.where(is_block, block_sum * tl.exp(block_max - row_max), 0.0), 0)

    for i in range(K):
        best = tl.max(key, 0)
        best_id = tl.min(tl.where(key == best, ids, LARGEST_ID), 0)
        key = tl.where(ids == best_id, lowest, key)
        if PROBS:
            best_id = tl.where(total == total, best_id, i)
        value = tl.load(values_ptr + row * stride_r + best_id.to(tl.int64) * stride_v)
        if PROBS:
            value = tl.where(total == total, tl.exp(value.to(tl.float32) - row_max) / total, 0.0)
        tl.store(out_values_ptr + row * K + i, value)
        reported = best_id.to(tl.int64)
        if HAS_MAP:
            reported = tl.load(id_map_ptr + best_id)
        tl.store(out_ids_ptr + row * K + i, reported)


def top_k_triton(values: Tensor, k: int, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """Any float dtype, any strides."""
    out_values = torch.empty(len(values), k, dtype=values.dtype, device=values.device)
    return out_values, _launch(values, k, None, out_values, probs=False, block=block)


def top_k_probs_triton(
    logits: Tensor, k: int, id_map: Tensor | None = None, block: int = BLOCK
) -> tuple[Tensor, Tensor]:
    """Any float dtype, any strides."""
    top_p = torch.empty(len(logits), k, dtype=torch.float32, device=logits.device)
    return top_p, _launch(logits, k, id_map, top_p, probs=True, block=block)


def _launch(
    values: Tensor, k: int, id_map: Tensor | None, out_values: Tensor, *, probs: bool, block: int
) -> Tensor:
    """Fill `out_values`; return the ids."""
    r, v = values.shape
    refuse_beyond(LARGEST_ID.value - 1, vocabulary=v)
    device = values.device
    out_ids = torch.empty(r, k, dtype=torch.long, device=device)
    if r == 0:
        return out_ids
    num_blocks = ceil_div(v, block)
    blocks_per_split = ceil_div(num_blocks, max(1, min(num_blocks, PROGRAMS // r)))
    num_splits = ceil_div(num_blocks, blocks_per_split)
    kept = next_power_of_2(k)
    key_type = torch.int64 if values.dtype == torch.float64 and not probs else torch.int32
    keys = torch.empty(r, num_splits, kept, dtype=key_type, device=device)
    ids = torch.empty(r, num_splits, kept, dtype=torch.int32, device=device)
    # the statistics are per block, not per split: then a row's probabilities do not depend on the batch size
    block_max, block_sum = torch.empty(2, r, num_blocks if probs else 0, device=device)
    _top_k_of_split[(r, num_splits)](
        values, keys, ids, block_max, block_sum, *values.stride(), v, num_blocks, blocks_per_split,
        K=kept, BLOCK=block, PROBS=probs, num_warps=8,
    )  # fmt: skip
    _merge_splits[(r,)](
        keys, ids, values, block_max, block_sum, ids if id_map is None else id_map, out_values, out_ids,
        *values.stride(), num_splits * kept, num_blocks,
        K=k, CANDIDATES=next_power_of_2(num_splits * kept), BLOCKS=next_power_of_2(num_blocks),
        PROBS=probs, HAS_MAP=id_map is not None,
    )  # fmt: skip
    return out_ids
