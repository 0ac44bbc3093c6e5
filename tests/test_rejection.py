"""Rejection sampling keeps the target's distribution, accepts more, and leaves greedy requests exact."""

import pytest
import torch
from scipy.stats import chisquare

from spec_v2 import SamplingParams
from spec_v2.kernels.accept_chain import accept_chain
from spec_v2.kernels.sample_nodes import SamplingInputs
from spec_v2.speculative.rejection import accept_by_rejection, propose
from spec_v2.types import DraftTree
from tests.cells import models
from tests.harness import CHAIN, check_identity, make_engine
from tests.surface import kept_tokens
from tests.tiny_models import marked_prompt, random_prompt

ROWS = 20_000
V = 6
TARGET = torch.tensor(
    [[0.3, 1.5, -0.5, 0.9, -1.0, 0.0], [1.0, -0.4, 0.2, 0.6, 0.1, -0.8], [0.5] * 3 + [-0.5] * 3]
)
DRAFT = torch.tensor([[0.9, 0.2, 0.4, 0.5, -0.2, 0.3], [0.0, 0.5, 0.9, -0.6, 0.4, 0.2]])
SETTINGS = {
    "temperature 1": {},
    "temperature 0.5": {"temperature": 0.5},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.3},
    "all": {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.1},
}


def sampling(b, temperature=1.0, top_k=2**62, top_p=1.0, min_p=0.0):
    return SamplingInputs(
        temperatures=torch.full((b,), temperature),
        top_ks=torch.full((b,), top_k),
        top_ps=torch.full((b,), top_p),
        min_ps=torch.full((b,), min_p),
        seeds=torch.arange(b),
        all_greedy=temperature == 0,
        any_filter=True,
    )


def chain_of(tokens, probs):
    """A chain below a root whose token does not matter."""
    b, d = tokens.shape
    return DraftTree(
        tokens=torch.cat([torch.zeros(b, 1, dtype=torch.long), tokens], 1),
        parents=torch.arange(-1, d).expand(b, -1),
        scores=torch.ones(b, d + 1),
        match_lens=torch.zeros(b, dtype=torch.long),
        draft_probs=probs,
    )


def speculate(settings, position=7):
    """One call for all rows: two drafts drawn, then accepted or not. The logits depend on the place alone."""
    given = sampling(ROWS, **settings)
    drawn = [propose(DRAFT[j].expand(ROWS, V), torch.full((ROWS,), position + j), given) for j in range(2)]
    tree = chain_of(torch.cat([t for t, _ in drawn], 1), torch.stack([p for _, p in drawn], 1))
    places = position + torch.arange(3).expand(ROWS, 3)
    index, predict, lens = accept_by_rejection(TARGET.expand(ROWS, 3, V), places, tree, given)
    return tree, index, predict, lens


def wanted_probs(place, settings):
    """The target's distribution at a place after the filters, by their definition."""
    params = SamplingParams(temperature=1.0, **{k: v for k, v in settings.items() if k != "temperature"})
    probs = (TARGET[place].double() / settings.get("temperature", 1.0)).softmax(-1)
    kept = kept_tokens(probs.tolist(), params)
    out = torch.zeros(V, dtype=torch.float64)
    out[kept] = probs[kept]
    return out / out.sum()


