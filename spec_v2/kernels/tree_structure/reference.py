"""Pointer jumping: after `i` rounds a node knows its nearest `2**i` ancestors."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int, Int32
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TreePlaces:
    """Where the nodes of a batch's trees are: who sees whom, absolute positions, slots of their KV.

    `next_positions`: of the tokens that the nodes' logits choose.
    """

    visible: Bool[Tensor, "b n n"]
    positions: Int[Tensor, "b n"]
    next_positions: Int[Tensor, "b n"]
    slots: Int[Tensor, "b n"]


def ancestor_mask_reference(parents: Int[Tensor, "b n"]) -> Bool[Tensor, "b n n"]:
    """One more node, its own parent, stands for "no parent"."""
    b, n = parents.shape
    nobody = n
    pointer = torch.where(parents < 0, nobody, parents)
    pointer = torch.cat([pointer, torch.full_like(pointer[:, :1], nobody)], 1)
    seen = torch.eye(n + 1, dtype=torch.bool, device=parents.device).repeat(b, 1, 1)
    for _ in range(max(n - 1, 0).bit_length()):
        seen = seen | seen.gather(1, pointer[:, :, None].expand(-1, -1, n + 1))
        pointer = pointer.gather(1, pointer)
    return seen[:, :n, :n]


def node_depths_reference(parents: Int[Tensor, "b n"]) -> Int[Tensor, "b n"]:
    """Ancestors, without the node itself."""
    return ancestor_mask_reference(parents).sum(-1) - 1


def ancestor_bits_reference(parents: Int[Tensor, "b n"]) -> Int32[Tensor, "b n words"]:
    """Bit 31 is the sign: it is summed in 64 bits and wraps around."""
    n = parents.shape[1]
    mask = torch.nn.functional.pad(ancestor_mask_reference(parents), (0, -n % 32))
    bit = torch.ones(32, dtype=torch.long, device=parents.device) << torch.arange(32, device=parents.device)
    words: Tensor = (mask.unflatten(2, (-1, 32)) * bit).sum(-1)
    return words.to(torch.int32)


def place_tree_reference(
    parents: Int[Tensor, "b n"],
    seq_lens: Int[Tensor, " b"],
    rows: Int[Tensor, " b"],
    row_slots: Int[Tensor, "rows width"],
) -> TreePlaces:
    """The nodes take consecutive row positions, whatever their depths are."""
    n, width = parents.shape[1], row_slots.shape[1]
    visible = ancestor_mask_reference(parents)
    places = seq_lens[:, None] + torch.arange(n, device=parents.device)
    next_positions = seq_lens[:, None] + visible.sum(-1)
    return TreePlaces(
        visible=visible,
        positions=next_positions - 1,
        next_positions=next_positions,
        slots=row_slots[rows[:, None], places.clamp(max=width - 1)].long(),
    )
