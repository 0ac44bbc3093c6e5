"""The tree operations against brute force in plain Python: structure, build, verify, top-k."""

import itertools

import pytest
import torch

from spec_v2.kernels.build_tree import build_tree
from spec_v2.kernels.top_k import top_k
from spec_v2.kernels.tree_structure import ancestor_mask, node_depths
from spec_v2.kernels.verify_tree import verify_tree


def random_parents(gen, b, n, padding=0):
    rows = []
    for _ in range(b):
        real = n - padding
        rows.append(
            [-1] + [int(torch.randint(0, j, (1,), generator=gen)) for j in range(1, real)] + [-1] * padding
        )
    return torch.tensor(rows)


def ancestors(parents, j):
    seen = {j}
    while parents[j] >= 0:
        j = parents[j]
        seen.add(j)
    return seen


@pytest.mark.parametrize("n", range(1, 18))
@pytest.mark.parametrize("padding", [0, 1])
def test_structure_follows_from_parents(n, padding):
    gen = torch.Generator().manual_seed(n)
    parents = random_parents(gen, 5, n, min(padding, n - 1))
    mask, depths = ancestor_mask(parents), node_depths(parents)
    for i, j in itertools.product(range(5), range(n)):
        want = ancestors(parents[i].tolist(), j)
        assert set(mask[i, j].nonzero()[:, 0].tolist()) == want
        assert depths[i, j] == len(want) - 1


def test_a_long_chain_sees_all_of_itself():
    parents = torch.arange(-1, 64)[None]
    assert torch.equal(ancestor_mask(parents)[0], torch.ones(65, 65).tril().bool())


def worked_example(k=2):
    """Two rounds of a tree with topk 2: ten candidates, by hand."""
    return {
        "root_tokens": torch.tensor([7]),
        "tokens": torch.tensor([[10, 11, 20, 21, 22, 23, 30, 31, 32, 33]]),
        "scores": torch.tensor([[0.6, 0.3, 0.42, 0.12, 0.27, 0.015, 0.21, 0.168, 0.216, 0.027]]),
        "parents": torch.tensor([[-1, -1, 0, 0, 1, 1, 2, 2, 4, 4]]),
    }


def test_worked_example():
    tree = build_tree(**worked_example(), num_nodes=6)
    assert tree.tokens.tolist() == [[7, 10, 11, 20, 22, 32]]
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 2, 4]]
    assert node_depths(tree.parents).tolist() == [[0, 1, 1, 2, 2, 3]]
    target = torch.tensor([[11, 0, 22, 0, 99, 0]])
    index, predict, accept_lens = verify_tree(
        tokens=tree.tokens, parents=tree.parents, target_tokens=target, longest_path=3
    )
    assert index.tolist() == [[0, 2, 4, -1]]
    assert predict.tolist() == [[11, 22, 99, -1]]
    assert accept_lens.tolist() == [3]


@pytest.mark.parametrize("num_nodes", range(2, 11))
def test_equal_scores_keep_parents(num_nodes):
    """With all scores equal a child must not be chosen before its parent."""
    example = worked_example() | {"scores": torch.ones(1, 10)}
    tree = build_tree(**example, num_nodes=num_nodes)
    assert tree.parents[0, 0] == -1
    for j in range(1, num_nodes):
        assert 0 <= tree.parents[0, j] < j
    assert tree.tokens[0].tolist() == [7, *example["tokens"][0, : num_nodes - 1].tolist()]


