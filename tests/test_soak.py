"""Random interleavings with everything counted after each step (tests/soak.py), and load over a pool far too small.

`nox -s soak` runs the same driver for 50,000 steps.
"""

import gc
import os
import random
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from spec_v2 import SamplingParams
from spec_v2.mem_cache.prefix_cache import PrefixCache
from spec_v2.scheduler.batch_planner import BatchPlanner
from tests import soak
from tests import tiny_models as tiny
from tests.cells import open_setup
from tests.faults import Fault, open_surviving
from tests.harness import sampled
from tests.scheduling_helpers import expected, free
from tests.surface import assert_at_rest, count_retractions
from tests.test_interrupt import Striking

STEPS = 2_000
ROOT = Path(__file__).parent.parent


@pytest.fixture
def cpu_only(device):
    if device.type != "cpu":
        pytest.skip("the driver's streams are those of a CPU")


@pytest.mark.slow
@pytest.mark.usefixtures("cpu_only")
def test_random_interleavings_keep_every_account():
    """In a process of its own, where types are not checked at each call: that takes four times as long."""
    child = subprocess.run(
        [sys.executable, "-m", "tests.soak", "--steps", str(STEPS)], check=False, cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert child.returncode == 0, child.stderr[-4000:]
    last = child.stdout.splitlines()[-1].removeprefix("soak passed: ")
    total = {
        name: int(count.replace(",", "")) for count, name in (part.split(" ", 1) for part in last.split(", "))
    }
    assert total["steps"] >= STEPS
    for name in (
        "aborts", "retractions", "errors", "prefix hits", "prompts in chunks", "changes of setting", "ended by stop",
        "ended by length", "ended by abort",
    ):  # fmt: skip
        assert total[name] >= 20, f"{name}: {last}"


def leaky_unlock(self, path):
    """A page too few is unlocked."""
    for node in path[1:]:
        node.locks -= 1
        self.num_evictable += node.locks == 0


def late_epoch(self, req):
    """What is in flight for a retracted request is not dropped."""
    self.keep_prefix(req)
    self.put_back(req)
    req.epoch -= 1


@pytest.mark.usefixtures("cpu_only")
@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [(PrefixCache, "unlock", leaky_unlock), (BatchPlanner, "retract", late_epoch)],
)
def test_the_driver_finds_what_is_broken_and_says_it_shortly(monkeypatch, caplog, owner, name, broken):
    caplog.set_level("CRITICAL", "spec_v2")
    monkeypatch.setattr(owner, name, broken)
    for seed in range(20):
        cell = soak.cell_of(seed)._replace(
            worker="plain", schedule="overlap", adapts=False, shares_prefixes=True
        )
        actions = soak.actions_of(seed, 60)
        try:
            soak.play(cell, actions)
        except Exception:  # noqa: BLE001 - whatever the driver notices
            short = soak.shrink(cell, actions)
            break
    else:
        pytest.fail("no run has noticed")
    assert 1 <= len(short) <= 20
    with pytest.raises(Exception):  # noqa: B017, PT011 - the same
        soak.play(cell, short)
    monkeypatch.undo()
    soak.play(cell, short)


# -- load ------------------------------------------------------------------------------------------------------


def load(engine, seed, count, wanted):
    """`count` requests in waves, some called off; a list of (finish reason, how many)."""
    rng = random.Random(seed)
    scheduler, loop, requests = engine.scheduler, None, []
    while len(requests) < count or scheduler.has_requests:
        if len(requests) < count and len(scheduler.planner.waiting) < 12:
            prompt, params = rng.choice(list(wanted))
            requests += engine._requests([prompt], params)
            scheduler.add_requests(requests[-1:])
            if rng.random() < 0.1:
                engine.abort(rng.choice(requests[-8:]).request_id)
            continue
        loop = scheduler.event_loop() if loop is None else loop
        if next(loop, None) is None:
            loop = None
    for _ in loop or ():
        pass
    for req in requests:
        text = wanted[req.prompt_ids, req.params]
        said = tuple(req.output_ids)
        assert said == (text if req.finish_reason == "length" else text[: len(said)])
    return [req.finish_reason for req in requests]


@pytest.mark.soak
@pytest.mark.parametrize("name", ["standalone-chain", "eagle-tree"])
def test_500_requests_over_a_tenth_of_their_memory(open_engine, name, schedule, device):
    """A pool for one or two of the twenty that wait: all are accounted for, and memory stays as it is."""
    engine = open_setup(
        open_engine, name, schedule, device, max_running_requests=4, max_total_tokens=72, chunked_prefill_size=8,
        disable_radix_cache=False, page_size=4,
    )  # fmt: skip
    prompts = [tiny.random_prompt(seed, 2 + 5 * seed % 19) for seed in range(20)]
    params = [sampled(i, max_new_tokens=3 + 4 * i % 13) for i in range(20)]
    texts = expected(engine, prompts, params)
    wanted = {(prompt, param): text for prompt, param, text in zip(prompts, params, texts, strict=True)}
    retracted = count_retractions(engine)
    load(engine, 0, 100, wanted)
    retracted.clear()
    engine.trace.clear()
    gc.collect()
    objects = len(gc.get_objects())
    tracemalloc.start()
    try:
        reasons = load(engine, 1, 200, wanted)
        engine.trace.clear()  # it grows up to a bound of its own
        gc.collect()
        bytes_before, _ = tracemalloc.get_traced_memory()
        reasons += load(engine, 2, 200, wanted)
        engine.trace.clear()
        gc.collect()
        bytes_after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(reasons) == 400
    assert set(reasons) == {"length", "abort"}
    assert reasons.count("abort") >= 10
    assert len(retracted) >= 5
    assert len(gc.get_objects()) - objects < 2_000
    assert bytes_after - bytes_before < 200_000
    assert_at_rest(engine)


# -- an interrupt at every line, after errors too --------------------------------------------------------------


class Anywhere(Striking):
    FILES = (
        *Striking.FILES,
        "scheduler/batch_planner.py",
        "scheduler/recovery.py",
        "mem_cache/prefix_cache.py",
    )


@pytest.mark.soak
@pytest.mark.usefixtures("cpu_only")
def test_an_interrupt_at_any_line_of_planning_and_recovery_leaves_everything_free(
    open_engine, schedule, device
):
    engine = open_surviving(
        open_engine,
        "standalone-tree",
        schedule,
        device,
        disable_radix_cache=False,
        page_size=4,
        max_total_tokens=104,
    )
    prompts = [tiny.random_prompt(seed, 6 + seed) for seed in range(4)]
    params = [SamplingParams(max_new_tokens=n) for n in (1, 16, 12, 14)]
    right = expected(engine, prompts, params)

    def generate():
        first = engine._factory.num_requests
        fault = Fault(
            engine, "verify", lambda requests, seen: any(r.request_id == first + 1 for r in requests)
        )
        try:
            return [done.output_ids for done in engine.generate(prompts, params)]
        finally:
            fault.stop()

    with Anywhere() as watching:
        assert generate()[2:] == right[2:]
    engine.scheduler.abort_all()
    before = free(engine)
    assert len(watching.lines) > 200
    for line in watching.lines:
        with pytest.raises(KeyboardInterrupt), Anywhere(line):
            generate()
        assert free(engine) == before, f"interrupted at {line}"
        assert not engine.scheduler.has_requests
    assert [done.output_ids for done in engine.generate(prompts, params)] == right
