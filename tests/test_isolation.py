"""A batch is transactional across one forward: whatever a worker rebinds is put back, and a test notices if not."""

import weakref
from contextlib import contextmanager
from dataclasses import fields

import pytest
import torch

from spec_v2.scheduler.schedule_batch import ScheduleBatch
from spec_v2.types import ForwardMode
from tests.scheduling_helpers import (
    ALGORITHMS,
    expected,
    first_batches,
    free,
    greedy,
    outputs,
    scene_engine,
    scene_prompts,
)

FIELDS = [f.name for f in fields(ScheduleBatch)]
STAGES = ("prefill", "decode")


class Junk:
    """Good for nothing: any use of it fails."""


class WorkerError(Exception):
    pass


class Vandal:
    """Runs a worker, then rebinds fields of the batch, and may raise. Notes what the worker was given."""

    def __init__(self, worker, names, *, raises=False):
        self.worker, self.names, self.raises = worker, names, raises
        self.given = []

    def forward_batch_generation(self, batch, on_publish):
        self.given.append({name: getattr(batch, name) for name in FIELDS})
        result = self.worker.forward_batch_generation(batch, on_publish)
        for name in self.names:
            setattr(batch, name, Junk())
        if self.raises:
            raise WorkerError
        return result


@pytest.fixture
def run_vandal(device, schedule):
    """run(names, stage, raises=...) -> (fields before, the batch after, what the worker was given, result)."""
    engines = []

    def run(names, stage, *, raises=False, isolation=None):
        engine = scene_engine("STANDALONE", device, schedule=schedule)
        engines.append(engine)
        scheduler = first_batches(engine, scene_prompts("STANDALONE", engine.model, 2), greedy(8))
        if isolation is not None:
            scheduler._forward_isolation = isolation
        overlap = schedule == "overlap"
        batch = scheduler.get_next_batch_to_run()
        if stage == "decode":
            scheduler.process_batch_result(batch.copy(), scheduler.run_batch(batch, overlap=overlap))
            batch = scheduler.get_next_batch_to_run()
        assert batch.forward_mode is (ForwardMode.EXTEND if stage == "prefill" else ForwardMode.DECODE)
        scheduler.worker = vandal = Vandal(scheduler.worker, names, raises=raises)
        before = {name: getattr(batch, name) for name in FIELDS}
        if not raises:
            result = scheduler.run_batch(batch, overlap=overlap)
            return before, batch, vandal.given[0], result
        with pytest.raises(WorkerError):
            scheduler.run_batch(batch, overlap=overlap)
        return before, batch, vandal.given[0], None

    yield run
    for engine in engines:
        engine.close()


def skipping(*names):
    """A broken isolation: it forgets to restore these fields."""

    @contextmanager
    def isolation(batch, *, overlap):
        snapshot = {name: getattr(batch, name) for name in FIELDS if name not in names}
        batch.sampling_info = batch.sampling_info.copy_for_forward()
        try:
            yield
        finally:
            for name, value in snapshot.items():
                setattr(batch, name, value)

    return isolation


def check_restored(schedule, stage, before, batch, result):
    """Every field is the very object it was, but for the four that are re-applied or consumed in the open."""
    wanted = dict(before) | {"spec_info": before["rows"], "input_ids": None, "prompt_staging": None}
    if schedule == "overlap":
        wanted["seq_lens"] = None
    elif stage == "decode":
        wanted["seq_lens"] = result.new_seq_lens
        assert result.new_seq_lens is not before["seq_lens"]
    for name in FIELDS:
        assert getattr(batch, name) is wanted[name], f"{name} was not put back"


def check_restored_after_error(given, before, batch):
    """After an exception nothing is re-applied: each field is what the worker was given."""
    for name in FIELDS:
        original = before["sampling_info"] if name == "sampling_info" else given[name]
        assert getattr(batch, name) is original, f"{name} was not put back"


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("names", [*([name] for name in FIELDS), FIELDS], ids=[*FIELDS, "all"])
def test_a_field_that_a_worker_rebinds_is_put_back(run_vandal, schedule, stage, names):
    before, batch, _, result = run_vandal(names, stage)
    check_restored(schedule, stage, before, batch, result)


@pytest.mark.parametrize("stage", STAGES)
def test_all_is_put_back_when_the_worker_raises(run_vandal, stage):
    before, batch, given, _ = run_vandal(FIELDS, stage, raises=True)
    check_restored_after_error(given, before, batch)


@pytest.mark.parametrize("name", FIELDS)
def test_the_check_notices_one_field_that_is_forgotten(run_vandal, name):
    before, batch, given, _ = run_vandal(FIELDS, "decode", raises=True, isolation=skipping(name))
    with pytest.raises(AssertionError, match=f"{name} was not put back"):
        check_restored_after_error(given, before, batch)


REAPPLIED = ("spec_info", "input_ids", "seq_lens", "prompt_staging")


