"""The loop on top: pick a batch, launch it, commit a result; synchronously or one step apart."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch

from spec_v2.mem_cache.kv_cache_builder import KvCache
from spec_v2.model_executor.npu_backend import can_pin
from spec_v2.observability.step_log import copy_step
from spec_v2.observability.trace import Trace
from spec_v2.scheduler.batch_planner import BatchPlanner
from spec_v2.scheduler.batch_result_processor import BatchResultProcessor
from spec_v2.scheduler.future_map import FutureMap, resolve_forward_inputs
from spec_v2.scheduler.recovery import accuse
from spec_v2.scheduler.sampling_batch_info import host_tensor
from spec_v2.scheduler.schedule_batch import GenerationBatchResult, Request, ScheduleBatch
from spec_v2.scheduler.step_shapes import StepShapes
from spec_v2.scheduler.streams import Step, Stream
from spec_v2.server_args import ServerArgs
from spec_v2.types import HostVerdict, PackedVerdict, TokenLogprobs, Verdict


@runtime_checkable
class Worker(Protocol):
    """All that the scheduler knows of a worker."""

    def forward_batch_generation(self, batch: ScheduleBatch, on_publish: Any) -> GenerationBatchResult: ...


class Scheduler:
    """Owns the requests, the batch and the streams' order. It decides; only launches touch memory."""

    def __init__(
        self,
        *,
        server_args: ServerArgs,
        worker: Worker,
        cache: KvCache,
        future_map: FutureMap,
        forward_stream: Stream,
        copy_stream: Stream,
        device: torch.device,
        trace: Trace,
        shapes: StepShapes,
        capture_sizes: Sequence[int] = (),
        survives_errors: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.server_args = server_args
        self.worker = worker
        self.cache = cache
        self.future_map = future_map
        self.forward_stream = forward_stream
        self.copy_stream = copy_stream
        self.trace = trace
        self.clock = clock
        self.planner = BatchPlanner(server_args, cache, device, shapes, capture_sizes)
        self.processor = BatchResultProcessor(self.planner, lambda: self.clock())
        self.result_queue: deque[tuple[ScheduleBatch, GenerationBatchResult]] = deque()
        self.batch_record_buf: deque[Any] = deque(maxlen=2)
        self.num_steps_launched = 0
        self.survives_errors = survives_errors
        self.num_failures = 0  # failed steps that it has survived
        self.is_unclean = False  # an interrupt came while it was giving up
        self._suspects: Sequence[Request] | None = None  # requests of the step that the host is busy with
        self._abort_ids: set[int] = set()

    # -- the two schedules: the same calls in another order ---------------------------------------------

    def event_loop_normal(self) -> Iterator[list[Request]]:
        """Launch a step, process it. Yields the requests that finished."""
        while (batch := self.get_next_batch_to_run()) is not None:
            result = self.run_batch(batch, overlap=False)
            yield self.process_batch_result(batch.copy(), result)

    def event_loop_overlap(self) -> Iterator[list[Request]]:
        """Launch step r, then process step r-1 while r runs. Yields the requests that finished."""
        while (batch := self.get_next_batch_to_run()) is not None or self.result_queue:
            previous = self.result_queue.popleft() if self.result_queue else None
            if batch is not None:
                self.result_queue.append((batch.copy(), self.run_batch(batch, overlap=True)))
            yield self.process_batch_result(*previous) if previous is not None else []

    def event_loop(self) -> Iterator[list[Request]]:
        """The loop that `disable_overlap_schedule` selects, begun again after a failed step."""
        sync = self.server_args.disable_overlap_schedule
        self.forward_stream.take_cores()
        try:
            while True:
                try:
                    yield from self.event_loop_normal() if sync else self.event_loop_overlap()
                    return
                except Exception as error:
                    if not self.survives_errors:
                        raise
                    yield self.start_over(error)
                    if not self.has_requests:  # else an error of planning would come again for nobody
                        return
        finally:
            self.forward_stream.release_cores()

    # -- one step ----------------------------------------------------------------------------------------

    def run_batch(self, batch: ScheduleBatch, *, overlap: bool) -> GenerationBatchResult:
        """Launch one step of `batch` and leave the batch as it was, but for what is re-applied below."""
        self._suspects = batch.reqs
        step, launched_at = self._begin_step(), self.clock()
        if batch.shape is not None:
            self.trace.note_setting(step.index, batch.shape.setting)
        with self.trace.span("host", "launch", step.index):
            self._launch_row_writes(batch)
            padded = batch.padded
            if self.future_map.host_seq_lens is not None and not batch.forward_mode.is_extend():
                step.seq_lens = self.future_map.lens_on_host(batch.rows)
            step.captured = padded
            resolve_forward_inputs(batch, self.future_map, self.forward_stream)
            with self._forward_isolation(batch, overlap=overlap):
                result = self.worker.forward_batch_generation(
                    batch, on_publish=partial(self._publish, batch.rows)
                )
            self.forward_stream.launch(
                self.future_map.stash, batch.rows, result.verdict, result.next_draft, label="stash"
            )
            result.packed = self.forward_stream.launch(pack_for_host, result.verdict, label="pack")
            if padded:
                step.captured = False
                result.packed = self.forward_stream.launch(in_new_memory, result.packed, label="keep")
            if self.processor.step_log is not None and result.tree is not None:
                result.noted = self.forward_stream.launch(
                    copy_step,
                    batch.rows,
                    result.tree,
                    result.verdict,
                    self.cache.row_table.slots,
                    batch.max_seq_len,
                    label="note",
                )
            self._copy_result_to_host(result)
        result.step, result.launched_at = step.index, launched_at
        result.epochs = tuple(req.epoch for req in batch.reqs)
        for req in batch.reqs:
            req.num_in_flight += req is not self.planner.chunked  # a chunk that is not the last emits nothing
        # What must survive the restore is re-applied here, in the open.
        batch.spec_info = batch.rows
        if overlap or padded:
            batch.seq_lens = None  # gathered from the rows at the next resolve
        elif result.new_seq_lens is not batch.seq_lens:
            batch.seq_lens = result.new_seq_lens
        batch.input_ids = None
        return result

    @contextmanager
    def _forward_isolation(self, batch: ScheduleBatch, *, overlap: bool) -> Iterator[None]:
        """Make the batch transactional across one forward: whatever the worker rebinds is put back, on exceptions too.

        Overlap only: batch and snapshot stay referenced for two iterations, so that tensors made here and
        used on another stream outlive their use.
        """
        snapshot = {f.name: getattr(batch, f.name) for f in fields(batch)}
        batch.sampling_info = batch.sampling_info.copy_for_forward()
        if overlap:
            self.record_batch_in_overlap(batch)
        try:
            yield
        finally:
            for name, value in snapshot.items():
                setattr(batch, name, value)

    def record_batch_in_overlap(self, batch: ScheduleBatch) -> None:
        """Keep the batch and the values of its fields alive until two more steps were launched."""
        self.batch_record_buf.append((batch, {f.name: getattr(batch, f.name) for f in fields(batch)}))

    def process_batch_result(self, batch: ScheduleBatch, result: GenerationBatchResult) -> list[Request]:
        """Wait for the step's results on the host and commit them. Returns the requests that finished."""
        self._suspects = batch.reqs
        with self.trace.span("host", "process", result.step):
            return self.processor.process(batch, result)

    def _launch_row_writes(self, batch: ScheduleBatch) -> None:
        """Put slots that were allocated since the last step into the row table, on the forward stream."""
        pages = self.cache.pages
        rows: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for req in batch.reqs:
            if req.kv_allocated_len == len(req.pages) * pages.page_size:
                continue
            new_slots = pages.slots(req.pages[req.kv_allocated_len // pages.page_size :])
            rows += [req.row] * len(new_slots)
            positions += range(req.kv_allocated_len, req.kv_allocated_len + len(new_slots))
            slots += new_slots
            req.kv_allocated_len += len(new_slots)
        if slots:
            written = (host_tensor(v, torch.long, self.planner.pin) for v in (rows, positions, slots))
            self.forward_stream.launch(self.cache.row_table.write, *written, label="row_table")

    def _begin_step(self) -> Step:
        step = Step(self.num_steps_launched)
        self.num_steps_launched += 1
        self.forward_stream.step = self.copy_stream.step = step
        return step

    def _publish(self, rows: torch.Tensor, verdict: Any) -> Any:
        """Between verify and draft-extend: from this event on, whoever needs the new lengths may go on."""
        new_seq_lens = self.forward_stream.launch(self.future_map.publish, rows, verdict, label="publish")
        if self.future_map.host_seq_lens is not None:
            step = self.forward_stream.step
            captured, step.captured = step.captured, False  # a copy to the host is not recorded
            self.forward_stream.launch(self.future_map.copy_lens_to_host, label="lens")
            step.captured = captured
        self.future_map.publish_ready = self.forward_stream.record_event()
        return new_seq_lens

    def _copy_result_to_host(self, result: GenerationBatchResult) -> None:
        self.copy_stream.wait_event(self.forward_stream.record_event())
        result.host = self.copy_stream.launch(copy_to_host, result.packed, label="copy")
        result.copy_done = self.copy_stream.record_event()

    # -- requests ----------------------------------------------------------------------------------------

    def add_requests(self, requests: list[Request]) -> None:
        """Queue requests that `planner.check_fits` has let pass. They join at the next step."""
        self.planner.waiting.extend(requests)

    def abort_request(self, request_id: int) -> None:
        """End a request at the next step with finish_reason "abort"; any thread may ask. Unknown ids are ignored."""
        self._abort_ids.add(request_id)

    def get_next_batch_to_run(self) -> ScheduleBatch | None:
        """The batch of the next step, or None where nothing is to be launched."""
        self._suspects = None
        with self.trace.span("host", "schedule", self.num_steps_launched):
            if self._abort_ids:
                self._end_aborted()
            return self.planner.next_batch()

    def _end_aborted(self) -> None:
        ids, self._abort_ids = self._abort_ids, set()
        requests = [*self.planner.live.values(), *self.planner.waiting]
        self.abort_now([r for r in requests if r.request_id in ids])

    def abort_now(self, requests: list[Request]) -> None:
        """End requests between two steps. What is in flight for them is dropped when it lands."""
        for req in requests:
            req.finish_reason = "abort"
            self.planner.finish(req)

    def fail_now(self, req: Request, error: str) -> None:
        """End a request between two steps with finish_reason "error"."""
        is_running = not req.finished
        req.fail(error)
        if is_running:
            self.planner.finish(req)

    @property
    def has_requests(self) -> bool:
        """True where some request is running or waiting."""
        return bool(self.planner.live or self.planner.waiting)

    # -- after errors --------------------------------------------------------------------------------------

    def start_over(self, error: Exception) -> list[Request]:
        """A step has failed: all go on from their committed tokens. Returns the request that is to blame, if one is."""
        self._drain()
        self.num_failures += 1
        suspects = self._suspects
        if suspects is None:  # it was to be decided who runs
            suspects = [*self.planner.live.values()] or [*self.planner.waiting][:1]
        guilty = accuse([req for req in suspects if not req.finished], error)
        self.planner.put_back_all()
        self._forget_steps()
        return [] if guilty is None else [guilty]

    def abort_all(self) -> None:
        """Drain the streams, then free what every request owns. The scheduler is as new afterwards.

        Of two interrupts the second one may come in here: then nobody waits for what is in flight, whose slots the next
        owner writes after it. Where it leaves something undone, `is_unclean` says so, and it is to be called again.
        """
        self.is_unclean = True
        try:
            self._drain()
        finally:
            self.planner.clear()
            self._forget_steps()
            self.is_unclean = False

    def _drain(self) -> None:
        self.forward_stream.synchronize()
        self.copy_stream.synchronize()

    def _forget_steps(self) -> None:
        self.result_queue.clear()
        self.batch_record_buf.clear()
        self._begin_step()  # a failed step must not poison what comes next


def pack_for_host(verdict: Verdict) -> PackedVerdict:
    """What the host commits, the integers in one piece, so that a step needs one download."""
    columns = (verdict.accept_lens, verdict.draft_depths, verdict.match_lens, verdict.has_numbers.long())
    return PackedVerdict(
        integers=torch.cat([verdict.predict, torch.stack(columns, 1)], 1), logprobs=verdict.logprobs
    )


def in_new_memory(packed: PackedVerdict) -> PackedVerdict:
    """A copy that is not recorded: the next replay writes its results over those of this one.

    Recorded steps have no log-probabilities.
    """
    return replace(packed, integers=packed.integers.clone())


def copy_to_host(packed: PackedVerdict) -> HostVerdict:
    """Start the download. On a CPU this hands over the tensors themselves."""

    def download(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "cpu":
            return tensor
        if not tensor.numel():
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=can_pin(tensor.device.type))
        return pinned.copy_(tensor, non_blocking=True)

    integers, logprobs = download(packed.integers), packed.logprobs
    return HostVerdict(
        predict=integers[:, :-4],
        accept_lens=integers[:, -4],
        draft_depths=integers[:, -3],
        match_lens=integers[:, -2],
        has_numbers=integers[:, -1],
        logprobs=TokenLogprobs(
            chosen=download(logprobs.chosen), top=download(logprobs.top), top_ids=download(logprobs.top_ids)
        ),
    )
