"""Whole distributions, for rejection sampling, and coins by themselves."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from spec_v2.kernels.dispatch import ceil_div
from spec_v2.kernels.sample_nodes.reference import SamplingInputs
from spec_v2.kernels.sample_nodes.triton_kernel import (
    BLOCK,
    greedy_id,
    kept_weights,
    position_coin,
    row_sums,
    weigh_rows,
)

COINS = 128


@triton.jit
@no_type_check
def _write_probs(
    temperatures_ptr,  # [b]
    probs_ptr,  # [r, v], out
    values_ptr,  # as in _choose, from here on
    block_key_ptr,
    block_id_ptr,
    block_max_ptr,
    block_sum_ptr,
    block_ties_ptr,
    kept_key_ptr,
    kept_ties_ptr,
    tie_weight_ptr,
    min_weight_ptr,
    stride_r,
    stride_v,
    rows_per_request,
    V,
    num_blocks,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    LOGITS: tl.constexpr,
    WIDE: tl.constexpr,
    FILTER: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    b = tl.arange(0, BLOCKS)
    temperature = tl.load(temperatures_ptr + row // rows_per_request).to(WIDE)
    sums, row_max, ties_before = row_sums(
        block_max_ptr, block_sum_ptr, block_ties_ptr, kept_ties_ptr, tie_weight_ptr, row, temperature, b,
        num_blocks, LOGITS, FILTER, WIDE,
    )  # fmt: skip
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(values_ptr + row * stride_r + ids.to(tl.int64) * stride_v, mask=ids < V, other=0.0)
    earlier = tl.sum(tl.where(b == block, ties_before, 0), 0)
    weights = kept_weights(
        x, ids, row_max, temperature, kept_key_ptr, kept_ties_ptr, min_weight_ptr, row, earlier, V,
        LOGITS, FILTER, WIDE,
    )  # fmt: skip
    point_mass = (ids == greedy_id(block_key_ptr, block_id_ptr, row, b, num_blocks)).to(WIDE)
    probs = tl.where(temperature > 0, weights / tl.sum(sums, 0), point_mass)
    tl.store(probs_ptr + row * V + ids, probs, mask=ids < V)


@triton.jit
@no_type_check
def _position_coins(
    seeds_ptr,  # [a, n], any strides
    positions_ptr,  # [a, n], any strides
    coins_ptr,  # [a, n], out
    seeds_stride_a,
    seeds_stride_n,
    positions_stride_a,
    positions_stride_n,
    salt,
    N,
    NUMEL,
    TILE: tl.constexpr,
):
    e = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    a, n = e // N, e % N
    seed = tl.load(seeds_ptr + a * seeds_stride_a + n * seeds_stride_n, mask=e < NUMEL, other=0)
    position = tl.load(
        positions_ptr + a * positions_stride_a + n * positions_stride_n, mask=e < NUMEL, other=0
    )
    tl.store(coins_ptr + e, position_coin(seed ^ salt, position), mask=e < NUMEL)


def node_distributions_triton(logits: Tensor, sampling: SamplingInputs, block: int = BLOCK) -> Tensor:
    """One more launch than a sample."""
    b, n, v = logits.shape
    rows = logits.flatten(0, 1)
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    probs = torch.empty(b, n, v, dtype=wide, device=logits.device)
    if b:
        filters = (sampling.top_ks, sampling.top_ps, sampling.min_ps) if sampling.any_filter else None
        weighed = weigh_rows(rows, n, sampling.temperatures, filters, block)
        grid = (b * n, ceil_div(v, block))
        _write_probs[grid](sampling.temperatures, probs, *weighed.arguments, **weighed.flags)
    return probs


def position_coins_triton(seeds: Tensor, positions: Tensor, salt: int = 0) -> Tensor:
    """Up to two axes, any strides, so that one seed can be expanded over a row of positions."""
    coins = torch.empty(positions.shape, dtype=torch.float32, device=positions.device)
    if coins.numel():
        seeds, positions = (x[None] if x.ndim == 1 else x for x in (seeds, positions))
        _position_coins[(ceil_div(coins.numel(), COINS),)](
            seeds, positions, coins, *seeds.stride(), *positions.stride(), salt, positions.shape[1], coins.numel(),
            TILE=COINS,
        )  # fmt: skip
    return coins
