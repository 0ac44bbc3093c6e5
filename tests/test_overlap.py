"""Overlap is real, shown without clocks; and no interleaving, delay or reuse of a row changes a token."""

import threading

import pytest

from tests.harness import Recorder
from tests.scheduling_helpers import (
    ALGORITHMS,
    LIVELY,
    World,
    expected,
    free,
    greedy,
    outputs,
    scene_engine,
    scene_prompts,
)
from tests.tiny_models import llama, oracle_of, random_prompt

LONG = 60  # seconds; only a failing test waits that long
SHORT = 0.2  # how long something is waited for that must never come

# -- the order of launching and processing -----------------------------------------------------------------


def test_sync_processes_each_step_before_the_next_launch(open_engine, device):
    engine = open_engine(llama(device), schedule="sync")
    engine.generate([(1, 2, 3)], greedy(6))
    order = engine.trace.order("launch", "process")
    assert order == [(name, step) for step in range(6) for name in ("launch", "process")]


def test_overlap_launches_each_step_before_the_one_before_is_processed(open_engine, device):
    engine = open_engine(llama(device), schedule="overlap")
    engine.generate([(1, 2, 3)], greedy(6))
    order = engine.trace.order("launch", "process")
    pairs = [(name, step) for r in range(5) for name, step in (("launch", r + 1), ("process", r))]
    assert order == [("launch", 0), *pairs, ("process", 5)]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_overlap_keeps_the_order_with_speculation_too(algorithm, device):
    with scene_engine(algorithm, device, schedule="overlap") as engine:
        engine.generate(scene_prompts(algorithm, engine.model, 3), greedy(8))
        order = engine.trace.order("launch", "process")
        place = {mark: i for i, mark in enumerate(order)}
        last = engine.scheduler.num_steps_launched - 1
        assert len(order) == 2 * (last + 1)
        assert all(place["launch", step + 1] < place["process", step] for step in range(last))


class NotOverlapping(Exception):
    pass


def gate_forwards(engine, num_steps, seconds):
    """The forward of each step but the last runs until the host has launched the next one."""
    launched = [threading.Event() for _ in range(num_steps)]
    run_batch = engine.scheduler.run_batch

    def noting(batch, *, overlap):
        step = engine.scheduler.num_steps_launched
        result = run_batch(batch, overlap=overlap)
        launched[step].set()
        return result

    def on_run(label, step):
        is_last = step == num_steps - 1
        if label in ("prefill", "verify") and not is_last and not launched[step + 1].wait(seconds):
            raise NotOverlapping(f"step {step} runs, and step {step + 1} was not launched")

    engine.scheduler.run_batch = noting
    engine._forward_stream.on_run = on_run


@pytest.fixture
def cpu_only(device):
    if device.type != "cpu":
        pytest.skip("gates hold the CPU stream's thread; a CUDA launch runs on the host's")


@pytest.mark.usefixtures("cpu_only")
def test_the_host_launches_the_next_step_while_this_one_runs(open_engine, device):
    engine = open_engine(llama(device), schedule="overlap")
    gate_forwards(engine, 7, LONG)
    params = [greedy(7)]
    assert outputs(engine, [(1, 2, 3)], params) == expected(engine, [(1, 2, 3)], params)


@pytest.mark.usefixtures("cpu_only")
def test_the_synchronous_schedule_does_not(open_engine, device):
    """The negative control: the same gate is a deadlock, which its time-out turns into an error."""
    engine = open_engine(llama(device), schedule="sync")
    gate_forwards(engine, 7, SHORT)
    with pytest.raises(NotOverlapping, match="step 0 runs"):
        engine.generate([(1, 2, 3)], greedy(7))
    engine._forward_stream.on_run = None


