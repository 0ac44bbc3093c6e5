"""Pointer jumping: after `i` rounds a node knows its nearest `2**i` ancestors."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor


def ancestor_mask(parents: Int[Tensor, "b n"]) -> Bool[Tensor, "b n n"]:
    """`[i, j, a]`: node `a` is node `j` or an ancestor of it. A padding node sees itself only."""
    b, n = parents.shape
    nobody = n  # one more node, its own parent, stands for "no parent"
    pointer = torch.where(parents < 0, nobody, parents)
    pointer = torch.cat([pointer, torch.full_like(pointer[:, :1], nobody)], 1)
    seen = torch.eye(n + 1, dtype=torch.bool, device=parents.device).repeat(b, 1, 1)
    for _ in range(max(n - 1, 0).bit_length()):
        seen = seen | seen.gather(1, pointer[:, :, None].expand(-1, -1, n + 1))
        pointer = pointer.gather(1, pointer)
    return seen[:, :n, :n]


def node_depths(parents: Int[Tensor, "b n"]) -> Int[Tensor, "b n"]:
    """Edges between a node and the root; 0 for the root and for padding nodes."""
    return ancestor_mask(parents).sum(-1) - 1
