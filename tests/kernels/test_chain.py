"""Rejection sampling along a chain: bit for bit the reference for sums that are exact."""

import pytest
import torch

from spec_v2.kernels.accept_chain.reference import accept_chain_reference
from spec_v2.kernels.accept_chain.triton_kernel import accept_chain_triton
from tests.kernels.support import DEVICE, assert_same, coins, dyadic, seeded, spread


def launches():
    """What compiles for sm_90: chains of 3 over 128k ids, and float64."""
    drafted, p, q = (
        torch.zeros(2, 3, dtype=torch.long),
        torch.zeros(2, 4, 128_256),
        torch.zeros(2, 3, 128_256),
    )
    given, bonus = torch.zeros(2, 3), torch.zeros(2)
    return {
        "float32": lambda: accept_chain_triton(drafted, q, p, given, bonus),
        "float64": lambda: accept_chain_triton(drafted, q.double(), p.double(), given, bonus),
    }


def chains(seed, b, d, v):
    """Drafts drawn from their distribution; in a third of the rows it is the target's, so that nothing is rejected."""
    gen = seeded(seed)
    q, p = dyadic(gen, b, d, v).cpu(), dyadic(gen, b, d + 1, v).cpu()
    q[: b // 3] = p[: b // 3, :d]
    drafted = torch.multinomial(q.flatten(0, 1), 1, generator=gen).view(b, d)
    return drafted, q, p, coins(gen, b, d).cpu(), coins(gen, b).cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("d", "v"), [(1, 2), (3, 37), (5, 100), (2, 1)])
@pytest.mark.parametrize("block", [16, 128])
def test_chains_are_the_reference(d, v, block, dtype):
    drafted, q, p, given, bonus = chains(d, 12, d, v)
    args = (drafted, q.to(dtype), p.to(dtype), given, bonus)
    want = accept_chain_reference(*args)
    assert_same(accept_chain_triton(*map(spread, args), block=block), want)
    if v > 2:
        assert len(set(want[2].tolist())) > 1


def test_a_zero_coin_never_accepts_an_impossible_token():
    p, q = torch.tensor([[[0.0, 1.0], [0.5, 0.5]]]), torch.tensor([[[1.0, 0.0]]])
    args = (torch.tensor([[0]]), q, p, torch.zeros(1, 1), torch.zeros(1))
    _, predict, lens = accept_chain_triton(*(x.to(DEVICE) for x in args))
    assert lens.tolist() == [1]
    assert predict.tolist() == [[1, -1]]


def test_an_empty_residual_is_drawn_from_the_target():
    """Only rounding rejects a draft of the same distribution; here the coin is out of its range instead."""
    p = torch.tensor([[[0.25, 0.75], [1.0, 0.0]]])
    args = (torch.tensor([[0]]), p[:, :1], p, torch.full((1, 1), 2.0), torch.full((1,), 0.5))
    assert_same(accept_chain_triton(*(x.to(DEVICE) for x in args)), accept_chain_reference(*args))


@pytest.mark.usefixtures("checked_kernels")
def test_a_draft_outside_of_the_vocabulary_is_noticed():
    drafted, *rest = chains(0, 3, 2, 5)
    drafted[1, 1] = -1
    with pytest.raises(Exception, match="drafted: not a token"):
        accept_chain_triton(drafted, *rest)


def test_probabilities_of_two_dtypes_are_refused():
    drafted, q, *rest = chains(0, 3, 2, 5)
    with pytest.raises(ValueError, match=r"draft_probs torch.float64, target_probs torch.float32"):
        accept_chain_triton(drafted, q.double(), *rest)
