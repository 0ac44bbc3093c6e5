"""NGRAM drafts against a search by hand over the same history."""

import pytest
import torch

from spec_v2.kernels.ngram_tree import NgramShape, match_tree, suffix_match_lens
from spec_v2.kernels.tree_structure import node_depths

SHAPE = NgramShape(max_trie_depth=6, min_bfs_breadth=1, max_bfs_breadth=4)


def match_len(tokens, end, depth):
    """Length of the longest common suffix of tokens[:end+1] and tokens, at most `depth`."""
    d = 0
    while d < depth and d <= end and tokens[end - d] == tokens[len(tokens) - 1 - d]:
        d += 1
    return d


def breadth(length, shape):
    narrowing = (shape.max_bfs_breadth - shape.min_bfs_breadth) * (length - 1) // (shape.max_trie_depth - 1)
    return max(shape.max_bfs_breadth - narrowing, 1)


def draft_by_hand(tokens, shape, num_nodes):
    """[(token, parent)] in order; the root is node 0."""
    found = [(match_len(tokens, e, shape.max_trie_depth), e) for e in range(len(tokens) - 1)]
    found = sorted((f for f in found if f[0]), reverse=True)[: shape.max_bfs_breadth]
    kept, taken = [], {}
    for length, end in found:
        taken[length] = taken.get(length, 0) + 1
        if taken[length] <= breadth(length, shape):
            kept.append((length, end))
    levels = [(length, depth, i) for i, (length, _) in enumerate(kept) for depth in range(num_nodes - 1)]
    nodes, by_path = [], {(): 0}
    for _, depth, i in sorted(levels, key=lambda x: (-x[0], x[1], x[2])):
        path = tuple(tokens[kept[i][1] + 1 : kept[i][1] + 2 + depth])
        if len(path) == depth + 1 and path not in by_path and len(nodes) < num_nodes - 1:
            nodes.append((path[-1], by_path[path[:-1]]))
            by_path[path] = len(nodes)
    return nodes


def run(histories, shape=SHAPE, num_nodes=9):
    longest = max(map(len, histories)) + 2
    table = torch.full((len(histories), longest), 999)  # beyond the newest token lies rubbish
    for i, tokens in enumerate(histories):
        table[i, : len(tokens)] = torch.tensor(tokens)
    last = torch.tensor([len(t) - 1 for t in histories])
    return match_tree(table, last, shape, num_nodes)


@pytest.mark.parametrize("alphabet", [2, 3, 8])
@pytest.mark.parametrize("num_nodes", [2, 3, 9, 14])
@pytest.mark.parametrize("breadths", [(1, 4), (2, 2), (1, 10), (1, 1)])
def test_matches_the_search_by_hand(alphabet, num_nodes, breadths):
    gen = torch.Generator().manual_seed(alphabet * num_nodes)
    shape = NgramShape(max_trie_depth=6, min_bfs_breadth=breadths[0], max_bfs_breadth=breadths[1])
    lengths = torch.randint(1, 40, (20,), generator=gen).tolist()
    histories = [torch.randint(0, alphabet, (n,), generator=gen).tolist() for n in lengths]
    tree = run(histories, shape, num_nodes)
    for i, tokens in enumerate(histories):
        want = draft_by_hand(tokens, shape, num_nodes)
        real = len(want) + 1
        assert tree.tokens[i, 0] == tokens[-1]
        assert (
            list(zip(tree.tokens[i, 1:real].tolist(), tree.parents[i, 1:real].tolist(), strict=True)) == want
        )
        assert tree.parents[i, real:].eq(-1).all()
        assert tree.scores[i].tolist() == [1.0] * real + [0.0] * (num_nodes - real)


def test_dr12_short_histories_and_overlapping_suffixes():
    tree = run([[5], [5, 6], [7, 7, 7, 7]])
    assert (tree.parents[:2] == -1).all()  # nothing to copy, no exception
    # a run of one token: the newest occurrence offers the one token that is known to follow it
    assert tree.tokens[2, 1] == 7
    assert tree.parents[2, 1] == 0


def test_a_match_never_offers_tokens_beyond_the_known_ones():
    for tokens in ([1, 2, 1], [1, 2, 3, 1, 2], [4, 4]):
        tree = run([tokens])
        assert not tree.tokens.eq(999).any()


def test_copying_gives_one_long_chain():
    text = list(range(10, 30))
    tree = run([text + text[:7]], NgramShape(max_trie_depth=18, min_bfs_breadth=1, max_bfs_breadth=10), 12)
    assert tree.tokens[0].tolist() == [16, *range(17, 28)]
    assert node_depths(tree.parents)[0].tolist() == list(range(12))


def test_the_newest_occurrence_comes_first_and_longer_matches_before_it():
    #          ....      1 2 -> 9        2 -> 8       1 2 (newest)
    tree = run([[1, 2, 9, 5, 2, 8, 6, 1, 2]])
    assert tree.tokens[0, 1] == 9  # two tokens match there, one at the newer place
    first_level = tree.tokens[0, 1:][tree.parents[0, 1:] == 0]
    assert first_level.tolist() == [9, 8]


def test_suffix_match_lens_stop_at_the_depth_asked_for():
    history = torch.tensor([[1, 2, 3, 1, 2, 3]])
    lens = suffix_match_lens(history, torch.tensor([5]), 2)
    assert lens.tolist() == [[0, 0, 2, 0, 0, 0]]
