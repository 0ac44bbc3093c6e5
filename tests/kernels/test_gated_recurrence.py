"""The recurrence along paths: bit for bit the reference where sums are exact, else against float64; one result for all modes."""

import pytest
import torch

from spec_v2.kernels.gated_recurrence import Saves, TokenInputs, gated_recurrence
from spec_v2.kernels.gated_recurrence.reference import gated_recurrence_reference
from spec_v2.kernels.gated_recurrence.triton_kernel import gated_recurrence_triton
from tests.kernels.support import DEVICE, assert_same, poison, seeded, spread

SHAPES = [
    (4, 2, 8, 8),
    (3, 1, 5, 37),
    (2, 2, 16, 3),
    (1, 1, 1, 1),
    (6, 2, 33, 40),
]  # heads, key heads, kd, vd


def launches():
    """What compiles for sm_90: Qwen3-Next's heads, and Bamba's with their 256-wide keys."""
    calls = {}
    for name, heads, key_heads, kd, vd in (("delta", 32, 16, 128, 128), ("mamba2", 128, 1, 256, 64)):
        states, rows = torch.zeros(5, heads, kd, vd), torch.zeros(2, dtype=torch.long)
        tokens = TokenInputs(
            *(
                torch.zeros(*s, dtype=torch.bfloat16)
                for s in ((8, heads, vd), (8, key_heads, kd), (8, key_heads, kd))
            ),
            *(torch.zeros(8, heads) for _ in range(2)),
        )
        saves = Saves(torch.ones(2, 2, dtype=torch.long), torch.ones(2, 2, dtype=torch.long))
        paths = torch.zeros(2, 4, dtype=torch.long)
        args = (states, rows, paths, tokens, name == "delta")
        calls[f"{name} prefill"] = lambda args=args, saves=saves: gated_recurrence_triton(*args, "all", saves)
        calls[f"{name} tree"] = lambda args=args: gated_recurrence_triton(*args, "last", None)
        one = (states, rows, paths[:, :1], tokens, name == "delta")  # a length of 1 is compiled by itself
        calls[f"{name} decode"] = lambda one=one: gated_recurrence_triton(*one, "all", None)
        calls[f"{name} commit one"] = lambda one=one, saves=saves: gated_recurrence_triton(
            *one, "none", saves
        )
        calls[f"{name} commit"] = lambda args=args, saves=saves: gated_recurrence_triton(*args, "none", saves)
    return calls


def whole(gen, *shape):
    """Small integers: with no decay, all sums are exact."""
    return torch.randint(-2, 3, shape, generator=gen).float().to(DEVICE)


def random_tokens(gen, t, heads, key_heads, kd, vd, dtype=torch.float32):
    """What a model might give: decays between 0 and 1, steps too."""
    shapes = ((t, heads, vd), (t, key_heads, kd), (t, key_heads, kd))
    value, key, query = (torch.randn(*s, generator=gen).to(DEVICE, dtype) for s in shapes)
    decay, step = (torch.rand(t, heads, generator=gen).to(DEVICE) for _ in range(2))
    return TokenInputs(value, key, query, -decay, step)


def in_double(tokens):
    return TokenInputs(
        *(getattr(tokens, name).double() for name in ("value", "key", "query", "decay", "step"))
    )


