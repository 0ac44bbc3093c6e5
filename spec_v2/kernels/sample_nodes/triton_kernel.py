"""The inverse CDF over a split vocabulary, without a sort.

Every block of a row reports what it weighs (`_weigh_blocks`), then one program per row finds the block where the running
sum exceeds the coin and looks only there (`_choose`). Blocks have the same size whatever the batch is, so a row's sample
does not depend on its neighbours. With filters the blocks first agree on what is kept: `filter_kernel.py`.
"""

from dataclasses import dataclass
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from spec_v2.kernels.dispatch import ceil_div, next_power_of_2, refuse_beyond
from spec_v2.kernels.sample_nodes.filter_kernel import filter_blocks, weigh
from spec_v2.kernels.sample_nodes.reference import SamplingInputs
from spec_v2.kernels.top_k.triton_kernel import order_key, top_k_triton

BLOCK = 4096  # numbers that a program holds at once
MOST_TOKENS = 1 << 24  # they are counted in fp32
LARGEST_ID = tl.constexpr(1 << 30)


@triton.jit
@no_type_check
def _mix(x):
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)


@triton.jit
@no_type_check
def position_coin(seed, position):
    """The coin of (seed, position), both int64; see `position_coins` of the reference."""
    state = _mix((seed & 0xFFFFFFFF) ^ 0x9E3779B9)
    state = _mix(state ^ ((seed >> 32) & 0xFFFFFFFF))
    state = _mix((state + position * 0x85EBCA77) & 0xFFFFFFFF)
    return (state >> 8).to(tl.float32) / 16777216.0


@triton.jit
@no_type_check
def threshold_of(coin, total):
    """What the running sum has to exceed: `coin * total`, which may have been rounded up to the total."""
    threshold = coin * total
    if total.dtype == tl.float64:
        below = (total.to(tl.int64, bitcast=True) - 1).to(tl.float64, bitcast=True)
    else:
        below = (total.to(tl.int32, bitcast=True) - 1).to(tl.float32, bitcast=True)
    return tl.where((threshold >= total) & (total > 0), below, threshold)


@triton.jit
@no_type_check
def block_of(sums, blocks, threshold, num_blocks):
    """The first block where the running sum exceeds the threshold (the last one where none does), and the sum before."""
    above = (tl.cumsum(sums, 0) > threshold) & (blocks < num_blocks)
    block = tl.min(tl.where(above, blocks, num_blocks - 1), 0)
    return block, tl.sum(tl.where(blocks < block, sums, 0.0), 0)


@triton.jit
@no_type_check
def id_in_block(weights, ids, before, threshold, V):
    """The first id whose running sum exceeds the threshold. Its weight is positive, if any of the block's is."""
    positive = (weights > 0) & (ids < V)
    above = (before + tl.cumsum(weights, 0) > threshold) & positive
    first = tl.min(tl.where(above, ids, LARGEST_ID), 0)
    # the block's sum and its running sum are rounded differently: then the last one that can be drawn
    last = tl.max(tl.where(positive, ids, -1), 0)
    return tl.where(first < LARGEST_ID, first, tl.where(last >= 0, last, V - 1))


