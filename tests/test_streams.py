"""The CPU stream keeps what a CUDA stream promises: order, events, errors that belong to their step."""

import threading

import pytest
import torch

from spec_v2.observability.trace import Trace
from spec_v2.scheduler.streams import CpuStream, Pending, Step, make_stream

LONG = 60  # seconds; only a failing test waits that long
SHORT = 0.2  # how long something is waited for that must not come


@pytest.fixture
def stream():
    made = CpuStream("forward", Trace())
    yield made
    made.close()


@pytest.fixture
def gate(stream):
    """Holds the stream until it is set; opened at the end, whatever happened."""
    event = threading.Event()
    yield event
    event.set()


def hold(stream, gate):
    """Launch something that runs until the gate opens. Returns when it is running."""
    inside = threading.Event()

    def wait():
        inside.set()
        assert gate.wait(LONG)

    stream.launch(wait)
    assert inside.wait(LONG)


def test_launches_run_in_order_on_one_other_thread(stream):
    ran = []
    for i in range(50):
        stream.launch(lambda i: ran.append((i, threading.current_thread())), i)
    stream.record_event().synchronize()
    assert [i for i, _ in ran] == list(range(50))
    threads = {thread for _, thread in ran}
    assert len(threads) == 1
    assert threading.current_thread() not in threads


def test_launch_returns_before_it_runs(stream, gate):
    hold(stream, gate)
    pending = stream.launch(lambda: 1)
    event = stream.record_event()
    assert not event.query()
    with pytest.raises(RuntimeError, match="before its event"):
        pending.get()
    gate.set()
    event.synchronize()
    assert event.query()
    assert pending.get() == 1


def test_a_pending_argument_is_replaced_by_its_value(stream, gate):
    hold(stream, gate)
    first = stream.launch(lambda: torch.arange(3))
    total = stream.launch(lambda tensor, factor: int(tensor.sum()) * factor, first, 5)
    gate.set()
    stream.record_event().synchronize()
    assert total.get() == 15


def test_none_is_a_value(stream):
    nothing = stream.launch(lambda: None)
    stream.record_event().synchronize()
    assert nothing.get() is None


def test_a_launch_never_reads_a_pending_of_another_stream_too_soon(stream, gate):
    hold(stream, gate)
    value = stream.launch(lambda: 1)
    other = CpuStream("copy", Trace())
    other.launch(lambda v: v, value)  # nobody made it wait
    with pytest.raises(RuntimeError, match="before its event"):
        other.record_event().synchronize()
    other.close()


def test_wait_event_orders_two_streams(stream, gate):
    hold(stream, gate)
    value = stream.launch(lambda: 7)
    other = CpuStream("copy", Trace())
    ran = threading.Event()
    other.on_run = lambda label, step: ran.set()
    other.wait_event(stream.record_event())
    copied = other.launch(lambda v: v + 1, value)
    copy_done = other.record_event()
    assert not ran.wait(SHORT)
    assert not copy_done.query()
    gate.set()
    copy_done.synchronize()
    assert copied.get() == 8
    other.close()


def test_an_exception_poisons_its_step_and_no_other(stream):
    ran, error = [], KeyError("from the launch")

    def fail():
        raise error

    stream.step = Step(1)
    before = stream.launch(ran.append, "before")
    failed = stream.launch(fail)
    skipped = stream.launch(ran.append, "skipped")
    event = stream.record_event()
    stream.step = Step(2)
    stream.launch(ran.append, "next step")
    stream.record_event().synchronize()
    assert ran == ["before", "next step"]
    for call in (event.synchronize, before.get, failed.get, skipped.get):
        with pytest.raises(KeyError) as caught:
            call()
        assert caught.value is error
    stream.synchronize()  # errors belong to steps: the stream itself has none


def test_the_first_error_of_a_step_is_the_one_reported(stream):
    stream.step = Step(1)
    stream.launch(lambda: 1 / 0)
    stream.launch({}.popitem)
    with pytest.raises(ZeroDivisionError):
        stream.record_event().synchronize()


def test_an_error_crosses_streams_with_the_step(stream):
    other = CpuStream("copy", Trace())
    stream.step = other.step = Step(1)
    value = stream.launch(lambda: 1 / 0)
    other.wait_event(stream.record_event())
    ran = []
    other.launch(ran.append, value)
    with pytest.raises(ZeroDivisionError):
        other.record_event().synchronize()
    assert not ran
    other.close()


def test_on_run_sees_label_and_step_on_the_stream_and_may_fail_the_launch(stream):
    seen = []
    stream.on_run = lambda label, step: seen.append((label, step, stream.owns_current_thread()))
    stream.step = Step(3)
    stream.launch(lambda: None, label="verify")
    stream.record_event().synchronize()
    assert seen == [("verify", 3, True)]

    def refuse(label, step):
        raise LookupError(label)

    stream.on_run = refuse
    stream.launch(lambda: None, label="draft")
    with pytest.raises(LookupError, match="draft"):
        stream.record_event().synchronize()


def test_grad_mode_is_off_in_launches_whatever_the_caller_has(stream):
    weight = torch.ones(2, requires_grad=True)
    with torch.enable_grad():
        product = stream.launch(
            lambda: (weight * 2, torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        )
        stream.record_event().synchronize()
    tensor, grad, inference = product.get()
    assert not tensor.requires_grad
    assert not grad
    assert not inference
    tensor += 1  # an inference tensor could not be written outside


def test_owns_current_thread(stream):
    assert not stream.owns_current_thread()
    other = CpuStream("copy", Trace())
    answers = stream.launch(lambda: (stream.owns_current_thread(), other.owns_current_thread()))
    stream.record_event().synchronize()
    assert answers.get() == (True, False)
    other.close()


def test_the_thread_count_is_the_streams_own():
    before = torch.get_num_threads()
    stream = CpuStream("forward", Trace(), num_threads=before + 1)
    inside = stream.launch(torch.get_num_threads)
    stream.record_event().synchronize()
    stream.close()
    assert inside.get() == before + 1
    assert torch.get_num_threads() == before


def test_close_runs_what_is_queued_and_joins_the_thread():
    stream = CpuStream("forward", Trace())
    ran = []
    for i in range(10):
        stream.launch(ran.append, i)
    stream.close()
    assert ran == list(range(10))
    assert not stream._thread.is_alive()


def test_an_engine_leaves_no_thread_behind(open_engine, device):
    from tests.tiny_models import llama

    before = set(threading.enumerate())
    engine = open_engine(llama(device))
    assert device.type != "cpu" or len(set(threading.enumerate()) - before) == 2
    engine.close()
    assert not set(threading.enumerate()) - before


def test_each_launch_leaves_a_span_on_its_lane(stream):
    stream.step = Step(4)
    stream.launch(lambda: None, label="verify")
    stream.record_event().synchronize()
    assert [(s.lane, s.name, s.step) for s in stream._trace.spans()] == [("forward", "verify", 4)]


def test_a_device_without_a_stream_is_refused():
    with pytest.raises(ValueError, match="device='meta'"):
        make_stream("forward", torch.device("meta"), Trace())


def test_a_pending_set_late_is_seen():
    pending = Pending(Step(0))
    with pytest.raises(RuntimeError):
        pending.get()
    pending.set(3)
    assert pending.get() == 3
