"""Ctrl-C and errors: wherever they strike, generate raises, everything is free again, and the engine goes on."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from tests.scheduling_helpers import World, expected, free, greedy, outputs, scene_engine, scene_prompts

ROOT = Path(__file__).parent.parent

CHILD = """
import os
import signal
import sys
import torch
from spec_v2.scheduler import streams
from tests.scheduling_helpers import World, expected, free, greedy, outputs, scene_engine, scene_prompts

def say(word):
    os.write(1, word.encode() + b"\\n")  # at once: two threads say something

def interrupt_once(number, frame):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt

torch.set_num_threads(1)
schedule = sys.argv[1]
engine = scene_engine("STANDALONE", torch.device("cpu"), schedule=schedule)
before = free(engine)
prompts, params = scene_prompts("STANDALONE", engine.model, 3), [greedy(n) for n in (9, 12, 7)]
held, ended, wait, abort_all = [], [], streams.CpuEvent.synchronize, engine.scheduler.abort_all

def on_run(label, step):
    if label == "verify" and step == 2 and not held:
        held.append(step)
        say("inside")
        assert sys.stdin.readline() == "go on\\n"
        ended.append(step)

def synchronize(self):
    if self._step.index == 2:
        say("waiting")
    wait(self)

def draining():
    streams.CpuEvent.synchronize = wait
    say("draining")
    abort_all()

engine._forward_stream.on_run = on_run
engine.scheduler.abort_all = draining
streams.CpuEvent.synchronize = synchronize
signal.signal(signal.SIGINT, interrupt_once)
try:
    engine.generate(prompts, params)
except KeyboardInterrupt:
    assert ended, "generate gave up while a step was running"
    say("caught")
engine.scheduler.abort_all = abort_all
assert held
assert free(engine) == before, free(engine)
assert outputs(engine, prompts, params) == expected(engine, prompts, params)
assert free(engine) == before
engine.close()
say("right")
"""


LONG = 120  # seconds; only a failing test waits that long


def read_until(child, wanted):
    """Read the child's words until all wanted ones have come. A child that says nothing is killed in the end."""
    watchdog = threading.Timer(LONG, child.kill)
    watchdog.start()
    missing = set(wanted)
    while missing:
        word = child.stdout.readline()
        assert word, f"the child ended before it said {missing}: {child.stderr.read()}"
        missing.discard(word.strip())
    watchdog.cancel()


def interrupt_until_it_is_seen(child):
    """A signal that comes just before a wait begins is seen only when the wait ends; the child counts one."""
    seen = threading.Event()

    def send():
        while not seen.wait(0.1):
            child.send_signal(signal.SIGINT)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        read_until(child, {"draining"})
    finally:
        seen.set()
        sender.join()


def test_ctrl_c_while_the_host_waits_for_a_slow_step(schedule):
    """The step in flight is drained, not killed: it goes on only after the interrupt has reached generate."""
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CHILD), schedule],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with child:
        try:
            read_until(child, {"inside", "waiting"})
            interrupt_until_it_is_seen(child)
            child.stdin.write("go on\n")
            child.stdin.flush()
            read_until(child, {"caught", "right"})
            assert child.wait() == 0
        finally:
            child.kill()


class Striking:
    """Raises KeyboardInterrupt before the first run of one line; otherwise notes the lines that run."""

    FILES = ("scheduler/scheduler.py", "scheduler/batch_result_processor.py", "mem_cache/allocator.py")

    def __init__(self, target=None):
        self.target, self.lines = target, []

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self.trace)
        return self

    def __exit__(self, *error):
        sys.settrace(self.before)

    def trace(self, frame, event, arg):
        path = frame.f_code.co_filename
        if not path.endswith(self.FILES) or frame.f_code.co_name == "abort_all":
            return None
        if event == "line":
            line = (Path(path).name, frame.f_lineno)
            if line == self.target:
                self.target = None
                sys.settrace(None)
                raise KeyboardInterrupt
            if line not in self.lines:
                self.lines.append(line)
        return self.trace


@pytest.mark.usefixtures("cpu_only")
def test_an_interrupt_at_any_line_of_the_scheduler_leaves_everything_free(schedule, device):
    with scene_engine("STANDALONE", device, schedule=schedule, max_running_requests=2) as engine:
        before = free(engine)
        prompts, params = scene_prompts("STANDALONE", engine.model, 3), [greedy(n) for n in (1, 7, 4)]
        right = expected(engine, prompts, params)
        with Striking() as watching:
            assert outputs(engine, prompts, params) == right
        assert len(watching.lines) > 80
        for line in watching.lines:
            with pytest.raises(KeyboardInterrupt), Striking(line):
                engine.generate(prompts, params)
            assert free(engine) == before, f"interrupted at {line}"
            assert not engine.scheduler.planner.live
            assert not engine.scheduler.planner.waiting
        assert outputs(engine, prompts, params) == right


