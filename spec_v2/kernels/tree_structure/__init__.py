"""What follows from `parents`: which nodes a node may attend to, its depth, and so its position and its slot.

Bytes moved by `place_tree`: it reads `8 * b * n` (parents; again for each level, from cache) and `4 * b * n` (slots), and
writes `b * n * n` (the mask, a byte per pair) and `16 * b * n`.
"""

from jaxtyping import Bool, Int, Int32
from torch import Tensor

from spec_v2.kernels import dispatch
from spec_v2.kernels.tree_structure.reference import (
    TreePlaces,
    ancestor_bits_reference,
    ancestor_mask_reference,
    node_depths_reference,
    place_tree_reference,
)

__all__ = ["TreePlaces", "ancestor_bits", "ancestor_mask", "node_depths", "place_tree"]


def ancestor_mask(parents: Int[Tensor, "b n"]) -> Bool[Tensor, "b n n"]:
    """`[i, j, a]`: node `a` is node `j` or an ancestor of it. A padding node sees itself only."""
    if dispatch.runs_triton(parents):
        from spec_v2.kernels.tree_structure.triton_kernel import walk_up_triton

        return walk_up_triton(parents)[0]
    return ancestor_mask_reference(parents)


def node_depths(parents: Int[Tensor, "b n"]) -> Int[Tensor, "b n"]:
    """Edges between a node and the root; 0 for the root and for padding nodes."""
    if dispatch.runs_triton(parents):
        from spec_v2.kernels.tree_structure.triton_kernel import walk_up_triton

        return walk_up_triton(parents)[1]
    return node_depths_reference(parents)


def ancestor_bits(parents: Int[Tensor, "b n"]) -> Int32[Tensor, "b n words"]:
    """`ancestor_mask`, 32 nodes to a word: bit `a % 32` of word `a // 32`. Bits past the last node are 0."""
    if dispatch.runs_triton(parents):
        from spec_v2.kernels.tree_structure.triton_kernel import ancestor_bits_triton

        return ancestor_bits_triton(parents)
    return ancestor_bits_reference(parents)


def place_tree(
    parents: Int[Tensor, "b n"],
    seq_lens: Int[Tensor, " b"],
    rows: Int[Tensor, " b"],
    row_slots: Int[Tensor, "rows width"],
) -> TreePlaces:
    """Node `j` is at position `seq_lens + depth(j)`, in slot `row_slots[row, seq_lens + j]`.

    Places beyond the row's width have its last slot.
    """
    if dispatch.runs_triton(parents):
        from spec_v2.kernels.tree_structure.triton_kernel import place_tree_triton

        return place_tree_triton(parents, seq_lens, rows, row_slots)
    return place_tree_reference(parents, seq_lens, rows, row_slots)
