"""Pools too small for what is asked: requests are put back and resumed, and their tokens stay the same."""

import random

import pytest

from spec_v2 import SamplingParams
from tests.cells import SETUPS, open_setup, setup_prompts
from tests.harness import Recorder, check_identity, sampled
from tests.surface import assert_at_rest, count_retractions
from tests.tiny_models import oracle_of, random_prompt

N = 20
COUNT = 5
# two requests are admitted, and grow beyond what the pool holds; two, and a third, for page 16
SMALL = {
    "plain": (44, 80),
    "ngram": (100, 128),
    "standalone-chain": (55, 96),
    "standalone-tree": (92, 128),
    "eagle-chain": (50, 80),
    "eagle-tree": (60, 96),
    "multi-layer": (50, 80),
    "frozen-kv": (60, 96),
}


def open_small(open_engine, setup, schedule, device, *, page_size=1, **changes):
    small = SMALL[setup][page_size > 1]
    settings = {"max_total_tokens": small, "page_size": page_size, "disable_radix_cache": False} | changes
    return open_setup(open_engine, setup, schedule, device, **settings)


def never_negative(engine):
    """Counters of steps in flight, looked at after each commit."""
    recorder = Recorder(engine)
    lows = []
    recorder.after = lambda batch, result: lows.extend(r.num_in_flight for r in batch.reqs)
    return recorder, lows


@pytest.mark.parametrize("radix", [True, False])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("setup", SETUPS)
def test_kv01_kv03_kv04_sc04_retracted_requests_say_the_same(
    open_engine, setup, page_size, radix, schedule, device
):
    engine = open_small(
        open_engine, setup, schedule, device, page_size=page_size, disable_radix_cache=not radix
    )
    retracted = count_retractions(engine)
    _, lows = never_negative(engine)
    prompts = setup_prompts(setup, engine.model, COUNT)
    params = [sampled(i, max_new_tokens=N) for i in range(COUNT)]
    for done, prompt, param in zip(engine.generate(prompts, params), prompts, params, strict=True):
        assert done.output_ids == oracle_of(engine.model).expected(prompt, param)
        assert done.finish_reason == "length"
        assert sum(done.step_lens) == N
    assert retracted or page_size > 1, "the pool was large enough: this test shows nothing"
    assert min(lows) >= 0
    assert_at_rest(engine)


@pytest.mark.parametrize("setup", SETUPS)
def test_sc03_retraction_with_a_step_in_flight(open_engine, setup, schedule, device):
    """Requests are put back at random, some twice and more; what was in flight for them is dropped."""
    engine = open_setup(
        open_engine, setup, schedule, device, disable_radix_cache=False, max_running_requests=3
    )
    retracted, planner, rng = count_retractions(engine), engine.scheduler.planner, random.Random(3)
    make_room = planner._make_room

    def and_more(keep):
        make_room(keep)
        if len(keep) > 1 and len(retracted) < 12 and rng.random() < 0.5:
            victim = rng.choice(keep)
            keep.remove(victim)
            planner.retract(victim)

    planner._make_room = and_more
    _, lows = never_negative(engine)
    prompts = setup_prompts(setup, engine.model, COUNT)
    params = [sampled(i, max_new_tokens=N) for i in range(COUNT)]
    done = engine.generate(prompts, params)
    plain = [oracle_of(engine.model).expected(*pair) for pair in zip(prompts, params, strict=True)]
    assert [d.output_ids for d in done] == plain
    ids = [request for request, _, _ in retracted]
    assert max(ids.count(i) for i in ids) >= 2, "no request was retracted twice"
    assert any(in_flight for _, in_flight, _ in retracted) == (schedule == "overlap")
    assert min(lows) >= 0
    assert_at_rest(engine)


@pytest.mark.parametrize("setup", SETUPS)
def test_sc03_a_prompt_that_is_partly_computed_is_put_back(open_engine, setup, schedule, device):
    engine = open_small(open_engine, setup, schedule, device, chunked_prefill_size=2, max_total_tokens=None)
    planner = engine.scheduler.planner
    retracted, available = count_retractions(engine), type(planner).num_available
    make_room = planner._make_room

    def short_once(keep):
        if planner.chunked is not None and len(retracted) < 3:
            # what a full pool does: the request with the shortest output goes first
            victim, planner.chunked = planner.chunked, None
            planner.retract(victim)
        make_room(keep)

    planner._make_room = short_once
    prompts = setup_prompts(setup, engine.model, 3)
    check_identity_across_retraction(engine, prompts)
    assert [partly for _, _, partly in retracted] == [True] * 3
    assert type(planner).num_available is available
    assert_at_rest(engine)


def check_identity_across_retraction(engine, prompts):
    done = engine.generate(prompts, SamplingParams(max_new_tokens=N))
    assert [d.output_ids for d in done] == [tuple(oracle_of(engine.model).tokens(p, N)) for p in prompts]


