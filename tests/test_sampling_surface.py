"""Penalties, bias, bans and filters: whatever is drafted, each request gets what plain decoding gives it."""

import dataclasses

import pytest
import torch

from spec_v2 import SamplingParams
from spec_v2.kernels.adjust_logits import TokenCounts, adjust_logits
from spec_v2.kernels.sample_nodes import inverse_cdf, processed_probs
from spec_v2.kernels.tree_structure import ancestor_mask
from spec_v2.scheduler.sampling_batch_info import SamplingBatchInfo
from spec_v2.scheduler.schedule_batch import Request
from spec_v2.types import CountReset
from tests.cells import SETUPS, open_setup, setup_prompts
from tests.surface import (
    adjusted,
    assert_at_rest,
    check_surface,
    count_retractions,
    full_oracle,
    kept_tokens,
)

N = 20
THIRDS = tuple(range(0, 64, 3))
OPTIONS = {
    "repetition and frequency": {"repetition_penalty": 1.3, "frequency_penalty": 0.5},
    "presence, min_p and bias": {
        "temperature": 0.8,
        "presence_penalty": 1.0,
        "min_p": 0.05,
        "seed": 5,
        "logit_bias": {3: 4.0, 7: -100.0},
    },
    "all filters and a minimum": {
        "temperature": 1.2,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.02,
        "seed": 6,
        "min_new_tokens": 9,
        "stop_token_ids": THIRDS,
    },
    "a minimum, greedy": {"min_new_tokens": 7, "stop_token_ids": THIRDS, "logprobs": True, "top_logprobs": 2},
    "nothing": {"logprobs": True},
    "rewards": {
        "temperature": 0.7,
        "seed": 8,
        "repetition_penalty": 0.8,
        "presence_penalty": -1.0,
        "frequency_penalty": -0.1,
    },
}
# pools in which a request's growth takes another one's pages
SMALL = {
    "plain": 60,
    "ngram": 100,
    "standalone-chain": 55,
    "standalone-tree": 92,
    "eagle-chain": 50,
    "eagle-tree": 60,
    "multi-layer": 50,
    "frozen-kv": 60,
}


def params_of(*names):
    return [SamplingParams(max_new_tokens=N, **OPTIONS[name]) for name in names]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("setup", SETUPS)
def test_a_mixed_batch_equals_plain_decoding(open_engine, setup, page_size, schedule, device):
    engine = open_setup(open_engine, setup, schedule, device, page_size=page_size)
    prompts = setup_prompts(setup, engine.model, len(OPTIONS))
    done = check_surface(engine, prompts, params_of(*OPTIONS))
    if setup != "plain":
        assert max(n for d in done for n in d.spec.accept_lens) > 1, "nothing was accepted"
    assert_at_rest(engine)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("setup", ["standalone-tree", "eagle-chain"])
def test_one_option_alone(open_engine, setup, option, schedule, device):
    """The flags that say whether a batch needs an option at all depend on the batch."""
    engine = open_setup(open_engine, setup, schedule, device)
    check_surface(engine, setup_prompts(setup, engine.model, 2), params_of(option, option))


@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("setup", SETUPS)
def test_sc04_options_survive_retraction_and_chunks(open_engine, setup, chunk, schedule, device):
    engine = open_setup(
        open_engine,
        setup,
        schedule,
        device,
        max_total_tokens=SMALL[setup],
        chunked_prefill_size=chunk,
        disable_radix_cache=False,
    )
    retracted = count_retractions(engine)
    check_surface(engine, setup_prompts(setup, engine.model, len(OPTIONS)), params_of(*OPTIONS))
    assert retracted, "the pool was large enough: this test shows nothing"
    assert_at_rest(engine)


# -- rows that are not numbers --------------------------------------------------------------------------------