@pytest.mark.usefixtures("cpu_only")
def test_giving_up_drains_the_streams_first(schedule, device, monkeypatch):
    """What is in flight still writes; so nothing is in flight any more when the error is seen."""
    world = World("late")
    monkeypatch.setattr("spec_v2.engine.make_stream", world.make_stream)
    with scene_engine("STANDALONE", device, schedule=schedule) as engine:
        process, left = engine.scheduler.process_batch_result, []

        def interrupted(batch, result):
            if result.step == 2:
                left.extend(len(stream.items) for stream in world.streams)
                raise KeyboardInterrupt
            return process(batch, result)

        engine.scheduler.process_batch_result = interrupted
        with pytest.raises(KeyboardInterrupt):
            engine.generate(scene_prompts("STANDALONE", engine.model, 3), greedy(12))
        assert min(left) > 0
        assert [len(stream.items) for stream in world.streams] == [0, 0]


@pytest.mark.usefixtures("cpu_only")
def test_an_error_in_a_launch_is_raised_as_it_is_and_poisons_nothing_later(schedule, device):
    error = LookupError("from a launch")
    with scene_engine("STANDALONE", device, schedule=schedule) as engine:
        before = free(engine)
        prompts, params = scene_prompts("STANDALONE", engine.model, 3), [greedy(9)] * 3

        def on_run(label, step):
            if (label, step) == ("verify", 2):
                raise error

        engine._forward_stream.on_run = on_run
        with pytest.raises(LookupError) as caught:
            engine.generate(prompts, params)
        assert caught.value is error
        assert free(engine) == before
        engine._forward_stream.on_run = None
        after = engine._forward_stream.launch(lambda: "ran")  # before any next step begins
        engine._forward_stream.record_event().synchronize()
        assert after.get() == "ran"
        assert outputs(engine, prompts, params) == expected(engine, prompts, params)


@pytest.fixture
def cpu_only(device):
    if device.type != "cpu":
        pytest.skip("tracing every line of a CUDA run proves nothing more")


# -- an interrupt while one is dealt with ----------------------------------------------------------------------


@pytest.mark.usefixtures("cpu_only")
@pytest.mark.parametrize("where", ["drain", "clear", "forget"])
def test_a_second_interrupt_while_giving_up_leaves_the_engine_usable(where, schedule, device, monkeypatch):
    """It may come while the streams are drained, or while owners are forgotten: the next call finishes that."""
    with scene_engine("STANDALONE", device, schedule=schedule, max_running_requests=2) as engine:
        before, scheduler = free(engine), engine.scheduler
        prompts, params = scene_prompts("STANDALONE", engine.model, 3), [greedy(n) for n in (2, 9, 7)]
        right = expected(engine, prompts, params)
        owner, name = {
            "drain": (scheduler, "_drain"),
            "clear": (scheduler.planner, "put_back_all"),
            "forget": (scheduler, "_forget_steps"),
        }[where]
        process, seen = scheduler.process_batch_result, []

        def interrupted(batch, result):
            if result.step == 3:
                raise KeyboardInterrupt
            return process(batch, result)

        def again(*args):
            seen.append(name)
            raise KeyboardInterrupt

        monkeypatch.setattr(scheduler, "process_batch_result", interrupted)
        monkeypatch.setattr(owner, name, again)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(prompts, params)
        monkeypatch.undo()
        assert seen == [name]
        assert scheduler.is_unclean == (where != "drain")
        assert outputs(engine, prompts, params) == right
        assert free(engine) == before


@pytest.mark.usefixtures("cpu_only")
def test_what_was_said_before_an_interrupt_is_not_lost(schedule, device, monkeypatch):
    with scene_engine("STANDALONE", device, schedule=schedule, max_running_requests=2) as engine:
        prompts, params = scene_prompts("STANDALONE", engine.model, 3), [greedy(n) for n in (3, 30, 7)]
        right, process = expected(engine, prompts, params), engine.scheduler.process_batch_result

        def interrupted(batch, result):
            if result.step == 8:
                raise KeyboardInterrupt
            return process(batch, result)

        monkeypatch.setattr(engine.scheduler, "process_batch_result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(prompts, params)
        first, second, third = engine.last_completions
        assert (first.output_ids, first.finish_reason) == (right[0], "length")
        assert (second.output_ids, second.finish_reason) == (right[1][: second.completion_tokens], "abort")
        assert 3 < second.completion_tokens < 30
        assert third.output_ids == right[2][: third.completion_tokens]
