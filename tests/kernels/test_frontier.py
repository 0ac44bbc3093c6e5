"""The draft loop's frontier, and what a verified path leaves. Bit for bit the references, along whole loops."""

import pytest
import torch

from spec_v2.kernels.commit_path.reference import commit_path_reference
from spec_v2.kernels.commit_path.triton_kernel import commit_path_triton
from spec_v2.kernels.draft_frontier.reference import expand_frontier_reference, start_frontier_reference
from spec_v2.kernels.draft_frontier.triton_kernel import expand_frontier_triton, start_frontier_triton
from tests.kernels.support import assert_same, seeded, spread
from tests.kernels.test_rows import random_paths


def launches():
    """What compiles for sm_90: two levels of a tree of topk 4, and its commit."""
    index, p = torch.zeros(2, 4, dtype=torch.long), torch.zeros(2, 4)
    hidden = torch.zeros(2, 512, dtype=torch.bfloat16)
    child_p, child_tokens = torch.zeros(8, 4), torch.zeros(8, 4, dtype=torch.long)
    of_nodes = torch.zeros(8, 512, dtype=torch.bfloat16)

    def loop():
        frontier, candidates = start_frontier_triton(index, p, hidden, 3)
        for level in (1, 2):
            frontier = expand_frontier_triton(frontier, candidates, level, child_p, child_tokens, of_nodes)

    return {
        "loop": loop,
        "commit": lambda: commit_path_triton(
            index, index[:, 0], index[:, 0], index, of_nodes.view(2, 4, 512)
        ),
    }


def same_fields(got, want, names):
    for name in names:
        assert_same(getattr(got, name), getattr(want, name))


FRONTIER = ("tokens", "scores", "numbers", "hidden_states", "visible")
CANDIDATES = ("tokens", "scores", "parents")


@pytest.mark.parametrize(("k", "num_steps", "h"), [(1, 3, 5), (2, 3, 0), (3, 4, 70), (5, 2, 33), (4, 1, 8)])
def test_a_whole_draft_loop_is_the_reference(k, num_steps, h):
    gen, b = seeded(k), 3
    topk_p = torch.randint(0, 5, (b, k), generator=gen) / 4  # ties and zeros
    topk_p[0, 0] = torch.nan
    index, hidden = torch.randint(0, 2**40, (b, k), generator=gen), torch.randn(b, h, generator=gen)
    want, wanted = start_frontier_reference(index, topk_p, hidden, num_steps)
    got, gotten = start_frontier_triton(*map(spread, (index, topk_p, hidden)), num_steps)
    same_fields(got, want, FRONTIER)
    for level in range(1, num_steps):
        child_p = torch.randint(0, 5, (b * k, k), generator=gen) / 4
        child_tokens = torch.randint(0, 2**40, (b * k, k), generator=gen)
        hidden = torch.randn(b * k, h, generator=gen).bfloat16()
        args = (child_p, child_tokens, hidden)
        want = expand_frontier_reference(want, wanted, level, *args)
        got = expand_frontier_triton(got, gotten, level, *map(spread, args))
        same_fields(got, want, FRONTIER)
    same_fields(gotten, wanted, CANDIDATES)


@pytest.mark.parametrize(("n", "w", "h"), [(1, 1, 7), (6, 4, 0), (5, 5, 100), (13, 3, 4100)])
def test_vf03_a_committed_path_is_the_reference(n, w, h):
    gen, b = seeded(n), 3
    index = random_paths(gen, b, n, w)
    positions = torch.randint(10, 20, (b, n), generator=gen)
    args = (
        index,
        (index >= 0).sum(1),
        torch.tensor([10, 2**40, 7]),
        positions,
        torch.randn(b, n, h, generator=gen),
    )
    got, want = commit_path_triton(*map(spread, args)), commit_path_reference(*args)
    same_fields(got, want, ("new_seq_lens", "draft_depths", "hidden_states"))


@pytest.mark.usefixtures("checked_kernels")
def test_a_node_that_is_none_is_noticed():
    ids, hidden = torch.zeros(1, 2, dtype=torch.long), torch.zeros(1, 2, 3)
    with pytest.raises(Exception, match="accept_index: not a node"):
        commit_path_triton(ids + 2, ids[:, 0], ids[:, 0], ids, hidden)
