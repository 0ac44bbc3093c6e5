"""Each program chooses the frontier of one request for itself, which is little work, and moves a part of its hidden
states; the first one of each request writes the rest."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from spec_v2.kernels.dispatch import ceil_div, next_power_of_2
from spec_v2.kernels.draft_frontier.reference import Candidates, Frontier
from spec_v2.kernels.top_k.triton_kernel import order_key


@triton.jit
@no_type_check
def _start_frontier(
    topk_index_ptr,  # [b, k], any strides
    topk_p_ptr,  # [b, k], any strides
    tokens_ptr,  # [b, c], out, columns 0 .. k - 1
    scores_ptr,
    parents_ptr,
    numbers_ptr,  # [b, k], out
    visible_ptr,  # [b, k, k] bytes, out
    index_stride_b,
    index_stride_k,
    p_stride_b,
    p_stride_k,
    C,
    K: tl.constexpr,
    CHILDREN: tl.constexpr,  # K, padded to a power of two
):
    i = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, CHILDREN)
    is_child = j < K
    token = tl.load(topk_index_ptr + i * index_stride_b + j * index_stride_k, mask=is_child)
    p = tl.load(topk_p_ptr + i * p_stride_b + j * p_stride_k, mask=is_child)
    tl.store(tokens_ptr + i * C + j, token, mask=is_child)
    tl.store(scores_ptr + i * C + j, tl.where(p == p, p, 0.0), mask=is_child)
    tl.store(parents_ptr + i * C + j, tl.full([CHILDREN], -1, tl.int64), mask=is_child)
    tl.store(numbers_ptr + i * K + j, j.to(tl.int64), mask=is_child)
    myself = (j[:, None] == j[None, :]).to(tl.uint8)
    tl.store(
        visible_ptr + (i * K + j[:, None]) * K + j[None, :],
        myself,
        mask=is_child[:, None] & is_child[None, :],
    )


@triton.jit(do_not_specialize=["first", "seen"])
@no_type_check
def _expand_frontier(
    scores_ptr,  # [b, k], a stride between requests
    numbers_ptr,  # [b, k]
    visible_ptr,  # [b, k, seen] bytes
    child_p_ptr,  # [b * k, k]
    child_tokens_ptr,  # [b * k, k]
    hidden_ptr,  # [b * k, h], any strides
    all_tokens_ptr,  # [b, c], out, columns first .. first + k * k - 1
    all_scores_ptr,
    all_parents_ptr,
    out_tokens_ptr,  # [b, k], out
    out_scores_ptr,
    out_numbers_ptr,
    out_hidden_ptr,  # [b, k, h], out with MOVE
    out_visible_ptr,  # [b, k, seen + k] bytes, out
    scores_stride,
    hidden_stride_t,
    hidden_stride_h,
    C,
    H,
    first,
    seen,
    K: tl.constexpr,
    NODES: tl.constexpr,  # K, padded to a power of two
    CHILDREN: tl.constexpr,  # K * K, padded to a power of two
    SEEN: tl.constexpr,  # at least seen + K, a power of two
    TILE: tl.constexpr,
    MOVE: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    is_first = tl.program_id(1) == 0
    f = tl.arange(0, CHILDREN)
    is_child = f < K * K
    score = tl.load(scores_ptr + i * scores_stride + f // K, mask=is_child, other=0.0)
    score *= tl.load(child_p_ptr + i * K * K + f, mask=is_child, other=0.0)
    if is_first:
        out = i * C + first + f
        tl.store(
            all_tokens_ptr + out, tl.load(child_tokens_ptr + i * K * K + f, mask=is_child), mask=is_child
        )
        tl.store(all_scores_ptr + out, score, mask=is_child)
        tl.store(all_parents_ptr + out, tl.load(numbers_ptr + i * K + f // K, mask=is_child), mask=is_child)

    node = tl.arange(0, NODES)
    from_node = tl.zeros([NODES], tl.int32)
    key = order_key(score)
    left = is_child
    for j in range(K):
        best_key = tl.max(tl.where(left, key, tl.min(key, 0)), 0)
        best = tl.min(tl.where(left & (key == best_key), f, CHILDREN), 0)
        left = left & (f != best)
        from_node = tl.where(node == j, best // K, from_node)
        if is_first:
            tl.store(out_tokens_ptr + i * K + j, tl.load(child_tokens_ptr + i * K * K + best))
            tl.store(out_scores_ptr + i * K + j, tl.sum(tl.where(f == best, score, 0.0), 0))
            tl.store(out_numbers_ptr + i * K + j, (first + best).to(tl.int64))

    is_node = node < K
    if is_first:
        a = tl.arange(0, SEEN)
        ancestor = tl.load(
            visible_ptr + (i * K + from_node[:, None]) * seen + a[None, :],
            mask=is_node[:, None] & (a < seen)[None, :],
            other=0,
        )
        ancestor = tl.where(
            (a >= seen)[None, :], ((a - seen)[None, :] == node[:, None]).to(tl.uint8), ancestor
        )
        tl.store(
            out_visible_ptr + (i * K + node[:, None]) * (seen + K) + a[None, :],
            ancestor,
            mask=is_node[:, None] & (a < seen + K)[None, :],
        )
    if MOVE:
        column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
        mask = is_node[:, None] & (column < H)[None, :]
        source = (i * K + from_node[:, None]) * hidden_stride_t + column[None, :] * hidden_stride_h
        hidden = tl.load(hidden_ptr + source, mask=mask)
        tl.store(out_hidden_ptr + (i * K + node[:, None]) * H + column[None, :], hidden, mask=mask)


def start_frontier_triton(
    topk_index: Tensor, topk_p: Tensor, hidden_states: Tensor, num_steps: int
) -> tuple[Frontier, Candidates]:
    """Any strides. The hidden states are shared by the root's children, not copied."""
    b, k = topk_index.shape
    c = k + (num_steps - 1) * k * k
    device = topk_index.device
    candidates = Candidates(
        tokens=torch.empty(b, c, dtype=torch.long, device=device),
        scores=torch.empty(b, c, dtype=topk_p.dtype, device=device),
        parents=torch.empty(b, c, dtype=torch.long, device=device),
    )
    frontier = Frontier(
        tokens=topk_index,
        scores=candidates.scores[:, :k],
        numbers=torch.empty(b, k, dtype=torch.long, device=device),
        hidden_states=hidden_states[:, None].expand(-1, k, -1),
        visible=torch.empty(b, k, k, dtype=torch.bool, device=device),
    )
    if b:
        _start_frontier[(b,)](
            topk_index, topk_p, candidates.tokens, candidates.scores, candidates.parents, frontier.numbers,
            frontier.visible.view(torch.uint8), *topk_index.stride(), *topk_p.stride(), c,
            K=k, CHILDREN=next_power_of_2(k),
        )  # fmt: skip
    return frontier, candidates