@pytest.mark.usefixtures("cpu_only")
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_step_is_processed_while_the_next_one_runs(algorithm, device):
    """All of processing step r-1 lies within the forward of step r."""
    with scene_engine(algorithm, device, schedule="overlap") as engine:
        running, processed = {}, {}
        for step in range(100):
            running[step], processed[step] = threading.Event(), threading.Event()
        process, within = engine.scheduler.process_batch_result, []

        def on_run(label, step):
            if label == "verify":
                running[step].set()
                assert processed[step - 1].wait(LONG)

        def gated(batch, result):
            if engine.scheduler.num_steps_launched > result.step + 1:
                assert running[result.step + 1].wait(LONG)
                within.append(result.step)
            finished = process(batch, result)
            processed[result.step].set()
            return finished

        engine._forward_stream.on_run = on_run
        engine.scheduler.process_batch_result = gated
        prompts, params = scene_prompts(algorithm, engine.model, 2), [greedy(9)] * 2
        assert outputs(engine, prompts, params) == expected(engine, prompts, params)
        assert len(within) >= engine.scheduler.num_steps_launched - 1 > 2


# -- any interleaving --------------------------------------------------------------------------------------

POLICIES = ("eager", "late", "ahead", 0, 1, 2)


@pytest.mark.usefixtures("cpu_only")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_interleaving_of_the_streams_changes_anything(algorithm, policy, schedule, device, monkeypatch):
    """SC-13 among others: with "late" the copy stream runs whenever it can, with "ahead" as late as it can."""
    monkeypatch.setattr("spec_v2.engine.make_stream", World(policy).make_stream)
    with scene_engine(algorithm, device, schedule=schedule, max_running_requests=2) as engine:
        before = free(engine)
        recorder = Recorder(engine)
        prompts = scene_prompts(algorithm, engine.model, 4)
        params = [greedy(n) for n in (6, 9, 3, 7)]
        assert outputs(engine, prompts, params) == expected(engine, prompts, params)
        assert free(engine) == before
        steps = [(r.request, r.seq_len, r.tokens, r.parents, r.accept_len) for r in recorder.records]
        alone = drafts_alone(algorithm, device)
        for request, seq_len, tokens, parents, accept_len in steps:
            assert alone[request, seq_len] == (tokens, parents, accept_len)


_ALONE: dict = {}


def drafts_alone(algorithm, device):
    """(request, seq_len) -> what a request by itself, in the synchronous schedule, drafted and accepted there."""
    if algorithm not in _ALONE:
        found = {}
        with scene_engine(algorithm, device, schedule="sync", max_running_requests=1) as engine:
            for i, prompt in enumerate(scene_prompts(algorithm, engine.model, 4)):
                recorder = Recorder(engine)
                engine.generate([prompt], greedy(20))
                found |= {(i, r.seq_len): (r.tokens, r.parents, r.accept_len) for r in recorder.records}
        _ALONE[algorithm] = found
    return _ALONE[algorithm]


# -- joining and leaving -----------------------------------------------------------------------------------


def stop_at(engine, prompt, place):
    """A stop token that the plain continuation meets at `place` or later, and where it does."""
    tokens = oracle_of(engine.model).tokens(prompt, 40)
    fresh = next(i for i in range(place, 40) if tokens[i] not in tokens[:i])
    return tokens[fresh], fresh + 1


def lag_forward(engine):
    """draft_extend and stash of each step wait until the host has launched the next step, or can't."""
    go_on = [threading.Event() for _ in range(400)]
    scheduler = engine.scheduler
    run_batch, process = scheduler.run_batch, scheduler.process_batch_result

    def launching(batch, *, overlap):
        result = run_batch(batch, overlap=overlap)
        if result.step:
            go_on[result.step - 1].set()
        return result

    def processing(batch, result):
        go_on[result.step].set()
        return process(batch, result)

    def on_run(label, step):
        if label == "draft_extend":
            assert go_on[step].wait(LONG)

    scheduler.run_batch, scheduler.process_batch_result = launching, processing
    engine._forward_stream.on_run = on_run