@triton.jit
@no_type_check
def _weigh_blocks(
    values_ptr,  # [r, v], any strides
    temperatures_ptr,  # [b], read with LOGITS
    block_key_ptr,  # [r, blocks], out with LOGITS: order key of the block's largest
    block_id_ptr,  # [r, blocks], out with LOGITS: its lowest id
    block_max_ptr,  # [r, blocks], out
    block_sum_ptr,  # [r, blocks], out: of weights, the block's largest logit weighing 1
    stride_r,
    stride_v,
    rows_per_request,
    V,
    num_blocks,
    BLOCK: tl.constexpr,
    LOGITS: tl.constexpr,
    WIDE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    in_row = ids < V
    x = tl.load(values_ptr + row * stride_r + ids.to(tl.int64) * stride_v, mask=in_row, other=-float("inf"))
    x = x.to(WIDE)
    out = row * num_blocks + block
    largest = tl.max(x, 0)
    tl.store(block_max_ptr + out, largest)
    temperature = 1.0
    if LOGITS:
        temperature = tl.load(temperatures_ptr + row // rows_per_request).to(WIDE)
        key = order_key(x)
        best = tl.max(key, 0)
        tl.store(block_key_ptr + out, best)
        tl.store(block_id_ptr + out, tl.min(tl.where((key == best) & in_row, ids, LARGEST_ID), 0))
    # a block of -inf alone weighs nothing, where exp(-inf - -inf) would be NaN
    weights = weigh(x, tl.where(largest == -float("inf"), 0.0, largest), temperature, LOGITS)
    tl.store(block_sum_ptr + out, tl.sum(tl.where(in_row, weights, 0.0), 0))


@triton.jit
@no_type_check
def row_sums(
    block_max_ptr, block_sum_ptr, block_ties_ptr, kept_ties_ptr, tie_weight_ptr, row, temperature, b, num_blocks,
    LOGITS: tl.constexpr, FILTER: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """(weights of a row's blocks, the row's largest number, and how many kept ties lie before each block)"""
    at = row * num_blocks + b
    is_block = b < num_blocks
    block_max = tl.load(block_max_ptr + at, mask=is_block, other=-float("inf"))
    sums = tl.load(block_sum_ptr + at, mask=is_block, other=0.0)
    row_max = tl.max(block_max, 0)
    if FILTER:
        ties = tl.load(block_ties_ptr + at, mask=is_block, other=0)
        ties_before = tl.cumsum(ties, 0) - ties
        kept_here = tl.minimum(tl.maximum(tl.load(kept_ties_ptr + row) - ties_before, 0.0), ties.to(WIDE))
        tie_weight = tl.load(tie_weight_ptr + row)
        sums += tl.where(tie_weight > 0, kept_here * tie_weight, 0.0)
    else:
        ties_before = tl.zeros_like(b)
        if LOGITS:
            sums = tl.where(sums > 0, sums * weigh(block_max, row_max, temperature, LOGITS), sums)
    return sums, row_max, ties_before


@triton.jit
@no_type_check
def kept_weights(
    x, ids, row_max, temperature, kept_key_ptr, kept_ties_ptr, min_weight_ptr, row, ties_before, V,
    LOGITS: tl.constexpr, FILTER: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Weights of a block's numbers, 0 for what is left out. `ties_before`: in the blocks before this one."""
    weights = tl.where(ids < V, weigh(x.to(WIDE), row_max, temperature, LOGITS), 0.0)
    if FILTER:
        key = order_key(x)
        kept_key = tl.load(kept_key_ptr + row)
        is_tie = (key == kept_key) & (ids < V)
        rank = ties_before + tl.cumsum(is_tie.to(tl.int32), 0)
        keep = (key > kept_key) | (is_tie & (rank.to(WIDE) <= tl.load(kept_ties_ptr + row)))
        weights = tl.where(keep & (weights >= tl.load(min_weight_ptr + row)), weights, 0.0)
    return weights


@triton.jit
@no_type_check
def greedy_id(block_key_ptr, block_id_ptr, row, b, num_blocks):
    """The lowest id of a row's largest number."""
    # places past the last block read that one again: no constant lies below the keys of every dtype
    at = row * num_blocks + tl.minimum(b, num_blocks - 1)
    best, ids = tl.load(block_key_ptr + at), tl.load(block_id_ptr + at)
    return tl.min(tl.where(best == tl.max(best, 0), ids, LARGEST_ID), 0)


@triton.jit
@no_type_check
def _choose(
    temperatures_ptr,  # [b], read with LOGITS
    seeds_ptr,  # [b], read with LOGITS
    positions_ptr,  # [r], read with LOGITS
    coins_ptr,  # [r], read unless LOGITS
    ids_ptr,  # [r], out
    values_ptr,  # [r, v], any strides
    block_key_ptr,  # [r, blocks], read with LOGITS
    block_id_ptr,  # [r, blocks], read with LOGITS
    block_max_ptr,  # [r, blocks]
    block_sum_ptr,  # [r, blocks]; with FILTER: of what lies above kept_key
    block_ties_ptr,  # [r, blocks], read with FILTER, as are those below
    kept_key_ptr,  # [r]
    kept_ties_ptr,  # [r]
    tie_weight_ptr,  # [r]
    min_weight_ptr,  # [r]
    stride_r,
    stride_v,
    rows_per_request,
    V,
    num_blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,  # num_blocks, padded to a power of two
    LOGITS: tl.constexpr,
    WIDE: tl.constexpr,
    FILTER: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    b = tl.arange(0, BLOCKS)
    temperature = 1.0
    if LOGITS:
        request = row // rows_per_request
        temperature = tl.load(temperatures_ptr + request).to(WIDE)
        coin = position_coin(tl.load(seeds_ptr + request), tl.load(positions_ptr + row))
    else:
        coin = tl.load(coins_ptr + row)
    sums, row_max, ties_before = row_sums(
        block_max_ptr, block_sum_ptr, block_ties_ptr, kept_ties_ptr, tie_weight_ptr, row, temperature, b,
        num_blocks, LOGITS, FILTER, WIDE,
    )  # fmt: skip
    threshold = threshold_of(coin.to(WIDE), tl.sum(sums, 0))
    block, before = block_of(sums, b, threshold, num_blocks)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(values_ptr + row * stride_r + ids.to(tl.int64) * stride_v, mask=ids < V, other=0.0)
    earlier = tl.sum(tl.where(b == block, ties_before, 0), 0)
    weights = kept_weights(
        x, ids, row_max, temperature, kept_key_ptr, kept_ties_ptr, min_weight_ptr, row, earlier, V,
        LOGITS, FILTER, WIDE,
    )  # fmt: skip
    chosen = id_in_block(weights, ids, before, threshold, V)
    if LOGITS:
        greedy = greedy_id(block_key_ptr, block_id_ptr, row, b, num_blocks)
        chosen = tl.where(temperature > 0, chosen, greedy)
    tl.store(ids_ptr + row, chosen.to(tl.int64))


@dataclass(frozen=True, slots=True)
class Weighed:
    """Rows whose blocks are weighed, as the arguments of a kernel that goes on from there."""

    arguments: tuple[Any, ...]
    flags: dict[str, Any]


def sample_nodes_triton(
    logits: Tensor, positions: Tensor, sampling: SamplingInputs, block: int = BLOCK
) -> Tensor:
    """Any float dtype. Greedy rows and sampled ones run in the same launches."""
    b, n, _ = logits.shape
    rows = logits.flatten(0, 1)
    if sampling.all_greedy:
        return top_k_triton(rows, 1, block=block)[1].view(b, n)
    ids = torch.empty(b, n, dtype=torch.long, device=logits.device)
    if b:
        filters = (sampling.top_ks, sampling.top_ps, sampling.min_ps) if sampling.any_filter else None
        weighed = weigh_rows(rows, n, sampling.temperatures, filters, block)
        coins = (sampling.temperatures, sampling.seeds, positions.contiguous(), ids)
        _choose[(b * n,)](*coins, ids, *weighed.arguments, **weighed.flags)
    return ids


def sample_probs_triton(
    weights: Tensor, coins: Tensor, filters: tuple[Tensor, Tensor, Tensor] | None, block: int = BLOCK
) -> Tensor:
    """Any float dtype, any strides. `filters`: top-k, top-p and min-p of each row."""
    r = len(weights)
    ids = torch.empty(r, dtype=torch.long, device=weights.device)
    if r:
        weighed = weigh_rows(weights, 1, None, filters, block)
        _choose[(r,)](ids, ids, ids, coins.contiguous(), ids, *weighed.arguments, **weighed.flags)
    return ids


def weigh_rows(
    values: Tensor,
    rows_per_request: int,
    temperatures: Tensor | None,
    filters: tuple[Tensor, Tensor, Tensor] | None,
    block: int,
) -> Weighed:
    """One launch, and those of the filters. With `temperatures` the values are logits, else weights."""
    r, v = values.shape
    refuse_beyond(MOST_TOKENS, vocabulary=v)
    device, is_double = values.device, values.dtype == torch.float64
    num_blocks = ceil_div(v, block)
    keys = torch.empty(r, num_blocks, dtype=torch.int64 if is_double else torch.int32, device=device)
    ids = torch.empty(r, num_blocks, dtype=torch.int32, device=device)
    wide = torch.float64 if is_double else torch.float32
    block_max, block_sum = torch.empty(2, r, num_blocks, dtype=wide, device=device)
    shape = (*values.stride(), rows_per_request, v, num_blocks)
    flags = {
        "BLOCK": block, "LOGITS": temperatures is not None, "WIDE": tl.float64 if is_double else tl.float32,
        "num_warps": 8,
    }  # fmt: skip
    nothing = keys  # a pointer that the kernel does not use
    heat = nothing if temperatures is None else temperatures
    _weigh_blocks[(r, num_blocks)](values, heat, keys, ids, block_max, block_sum, *shape, **flags)
    kept: tuple[Tensor, ...] = (nothing,) * 5
    if filters is not None:
        found = filter_blocks(values, heat, filters, block_max, block_sum, shape, flags)
        block_sum = found.block_sums
        kept = (found.block_ties, found.key, found.ties, found.tie_weight, found.min_weight)
    blocks = {"BLOCKS": next_power_of_2(num_blocks), "FILTER": filters is not None}
    return Weighed((values, keys, ids, block_max, block_sum, *kept, *shape), flags | blocks)
