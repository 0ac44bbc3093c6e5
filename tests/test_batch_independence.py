"""A request gets the same drafts and tokens alone, in any batch, under either schedule, at any speed (item 7)."""

import random
import time

import pytest

from spec_v2 import SamplingParams
from spec_v2.scheduler.batch_planner import KEY_BLOCK
from tests import tiny_models as tiny
from tests.cells import SETUPS, open_setup, setup_prompts
from tests.harness import Recorder, check_identity, sampled

SPECULATIVE = [name for name in SETUPS if name != "plain"]
COUNT = 5


def params():
    return [sampled(i, max_new_tokens=14 + 4 * i) for i in range(COUNT)]


def history(records):
    """What a request drafted and accepted, step by step; drafts that nothing reaches are left out."""
    return [
        (
            r.seq_len,
            [(token, parent) for token, parent in zip(r.tokens, r.parents, strict=True) if parent >= 0],
            r.accepted_nodes,
            r.emitted,
        )
        for r in records
    ]


def run(open_engine, setup, schedule, device, **changes):
    """Per request: its history, its output and its metrics."""
    engine = open_setup(open_engine, setup, schedule, device, **changes)
    recorder = Recorder(engine)
    done = engine.generate(setup_prompts(setup, engine.model, COUNT), params())
    return [(history(recorder.of_request(i)), done[i].output_ids, done[i].spec) for i in range(COUNT)]


@pytest.mark.parametrize("setup", SPECULATIVE)
def test_dr03_vf02_a_batch_gives_each_request_what_it_gets_alone(open_engine, setup, schedule, device):
    alone = run(open_engine, setup, schedule, device, max_running_requests=1)
    together = run(open_engine, setup, schedule, device)
    joining = run(open_engine, setup, schedule, device, max_running_requests=3, page_size=16)
    assert together == alone
    assert joining == alone
    assert len({spec.accept_lens for _, _, spec in alone}) == COUNT, "the requests are too much alike"


@pytest.mark.parametrize("setup", SPECULATIVE)
def test_dr06_both_schedules_draft_and_accept_the_same(open_engine, setup, device):
    sync = run(open_engine, setup, "sync", device)
    overlap = run(open_engine, setup, "overlap", device)
    assert overlap == sync


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("setup", SPECULATIVE)
def test_sc05_sc13_delays_change_nothing(open_engine, setup, seed, device):
    """Rows and slots are handed on while steps are in flight, and each stream falls behind now and then."""
    engine = open_setup(open_engine, setup, "overlap", device, max_running_requests=2)
    delays = random.Random(seed)

    def delay(label, step):
        if delays.random() < 0.5:
            time.sleep(delays.random() * 1e-3)

    engine._forward_stream.on_run = delay
    engine._copy_stream.on_run = delay
    check_identity(engine, setup_prompts(setup, engine.model, COUNT), params())


@pytest.mark.parametrize("setup", SPECULATIVE)
def test_dr16_a_request_leaves_nothing_behind(open_engine, setup, schedule, device):
    """After a request that ran to the context's end, a short one is drafted for as on a new engine."""
    engine = open_setup(open_engine, setup, schedule, device, max_running_requests=1)
    recorder = Recorder(engine)
    prompts = setup_prompts(setup, engine.model, 2)
    short, long = SamplingParams(max_new_tokens=20), SamplingParams(max_new_tokens=1000)
    first, longest, again = (
        engine.generate(prompt, p)[0]
        for prompt, p in ((prompts[0], short), (prompts[1], long), (prompts[0], short))
    )
    assert longest.prompt_tokens + longest.completion_tokens == tiny.CONTEXT
    assert again == first
    assert history(recorder.of_request(2)) == history(recorder.of_request(0))


@pytest.mark.parametrize("setup", SPECULATIVE)
def test_the_bound_on_lengths_hides_no_key(open_engine, setup, schedule, device):
    """Forwards look at whole blocks of keys. Alone, a request comes to each place of a block's end, where a
    bound that is too low by one loses its newest key; next to a long request it never does."""
    runs = []
    for rows in (1, 5):
        engine = open_setup(open_engine, setup, schedule, device, max_running_requests=rows)
        recorder = Recorder(engine)
        long = (setup_prompts(setup, engine.model, 1)[0] * KEY_BLOCK)[: 2 * KEY_BLOCK - 30]
        prompts = [*(long[-length:] for length in range(KEY_BLOCK - 3, KEY_BLOCK + 1)), long]
        done = engine.generate(prompts, SamplingParams(max_new_tokens=10))
        plain = [tuple(tiny.oracle_of(engine.model).tokens(prompt, 10)) for prompt in prompts]
        assert [d.output_ids for d in done] == plain
        runs.append([history(recorder.of_request(i)) for i in range(COUNT)])
    assert runs[0] == runs[1]
    assert KEY_BLOCK in {seq_len for steps in runs[0] for seq_len, *_ in steps}