def watch_rows(engine):
    """Notes (request, row) at admission and (request, row, steps in flight) at release."""
    admitted, released = [], []
    planner = engine.scheduler.planner
    prefill, release = planner._extend_batch, planner.release

    def noting_prefill(reqs, spans):
        admitted.extend((r.request_id, r.row) for r in reqs)
        return prefill(reqs, spans)

    def noting_release(req):
        released.append((req.request_id, req.row, req.num_in_flight))
        release(req)

    planner._extend_batch, planner.release = noting_prefill, noting_release
    return admitted, released


@pytest.mark.usefixtures("cpu_only")
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_sc_05_a_row_is_reused_while_the_step_before_still_writes_it(algorithm, device):
    with scene_engine(
        algorithm, device, LIVELY.get(algorithm), schedule="overlap", max_running_requests=2
    ) as engine:
        before = free(engine)
        prompts = scene_prompts(algorithm, engine.model, 5)
        stops = [stop_at(engine, prompt, 2 + 3 * i) for i, prompt in enumerate(prompts)]
        params = [greedy(30, stop_token_ids=(token,)) for token, _ in stops]
        admitted, released = watch_rows(engine)
        lag_forward(engine)
        completions = engine.generate(prompts, params)
        assert [done.output_ids for done in completions] == expected(engine, prompts, params)
        assert [len(done.output_ids) for done in completions] == [length for _, length in stops]
        row_of = dict(admitted)
        reused = [(old, new) for old, row, flying in released if flying for new in row_of if new > old + 1]
        assert any(row_of[old] == row_of[new] for old, new in reused), (
            "no row was reused with a step in flight"
        )
        assert free(engine) == before


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_requests_that_join_and_leave_get_what_they_get_alone(algorithm, schedule, device):
    """SC-07, DR-03: lengths differ, so the batch is filtered and merged at many steps."""
    with scene_engine(algorithm, device, schedule=schedule, max_running_requests=3) as engine:
        prompts = scene_prompts(algorithm, engine.model, 4) * 2
        params = [greedy(n) for n in (1, 15, 4, 9, 2, 7, 12, 3)]
        together = engine.generate(prompts, params)
        assert [done.output_ids for done in together] == expected(engine, prompts, params)
        with scene_engine(algorithm, device, schedule=schedule, max_running_requests=1) as one:
            alone = [one.generate([p], q)[0] for p, q in zip(prompts, params, strict=True)]
        assert together == alone  # the metrics too


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_finished_requests_step_in_flight_is_dropped(algorithm, device):
    """Its tokens, its lengths and its metrics: nothing of it is counted."""
    found = {}
    for schedule in ("sync", "overlap"):
        with scene_engine(algorithm, device, LIVELY.get(algorithm), schedule=schedule) as engine:
            prompts = [random_prompt(40, 5), *scene_prompts(algorithm, engine.model, 2)]
            params = [greedy(30, stop_token_ids=stop_at(engine, p, 6)[:1]) for p in prompts]
            recorder = Recorder(engine)
            found[schedule] = engine.generate(prompts, params)
            dropped = [r for r in recorder.records if r.dropped]
            assert bool(dropped) == (schedule == "overlap")
            for i, done in enumerate(found[schedule]):
                landed = [r.accept_len for r in recorder.of_request(i)]
                assert done.spec.accept_lens == tuple(landed)
                assert 1 + sum(landed[:-1]) < len(done.output_ids) <= 1 + sum(landed)
    assert found["overlap"] == found["sync"]


def test_what_the_copy_stream_reads_lives_until_it_was_copied(open_engine, schedule, device):
    """Memory that is let go of is the forward stream's again, whose next launch may write it before it was read."""
    engine = open_engine(llama(device), schedule=schedule)
    scheduler, alive = engine.scheduler, []
    process = scheduler.processor.process

    def watching(batch, result):
        result.copy_done.synchronize()
        alive.append(result.packed.get().integers.shape[0] >= len(batch.reqs))
        return process(batch, result)

    scheduler.processor.process = watching
    engine.generate(random_prompt(1, 5), greedy(6))
    assert len(alive) >= 6
    assert all(alive)