def test_a_full_pool_puts_back_the_prompt_that_is_partly_computed(open_engine, schedule, device):
    """The same without help: the pool's own shortage finds the chunked request."""
    engine = open_setup(open_engine, "plain", schedule, device, max_total_tokens=72, chunked_prefill_size=2)
    retracted = count_retractions(engine)
    prompts = [random_prompt(1, 3), random_prompt(2, 60)]
    done = engine.generate(prompts, [SamplingParams(max_new_tokens=40), SamplingParams(max_new_tokens=4)])
    plain = [oracle_of(engine.model).tokens(p, n) for p, n in zip(prompts, (40, 4), strict=True)]
    assert [list(d.output_ids) for d in done] == plain
    assert any(partly for _, _, partly in retracted)
    assert_at_rest(engine)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("setup", SETUPS)
def test_kv06_one_request_may_fill_the_pool_and_no_more(open_engine, setup, page_size, schedule, device):
    """The largest request that is let in runs to its end; one token more is refused before anything runs."""
    engine = open_small(open_engine, setup, schedule, device, page_size=page_size)
    usable = engine.scheduler.cache.pages.num_usable * page_size
    prompt = setup_prompts(setup, engine.model, 1)[0]
    most = usable - 2 * engine.server_args.slots_per_step - len(prompt)
    assert most > 0
    check_identity(engine, [prompt], [SamplingParams(max_new_tokens=most)])
    assert_at_rest(engine)
    with pytest.raises(ValueError, match="max_total_tokens"):
        engine.generate(prompt, SamplingParams(max_new_tokens=most + 1))
    check_identity(engine, [prompt[:5]], [SamplingParams(max_new_tokens=5)])
    assert_at_rest(engine)


# -- joining and leaving -------------------------------------------------------------------------------------


def drive(engine, requests, actions):
    """Run the scheduler's own loop; `actions[k]` happens after the k-th step was processed."""
    engine.scheduler.add_requests(requests)
    for k, _ in enumerate(engine.scheduler.event_loop()):
        if k in actions:
            actions[k]()


def new_requests(engine, prompts, count=N):
    return engine._requests(prompts, SamplingParams(max_new_tokens=count))


@pytest.mark.parametrize("setup", ["plain", "ngram", "standalone-tree", "eagle-chain"])
def test_requests_may_join_at_any_step(open_engine, setup, schedule, device):
    engine = open_setup(open_engine, setup, schedule, device, disable_radix_cache=False)
    prompts = setup_prompts(setup, engine.model, 3)
    plain = [tuple(oracle_of(engine.model).tokens(p, N)) for p in prompts]
    for step in range(6):
        first, second, third = new_requests(engine, prompts)
        drive(
            engine,
            [first],
            {
                step: lambda req=second: engine.scheduler.add_requests([req]),
                step + 1: lambda req=third: engine.scheduler.add_requests([req]),
            },
        )
        assert [tuple(r.output_ids) for r in (first, second, third)] == plain, f"joined after step {step}"
        assert_at_rest(engine)


@pytest.mark.parametrize("victim", [0, 2], ids=["running", "waiting"])
@pytest.mark.parametrize("setup", SETUPS)
def test_an_abort_at_any_step_frees_its_request_and_disturbs_no_other(
    open_engine, setup, victim, schedule, device
):
    engine = open_setup(open_engine, setup, schedule, device, max_running_requests=2, chunked_prefill_size=6)
    prompts = setup_prompts(setup, engine.model, 3)
    plain = [tuple(oracle_of(engine.model).tokens(p, 12)) for p in prompts]
    lengths = []
    for step in range(7):
        requests = new_requests(engine, prompts, 12)
        aborted = requests[victim]
        drive(engine, requests, {step: lambda req=aborted: engine.abort(req.request_id)})
        for i, req in enumerate(requests):
            if req is aborted and req.finish_reason == "abort":
                lengths.append(len(req.output_ids))
                assert tuple(req.output_ids) == plain[i][: len(req.output_ids)]
            else:
                assert tuple(req.output_ids) == plain[i]
        assert_at_rest(engine)
    assert len(lengths) >= 2, "no abort came in time"


def test_an_abort_before_the_first_step_and_of_nobody(open_engine, schedule, device):
    engine = open_setup(open_engine, "standalone-chain", schedule, device)
    first, second = new_requests(engine, setup_prompts("standalone-chain", engine.model, 2))
    engine.scheduler.abort_request(second.request_id)
    engine.scheduler.abort_request(10_000)
    drive(engine, [first, second], {})
    assert (first.finish_reason, second.finish_reason, second.output_ids) == ("length", "abort", [])
    assert_at_rest(engine)
