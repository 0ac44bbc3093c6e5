"""Sampling: the coin belongs to (seed, position), and the sample has the right distribution."""

import pytest
import torch
from scipy.stats import chisquare

from spec_v2.kernels.sample_nodes import (
    SamplingInputs,
    inverse_cdf,
    position_coins,
    processed_probs,
    sample_nodes,
)

NUM_ROWS = 20_000


def sampling(b, *, temperature=1.0, top_k=2**62, top_p=1.0, min_p=0.0, first_seed=0):
    return SamplingInputs(
        temperatures=torch.full((b,), temperature),
        top_ks=torch.full((b,), top_k),
        top_ps=torch.full((b,), top_p),
        min_ps=torch.full((b,), min_p),
        seeds=torch.arange(first_seed, first_seed + b),
        all_greedy=False,
        any_filter=top_k < 2**62 or top_p < 1 or min_p > 0,
    )


def filtered(probs, top_k, top_p):
    """Top-k, then top-p, one row, as the definition reads."""
    ranked = sorted(range(len(probs)), key=lambda t: (-probs[t], t))[:top_k]
    total, mass, kept = sum(probs[t] for t in ranked), 0.0, []
    for t in ranked:
        if mass >= top_p * total:
            break
        kept.append(t)
        mass += probs[t]
    return [p if t in kept else 0.0 for t, p in enumerate(probs)]


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(99, 1.0), (3, 1.0), (99, 0.6), (4, 0.7), (1, 1.0), (99, 0.001)]
)
def test_filters_follow_their_definition(top_k, top_p):
    gen = torch.Generator().manual_seed(0)
    logits = torch.randint(-3, 3, (40, 11), generator=gen).double()  # many ties
    probs = processed_probs(
        logits, torch.ones(40), torch.full((40,), top_k), torch.full((40,), top_p), torch.zeros(40)
    )
    for i in range(40):
        want = filtered(logits[i].softmax(-1).tolist(), top_k, top_p)
        assert [t for t, p in enumerate(want) if p] == probs[i].nonzero()[:, 0].tolist()
        assert probs[i].tolist() == pytest.approx(want)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.7}])
@pytest.mark.parametrize("position", [0, 5, 70_000])
def test_samples_follow_the_distribution(settings, position):
    logits = torch.tensor([0.3, 1.5, -0.5, 0.9, -1.0, 0.0])
    given = sampling(NUM_ROWS, **settings)
    tokens = sample_nodes(logits.expand(NUM_ROWS, 1, 6), torch.full((NUM_ROWS, 1), position), given)
    scaled = (logits / settings.get("temperature", 1.0)).softmax(-1).tolist()
    want = torch.tensor(
        filtered(scaled, settings.get("top_k", 99), settings.get("top_p", 1.0)), dtype=torch.float64
    )
    counts = tokens.flatten().bincount(minlength=6)
    assert counts[want == 0].sum() == 0
    kept = want > 0
    assert chisquare(counts[kept], NUM_ROWS * want[kept] / want.sum()).pvalue > 1e-4
    # negative control: the same counts are no sample of a distribution 3% away
    bent = want[kept] + torch.nn.functional.one_hot(torch.tensor(0), int(kept.sum())) * 0.03
    assert chisquare(counts[kept], NUM_ROWS * bent / bent.sum()).pvalue < 1e-4


def test_coins_differ_by_seed_and_by_position():
    seeds = torch.arange(200)[:, None].expand(200, 100)
    coins = position_coins(seeds, torch.arange(100).expand(200, 100))
    assert coins.min() >= 0
    assert coins.max() < 1
    assert len(coins.unique()) > 0.998 * coins.numel()  # 24 bits: a few collisions are chance
    counts = (coins.flatten() * 50).long().bincount(minlength=50)
    assert chisquare(counts).pvalue > 1e-4
    for a, b in ((coins[:, :-1], coins[:, 1:]), (coins[:-1], coins[1:])):
        correlation = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]
        assert abs(correlation) < 0.03


def test_high_seed_bits_count():
    seeds = torch.tensor([1, 1 + (1 << 40), 2**63 - 1])
    assert len(position_coins(seeds, torch.zeros(3, dtype=torch.long)).unique()) == 3


def test_greedy_rows_take_the_lowest_of_equal_ids():
    logits = torch.tensor([[[1.0, 3.0, 3.0, 0.0]], [[0.0, 0.0, 0.0, 0.0]]])
    positions = torch.zeros(2, 1, dtype=torch.long)
    assert sample_nodes(logits, positions, sampling(2, temperature=0.0)).tolist() == [[1], [0]]


def test_sa07_an_id_of_weight_zero_is_never_drawn():
    weights = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]]).repeat(4096, 1)
    coins = torch.arange(4096) / 4096
    tokens = inverse_cdf(weights, coins)
    assert set(tokens.tolist()) == {1, 3}
    assert (tokens == 1).sum() == 2048
    largest = torch.full((1,), 1 - 2**-24)
    assert inverse_cdf(torch.full((1, 7), 1 / 7), largest).item() <= 6
    assert inverse_cdf(torch.tensor([[0.1, 0.9, 0.0]]), largest).item() == 1


def test_one_row_does_not_depend_on_its_neighbours():
    gen = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 4, 33, generator=gen)
    positions = torch.randint(0, 500, (6, 4), generator=gen)
    given = sampling(6, temperature=0.8, top_k=5, top_p=0.9)
    together = sample_nodes(logits, positions, given)
    for i in range(6):
        own = sampling(1, temperature=0.8, top_k=5, top_p=0.9, first_seed=i)
        assert torch.equal(sample_nodes(logits[i : i + 1], positions[i : i + 1], own), together[i : i + 1])
