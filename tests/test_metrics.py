"""Speculation is counted once: what a completion says equals a recount of the steps, also across retraction."""

import copy
from collections import Counter

import pytest

from spec_v2 import SamplingParams
from spec_v2.observability.metrics import SpecMetrics, total
from tests import tiny_models as tiny
from tests.cells import SETUPS, open_setup, setup_prompts
from tests.surface import count_retractions

SPECULATIVE = [name for name in SETUPS if name != "plain"]
N = 20
SMALL = {  # pools in which requests are retracted
    "plain": 44,
    "ngram": 100,
    "standalone-chain": 55,
    "standalone-tree": 92,
    "eagle-chain": 50,
    "eagle-tree": 60,
    "multi-layer": 50,
}


def recount(engine):
    """{request: [(tokens verified, longest path offered)]}, and {request: prefills}, from the steps themselves."""
    steps, prefills = {}, Counter()
    process = engine.scheduler.processor.process

    def noting(batch, result):
        result.copy_done.synchronize()
        verdict, tree = result.verdict.get(), result.tree.get() if result.tree is not None else None
        for i, req in enumerate(batch.reqs):
            if req.finished or req.epoch != result.epochs[i] or not verdict.accept_lens[i]:
                continue
            if tree is None:
                prefills[req.request_id] += 1
                continue
            parents = tree.parents[i].tolist()
            depths = [0]
            for node in range(1, len(parents)):
                depths.append(depths[parents[node]] + 1 if parents[node] >= 0 else 0)
            steps.setdefault(req.request_id, []).append((int(verdict.accept_lens[i]), max(depths)))
        return process(batch, result)

    engine.scheduler.processor.process = noting
    return steps, prefills


def check_recount(done, steps, prefills):
    for request, one in enumerate(done):
        wanted = steps.get(request, [])
        assert list(zip(one.spec.accept_lens, one.spec.draft_depths, strict=True)) == wanted
        assert all(1 <= n <= depth + 1 for n, depth in wanted), f"request {request}"
        emitted = prefills[request] + sum(one.spec.accept_lens)
        cut = emitted - one.completion_tokens
        assert 0 <= cut < max((n for n, _ in wanted), default=1), "more than the last step was cut"
        assert len(one.step_lens) == prefills[request] + one.spec.verify_ct
        assert sum(one.step_lens) == one.completion_tokens


@pytest.mark.parametrize("setup", SETUPS)
def test_om04_om05_a_recount_of_the_steps(open_engine, setup, schedule, device):
    engine = open_setup(open_engine, setup, schedule, device, max_running_requests=2)
    steps, prefills = recount(engine)
    prompts = setup_prompts(setup, engine.model, 4)
    stops = [tiny.oracle_of(engine.model).tokens(p, N)[7 + i] for i, p in enumerate(prompts)]
    params = [SamplingParams(max_new_tokens=N, stop_token_ids=(token,)) for token in stops]
    done = engine.generate(prompts, params)
    check_recount(done, steps, prefills)
    everything = total(d.spec for d in done)
    assert everything.verify_ct == sum(map(len, steps.values()))
    assert everything.num_correct_drafts == sum(n - 1 for own in steps.values() for n, _ in own)
    assert 0 <= everything.draft_acceptance_rate <= 1
    if setup == "plain":
        assert everything.num_correct_drafts == sum(everything.draft_depths) == 0


@pytest.mark.parametrize("setup", SMALL)
def test_om05_metrics_survive_retraction_exactly_once(open_engine, setup, schedule, device):
    engine = open_setup(open_engine, setup, schedule, device, max_total_tokens=SMALL[setup])
    retracted = count_retractions(engine)
    steps, prefills = recount(engine)
    done = engine.generate(setup_prompts(setup, engine.model, 4), SamplingParams(max_new_tokens=N))
    assert retracted
    check_recount(done, steps, prefills)
    assert 4 < sum(prefills.values()) <= 4 + len(retracted)