def random_candidates(gen, b, k, num_steps):
    """What a draft loop records: scores fall along a path, ties included (multiples of 1/8)."""
    tokens = torch.arange(k + (num_steps - 1) * k * k).repeat(b, 1) + 100
    scores = torch.randint(1, 9, tokens.shape, generator=gen) / 8
    parents = torch.full_like(tokens, -1)
    for i in range(b):
        frontier = list(range(k))
        for step in range(num_steps - 1):
            base = k + step * k * k
            for j in range(k * k):
                parents[i, base + j] = frontier[j // k]
                scores[i, base + j] *= scores[i, frontier[j // k]]
            frontier = sorted(range(base, base + k * k), key=lambda c: (-float(scores[i, c]), c))[:k]
    return tokens, scores, parents


@pytest.mark.parametrize(
    ("k", "num_steps", "num_nodes"), [(1, 4, 5), (2, 3, 6), (3, 5, 6), (4, 3, 9), (2, 1, 3)]
)
def test_build_tree_matches_brute_force(k, num_steps, num_nodes):
    gen = torch.Generator().manual_seed(k)
    tokens, scores, parents = random_candidates(gen, 7, k, num_steps)
    root = torch.arange(7)
    tree = build_tree(root_tokens=root, tokens=tokens, scores=scores, parents=parents, num_nodes=num_nodes)
    for i in range(7):
        best = sorted(range(tokens.shape[1]), key=lambda c: (-float(scores[i, c]), c))[: num_nodes - 1]
        chosen = sorted(best)
        node = {-1: 0} | {c: 1 + r for r, c in enumerate(chosen)}
        assert tree.tokens[i].tolist() == [i] + [int(tokens[i, c]) for c in chosen]
        assert tree.parents[i].tolist() == [-1] + [node[int(parents[i, c])] for c in chosen]
        assert tree.scores[i].tolist() == [1.0] + [float(scores[i, c]) for c in chosen]


def traverse(tokens, parents, target, longest_path):
    """One request, node by node, as one would do it by hand."""
    path, predict = [0], [target[0]]
    while len(path) <= longest_path:
        step = [j for j in range(len(tokens)) if parents[j] == path[-1] and tokens[j] == predict[-1]]
        if not step:
            break
        path.append(step[0])
        predict.append(target[step[0]])
    return path, predict


@pytest.mark.parametrize("n", [1, 2, 3, 5, 6, 12, 17])
@pytest.mark.parametrize("longest_path", [0, 1, 3, 5])
def test_verify_matches_traversal(n, longest_path):
    gen = torch.Generator().manual_seed(100 * n + longest_path)
    b = 64
    parents = random_parents(gen, b, n, padding=min(1, n - 1))
    tokens = torch.randint(0, 3, (b, n), generator=gen)
    target = torch.randint(0, 3, (b, n), generator=gen)
    index, predict, accept_lens = verify_tree(
        tokens=tokens, parents=parents, target_tokens=target, longest_path=longest_path
    )
    for i in range(b):
        path, want = traverse(tokens[i].tolist(), parents[i].tolist(), target[i].tolist(), longest_path)
        fill = [-1] * (longest_path + 1 - len(path))
        assert index[i].tolist() == path + fill
        assert predict[i].tolist() == want + fill
        assert accept_lens[i] == len(path)


def test_dr08_padding_nodes_are_never_accepted():
    """A padding node holds a real token id; only its missing parent keeps it out."""
    index, _, accept_lens = verify_tree(
        tokens=torch.tensor([[5, 0, 0]]),
        parents=torch.tensor([[-1, -1, -1]]),
        target_tokens=torch.zeros(1, 3, dtype=torch.long),
        longest_path=2,
    )
    assert accept_lens.tolist() == [1]
    assert index.tolist() == [[0, -1, -1]]


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_tb08_top_k_ties_go_to_the_lowest_id(k):
    gen = torch.Generator().manual_seed(k)
    probs = torch.randint(0, 4, (50, 9), generator=gen) / 4
    values, ids = top_k(probs, k)
    for i in range(50):
        want = sorted(range(9), key=lambda t: (-float(probs[i, t]), t))[:k]
        assert ids[i].tolist() == want
        assert values[i].tolist() == [float(probs[i, t]) for t in want]
    before = probs.clone()
    top_k(probs.t(), k)  # a view that is not contiguous, and the input is left alone
    assert torch.equal(probs, before)


def test_tb08_children_are_distinct_even_where_all_is_zero():
    _, ids = top_k(torch.zeros(3, 5), 4)
    assert ids.tolist() == [[0, 1, 2, 3]] * 3
