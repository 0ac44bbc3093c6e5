"""Drafting by copying: bit for bit the reference, with and without a corpus, over every way to split a history."""

import pytest
import torch

from spec_v2.kernels.ngram_tree import NOTHING, NgramShape, triton_kernel
from spec_v2.kernels.ngram_tree.reference import ngram_tree_reference
from spec_v2.kernels.ngram_tree.triton_kernel import ngram_tree_triton
from tests.kernels.support import DEVICE, assert_same, seeded, spread

FIELDS = ("tokens", "parents", "scores", "match_lens", "draft_probs")
SHAPE = NgramShape(max_trie_depth=6, min_bfs_breadth=1, max_bfs_breadth=4)


def launches():
    """What compiles for sm_90: the default shape over a long history and a corpus."""
    history, corpus = torch.zeros(3, 4096, dtype=torch.long), torch.zeros(5000, dtype=torch.long)
    ids = torch.zeros(2, dtype=torch.long)
    shape = NgramShape(max_trie_depth=18, min_bfs_breadth=1, max_bfs_breadth=10)
    return {
        "tree": lambda: ngram_tree_triton(history, None, ids, ids, 4000, shape, 12),
        "tree with a corpus": lambda: ngram_tree_triton(history, corpus, ids, ids, 4000, shape, 12),
    }


def texts(seed, alphabet, width=70):
    """Histories of many lengths, rubbish behind each; the padding row's is empty."""
    gen = seeded(seed)
    history = torch.randint(0, alphabet, (7, width), generator=gen)
    rows = torch.tensor([5, 1, 6, 0])
    seq_lens = torch.tensor([width - 9, int(torch.randint(0, 40, (1,), generator=gen)), 3, 0])
    for row, length in zip(rows.tolist(), seq_lens.tolist(), strict=True):
        history[row, length + 1 :] = -1 if row % 2 else 99
    corpus = torch.randint(0, alphabet, (40,), generator=gen)
    corpus[torch.randint(0, 40, (5,), generator=gen)] = NOTHING
    corpus[-1] = NOTHING
    return history, corpus, rows, seq_lens


def check(history, corpus, rows, seq_lens, shape, num_nodes, block):
    longest = int(seq_lens.max())
    want = ngram_tree_reference(history, corpus, rows, seq_lens, longest, shape, num_nodes)
    own = None if corpus is None else spread(corpus)
    got = ngram_tree_triton(
        history.to(DEVICE), own, spread(rows), spread(seq_lens), longest, shape, num_nodes, block=block
    )
    for name in FIELDS:
        assert_same(getattr(got, name), getattr(want, name))
    return want


@pytest.mark.parametrize("alphabet", [2, 5])
@pytest.mark.parametrize("num_nodes", [1, 2, 9, 14])
@pytest.mark.parametrize("breadths", [(1, 4), (2, 2), (1, 10), (1, 1), (3, 5)], ids=str)
def test_trees_are_the_reference(alphabet, num_nodes, breadths):
    history, corpus, rows, seq_lens = texts(alphabet + num_nodes, alphabet)
    shape = NgramShape(max_trie_depth=6, min_bfs_breadth=breadths[0], max_bfs_breadth=breadths[1])
    for given in (None, corpus):
        want = check(history, given, rows, seq_lens, shape, num_nodes, block=64)
    if num_nodes > 2:
        assert (want.parents[:, 1:] >= 0).any()


@pytest.mark.parametrize("max_depth", [1, 2, 18])
def test_any_depth(max_depth):
    history, corpus, rows, seq_lens = texts(1, 2)
    shape = NgramShape(max_trie_depth=max_depth, min_bfs_breadth=1, max_bfs_breadth=3)
    check(history, corpus, rows, seq_lens, shape, 7, block=32)


@pytest.mark.parametrize("programs", [1, 8, 999])
def test_any_split(programs, monkeypatch):
    monkeypatch.setattr(triton_kernel, "PROGRAMS", programs)
    history, corpus, rows, seq_lens = texts(2, 3)
    check(history, corpus, rows, seq_lens, SHAPE, 9, block=16)


def test_a_text_that_repeats_itself_is_followed_to_its_end():
    """Every place matches; the newest one has a single token behind it."""
    history = torch.full((2, 50), 7)
    want = check(history, None, torch.tensor([1]), torch.tensor([40]), SHAPE, 12, block=32)
    assert want.match_lens.tolist() == [6]


def test_histories_that_are_too_long_to_count_are_refused():
    shape = NgramShape(max_trie_depth=2**20, min_bfs_breadth=1, max_bfs_breadth=4)
    ids = torch.zeros(1, dtype=torch.long, device=DEVICE)
    with pytest.raises(ValueError, match=r"matches=2149582850 .*\(2147483647\)"):
        ngram_tree_triton(torch.zeros(1, 2050, device=DEVICE).long(), None, ids, ids, 2049, shape, 4)


@pytest.mark.usefixtures("checked_kernels")
@pytest.mark.parametrize(
    ("row", "seq_len", "message"),
    [(9, 3, "rows: not"), (1, -1, "seq_lens: out"), (1, 30, "seq_lens: beyond")],
)
def test_what_is_outside_is_noticed(row, seq_len, message):
    history, given = torch.zeros(3, 50, dtype=torch.long), torch.tensor([row])
    with pytest.raises(Exception, match=message):
        ngram_tree_triton(history, None, given, torch.tensor([seq_len]), 20, SHAPE, 4)
