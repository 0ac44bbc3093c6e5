"""Joining what the splits of a tile found: each has its largest logit, its sum of weights and its weighted values.

Always in the order of the splits, so the result is the same bits whichever split ends first.
"""

import math
from typing import TYPE_CHECKING, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from spec_v2.kernels.pdl import after_kernel_ahead, pdl_options

if TYPE_CHECKING:
    from spec_v2.kernels.paged_attention import PagedView

LOG2E = tl.constexpr(math.log2(math.e))


@triton.jit
@no_type_check
def normalise(acc, top, total, sinks_ptr, head):
    """Weighted values to their mean; a sink takes its share and gives nothing. Nothing seen: 0. `top`: to base 2."""
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
        total += tl.exp2(sink - tl.where(top == float("-inf"), 0.0, top))
    return acc / tl.where(total == 0, 1.0, total)[:, None]


@triton.jit
@no_type_check
def merge_tile(
    parts_ptr, stats_ptr, tile_index, num_splits, used, exists, to_base_2,
    BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """All splits of one tile, by the program that finished last. Reads past the L1 cache, which others don't share."""
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    first = (tile_index * num_splits).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    dv = tl.arange(0, BLOCK_DV)[None, :]
    for split in tl.range(0, used, num_stages=3):
        place = first + split * BLOCK_M
        part_top = tl.load(stats_ptr + place * 2, mask=exists, other=0.0, cache_modifier=".cg")
        part_total = tl.load(stats_ptr + place * 2 + 1, mask=exists, other=0.0, cache_modifier=".cg")
        part = tl.load(
            parts_ptr + place[:, None] * BLOCK_DV + dv, mask=exists[:, None], other=0.0, cache_modifier=".cg"
        )
        new_top = tl.maximum(top, part_top)
        finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        fade, share = tl.exp2((top - finite_top) * to_base_2), tl.exp2((part_top - finite_top) * to_base_2)
        total = total * fade + part_total * share
        acc = acc * fade[:, None] + part * share[:, None]
        top = new_top
    return acc, top, total


@triton.jit(do_not_specialize=["num_queries", "num_splits"])
@no_type_check
def merge_kernel(
    parts_ptr,  # [tiles, num_splits, BLOCK_M, BLOCK_DV]
    stats_ptr,  # [tiles, num_splits, BLOCK_M, 2]
    counts_ptr,  # [tiles]: splits in use; where it is 1 the output is there already
    query_starts_ptr,  # [b + 1] or None
    sinks_ptr,  # [KV_HEADS * GROUP] or None
    out_ptr,  # [t, KV_HEADS * GROUP, VALUE_DIM], out
    num_queries,
    num_splits,
    to_base_2,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):
    """One pair (query token, head) per program, `BLOCK_S` splits side by side."""
    after_kernel_ahead(PDL)
    num_tiles = tl.num_programs(0) // KV_HEADS
    kv_head = tl.program_id(0) % KV_HEADS
    tile = tl.program_id(0) // KV_HEADS
    i = tl.program_id(2)
    if query_starts_ptr is None:
        first_query = i.to(tl.int64) * num_queries
    else:
        first_query = tl.load(query_starts_ptr + i).to(tl.int64)
        num_queries = (tl.load(query_starts_ptr + i + 1) - first_query).to(tl.int32)
    pair = tile * BLOCK_M + tl.program_id(1)
    if pair >= num_queries * GROUP:
        return
    tile_index = (i * num_tiles + tile) * KV_HEADS + kv_head
    used = tl.load(counts_ptr + tile_index)
    if used == 1:
        return

    dv = tl.arange(0, BLOCK_DV)[None, :]
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, BLOCK_DV], tl.float32)
    for first in tl.range(0, used, BLOCK_S):
        split = first + tl.arange(0, BLOCK_S)
        place = (tile_index * num_splits + split).to(tl.int64) * BLOCK_M + tl.program_id(1)
        part_top = tl.load(stats_ptr + place * 2, mask=split < used, other=float("-inf"))
        part_total = tl.load(stats_ptr + place * 2 + 1, mask=split < used, other=0.0)
        part = tl.load(parts_ptr + place[:, None] * BLOCK_DV + dv, mask=(split < used)[:, None], other=0.0)
        new_top = tl.maximum(top, tl.max(part_top, 0))
        finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        fade, share = tl.exp2((top - finite_top) * to_base_2), tl.exp2((part_top - finite_top) * to_base_2)
        total = total * fade + tl.sum(part_total * share, 0)
        acc = acc * fade[:, None] + tl.sum(part * share[:, None], 0)[None, :]
        top = new_top

    head = kv_head * GROUP + pair % GROUP
    out = normalise(acc, top * to_base_2, total, sinks_ptr, head)
    row = (first_query + pair // GROUP) * (KV_HEADS * GROUP) + head
    tl.store(out_ptr + row * VALUE_DIM + dv, out.to(out_ptr.dtype.element_ty), mask=dv < VALUE_DIM)


def merge_splits(
    parts: Tensor,
    stats: Tensor,
    counts: Tensor,
    query_starts: Tensor | None,
    sinks: Tensor | None,
    out: Tensor,
    max_queries: int,
    kv_heads: int,
    to_base_2: float,
) -> None:
    """Merge all tiles that were split, into `out`."""
    tiles, num_splits, block_m, block_dv = parts.shape
    _, heads, value_dim = out.shape
    group = heads // kv_heads
    tiles_per_request = kv_heads * triton.cdiv(max_queries * group, block_m)
    merge_kernel[(tiles_per_request, block_m, tiles // tiles_per_request)](
        parts, stats, counts, query_starts, sinks, out, max_queries, num_splits, to_base_2,
        KV_HEADS=kv_heads, GROUP=group, VALUE_DIM=value_dim,
        BLOCK_M=block_m, BLOCK_DV=block_dv, BLOCK_S=min(16, triton.next_power_of_2(num_splits)),
        num_warps=2, **pdl_options(out),
    )  # fmt: skip


def scratch(
    view: "PagedView", shape: tuple[int, int, int, int], fused: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Where the splits of a layer meet: partial values, statistics, counts. The forward's layers take turns."""
    if (*shape, fused) not in view.scratch:
        device = view.table.device
        view.scratch[*shape, fused] = (
            torch.empty(shape, dtype=torch.float32, device=device),
            torch.empty(*shape[:3], 2, dtype=torch.float32, device=device),
            torch.zeros(shape[0], dtype=torch.int32, device=device),
        )
    return view.scratch[*shape, fused]
