"""The nodes that a draft model expands next, and the record of everything it has proposed.

EAGLE-2 (Li et al. 2024, arXiv 2406.16858): each round scores the `k * k` children of `k` nodes by the product of
probabilities along the path, and the best `k` are the next frontier. All of them stay candidates of the final tree.

Bytes moved by `expand_frontier`: reads `12 * b * k * k`, writes `20 * b * k * k`, reads and writes `b * k * h` hidden
numbers, and `b * k` rows of the mask. A chain keeps its hidden states where they are.
"""

from jaxtyping import Float, Int
from torch import Tensor

from spec_v2.kernels import dispatch
from spec_v2.kernels.draft_frontier.reference import (
    Candidates,
    Frontier,
    expand_frontier_reference,
    start_frontier_reference,
)

__all__ = ["Candidates", "Frontier", "expand_frontier", "start_frontier"]


def start_frontier(
    topk_index: Int[Tensor, "b k"],
    topk_p: Float[Tensor, "b k"],
    hidden_states: Float[Tensor, "b h"],
    num_steps: int,
) -> tuple[Frontier, Candidates]:
    """The root's children, and room for the candidates of `num_steps` levels. A probability of NaN counts as 0."""
    if dispatch.runs_triton(topk_index):
        from spec_v2.kernels.draft_frontier.triton_kernel import start_frontier_triton

        return start_frontier_triton(topk_index, topk_p, hidden_states, num_steps)
    return start_frontier_reference(topk_index, topk_p, hidden_states, num_steps)


def expand_frontier(
    frontier: Frontier,
    candidates: Candidates,
    level: int,
    child_p: Float[Tensor, "r k"],
    child_tokens: Int[Tensor, "r k"],
    hidden_states: Float[Tensor, "r h"],
) -> Frontier:
    """Record the children of the frontier's nodes as candidates of `level` (the first is 1); return the best of them.

    `hidden_states`: what the drafter made of each node, which its children start from. Ties go to the lowest child.
    """
    if dispatch.runs_triton(child_p):
        from spec_v2.kernels.draft_frontier.triton_kernel import expand_frontier_triton

        return expand_frontier_triton(frontier, candidates, level, child_p, child_tokens, hidden_states)
    return expand_frontier_reference(frontier, candidates, level, child_p, child_tokens, hidden_states)
