"""Two launches: every split of a history keeps its best places, then one program per request merges what follows them.

A place is one integer, `length * num_places + place`: longer matches are larger, and of equal ones the newer.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from spec_v2.kernels.dispatch import INT32_MAX, ceil_div, debug_kernels, next_power_of_2, refuse_beyond
from spec_v2.kernels.ngram_tree.reference import NgramShape
from spec_v2.types import DraftTree

BLOCK = 1024  # places that a program looks at at once
PROGRAMS = 1024
MOST_SPLITS = 128  # of one history: the last program holds what they keep


@triton.jit
@no_type_check
def _token_at(corpus_ptr, history_ptr, place, corpus_len, mask):
    """The token at a place of the corpus and, behind it, of one request's history; -1 where the mask is off."""
    from_corpus = tl.load(corpus_ptr + place, mask=mask & (place < corpus_len), other=-1)
    own = tl.load(history_ptr + place - corpus_len, mask=mask & (place >= corpus_len), other=-1)
    return tl.maximum(from_corpus, own)


@triton.jit
@no_type_check
def _find_places(
    corpus_ptr,  # [corpus]
    history_ptr,  # [rows, width]
    rows_ptr,  # [b]
    seq_lens_ptr,  # [b]
    kept_ptr,  # [b, splits, K], out: the best places, in no order; negative where there are fewer
    stride_row,
    num_rows,
    width,
    corpus_len,
    num_places,
    blocks_per_split,
    MAX_DEPTH: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    CHECK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    row = tl.load(rows_ptr + i).to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + i).to(tl.int32)
    if CHECK:
        tl.device_assert((row >= 0) & (row < num_rows), "rows: not a row of the history")
        tl.device_assert((seq_len >= 0) & (seq_len < width), "seq_lens: outside of the history")
        tl.device_assert(seq_len + corpus_len < num_places, "seq_lens: beyond max_seq_len")
    history_ptr += row * stride_row
    last = corpus_len + seq_len
    lane = tl.arange(0, BLOCK)
    kept = -1 - tl.arange(0, K)  # different, so that the worst is always exactly one of them

    block = split * blocks_per_split
    end = tl.minimum(block + blocks_per_split, tl.cdiv(last, BLOCK))
    while block < end:
        place = block * BLOCK + lane
        length = tl.zeros([BLOCK], tl.int32)
        alive = (place < last).to(tl.int32)
        depth = 0
        while (depth < MAX_DEPTH) & (tl.max(alive, 0) > 0):
            newest = _token_at(corpus_ptr, history_ptr, last - depth, corpus_len, last >= depth)
            here = (alive > 0) & (place >= depth)
            token = _token_at(corpus_ptr, history_ptr, place - depth, corpus_len, here)
            alive = (here & (token == newest) & (token >= 0)).to(tl.int32)
            length += alive
            depth += 1
        key = tl.where(length > 0, length * num_places + place, -0x80000000)
        best = tl.max(key, 0)
        worst = tl.min(kept, 0)
        while best > worst:
            kept = tl.where(kept == worst, best, kept)
            key = tl.where(key == best, -0x80000000, key)
            best = tl.max(key, 0)
            worst = tl.min(kept, 0)
        block += 1
    tl.store(kept_ptr + (i * tl.num_programs(1) + split) * K + tl.arange(0, K), kept)


@triton.jit
@no_type_check
def _merge_level(
    corpus_ptr, history_ptr, first, depth, corpus_len, last, known, owner, CHAINS: tl.constexpr
):  # fmt: skip
    """One level further along all chains: (token, known, owner). The owner of a node is the first chain that has it."""
    chain = tl.arange(0, CHAINS)
    place = first + depth
    known = known & (place <= last)
    token = _token_at(corpus_ptr, history_ptr, place, corpus_len, known)
    known = known & (token >= 0)  # a document of a corpus ends
    same = (
        (token[:, None] == token[None, :])
        & (owner[:, None] == owner[None, :])
        & known[:, None]
        & known[None, :]
    )
    return token, known, tl.min(tl.where(same, chain[None, :], CHAINS), 1)