def spoil(runner, what):
    """Spoil the logits of the batch's first request in every forward that gives logits for several tokens each."""
    forward = runner.forward

    def spoiled(*args, **kwargs):
        out = forward(*args, **kwargs)
        logits = out.logits.clone()
        logits[: max(len(logits) // 3, 1)] = what
        return dataclasses.replace(out, logits=logits)

    runner.forward = spoiled


@pytest.mark.parametrize("what", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("setup", ["standalone-tree", "eagle-chain"])
def test_dr19_a_drafter_without_numbers_spoils_no_text(open_engine, setup, what, schedule, device):
    engine = open_setup(open_engine, setup, schedule, device)
    prompts = setup_prompts(setup, engine.model, 3)
    params = [SamplingParams(max_new_tokens=8, temperature=1.0, seed=i) for i in range(3)]
    plain = [full_oracle(engine.model).run(*pair).output_ids for pair in zip(prompts, params, strict=True)]
    spoil(engine._runners[1], what)
    done = engine.generate(prompts, params)
    assert [d.completion_tokens for d in done] == [8, 8, 8]
    assert [d.output_ids for d in done] == plain
    assert_at_rest(engine)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_vf11_where_every_token_is_banned_one_is_said_all_the_same(
    open_engine, temperature, schedule, device
):
    engine = open_setup(open_engine, "standalone-tree", schedule, device)
    options = {"temperature": temperature, "min_new_tokens": 4, "stop_token_ids": tuple(range(64))}
    (done,) = engine.generate([1, 2, 3], SamplingParams(max_new_tokens=6, seed=1, **options))
    assert (done.completion_tokens, done.finish_reason) == (4, "stop")
    assert all(0 <= token < 64 for token in done.output_ids)


def test_sa07_without_a_weight_the_id_stays_inside():
    weights = torch.tensor([[0.0] * 5, [float("nan")] * 5, [0.5, float("nan"), 0.1, 0.2, 0.2]])
    assert inverse_cdf(weights, torch.full((3,), 0.999)).max() < 5


# -- the kernel, node by node --------------------------------------------------------------------------------


def random_parents(generator, n):
    """Each node under any earlier one, a few of them padding."""
    parents = [-1]
    for node in range(1, n):
        parent = int(torch.randint(-1, node, (), generator=generator))
        parents.append(parent if parent < 0 or parent == 0 or parents[parent] >= 0 else -1)
    return parents


def path_to(parents, node):
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def request(i, prompt, output, params):
    return Request(
        request_id=i,
        prompt_ids=tuple(prompt),
        params=params,
        seed=0,
        max_new_tokens=N,
        stop_token_ids=frozenset(params.stop_token_ids),
        output_ids=list(output),
        row=i + 1,
    )


def counts_of(reqs, vocab):
    """What the engine's rows hold: everything but the newest token at prefill, the newest by `add`."""

    def flat(pairs):
        return torch.tensor([x for x, _ in pairs], dtype=torch.long), torch.tensor([y for _, y in pairs])

    counts = TokenCounts(len(reqs) + 1, vocab, torch.device("cpu"))
    prompt_rows, prompt_tokens = flat([(r.row, t) for r in reqs for t in r.prompt_ids])
    output_rows, output_tokens = flat([(r.row, t) for r in reqs for t in r.output_ids[:-1]])
    rows = torch.tensor([r.row for r in reqs])
    counts.reset(
        CountReset(
            rows=rows,
            prompt_rows=prompt_rows,
            prompt_tokens=prompt_tokens,
            output_rows=output_rows,
            output_tokens=output_tokens,
        )
    )
    newest = torch.tensor([[r.output_ids[-1], -1] for r in reqs])
    counts.add(rows, newest)
    return counts


@pytest.mark.parametrize("n", [1, 2, 7, 12])
def test_each_node_is_adjusted_along_its_own_path(n):
    generator, vocab = torch.Generator().manual_seed(n), 9

    def ids(count):
        return torch.randint(vocab, (count,), generator=generator).tolist()

    small = {"stop_token_ids": (1, 4), "logit_bias": {0: 2.5, 8: -3.0}}
    many = [SamplingParams(max_new_tokens=N, **(option | small)) for option in OPTIONS.values()]
    reqs = [request(i, ids(2 + i), ids(3 + i), params) for i, params in enumerate(many)]
    parents = [random_parents(generator, n) for _ in reqs]
    tokens = [[r.output_ids[-1], *ids(n - 1)] for r in reqs]
    logits = torch.randn(len(reqs), n, vocab, generator=generator, dtype=torch.float64) * 3
    visible = ancestor_mask(torch.tensor(parents))
    starts = torch.tensor([len(r.prompt_ids) + len(r.output_ids) - 1 for r in reqs])
    found = adjust_logits(
        logits,
        rows=torch.tensor([r.row for r in reqs]),
        tokens=torch.tensor(tokens),
        visible=visible,
        positions=starts[:, None] + visible.sum(-1),
        inputs=SamplingBatchInfo.from_requests(reqs, pin=False).logits,
        counts=counts_of(reqs, vocab),
    )
    for i, req in enumerate(reqs):
        for node in range(n):
            if node and parents[i][node] < 0:
                continue  # padding
            output = req.output_ids + [tokens[i][k] for k in path_to(parents[i], node)[1:]]
            wanted = adjusted(logits[i, node].tolist(), req.prompt_ids, output, req.params)
            assert found[i, node].tolist() == pytest.approx(wanted, abs=1e-5), (i, node)


def test_without_options_logits_stay_the_same_object():
    reqs = [request(0, [1], [2], SamplingParams())]
    logits = torch.randn(1, 1, 5)
    only = torch.ones(1, 1, 1, dtype=torch.bool)
    place = torch.zeros(1, 1, dtype=torch.long)
    inputs = SamplingBatchInfo.from_requests(reqs, pin=False).logits
    same = adjust_logits(
        logits,
        rows=torch.tensor([1]),
        tokens=place,
        visible=only,
        positions=place,
        inputs=inputs,
        counts=TokenCounts(2, 5, torch.device("cpu")),
    )
    assert same is logits


@pytest.mark.parametrize("min_p", [0.0, 0.05, 0.3, 1.0])
@pytest.mark.parametrize(("top_k", "top_p"), [(-1, 1.0), (4, 1.0), (-1, 0.8), (5, 0.7)])
def test_min_p_comes_last(min_p, top_k, top_p):
    generator = torch.Generator().manual_seed(1)
    logits = torch.randint(-3, 4, (30, 11), generator=generator).double()  # many ties
    params = SamplingParams(temperature=0.5, top_k=top_k, top_p=top_p, min_p=min_p)
    probs = processed_probs(
        logits,
        torch.full((30,), 0.5),
        torch.full((30,), top_k if top_k > 0 else 99),
        torch.full((30,), top_p),
        torch.full((30,), min_p),
    )
    for row, found in zip((logits / 0.5).softmax(-1).tolist(), probs.tolist(), strict=True):
        kept = kept_tokens(row, params)
        assert [t for t, p in enumerate(found) if p] == sorted(kept)
        assert [found[t] for t in kept] == pytest.approx([row[t] for t in kept])