def p_value(tokens, probs):
    counts = tokens.bincount(minlength=V)
    assert counts[probs == 0].sum() == 0, "a token that the filters leave out"
    kept = probs > 0
    return chisquare(counts[kept], len(tokens) * probs[kept] / probs[kept].sum()).pvalue


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_sa04_sa11_tokens_follow_the_target(settings):
    _, _, predict, lens = speculate(settings)
    assert p_value(predict[:, 0], wanted_probs(0, settings)) > 1e-4
    second = predict[lens >= 2, 1]
    assert len(second) > ROWS / 4
    assert p_value(second, wanted_probs(1, settings)) > 1e-4, "after an accepted first draft"
    third = predict[lens == 3, 2]
    assert p_value(third, wanted_probs(2, settings)) > 1e-4, "the bonus behind an accepted chain"


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_sa11_after_a_rejection_the_residual_is_drawn_from(settings):
    tree, _, predict, lens = speculate(settings)
    for place in range(2):
        target, draft = wanted_probs(place, settings), tree.draft_probs[0, place].double()
        residual = (target - draft).clamp(min=0)
        rejected = predict[lens == place + 1, place]
        assert len(rejected) > 500
        assert p_value(rejected, residual / residual.sum()) > 1e-4
        # the coin that rejected a draft says nothing about the token that replaces it
        for drafted in range(V):
            same = rejected[tree.tokens[lens == place + 1, place + 1] == drafted]
            if len(same) > 500:
                assert p_value(same, residual / residual.sum()) > 1e-4


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_sa11_drafts_are_accepted_as_often_as_the_overlap_says(settings):
    tree, _, _, lens = speculate(settings)
    overlap = torch.minimum(wanted_probs(0, settings), tree.draft_probs[0, 0].double()).sum()
    accepted = int((lens >= 2).sum())
    assert chisquare([accepted, ROWS - accepted], [ROWS * overlap, ROWS * (1 - overlap)]).pvalue > 1e-4


def test_negative_controls_are_rejected():
    """The same test refuses the drafter's distribution, the wrong place's, and a rule with one coin."""
    _, _, predict, _ = speculate({})
    assert p_value(predict[:, 0], DRAFT[0].double().softmax(-1)) < 1e-4
    assert p_value(predict[:, 0], wanted_probs(1, {})) < 1e-4
    drafted, probs = propose(DRAFT[0].expand(ROWS, V), torch.full((ROWS,), 7), sampling(ROWS))
    coins = torch.rand(ROWS, generator=torch.Generator().manual_seed(0))
    target = TARGET[:2].softmax(-1).expand(ROWS, 2, V)
    _, reused, _ = accept_chain(
        drafted=drafted,
        draft_probs=probs[:, None],
        target_probs=target,
        accept_coins=coins[:, None],
        bonus_coins=coins,
    )
    assert p_value(reused[:, 0], wanted_probs(0, {})) < 1e-4, "one coin for both would go unnoticed"


def test_greedy_rows_are_exact_among_sampled_ones():
    given = sampling(ROWS)
    given.temperatures[::2] = 0.0
    drawn = [propose(DRAFT[j].expand(ROWS, V), torch.full((ROWS,), 7 + j), given) for j in range(2)]
    tree = chain_of(torch.cat([t for t, _ in drawn], 1), torch.stack([p for _, p in drawn], 1))
    target = TARGET.clone()
    target[0] = DRAFT[0]  # the first draft is the target's own choice, the second is not
    places = 7 + torch.arange(3).expand(ROWS, 3)
    _, predict, lens = accept_by_rejection(target.expand(ROWS, 3, V), places, tree, given)
    assert set(map(tuple, predict[::2].tolist())) == {(int(target[0].argmax()), int(target[1].argmax()), -1)}
    assert set(lens[::2].tolist()) == {2}


# -- the kernel, exactly -------------------------------------------------------------------------------------


def dyadic(generator, *shape):
    """Distributions whose entries are multiples of 1/1024: all sums are exact."""
    cuts = torch.randint(0, 1025, (*shape, V - 1), generator=generator).sort(-1).values
    edges = torch.nn.functional.pad(cuts, (1, 0)), torch.nn.functional.pad(cuts, (0, 1), value=1024)
    return (edges[1] - edges[0]).float() / 1024


def accept_one(drafted, draft_probs, target_probs, accept_coins, bonus_coin):
    """One request, by the book, in integers: probabilities in 1/1024, coins in 1/4096."""
    emitted = []
    for j, token in enumerate(drafted):
        if accept_coins[j] * draft_probs[j][token] >= 4096 * target_probs[j][token]:
            weights = [max(t - d, 0) for t, d in zip(target_probs[j], draft_probs[j], strict=True)]
            weights = weights if sum(weights) else target_probs[j]
            break
        emitted.append(token)
    else:
        weights = target_probs[len(drafted)]
    running = 0
    for token, weight in enumerate(weights):
        running += weight
        if running * 4096 > bonus_coin * sum(weights):
            return [*emitted, token]
    raise AssertionError("no token")