@pytest.mark.parametrize("setup", SPECULATIVE)
def test_om05_metrics_are_there_before_the_end(open_engine, setup, schedule, device):
    engine = open_setup(open_engine, setup, schedule, device)
    (request,) = engine._requests(setup_prompts(setup, engine.model, 1), SamplingParams(max_new_tokens=N))
    engine.scheduler.add_requests([request])
    seen = [len(request.accept_lens) for _ in engine.scheduler.event_loop()]
    assert seen == sorted(seen)
    assert len(set(seen)) > 3


def test_dr08_nothing_drafted_counts_as_nothing(open_engine, schedule, device):
    engine = open_setup(open_engine, "ngram", schedule, device)
    (done,) = engine.generate([1, 2, 3], SamplingParams(max_new_tokens=2))
    assert done.spec.draft_depths == (0,)
    assert done.spec.draft_acceptance_rate == 0


# -- the numbers ---------------------------------------------------------------------------------------------


def test_om04_numbers_by_hand():
    spec = SpecMetrics(accept_lens=(1, 3, 4, 2, 1), draft_depths=(3, 3, 3, 1, 0))
    assert (spec.verify_ct, spec.num_correct_drafts) == (5, 6)
    assert spec.mean_acceptance_length == spec.accept_length == 1 + 6 / 5
    assert spec.draft_acceptance_rate == spec.accept_rate == 6 / 10
    assert spec.acceptance_rate_per_position == (3 / 4, 2 / 3, 1 / 3)
    assert spec.acceptance_histogram == {0: 2, 1: 1, 2: 1, 3: 1}


def test_om04_sums_of_requests_are_the_totals():
    parts = [SpecMetrics((1, 2), (2, 2)), SpecMetrics(), SpecMetrics((3,), (4,))]
    everything = total(parts)
    assert everything == parts[0] + parts[1] + parts[2] == SpecMetrics((1, 2, 3), (2, 2, 4))
    assert everything.num_correct_drafts == sum(p.num_correct_drafts for p in parts)


def test_om06_without_a_step_everything_is_zero():
    spec = SpecMetrics()
    assert (spec.verify_ct, spec.num_correct_drafts, spec.accept_length, spec.accept_rate) == (0, 0, 0.0, 0.0)
    assert spec.acceptance_rate_per_position == ()
    assert spec.acceptance_histogram == {}
    assert total([]) == spec


@pytest.mark.parametrize("setup", SPECULATIVE)
def test_om04_rates_fall_with_the_position(open_engine, setup, schedule, device):
    """Where every step offers as much, a draft is accepted only if those before it were."""
    engine = open_setup(open_engine, setup, schedule, device)
    spec = total(
        d.spec
        for d in engine.generate(setup_prompts(setup, engine.model, 4), SamplingParams(max_new_tokens=30))
    )
    deepest = max(spec.draft_depths)
    steps = [n for n, depth in zip(spec.accept_lens, spec.draft_depths, strict=True) if depth == deepest]
    full = SpecMetrics(tuple(steps), (deepest,) * len(steps))
    rates = full.acceptance_rate_per_position
    assert all(0 <= rate <= 1 for rate in spec.acceptance_rate_per_position)
    assert list(rates) == sorted(rates, reverse=True)
    assert sum(spec.acceptance_histogram.values()) == spec.verify_ct


def test_ck09_a_drafter_that_is_never_right_is_reported_once(open_engine, schedule, device, caplog):
    """The texts are right, so only the log can tell."""
    target = tiny.llama(device)
    wrong = copy.deepcopy(target)
    wrong.lm_head.weight.data.neg_()  # it likes best what the target likes least
    engine = open_engine(target, "STANDALONE", wrong, schedule=schedule)
    for _ in range(2):
        engine.generate([tiny.random_prompt(s, 5) for s in range(4)], SamplingParams(max_new_tokens=40))
    (record,) = [
        r for r in caplog.records if "none of its drafts was accepted in the first 100 steps" in r.message
    ]
    assert record.levelname == "WARNING"


def test_ck09_a_drafter_that_is_sometimes_right_is_not_reported(open_engine, schedule, device, caplog):
    target = tiny.llama(device)
    engine = open_engine(target, "STANDALONE", tiny.noisy_copy(target), schedule=schedule)
    engine.generate([tiny.random_prompt(s, 5) for s in range(4)], SamplingParams(max_new_tokens=40))
    assert not caplog.records