@pytest.mark.parametrize("outputs", ["all", "last", "none"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_exact_sums_are_the_reference(shape, outputs):
    heads, key_heads, kd, vd = shape
    gen = seeded(kd)
    states = whole(gen, 9, heads, kd, vd)
    value, key, query = (whole(gen, 10, h, d) for h, d in ((heads, vd), (key_heads, kd), (key_heads, kd)))
    nothing = torch.zeros(10, heads, device=DEVICE)
    tokens = TokenInputs(spread(value), spread(key), spread(query), nothing, whole(gen, 10, heads))
    paths = torch.tensor([[0, 1, 2, 3], [-1, 5, -1, 6], [9, 4, 8, 7]], device=DEVICE)
    rows = torch.tensor([1, 0, 2], device=DEVICE)
    saves = Saves(
        torch.tensor([[1, 4], [0, 5], [3, 0]]).to(DEVICE), torch.tensor([[4, 2], [3, 4], [1, 1]]).to(DEVICE)
    )
    expected = states.clone()
    want = gated_recurrence_reference(expected, rows, paths, tokens, False, outputs, saves)
    got = gated_recurrence_triton(states, rows, paths, tokens, False, outputs, saves)
    assert (got is None) == (outputs == "none")
    if got is not None:
        assert_same(got, want)
    assert_same(states, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_near_to_float64_as_the_reference(shape, delta, dtype):
    gen = seeded(7)
    heads, _, kd, vd = shape
    states = torch.randn(4, heads, kd, vd, generator=gen).to(DEVICE)
    tokens = random_tokens(gen, 40, *shape, dtype=dtype)
    paths = torch.arange(40, device=DEVICE).view(2, 20)
    rows = torch.tensor([1, 2], device=DEVICE)
    saves = Saves(rows[:, None], torch.tensor([[20], [11]], device=DEVICE))

    def errors(run, states, tokens):
        kept = states.clone()
        out = run(kept, rows, paths, tokens, delta, "all", saves)
        return out.double(), kept.double()

    truth = errors(gated_recurrence_reference, states.double(), in_double(tokens))
    mine, reference = (
        errors(f, states, tokens) for f in (gated_recurrence_triton, gated_recurrence_reference)
    )
    for got, other, want in zip(mine, reference, truth, strict=True):
        floor = 1e-6 * want.abs().max()
        assert (got - want).abs().max() <= 2 * (other - want).abs().max() + floor


@pytest.mark.parametrize("delta", [False, True])
def test_prompt_chain_tree_and_commit_agree_to_the_last_bit(delta):
    """The same tokens in one prompt, as the paths of a tree, and committed afterwards."""
    gen = seeded(11)
    shape = (4, 2, 16, 24)
    states = torch.randn(12, 4, 16, 24, generator=gen).to(DEVICE)
    tokens = random_tokens(gen, 6, *shape, dtype=torch.bfloat16)
    order = [0, 2, 5, 3]
    path, row = torch.tensor([order], device=DEVICE), torch.tensor([1], device=DEVICE)
    saves = Saves(torch.tensor([[2, 3, 4, 5]]).to(DEVICE), torch.tensor([[1, 2, 3, 4]]).to(DEVICE))
    said = gated_recurrence_triton(states, row, path, tokens, delta, "all", saves)
    ends = torch.tensor([[-1] * (3 - j) + order[: j + 1] for j in range(4)], device=DEVICE)
    at_ends = gated_recurrence_triton(states, row.repeat(4), ends, tokens, delta, "last", None)
    assert_same(at_ends, said[order])
    for j in range(1, 5):
        accepted = torch.tensor([order[:j] + [-1] * (4 - j)], device=DEVICE)
        own = Saves(torch.tensor([[6]], device=DEVICE), torch.tensor([[j]], device=DEVICE))
        gated_recurrence_triton(states, row, accepted, tokens, delta, "none", own)
        assert_same(states[6], states[1 + j])
    again = gated_recurrence_triton(states, row, path, tokens, delta, "all", None)
    assert_same(again, said)


@pytest.mark.parametrize("run", [gated_recurrence_triton, gated_recurrence_reference])
def test_poison_in_other_rows_tokens_and_branches_stays_there(run):
    gen = seeded(5)
    states = torch.randn(5, 2, 4, 4, generator=gen).to(DEVICE)
    tokens = random_tokens(gen, 5, 2, 1, 4, 4)
    paths, rows = torch.tensor([[-1, 1, 2]], device=DEVICE), torch.tensor([3], device=DEVICE)
    saves = Saves(torch.tensor([[3, 0]], device=DEVICE), torch.tensor([[3, 2]], device=DEVICE))
    want_states = states.clone()
    want = gated_recurrence(want_states, rows, paths, tokens, delta=True, outputs="last", saves=saves)
    for other in (0, 3, 4):
        for part in (tokens.value, tokens.key, tokens.query, tokens.decay, tokens.step):
            poison(part[other])
    for other in (1, 2, 4):
        poison(states[other])
    got = run(states, rows, paths, tokens, True, "last", saves)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(states[3], want_states[3])
    assert_same(states[0], want_states[0])


def test_wrong_numbers_are_noticed(checked_kernels):
    states, rows = torch.zeros(3, 1, 4, 4), torch.zeros(1, dtype=torch.long)
    tokens = random_tokens(seeded(0), 2, 1, 1, 4, 4)
    path = rows[:, None]
    with pytest.raises(Exception, match="start_rows"):
        gated_recurrence_triton(states, rows + 3, path, tokens, True, "all", None)
    with pytest.raises(Exception, match="paths"):
        gated_recurrence_triton(states, rows, path + 2, tokens, True, "all", None)
    with pytest.raises(Exception, match="save_rows"):
        gated_recurrence_triton(states, rows, path, tokens, True, "all", Saves(path + 3, path + 1))
