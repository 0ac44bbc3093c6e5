"""A stable sort does two things: ties go to the lowest candidate, and a parent is never left out."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from spec_v2.types import DraftTree


def build_tree_reference(
    *,
    root_tokens: Int[Tensor, " b"],
    tokens: Int[Tensor, "b c"],
    scores: Float[Tensor, "b c"],
    parents: Int[Tensor, "b c"],
    num_nodes: int,
) -> DraftTree:
    """The chosen in candidate order, so that parents stay before their children."""
    order = scores.sort(dim=1, descending=True, stable=True).indices
    chosen = order[:, : num_nodes - 1].sort(dim=1).values
    parent_candidates = parents.gather(1, chosen)
    # `chosen` is ascending, so a parent's node number is its rank among the chosen, after the root
    parent_nodes = torch.searchsorted(chosen, parent_candidates.contiguous()) + 1
    parent_nodes = torch.where(parent_candidates < 0, 0, parent_nodes)
    root = root_tokens[:, None]
    return DraftTree(
        tokens=torch.cat([root, tokens.gather(1, chosen)], 1),
        parents=torch.cat([torch.full_like(root, -1), parent_nodes], 1),
        scores=torch.cat([torch.ones_like(scores[:, :1]), scores.gather(1, chosen)], 1),
        match_lens=torch.zeros_like(root_tokens),
        draft_probs=scores.new_empty(len(scores), 0, 0),
    )