@triton.jit
@no_type_check
def _merge_chains(
    corpus_ptr,  # [corpus]
    history_ptr,  # [rows, width]
    rows_ptr,  # [b]
    seq_lens_ptr,  # [b]
    kept_ptr,  # [b, KEPT]
    tokens_ptr,  # [b, n], out
    parents_ptr,  # [b, n], out
    scores_ptr,  # [b, n], out
    match_lens_ptr,  # [b], out
    stride_row,
    corpus_len,
    num_places,
    num_kept,
    MAX_DEPTH: tl.constexpr,
    MIN_BREADTH: tl.constexpr,
    MAX_BREADTH: tl.constexpr,
    N: tl.constexpr,
    NODES: tl.constexpr,  # N, padded to a power of two
    CHAINS: tl.constexpr,  # MAX_BREADTH, padded to a power of two
    KEPT: tl.constexpr,  # num_kept, padded to a power of two
):
    i = tl.program_id(0).to(tl.int64)
    history_ptr += tl.load(rows_ptr + i).to(tl.int64) * stride_row
    last = corpus_len + tl.load(seq_lens_ptr + i).to(tl.int32)
    slot = tl.arange(0, KEPT)
    kept = tl.load(kept_ptr + i * num_kept + slot, mask=slot < num_kept, other=-1)

    # the best places in order
    chain = tl.arange(0, CHAINS)
    length = tl.zeros([CHAINS], tl.int32)
    first = tl.zeros([CHAINS], tl.int32)
    for c in range(MAX_BREADTH):
        best = tl.max(kept, 0)
        kept = tl.where(kept == best, -1, kept)
        best = tl.maximum(best, 0)
        length = tl.where(chain == c, best // num_places, length)
        first = tl.where(chain == c, best % num_places + 1, first)
    tl.store(match_lens_ptr + i, tl.max(length, 0).to(tl.int64))

    # how many of equally long matches are followed
    equal = length[:, None] == length[None, :]
    earlier = chain[None, :] < chain[:, None]
    rank = tl.sum((equal & earlier).to(tl.int32), 1)
    span: tl.constexpr = max(MAX_DEPTH - 1, 1)
    breadth = MAX_BREADTH - (MAX_BREADTH - MIN_BREADTH) * (length - 1) // span
    followed = (length > 0) & (rank < tl.maximum(breadth, 1))

    # nodes are numbered by match length, then depth, then chain. First: how many nodes each chain owns
    known = followed
    owner = tl.zeros([CHAINS], tl.int32)
    owned = tl.zeros([CHAINS], tl.int32)
    for depth in range(N - 1):
        _, known, owner = _merge_level(
            corpus_ptr, history_ptr, first, depth, corpus_len, last, known, owner, CHAINS
        )
        owned += (known & (owner == chain)).to(tl.int32)
    longer = length[None, :] > length[:, None]
    before = 1 + tl.sum(tl.where(longer, owned[None, :], 0), 1)

    # then again, with numbers
    out = i * N
    known = followed
    owner = tl.zeros([CHAINS], tl.int32)
    parent = tl.zeros([CHAINS], tl.int32)
    for depth in range(N - 1):
        token, known, owner = _merge_level(
            corpus_ptr, history_ptr, first, depth, corpus_len, last, known, owner, CHAINS
        )
        owns = (known & (owner == chain)).to(tl.int32)
        number = before + tl.sum(tl.where(equal & earlier, owns[None, :], 0), 1)
        writes = (owns > 0) & (number < N)
        tl.store(tokens_ptr + out + number, token, mask=writes)
        tl.store(parents_ptr + out + number, parent.to(tl.int64), mask=writes)
        tl.store(scores_ptr + out + number, 1.0, mask=writes)
        before += tl.sum(tl.where(equal, owns[None, :], 0), 1)
        parent = tl.sum(tl.where(owner[:, None] == chain[None, :], number[None, :], 0), 1)

    root = _token_at(corpus_ptr, history_ptr, last, corpus_len, last >= 0)
    node = tl.arange(0, NODES)
    unused = (node > tl.sum(owned, 0)) & (node < N)
    is_root = node == 0
    tl.store(tokens_ptr + out + node, tl.zeros([NODES], tl.int64) + root, mask=unused | is_root)
    tl.store(parents_ptr + out + node, tl.full([NODES], -1, tl.int64), mask=unused | is_root)
    tl.store(scores_ptr + out + node, tl.where(is_root, 1.0, 0.0), mask=unused | is_root)


def ngram_tree_triton(
    history: Tensor,
    corpus: Tensor | None,
    rows: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    ngram: NgramShape,
    num_nodes: int,
    block: int = BLOCK,
) -> DraftTree:
    """Each row of the history must lie together."""
    assert history.stride(1) == 1, "a row of the history lies together"
    b, device = len(rows), history.device
    corpus_len = 0 if corpus is None else len(corpus)
    num_places = corpus_len + min(max_seq_len + 1, history.shape[1])
    refuse_beyond(INT32_MAX, matches=(ngram.max_trie_depth + 1) * num_places)
    num_blocks = ceil_div(num_places, block)
    blocks_per_split = ceil_div(num_blocks, max(1, min(num_blocks, PROGRAMS // max(b, 1), MOST_SPLITS)))
    num_splits = ceil_div(num_blocks, blocks_per_split)
    chains = next_power_of_2(ngram.max_bfs_breadth)
    kept = torch.empty(b, num_splits, chains, dtype=torch.int32, device=device)
    tree = DraftTree(
        tokens=torch.empty(b, num_nodes, dtype=torch.long, device=device),
        parents=torch.empty(b, num_nodes, dtype=torch.long, device=device),
        scores=torch.empty(b, num_nodes, dtype=torch.float32, device=device),
        match_lens=torch.empty(b, dtype=torch.long, device=device),
        draft_probs=torch.empty(b, 0, 0, device=device),
    )
    if b == 0:
        return tree
    texts = (
        history if corpus is None else corpus.contiguous(),
        history,
        rows.contiguous(),
        seq_lens.contiguous(),
        kept,
    )
    _find_places[(b, num_splits)](
        *texts, history.stride(0), *history.shape, corpus_len, num_places, blocks_per_split,
        MAX_DEPTH=ngram.max_trie_depth, K=chains, BLOCK=block, CHECK=debug_kernels(), debug=debug_kernels(),
    )  # fmt: skip
    _merge_chains[(b,)](
        *texts, tree.tokens, tree.parents, tree.scores, tree.match_lens,
        history.stride(0), corpus_len, num_places, num_splits * chains,
        MAX_DEPTH=ngram.max_trie_depth, MIN_BREADTH=ngram.min_bfs_breadth, MAX_BREADTH=ngram.max_bfs_breadth,
        N=num_nodes, NODES=next_power_of_2(num_nodes), CHAINS=chains,
        KEPT=next_power_of_2(num_splits * chains), num_warps=1 if chains <= 16 else 4,
    )  # fmt: skip
    return tree
