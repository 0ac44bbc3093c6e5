"""The inverse CDF over a split vocabulary, without a sort.

Every block of a row reports what it weighs (`_weigh_blocks`), then one program per row finds the block where the running
sum exceeds the coin and looks only there (`_choose`). Blocks have the same size whatever the batch is, so a row's sample
does not depend on its neighbours. With filters the blocks first agree on what is kept: `filter_kernel.py`.
"""

from typing import no_type_check

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
def _choose(
    values_ptr,  # [r, v], any strides
    temperatures_ptr,  # [b], read with LOGITS
    seeds_ptr,  # [b], read with LOGITS
    positions_ptr,  # [r], read with LOGITS
    coins_ptr,  # [r], read unless LOGITS
    block_key_ptr,  # [r, blocks], read with LOGITS
    block_id_ptr,  # [r, blocks], read with LOGITS
    block_max_ptr,  # [r, blocks]
    block_sum_ptr,  # [r, blocks]; with FILTER: of what lies above kept_key
    block_ties_ptr,  # [r, blocks], read with FILTER, as are those below
    kept_key_ptr,  # [r]
    kept_ties_ptr,  # [r]
    tie_weight_ptr,  # [r]
    min_weight_ptr,  # [r]
    ids_ptr,  # [r], out
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
    is_block = b < num_blocks
    at = row * num_blocks + b
    block_max = tl.load(block_max_ptr + at, mask=is_block, other=-float("inf"))
    sums = tl.load(block_sum_ptr + at, mask=is_block, other=0.0)
    row_max = tl.max(block_max, 0)
    temperature = 1.0
    if LOGITS:
        request = row // rows_per_request
        temperature = tl.load(temperatures_ptr + request).to(WIDE)
        coin = position_coin(tl.load(seeds_ptr + request), tl.load(positions_ptr + row))
        if not FILTER:
            sums = tl.where(sums > 0, sums * weigh(block_max, row_max, temperature, LOGITS), sums)
    else:
        coin = tl.load(coins_ptr + row)
    if FILTER:
        kept_key = tl.load(kept_key_ptr + row)
        kept_ties = tl.load(kept_ties_ptr + row)
        ties = tl.load(block_ties_ptr + at, mask=is_block, other=0)
        ties_before = tl.cumsum(ties, 0) - ties
        kept_here = tl.minimum(tl.maximum(kept_ties - ties_before, 0.0), ties.to(WIDE))
        tie_weight = tl.load(tie_weight_ptr + row)
        sums += tl.where(tie_weight > 0, kept_here * tie_weight, 0.0)

    threshold = threshold_of(coin.to(WIDE), tl.sum(sums, 0))
    block, before = block_of(sums, b, threshold, num_blocks)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(values_ptr + row * stride_r + ids.to(tl.int64) * stride_v, mask=ids < V, other=-float("inf"))
    weights = tl.where(ids < V, weigh(x.to(WIDE), row_max, temperature, LOGITS), 0.0)
    if FILTER:
        key = order_key(x)
        is_tie = (key == kept_key) & (ids < V)
        earlier = tl.sum(tl.where(b < block, ties, 0), 0)
        rank = earlier + tl.cumsum(is_tie.to(tl.int32), 0)
        keep = (key > kept_key) | (is_tie & (rank.to(WIDE) <= kept_ties))
        weights = tl.where(keep & (weights >= tl.load(min_weight_ptr + row)), weights, 0.0)
    chosen = id_in_block(weights, ids, before, threshold, V)
    if LOGITS:
        lowest: tl.constexpr = -0x8000000000000000 if tl.float64 == WIDE else -0x80000000
        best_key = tl.load(block_key_ptr + at, mask=is_block, other=lowest)
        best = tl.load(block_id_ptr + at, mask=is_block, other=LARGEST_ID)
        greedy = tl.min(tl.where(best_key == tl.max(best_key, 0), best, LARGEST_ID), 0)
        chosen = tl.where(temperature > 0, chosen, greedy)
    tl.store(ids_ptr + row, chosen.to(tl.int64))


def sample_nodes_triton(
    logits: Tensor, positions: Tensor, sampling: SamplingInputs, block: int = BLOCK
) -> Tensor:
    """Any float dtype. Greedy rows and sampled ones run in the same launches."""
    b, n, _ = logits.shape
    rows = logits.flatten(0, 1)
    if sampling.all_greedy:
        return top_k_triton(rows, 1, block=block)[1].view(b, n)
    coins = (sampling.temperatures, sampling.seeds, positions.contiguous())
    filters = (sampling.top_ks, sampling.top_ps, sampling.min_ps) if sampling.any_filter else None
    return _sample(rows, n, coins, filters, block).view(b, n)


def sample_probs_triton(
    weights: Tensor, coins: Tensor, filters: tuple[Tensor, Tensor, Tensor] | None, block: int = BLOCK
) -> Tensor:
    """Any float dtype, any strides. `filters`: top-k, top-p and min-p of each row."""
    return _sample(weights, 1, coins.contiguous(), filters, block)


def _sample(
    values: Tensor,
    rows_per_request: int,
    coins: Tensor | tuple[Tensor, Tensor, Tensor],
    filters: tuple[Tensor, Tensor, Tensor] | None,
    block: int,
) -> Tensor:
    """`coins`: given, for values that are weights; or temperatures, seeds and positions, for values that are logits."""
    r, v = values.shape
    refuse_beyond(MOST_TOKENS, vocabulary=v)
    device = values.device
    ids = torch.empty(r, dtype=torch.long, device=device)
    if r == 0:
        return ids
    is_double = values.dtype == torch.float64
    num_blocks = ceil_div(v, block)
    keys = torch.empty(r, num_blocks, dtype=torch.int64 if is_double else torch.int32, device=device)
    best = torch.empty(r, num_blocks, dtype=torch.int32, device=device)
    wide = torch.float64 if is_double else torch.float32
    block_max, block_sum = torch.empty(2, r, num_blocks, dtype=wide, device=device)
    nothing = ids  # a pointer that the kernel does not use
    has_logits = isinstance(coins, tuple)
    temperatures, seeds, positions = coins if isinstance(coins, tuple) else (nothing, nothing, nothing)
    given = nothing if isinstance(coins, tuple) else coins
    shape = (*values.stride(), rows_per_request, v, num_blocks)
    flags = {"BLOCK": block, "LOGITS": has_logits, "WIDE": tl.float64 if is_double else tl.float32}
    _weigh_blocks[(r, num_blocks)](
        values, temperatures, keys, best, block_max, block_sum, *shape, **flags, num_warps=8
    )
    kept: tuple[Tensor, ...] = (nothing,) * 5
    if filters is not None:
        found = filter_blocks(values, temperatures, filters, block_max, block_sum, shape, flags)
        block_sum = found.block_sums
        kept = (found.block_ties, found.key, found.ties, found.tie_weight, found.min_weight)
    _choose[(r,)](
        values, temperatures, seeds, positions, given, keys, best, block_max, block_sum, *kept, ids, *shape,
        **flags, BLOCKS=next_power_of_2(num_blocks), FILTER=filters is not None, num_warps=8,
    )  # fmt: skip
    return ids
