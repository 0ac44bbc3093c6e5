"""A program follows the parents of a few nodes up to the root, all of them one level at a time."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from spec_v2.kernels.dispatch import ceil_div, debug_kernels, next_power_of_2
from spec_v2.kernels.tree_structure.reference import TreePlaces


@triton.jit
@no_type_check
def _walk_up(
    parents_ptr,  # [b, n], any strides
    visible_ptr,  # [b, n, n] bytes, out unless BITS
    bits_ptr,  # [b, n, words], out with BITS
    positions_ptr,  # [b, n], out unless BITS: the depth, on top of seq_len with PLACE
    seq_lens_ptr,  # [b], read with PLACE
    rows_ptr,  # [b], read with PLACE
    row_slots_ptr,  # [rows, width], read with PLACE
    slots_ptr,  # [b, n], out with PLACE
    next_positions_ptr,  # [b, n], out with PLACE
    stride_b,
    stride_n,
    stride_row,
    num_rows,
    width,
    N: tl.constexpr,
    NODES: tl.constexpr,  # N, padded to a power of two
    TILE: tl.constexpr,  # nodes of a program
    PLACE: tl.constexpr,
    BITS: tl.constexpr,
    CHECK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    node = tl.program_id(1) * TILE + tl.arange(0, TILE)
    is_node = node < N
    ancestor = tl.arange(0, NODES)
    row_parents_ptr = parents_ptr + i * stride_b

    seen = node[:, None] == ancestor[None, :]
    depth = tl.zeros([TILE], tl.int64)
    pointer = tl.load(row_parents_ptr + node * stride_n, mask=is_node, other=-1)
    levels = 0  # a path has fewer than N edges: a row of garbage must not hang the device
    while (tl.max(pointer, 0) >= 0) & (levels < N):
        if CHECK:
            tl.device_assert((pointer < N) & (pointer >= -1), "parents: not a node of the tree")
        seen = seen | (pointer[:, None] == ancestor[None, :])
        depth += (pointer >= 0).to(tl.int64)
        up = tl.maximum(tl.minimum(pointer, N - 1), 0)
        pointer = tl.load(row_parents_ptr + up * stride_n, mask=pointer >= 0, other=-1)
        levels += 1

    if BITS:
        words: tl.constexpr = (N + 31) // 32
        word = tl.arange(0, NODES // 32)
        bits = tl.reshape(seen.to(tl.int32), [TILE, NODES // 32, 32]) << tl.arange(0, 32)[None, None, :]
        out = (i * N + node[:, None]) * words + word[None, :]
        tl.store(bits_ptr + out, tl.sum(bits, 2), mask=is_node[:, None] & (word < words)[None, :])
    else:
        out = (i * N + node[:, None]) * N + ancestor[None, :]
        tl.store(visible_ptr + out, seen.to(tl.uint8), mask=is_node[:, None] & (ancestor < N)[None, :])
        if PLACE:
            seq_len = tl.load(seq_lens_ptr + i)
            row = tl.load(rows_ptr + i).to(tl.int64)
            if CHECK:
                tl.device_assert((row >= 0) & (row < num_rows), "rows: not a row of the table")
                tl.device_assert(seq_len >= 0, "seq_lens: negative")
            place = tl.minimum(seq_len + node, width - 1)
            slot = tl.load(row_slots_ptr + row * stride_row + place, mask=is_node, other=0)
            tl.store(slots_ptr + i * N + node, slot.to(tl.int64), mask=is_node)
            depth += seq_len
            tl.store(next_positions_ptr + i * N + node, depth + 1, mask=is_node)
        tl.store(positions_ptr + i * N + node, depth, mask=is_node)


def walk_up_triton(parents: Tensor) -> tuple[Tensor, Tensor]:
    """The ancestor mask and the depths."""
    visible, depths = _outputs(parents)
    _launch(parents, visible=visible, positions=depths)
    return visible, depths


def ancestor_bits_triton(parents: Tensor) -> Tensor:
    """Packed masks; any strides."""
    b, n = parents.shape
    bits = torch.empty(b, n, ceil_div(n, 32), dtype=torch.int32, device=parents.device)
    _launch(parents, bits=bits)
    return bits


def place_tree_triton(parents: Tensor, seq_lens: Tensor, rows: Tensor, row_slots: Tensor) -> TreePlaces:
    """Any strides of the parents; each row of the table must lie together."""
    visible, positions = _outputs(parents)
    slots, next_positions = torch.empty_like(positions), torch.empty_like(positions)
    _launch(
        parents,
        visible=visible,
        positions=positions,
        place=(seq_lens.contiguous(), rows.contiguous(), row_slots, slots, next_positions),
    )
    return TreePlaces(visible, positions, next_positions, slots)


def _outputs(parents: Tensor) -> tuple[Tensor, Tensor]:
    b, n = parents.shape
    visible = torch.empty(b, n, n, dtype=torch.bool, device=parents.device)
    return visible, torch.empty(b, n, dtype=torch.long, device=parents.device)


def _launch(
    parents: Tensor,
    *,
    visible: Tensor | None = None,
    bits: Tensor | None = None,
    positions: Tensor | None = None,
    place: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] | None = None,
) -> None:
    b, n = parents.shape
    if b == 0:
        return
    nodes = max(next_power_of_2(n), 32 if bits is not None else 1)
    tile = min(nodes, 16)
    nothing = parents  # a pointer that the kernel does not use
    seq_lens, rows, row_slots, slots, next_positions = place or (nothing,) * 5
    assert row_slots is nothing or row_slots.stride(1) == 1, "a row of the table lies together"
    _walk_up[(b, ceil_div(n, tile))](
        parents,
        nothing if visible is None else visible.view(torch.uint8),
        nothing if bits is None else bits,
        nothing if positions is None else positions,
        seq_lens, rows, row_slots, slots, next_positions,
        *parents.stride(), row_slots.stride(0), row_slots.shape[0], row_slots.shape[1],
        N=n, NODES=nodes, TILE=tile, PLACE=place is not None, BITS=bits is not None,
        CHECK=debug_kernels(), debug=debug_kernels(),
    )  # fmt: skip
