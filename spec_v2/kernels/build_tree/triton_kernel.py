"""One program per request: rank by comparing every candidate with every other, then number the chosen."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from spec_v2.kernels.dispatch import debug_kernels, next_power_of_2, refuse_beyond
from spec_v2.kernels.top_k.triton_kernel import order_key
from spec_v2.types import DraftTree

MOST_CANDIDATES = 4096  # they are held in registers


@triton.jit
@no_type_check
def _build_tree(
    root_tokens_ptr,  # [b]
    tokens_ptr,  # [b, c], each with a stride between requests
    scores_ptr,  # [b, c]
    parents_ptr,  # [b, c]
    out_tokens_ptr,  # [b, n], out
    out_parents_ptr,  # [b, n], out
    out_scores_ptr,  # [b, n], out
    match_lens_ptr,  # [b], out: zeros
    stride_root,
    stride_tokens,
    stride_scores,
    stride_parents,
    C: tl.constexpr,
    N: tl.constexpr,
    CANDIDATES: tl.constexpr,  # C, padded to a power of two
    TILE: tl.constexpr,  # candidates that are ranked at once
    CHECK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, CANDIDATES)
    is_candidate = c < C
    score = tl.load(scores_ptr + i * stride_scores + c, mask=is_candidate, other=-float("inf"))
    key = order_key(score)

    # the last one that is chosen: exactly N - 2 candidates are better. Without one, nothing is above the largest key.
    last_key = tl.max(key, 0)
    last = -1
    for start in range(0, CANDIDATES, TILE):
        mine = start + tl.arange(0, TILE)
        my_score = tl.load(scores_ptr + i * stride_scores + mine, mask=mine < C, other=-float("inf"))
        my_key = order_key(my_score)
        better = (key[None, :] > my_key[:, None]) | (
            (key[None, :] == my_key[:, None]) & (c[None, :] < mine[:, None])
        )
        rank = tl.sum((better & is_candidate[None, :]).to(tl.int32), 1)
        is_last = (rank == N - 2) & (mine < C)
        last = tl.maximum(last, tl.max(tl.where(is_last, mine, -1), 0))
        last_key = tl.minimum(last_key, tl.min(tl.where(is_last, my_key, last_key), 0))

    chosen = ((key > last_key) | ((key == last_key) & (c <= last))) & is_candidate
    node = tl.cumsum(chosen.to(tl.int32), 0)  # of a chosen candidate; the root is node 0
    parent = tl.load(parents_ptr + i * stride_parents + c, mask=is_candidate, other=-1)
    if CHECK:
        tl.device_assert((parent >= -1) & ((parent < c) | (c == 0)), "parents: not an earlier candidate")
    parent_node = tl.gather(node, tl.maximum(parent, 0).to(tl.int32), 0)
    parent_node = tl.where(parent >= 0, parent_node, 0)

    token = tl.load(tokens_ptr + i * stride_tokens + c, mask=is_candidate, other=0)
    out = i * N + node
    tl.store(out_tokens_ptr + out, token, mask=chosen)
    tl.store(out_parents_ptr + out, parent_node.to(tl.int64), mask=chosen)
    tl.store(out_scores_ptr + out, score, mask=chosen)
    tl.store(out_tokens_ptr + i * N, tl.load(root_tokens_ptr + i * stride_root))
    tl.store(out_parents_ptr + i * N, -1)
    tl.store(out_scores_ptr + i * N, 1.0)
    tl.store(match_lens_ptr + i, 0)


def build_tree_triton(
    root_tokens: Tensor, tokens: Tensor, scores: Tensor, parents: Tensor, num_nodes: int
) -> DraftTree:
    """The candidates of one request must lie together; requests may be apart."""
    b, c = tokens.shape
    refuse_beyond(MOST_CANDIDATES, candidates=c)
    tokens, scores, parents = (x if x.stride(1) == 1 else x.contiguous() for x in (tokens, scores, parents))
    device = tokens.device
    tree = DraftTree(
        tokens=torch.empty(b, num_nodes, dtype=torch.long, device=device),
        parents=torch.empty(b, num_nodes, dtype=torch.long, device=device),
        scores=torch.empty(b, num_nodes, dtype=scores.dtype, device=device),
        match_lens=torch.empty(b, dtype=torch.long, device=device),
        draft_probs=torch.empty(b, 0, 0, dtype=scores.dtype, device=device),
    )
    candidates = next_power_of_2(c)
    if b:
        _build_tree[(b,)](
            root_tokens, tokens, scores, parents, tree.tokens, tree.parents, tree.scores, tree.match_lens,
            root_tokens.stride(0), tokens.stride(0), scores.stride(0), parents.stride(0),
            C=c, N=num_nodes, CANDIDATES=candidates, TILE=max(1, min(candidates, 4096 // candidates)),
            CHECK=debug_kernels(), debug=debug_kernels(),
        )  # fmt: skip
    return tree
