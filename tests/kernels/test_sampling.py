"""Sampling: the ids of the reference for sums that are exact, and for logits the ids that a float64 CDF allows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_v2.kernels.sample_nodes.probs_kernel import node_distributions_triton, position_coins_triton
from spec_v2.kernels.sample_nodes.reference import (
    SamplingInputs,
    filter_probs,
    inverse_cdf_reference,
    node_distributions_reference,
    position_coins_reference,
    sample_nodes_reference,
)
from spec_v2.kernels.sample_nodes.triton_kernel import sample_nodes_triton, sample_probs_triton
from tests.kernels.support import DEVICE, assert_same, coins, dyadic, seeded, spread

DTYPES = [torch.float32, torch.float64]
NO_LIMIT = 2**62


def sampling(b, *, temperature=1.0, top_k=NO_LIMIT, top_p=1.0, min_p=0.0, device="cpu"):
    return SamplingInputs(
        temperatures=torch.full((b,), temperature),
        top_ks=torch.full((b,), top_k),
        top_ps=torch.full((b,), top_p),
        min_ps=torch.full((b,), min_p),
        seeds=torch.arange(b) * 7919 + (1 << 40),
        all_greedy=temperature == 0,
        any_filter=top_k < NO_LIMIT or top_p < 1 or min_p > 0,
    ).to(torch.device(device))


def launches():
    """What compiles for sm_90: bf16 logits at 128k ids, and given probabilities, with and without filters."""
    logits, positions = torch.zeros(2, 2, 128_256, dtype=torch.bfloat16), torch.zeros(2, 2, dtype=torch.long)
    probs, row_coins = torch.zeros(2, 300), torch.zeros(2)
    filters = (torch.ones(2, dtype=torch.long), torch.ones(2), torch.ones(2))
    return {
        "logits": lambda: sample_nodes_triton(logits, positions, sampling(2)),
        "filtered logits": lambda: sample_nodes_triton(logits, positions, sampling(2, top_k=5)),
        "probabilities": lambda: sample_probs_triton(probs, row_coins, None),
        "filtered probabilities": lambda: sample_probs_triton(probs, row_coins, filters),
        "distributions": lambda: node_distributions_triton(logits, sampling(2)),
        "filtered distributions": lambda: node_distributions_triton(logits, sampling(2, top_p=0.9)),
        "coins": lambda: position_coins_triton(positions, positions, 7),
        "float64": lambda: sample_nodes_triton(logits.double(), positions, sampling(2, top_k=5)),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", [16, 128])
@pytest.mark.parametrize("v", [1, 2, 100])
def test_sa07_exact_sums_give_the_reference(v, block, dtype):
    gen = seeded(v)
    probs, row_coins = dyadic(gen, 20, v).cpu(), coins(gen, 20).cpu()
    probs[:3] = dyadic(gen, 3, v, denominator=4).cpu() if v > 1 else probs[:3]  # mostly zeros
    row_coins[::5] = 0.0
    probs, row_coins = probs.to(dtype), row_coins.to(dtype)
    got = sample_probs_triton(spread(probs), spread(row_coins), None, block=block)
    assert_same(got, inverse_cdf_reference(probs, row_coins))


@pytest.mark.parametrize("block", [16, 1024])
def test_the_largest_coin_stays_in_the_row(block):
    largest = torch.full((3,), 1 - 2**-24)
    weights = torch.full((3, 70), 1 / 70)
    weights[1, 40:] = 0.0
    weights[2] = torch.rand(70, generator=seeded())
    ids = sample_probs_triton(weights.to(DEVICE), largest.to(DEVICE), None, block=block).tolist()
    assert ids == [69, 39, 69]


@pytest.mark.parametrize("filters", [None, (3, 0.5, 0.1)])
def test_vf11_a_row_that_has_no_distribution_gives_an_id_of_the_row(filters):
    weights = torch.tensor([[0.0] * 40, [torch.nan] * 40, [0.1] * 39 + [torch.nan], [torch.inf] * 40]).to(
        DEVICE
    )
    if filters is not None:
        filters = tuple(torch.full((4,), f, device=DEVICE) for f in filters)
    ids = sample_probs_triton(weights, torch.full((4,), 0.5, device=DEVICE), filters, block=16)
    assert ((ids >= 0) & (ids < 40)).all()
    assert ids[0] == inverse_cdf_reference(torch.zeros(1, 40), torch.full((1,), 0.5)).item()
    if filters is None:
        ids = sample_nodes_triton(
            weights[:, None], torch.zeros(4, 1, device=DEVICE).long(), sampling(4, device=DEVICE), 16
        )
        assert ((ids >= 0) & (ids < 40)).all()


def filtered(probs, row_coins, top_ks, top_ps, min_ps):
    return inverse_cdf_reference(filter_probs(probs, top_ks, top_ps, min_ps), row_coins)


def random_filters(gen, r, v):
    """Each filter is off in some rows."""
    top_ks = torch.randint(1, v + 2, (r,), generator=gen)
    top_ks[::4] = NO_LIMIT
    top_ps = torch.randint(1, 17, (r,), generator=gen) / 16
    top_ps[1::4] = 1.0
    min_ps = torch.randint(0, 4, (r,), generator=gen) / 4
    min_ps[2::4] = 0.0
    return top_ks, top_ps, min_ps


def check_filters(probs, row_coins, filters, dtype, block):
    """The reference computes in a dtype in which the sums are exact."""
    exact = torch.promote_types(dtype, torch.float32)
    want = filtered(probs.to(exact), row_coins.to(exact), *filters)
    own = tuple(x.to(DEVICE) for x in filters)
    got = sample_probs_triton(spread(probs.to(dtype)), spread(row_coins.to(exact)), own, block=block)
    assert_same(got, want)


@pytest.mark.parametrize(("dtype", "r"), [(torch.float32, 10), (torch.float64, 3)], ids=str)
@pytest.mark.parametrize("v", [1, 70])
def test_filters_of_exact_sums_give_the_reference(v, dtype, r):
    gen = seeded(v)
    check_filters(dyadic(gen, r, v).cpu(), coins(gen, r).cpu(), random_filters(gen, r, v), dtype, 64)


@settings(max_examples=6, deadline=None, database=None)
@given(st.integers(0, 10**6), st.integers(1, 50), st.sampled_from([torch.bfloat16, torch.float16]))
def test_filters_give_the_reference_where_ties_cross_their_limits(seed, v, dtype):
    """Few distinct probabilities, exact in 16 bits."""
    gen, r = seeded(seed), 3
    probs = torch.randint(0, 6, (r, v), generator=gen) / 1024
    check_filters(probs, coins(gen, r).cpu(), random_filters(gen, r, v), dtype, 32)


OPTIONS = [
    {},
    {"temperature": 0.3},
    {"top_k": 3},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"temperature": 1.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_samples_of_logits_are_the_reference(options, dtype):
    """Coins as near to a boundary as rounding reaches are few, and none among these."""
    gen, b, n, v = seeded(5), 2, 2, 90
    logits = (torch.randn(b, n, v, generator=gen) * 3).to(dtype)
    positions = torch.randint(0, 10**6, (b, n), generator=gen)
    got = sample_nodes_triton(
        spread(logits), spread(positions), sampling(b, **options, device=DEVICE), block=32
    )
    assert_same(got, sample_nodes_reference(logits, positions, sampling(b, **options)))


def test_coins_are_those_of_the_reference():
    """Uniform weights turn a coin into an id: 4096 of them tell its leading 12 bits."""
    b, n, v = 2, 3, 4096
    positions = torch.arange(b * n).view(b, n) * 1_000_003 + 2**33
    logits = torch.zeros(b, n, v)
    given = sampling(b)
    got = sample_nodes_triton(logits.to(DEVICE), positions.to(DEVICE), given.to(DEVICE), block=1024)
    want = position_coins_reference(given.seeds[:, None].expand(b, n), positions) * v
    assert_same(got, want.long())


def test_greedy_rows_among_sampled_ones_take_the_lowest_of_equal_ids():
    logits = torch.randint(0, 3, (4, 2, 50), generator=seeded()).bfloat16()
    logits[3] = torch.nan
    given = sampling(4)
    given.temperatures[1::2] = 0.0
    positions = torch.arange(8).view(4, 2)
    got = sample_nodes_triton(logits.to(DEVICE), positions.to(DEVICE), given.to(DEVICE), block=16)
    assert_same(got[1::2], logits[1::2].argmax(-1))
    all_greedy = sample_nodes_triton(
        logits.to(DEVICE), positions.to(DEVICE), sampling(4, temperature=0.0), block=16
    )
    assert_same(all_greedy, logits.argmax(-1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, *DTYPES], ids=str)
@pytest.mark.parametrize("v", [40, 70, 300])
def test_greedy_rows_whose_logits_are_all_negative_stay_in_the_row(v, dtype):
    """Three and five blocks of 16 are padded to four and eight: no padding may lie above a negative number's key."""
    logits = (-torch.rand(3, 1, v, generator=seeded(v)) * 5 - 1).to(dtype)
    logits[2] = -torch.inf
    logits[2, 0, v // 2] = -1000.0
    inputs = sampling(3)
    inputs.temperatures[::2] = 0.0
    positions = torch.tensor([[3], [4], [5]])
    on_device = inputs.to(DEVICE)
    got = sample_nodes_triton(logits.to(DEVICE), positions.to(DEVICE), on_device, block=16)
    assert_same(got, sample_nodes_reference(logits, positions, inputs).to(DEVICE))
    probs = node_distributions_triton(logits.to(DEVICE), on_device, block=16)
    assert probs[::2].argmax(-1).tolist() == got[::2].tolist()


@pytest.mark.parametrize("shape", [(0,), (5,), (300,), (3, 1), (7, 40)], ids=str)
def test_coins_with_a_salt_are_the_reference(shape):
    gen = seeded(sum(shape))
    positions = torch.randint(0, 2**40, shape, generator=gen)
    seeds = torch.randint(-(2**62), 2**62, shape, generator=gen)
    for salt in (0, 0x44524146):
        got = position_coins_triton(spread(seeds), spread(positions), salt)
        assert_same(got, position_coins_reference(seeds, positions, salt))
    one_seed = torch.tensor([2**62 + 5]).expand(shape)
    want = position_coins_reference(one_seed, positions)
    assert_same(position_coins_triton(one_seed.to(DEVICE), positions.to(DEVICE)), want)


@pytest.mark.parametrize(
    ("options", "dtype"), [*((o, torch.bfloat16) for o in OPTIONS), (OPTIONS[-1], torch.float64)], ids=str
)
def test_distributions_are_the_reference(options, dtype):
    """The same tokens are left out; probabilities agree as far as the exponential does."""
    b, n, v = 2, 2, 90
    logits = (torch.randn(b, n, v, generator=seeded(6)) * 3).to(dtype)
    given, own = sampling(b, **options), sampling(b, **options, device=DEVICE)
    given.temperatures[1] = own.temperatures[1] = 0.0
    got = node_distributions_triton(spread(logits), own, block=64).cpu()
    want = node_distributions_reference(logits, given)
    assert torch.equal(got > 0, want > 0)
    assert torch.equal(got[1], want[1])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0)


@pytest.mark.parametrize("options", [{}, {"top_p": 0.8}], ids=str)
def test_a_row_does_not_depend_on_its_neighbours(options):
    logits = torch.randn(3, 2, 60, generator=seeded()).bfloat16().to(DEVICE)
    positions = torch.arange(6, device=DEVICE).view(3, 2)
    given = sampling(3, **options, device=DEVICE)
    together = sample_nodes_triton(logits, positions, given, block=32)
    for i in range(3):
        own = SamplingInputs(
            temperatures=given.temperatures[i : i + 1],
            top_ks=given.top_ks[i : i + 1],
            top_ps=given.top_ps[i : i + 1],
            min_ps=given.min_ps[i : i + 1],
            seeds=given.seeds[i : i + 1],
            all_greedy=False,
            any_filter=given.any_filter,
        )
        for j in range(2):
            alone = sample_nodes_triton(
                logits[i : i + 1, j : j + 1], positions[i : i + 1, j : j + 1], own, block=16
            )
            assert_same(alone, together[i : i + 1, j : j + 1])
