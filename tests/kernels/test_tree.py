"""The tree: structure from parents, re-ranking, traversal. Bit for bit the references, on random trees."""

import pytest
import torch

from spec_v2.kernels.build_tree import build_tree
from spec_v2.kernels.build_tree.reference import build_tree_reference
from spec_v2.kernels.build_tree.triton_kernel import build_tree_triton
from spec_v2.kernels.tree_structure.reference import (
    ancestor_bits_reference,
    ancestor_mask_reference,
    node_depths_reference,
    place_tree_reference,
)
from spec_v2.kernels.tree_structure.triton_kernel import (
    ancestor_bits_triton,
    place_tree_triton,
    walk_up_triton,
)
from spec_v2.kernels.verify_tree.reference import verify_tree_reference
from spec_v2.kernels.verify_tree.triton_kernel import verify_tree_triton
from tests.kernels.support import DEVICE, assert_same, seeded, spread
from tests.test_tree_kernels import random_candidates, random_parents

SIZES = [1, 2, 3, 5, 6, 12, 17]


def launches():
    """What compiles for sm_90: a tree of 64 nodes out of 264 candidates."""
    parents = torch.zeros(4, 64, dtype=torch.long)
    tokens, scores, ids = (
        torch.zeros(4, 264, dtype=torch.long),
        torch.zeros(4, 264),
        torch.zeros(4, dtype=torch.long),
    )
    table = torch.zeros(5, 128, dtype=torch.int32)
    return {
        "structure": lambda: (walk_up_triton(parents), ancestor_bits_triton(parents)),
        "places": lambda: place_tree_triton(parents, ids, ids, table),
        "build": lambda: build_tree_triton(ids, tokens, scores, tokens, 64),
        "build float64": lambda: build_tree_triton(ids, tokens, scores.double(), tokens, 64),
        "verify": lambda: verify_tree_triton(parents, parents, parents, 5),
    }


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("padding", [0, 1])
def test_structure_is_the_reference(n, padding):
    parents = random_parents(seeded(n), 3, n, min(padding, n - 1))
    mask, depths = walk_up_triton(spread(parents))
    assert_same((mask, depths), (ancestor_mask_reference(parents), node_depths_reference(parents)))


@pytest.mark.parametrize("n", [1, 31, 32, 33, 63, 64, 65])
def test_tb05_packed_masks_are_the_mask(n):
    parents = random_parents(seeded(n), 2, n, padding=min(2, n - 1))
    got = ancestor_bits_triton(spread(parents))
    assert_same(got, ancestor_bits_reference(parents))
    mask = ancestor_mask_reference(parents)
    for a in range(n):
        assert torch.equal((got.cpu()[:, :, a // 32] >> (a % 32)) & 1, mask[:, :, a].int())


@pytest.mark.parametrize("n", [1, 5, 17, 40])
def test_places_are_the_reference(n):
    gen = seeded(n)
    parents = random_parents(gen, 3, n)
    table = torch.randint(0, 10**6, (7, 50), generator=gen, dtype=torch.int32)
    lens, rows = torch.tensor([0, 7, 45]), torch.tensor([6, 0, 3])  # the last one runs out of its row
    got = place_tree_triton(spread(parents), spread(lens), spread(rows), table.to(DEVICE)[:, :48])
    want = place_tree_reference(parents, lens, rows, table[:, :48])
    for name in ("visible", "positions", "next_positions", "slots"):
        assert_same(getattr(got, name), getattr(want, name))


def test_parents_that_go_round_in_a_circle_end_too():
    walk_up_triton(torch.tensor([[1, 0, 2]], device=DEVICE))


def same_tree(got, want):
    for name in ("tokens", "parents", "scores", "match_lens", "draft_probs"):
        assert_same(getattr(got, name), getattr(want, name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("k", "num_steps", "num_nodes"),
    [(1, 1, 2), (1, 4, 5), (2, 3, 6), (3, 5, 6), (4, 3, 9), (2, 1, 3), (5, 4, 40), (3, 2, 1)],
)
def test_build_tree_is_the_reference(k, num_steps, num_nodes, dtype):
    tokens, scores, parents = random_candidates(seeded(k), 3, k, num_steps)
    args = (torch.arange(3) + 5, tokens, scores.to(dtype), parents)
    got = build_tree_triton(*map(spread, args), num_nodes)
    names = ("root_tokens", "tokens", "scores", "parents")
    same_tree(got, build_tree_reference(**dict(zip(names, args, strict=True)), num_nodes=num_nodes))


@pytest.mark.parametrize("fill", [0.0, 1.0, torch.nan])
def test_equal_scores_are_ranked_by_candidate(fill):
    """Zeros are what a drafter without a softmax leaves. NaN never comes, but must not leave holes either."""
    tokens, scores, parents = random_candidates(seeded(), 2, 3, 3)
    scores = torch.full_like(scores, fill)
    root = torch.tensor([1, 2])
    got = build_tree_triton(*(x.to(DEVICE) for x in (root, tokens, scores, parents)), 8)
    want = build_tree_reference(root_tokens=root, tokens=tokens, scores=scores, parents=parents, num_nodes=8)
    same_tree(got, want)


def test_more_nodes_than_candidates_are_refused():
    tokens, scores, parents = random_candidates(seeded(), 1, 2, 1)
    with pytest.raises(ValueError, match="num_nodes=4: 2 candidates"):
        build_tree(
            root_tokens=torch.zeros(1).long(), tokens=tokens, scores=scores, parents=parents, num_nodes=4
        )


def test_more_candidates_than_a_program_holds_are_refused():
    many = torch.zeros(1, 4097, device=DEVICE)
    with pytest.raises(ValueError, match=r"candidates=4097 .*\(4096\)"):
        build_tree_triton(torch.zeros(1, device=DEVICE).long(), many.long(), many, many.long(), 5)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("longest_path", [0, 1, 4])
def test_verify_is_the_reference(n, longest_path):
    gen, b = seeded(100 * n + longest_path), 12
    parents = random_parents(gen, b, n, padding=min(1, n - 1))
    tokens, target = torch.randint(0, 3, (2, b, n), generator=gen)
    got = verify_tree_triton(spread(tokens), spread(parents), spread(target), longest_path)
    want = verify_tree_reference(
        tokens=tokens, parents=parents, target_tokens=target, longest_path=longest_path
    )
    assert_same(got, want)