def expand_frontier_triton(
    frontier: Frontier,
    candidates: Candidates,
    level: int,
    child_p: Tensor,
    child_tokens: Tensor,
    hidden_states: Tensor,
) -> Frontier:
    """Any strides of the hidden states."""
    b, k = frontier.tokens.shape
    c, h, seen = candidates.tokens.shape[1], hidden_states.shape[1], frontier.visible.shape[2]
    device = child_p.device
    is_chain = k == 1  # the only child is the next frontier, and has the only hidden state
    hidden = torch.empty(b, k, 0 if is_chain else h, dtype=hidden_states.dtype, device=device)
    after = Frontier(
        tokens=torch.empty(b, k, dtype=torch.long, device=device),
        scores=torch.empty(b, k, dtype=frontier.scores.dtype, device=device),
        numbers=torch.empty(b, k, dtype=torch.long, device=device),
        hidden_states=hidden_states[:, None] if is_chain else hidden,
        visible=torch.empty(b, k, seen + k, dtype=torch.bool, device=device),
    )
    nodes = next_power_of_2(k)
    num_levels = 1 + (c - k) // (k * k)
    tile = max(32, min(next_power_of_2(h), 2048 // nodes))
    if b:
        _expand_frontier[(b, 1 if is_chain else max(1, ceil_div(h, tile)))](
            frontier.scores, frontier.numbers, frontier.visible.contiguous().view(torch.uint8),
            child_p.contiguous(), child_tokens.contiguous(), hidden_states,
            candidates.tokens, candidates.scores, candidates.parents,
            after.tokens, after.scores, after.numbers, hidden, after.visible.view(torch.uint8),
            frontier.scores.stride(0), *hidden_states.stride(), c, h, k + (level - 1) * k * k, seen,
            K=k, NODES=nodes, CHILDREN=next_power_of_2(k * k), SEEN=next_power_of_2(k * num_levels),
            TILE=tile, MOVE=not is_chain,
        )  # fmt: skip
    return after