@pytest.mark.parametrize("name", [name for name in FIELDS if name not in REAPPLIED])
def test_without_an_error_too_the_check_notices(run_vandal, schedule, name):
    def run_and_check():
        before, batch, _, result = run_vandal([name], "decode", isolation=skipping(name))
        check_restored(schedule, "decode", before, batch, result)

    # run_batch itself needs the requests right after the forward
    error, message = (TypeError, "Junk") if name == "reqs" else (AssertionError, f"{name} was not put back")
    with pytest.raises(error, match=message):
        run_and_check()


@pytest.mark.parametrize("stage", STAGES)
def test_the_forward_samples_from_a_copy(run_vandal, stage):
    before, batch, given, _ = run_vandal([], stage)
    assert given["sampling_info"] is not before["sampling_info"]
    assert batch.sampling_info is before["sampling_info"]


def test_one_shot_staging_is_consumed_before_isolation(run_vandal):
    before, batch, given, _ = run_vandal([], "prefill")
    assert before["prompt_staging"] is not None
    assert given["prompt_staging"] is None
    assert given["spec_info"] is before["prompt_staging"]
    assert batch.prompt_staging is None


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_generation_with_a_vandal_is_as_without(algorithm, schedule, device):
    with scene_engine(algorithm, device, schedule=schedule, max_running_requests=2) as engine:
        before = free(engine)
        prompts = scene_prompts(algorithm, engine.model, 4)
        params = [greedy(n) for n in (9, 14, 5, 11)]
        plain = engine.generate(prompts, params)
        assert [done.output_ids for done in plain] == expected(engine, prompts, params)
        engine.scheduler.worker = Vandal(engine.scheduler.worker, FIELDS)
        assert engine.generate(prompts, params) == plain
        assert free(engine) == before


def test_an_engine_survives_a_worker_that_raises(schedule, device):
    with scene_engine("STANDALONE", device, schedule=schedule) as engine:
        before = free(engine)
        prompts = scene_prompts("STANDALONE", engine.model, 3)
        worker = engine.scheduler.worker
        engine.scheduler.worker = Vandal(worker, FIELDS, raises=True)
        with pytest.raises(WorkerError):
            engine.generate(prompts, greedy(6))
        engine.scheduler.worker = worker
        assert free(engine) == before
        assert outputs(engine, prompts, greedy(6)) == expected(engine, prompts, [greedy(6)] * 3)


def test_workers_do_not_write_into_the_batchs_tensors(device, schedule):
    """Rebinding is put back; an in-place write could not be."""
    with scene_engine("EAGLE", device, schedule=schedule) as engine:
        scheduler = first_batches(engine, scene_prompts("EAGLE", engine.model, 3), greedy(8))
        for _ in range(3):
            batch = scheduler.get_next_batch_to_run()
            tensors = {n: v for n in FIELDS if isinstance(v := getattr(batch, n), torch.Tensor)}
            if batch.prompt_staging is not None:
                tensors["input_ids"] = batch.prompt_staging.input_ids
            inputs = batch.sampling_info.sampling
            tensors |= {n: v for n in inputs.__slots__ if isinstance(v := getattr(inputs, n), torch.Tensor)}
            copies = {name: tensor.clone() for name, tensor in tensors.items()}
            result = scheduler.run_batch(batch, overlap=schedule == "overlap")
            scheduler.process_batch_result(batch.copy(), result)
            for name, tensor in tensors.items():
                assert torch.equal(tensor, copies[name]), f"{name} was written"


# -- pinning -------------------------------------------------------------------------------------------------


def run_steps_with_marker(engine, *, overlap):
    """Whether a tensor that only the first decode batch knew is alive after each of four decode steps."""
    scheduler = first_batches(engine, scene_prompts(None, engine.model, 1), greedy(30))
    marker, alive = torch.zeros(1), []
    for step in range(5):
        batch = scheduler.get_next_batch_to_run()
        if step == 1:
            batch.input_ids = marker
            reference = weakref.ref(marker)
            del marker
        result = scheduler.run_batch(batch, overlap=overlap)
        scheduler.process_batch_result(batch.copy(), result)
        if step >= 1:
            alive.append(reference() is not None)
    return alive


def test_overlap_pins_a_batch_for_exactly_two_iterations(open_engine, device):
    engine = scene_engine(None, device, schedule="overlap")
    assert run_steps_with_marker(engine, overlap=True) == [True, True, False, False]
    engine.close()
    assert not engine.scheduler.batch_record_buf


def test_sync_pins_nothing(device):
    engine = scene_engine(None, device, schedule="sync")
    assert run_steps_with_marker(engine, overlap=False) == [False] * 4
    assert not engine.scheduler.batch_record_buf
    engine.close()


def test_record_batch_in_overlap_keeps_batch_and_values(device):
    with scene_engine(None, device, schedule="overlap") as engine:
        scheduler = first_batches(engine, scene_prompts(None, engine.model, 1), greedy(4))
        batch = scheduler.get_next_batch_to_run()
        scheduler.worker = vandal = Vandal(scheduler.worker, [])
        scheduler.run_batch(batch, overlap=True)
        kept, values = scheduler.batch_record_buf[-1]
        assert kept is batch
        assert set(values) == set(FIELDS)
        assert all(values[name] is vandal.given[0][name] for name in FIELDS)