@pytest.mark.parametrize("d", [1, 2, 5])
def test_accept_chain_is_the_loop_over_requests(d):
    generator, b = torch.Generator().manual_seed(d), 400
    draft, target = dyadic(generator, b, d), dyadic(generator, b, d + 1)
    draft[: b // 4] = target[: b // 4, :d]  # equal distributions: nothing is rejected
    drafted = draft.flatten(0, 1).multinomial(1, generator=generator).view(b, d)
    coins = torch.randint(0, 4096, (b, d + 1), generator=generator)
    index, predict, lens = accept_chain(
        drafted=drafted,
        draft_probs=draft,
        target_probs=target,
        accept_coins=coins[:, :d] / 4096,
        bonus_coins=coins[:, d] / 4096,
    )

    def whole(x):
        return (x * 1024).long().tolist()

    for i in range(b):
        own = coins[i].tolist()
        wanted = accept_one(drafted[i].tolist(), whole(draft[i]), whole(target[i]), own[:d], own[d])
        padding = [-1] * (d + 1 - len(wanted))
        assert predict[i].tolist() == wanted + padding
        assert index[i].tolist() == [*range(len(wanted)), *padding]
        assert int(lens[i]) == len(wanted)
    assert set(lens.tolist()) == set(range(1, d + 2))
    assert set(lens[: b // 4].tolist()) == {d + 1}


# -- the engine ----------------------------------------------------------------------------------------------

OPTIONS = {"speculative_use_rejection_sampling": True}
ALGORITHMS = ("STANDALONE", "EAGLE", "MULTI_LAYER_EAGLE", "FROZEN_KV_MTP")


def chain_prompts(algorithm, count):
    make = marked_prompt if algorithm == "FROZEN_KV_MTP" else random_prompt
    return [make(i, 9 + i) for i in range(count)]


@pytest.mark.parametrize("drafter", ["random", "noisy", "self"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_greedy_requests_equal_plain_decoding(open_engine, algorithm, drafter, schedule, device):
    target, draft = models(algorithm, drafter, device)
    engine = open_engine(target, algorithm, draft, CHAIN, schedule=schedule, **OPTIONS)
    prompts = chain_prompts(algorithm, 3)
    records = check_identity(engine, prompts, [SamplingParams(max_new_tokens=20)] * 3)
    if drafter == "self":
        assert {r.accept_len for r in records} == {CHAIN[0] + 1}


def accept_lengths(algorithm, drafter, schedule, device, params, **options):
    target, draft = models(algorithm, drafter, device)
    prompts = chain_prompts(algorithm, 4)
    with make_engine(target, algorithm, draft, CHAIN, schedule=schedule, **options) as engine:
        done = engine.generate(prompts, [params] * 4)
        again = engine.generate(prompts, [params] * 4)
    assert [d.output_ids for d in done] == [d.output_ids for d in again], "a seed gives the same sample again"
    return [n for d in done for n in d.spec.accept_lens]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_drafter_that_is_the_target_is_always_accepted(algorithm, schedule, device):
    params = SamplingParams(max_new_tokens=24, temperature=1.0, seed=3)
    assert set(accept_lengths(algorithm, "self", schedule, device, params, **OPTIONS)) == {CHAIN[0] + 1}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_more_is_accepted_than_by_following_the_seeded_sample(algorithm, schedule, device):
    params = SamplingParams(max_new_tokens=60, temperature=1.5, seed=3)
    means = []
    for options in ({}, OPTIONS):
        lens = accept_lengths(algorithm, "noisy", schedule, device, params, **options)
        means.append(sum(lens) / len(lens))
    assert means[1] > means[0] + 0.1, means
