"""Candidates are numbered level by level: the root's `k` children, then `k * k` for each further level."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spec_v2.kernels.top_k.reference import top_k_reference


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """`numbers`: as candidates. `visible`: which draft nodes so far are ancestors of each, itself included."""

    tokens: Int[Tensor, "b k"]
    scores: Float[Tensor, "b k"]
    numbers: Int[Tensor, "b k"]
    hidden_states: Float[Tensor, "b k h"]
    visible: Bool[Tensor, "b k seen"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Everything drafted; `parents` are candidate numbers, -1 for children of the root. Filled level by level."""

    tokens: Int[Tensor, "b c"]
    scores: Float[Tensor, "b c"]
    parents: Int[Tensor, "b c"]


def start_frontier_reference(
    topk_index: Int[Tensor, "b k"],
    topk_p: Float[Tensor, "b k"],
    hidden_states: Float[Tensor, "b h"],
    num_steps: int,
) -> tuple[Frontier, Candidates]:
    """Level 0: every node sees itself."""
    b, k = topk_index.shape
    c = k + (num_steps - 1) * k * k
    scores = topk_p.nan_to_num(0.0)
    candidates = Candidates(
        tokens=topk_index.new_empty(b, c), scores=scores.new_empty(b, c), parents=topk_index.new_empty(b, c)
    )
    candidates.tokens[:, :k], candidates.scores[:, :k], candidates.parents[:, :k] = topk_index, scores, -1
    frontier = Frontier(
        tokens=topk_index,
        scores=scores,
        numbers=torch.arange(k, device=topk_index.device).repeat(b, 1),
        hidden_states=hidden_states[:, None].expand(-1, k, -1),
        visible=torch.eye(k, dtype=torch.bool, device=topk_index.device).repeat(b, 1, 1),
    )
    return frontier, candidates


def expand_frontier_reference(
    frontier: Frontier,
    candidates: Candidates,
    level: int,
    child_p: Float[Tensor, "r k"],
    child_tokens: Int[Tensor, "r k"],
    hidden_states: Float[Tensor, "r h"],
) -> Frontier:
    """Children in order of their parents; `best // k` is the node that a chosen child comes from."""
    b, k = frontier.tokens.shape
    first = k + (level - 1) * k * k
    scores = (frontier.scores[:, :, None] * child_p.view(b, k, k)).flatten(1)
    tokens = child_tokens.view(b, k * k)
    candidates.tokens[:, first : first + k * k] = tokens
    candidates.scores[:, first : first + k * k] = scores
    candidates.parents[:, first : first + k * k] = frontier.numbers.repeat_interleave(k, 1)

    best_scores, best = top_k_reference(scores, k)
    from_node = (best // k)[:, :, None]
    myself = torch.eye(k, dtype=torch.bool, device=best.device).expand(b, k, k)
    return Frontier(
        tokens=tokens.gather(1, best),
        scores=best_scores,
        numbers=first + best,
        hidden_states=hidden_states.view(b, k, -1).gather(
            1, from_node.expand(-1, -1, hidden_states.shape[1])
        ),
        visible=torch.cat(
            [frontier.visible.gather(1, from_node.expand(-1, -1, frontier.visible.shape[2])), myself], 2
        ),
    )
