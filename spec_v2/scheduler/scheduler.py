"""The loop on top: pick a batch, launch it, commit a result; synchronously or one step apart."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from typing import Any, Protocol

import torch

from spec_v2.mem_cache.kv_cache_builder import KvCache
from spec_v2.observability.trace import Trace
from spec_v2.scheduler.batch_result_processor import BatchResultProcessor
from spec_v2.scheduler.future_map import FutureMap, resolve_forward_inputs
from spec_v2.scheduler.schedule_batch import (
    GenerationBatchResult,
    Request,
    SamplingBatchInfo,
    ScheduleBatch,
    host_tensor,
)
from spec_v2.scheduler.streams import Step, Stream
from spec_v2.server_args import ServerArgs
from spec_v2.types import ForwardMode, HostVerdict, PromptStaging, Verdict


KEY_BLOCK = 64


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
    ) -> None:
        self.server_args = server_args
        self.worker = worker
        self.cache = cache
        self.future_map = future_map
        self.forward_stream = forward_stream
        self.copy_stream = copy_stream
        self.trace = trace
        self.pin = device.type == "cuda"
        self.processor = BatchResultProcessor(cache)
        self.waiting: deque[Request] = deque()
        self.live: dict[int, Request] = {}
        self.running_batch: ScheduleBatch | None = None
        self.last_batch: ScheduleBatch | None = None
        self.batch_record_buf: deque[Any] = deque(maxlen=2)
        self.num_steps_launched = 0

    # -- the two schedules: the same calls in another order ---------------------------------------------

    def event_loop_normal(self) -> Iterator[list[Request]]:
        """Launch a step, process it. Yields the requests that finished."""
        while (batch := self.get_next_batch_to_run()) is not None:
            result = self.run_batch(batch, overlap=False)
            yield self.process_batch_result(batch.copy(), result)

    def event_loop_overlap(self) -> Iterator[list[Request]]:
        """Launch step r, then process step r-1 while r runs. Yields the requests that finished."""
        in_flight: tuple[ScheduleBatch, GenerationBatchResult] | None = None
        while (batch := self.get_next_batch_to_run()) is not None or in_flight is not None:
            previous, in_flight = in_flight, None
            if batch is not None:
                in_flight = (batch.copy(), self.run_batch(batch, overlap=True))
            yield self.process_batch_result(*previous) if previous is not None else []

    def event_loop(self) -> Iterator[list[Request]]:
        """The loop that `disable_overlap_schedule` selects."""
        return (
            self.event_loop_normal()
            if self.server_args.disable_overlap_schedule
            else self.event_loop_overlap()
        )

    # -- one step ----------------------------------------------------------------------------------------

    def run_batch(self, batch: ScheduleBatch, *, overlap: bool) -> GenerationBatchResult:
        """Launch one step of `batch` and leave the batch as it was, but for what is re-applied below."""
        step = self._begin_step()
        with self.trace.span("host", "launch", step.index):
            self._launch_row_writes(batch)
            resolve_forward_inputs(batch, self.future_map, self.forward_stream)
            with self._forward_isolation(batch, overlap=overlap):
                result = self.worker.forward_batch_generation(
                    batch, on_publish=partial(self._publish, batch.rows)
                )
            self.forward_stream.launch(
                self.future_map.stash, batch.rows, result.verdict, result.next_draft, label="stash"
            )
            self._copy_result_to_host(result)
        for req in batch.reqs:
            req.num_in_flight += 1
        # What must survive the restore is re-applied here, in the open.
        batch.spec_info = batch.rows
        if overlap:
            batch.seq_lens = None  # gathered from the rows at the next resolve
        elif result.new_seq_lens is not batch.seq_lens:
            batch.seq_lens = result.new_seq_lens
        batch.input_ids = None
        result.step = step.index
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
        with self.trace.span("host", "process", result.step):
            finished = self.processor.process(batch, result)
        for req in finished:
            del self.live[req.request_id]
        return finished

    def _begin_step(self) -> Step:
        step = Step(self.num_steps_launched)
        self.num_steps_launched += 1
        self.forward_stream.step = self.copy_stream.step = step
        return step

    def _publish(self, rows: torch.Tensor, verdict: Any) -> Any:
        """Between verify and draft-extend: from this event on, whoever needs the new lengths may go on."""
        new_seq_lens = self.forward_stream.launch(self.future_map.publish, rows, verdict, label="publish")
        self.future_map.publish_ready = self.forward_stream.record_event()
        return new_seq_lens

    def _copy_result_to_host(self, result: GenerationBatchResult) -> None:
        self.copy_stream.wait_event(self.forward_stream.record_event())
        result.host = self.copy_stream.launch(copy_to_host, result.verdict, label="copy")
        result.copy_done = self.copy_stream.record_event()

    # -- what runs next ----------------------------------------------------------------------------------

    def add_request(self, req: Request) -> None:
        """Queue a request that `check_fits` has let pass."""
        self.waiting.append(req)

    def check_fits(self, req: Request) -> None:
        """Raise ValueError where the pool could not hold the request even alone."""
        needed, usable = self._pages_needed(req), self.cache.pages.num_usable
        if needed > usable:
            page_size = self.cache.pages.page_size
            raise ValueError(
                f"max_total_tokens={usable * page_size} is too small for one request: {len(req.prompt_ids)} prompt "
                f"tokens and max_new_tokens={req.max_new_tokens} need {needed * page_size} slots, drafts included; "
                "raise --max-total-tokens or lower max_new_tokens"
            )

    def get_next_batch_to_run(self) -> ScheduleBatch | None:
        """Prefill what can be admitted, else decode what runs. None where nothing is to be launched."""
        with self.trace.span("host", "schedule", self.num_steps_launched):
            if self.last_batch is not None and self.last_batch.forward_mode.is_extend():
                self._merge_into_running(self.last_batch)
            self.last_batch = self._new_prefill_batch() or self._next_decode_batch()
            return self.last_batch

    def _merge_into_running(self, batch: ScheduleBatch) -> None:
        batch.forward_mode = ForwardMode.DECODE
        if self.running_batch is None:
            self.running_batch = batch
            batch.seq_lens = None
        else:
            self.running_batch.merge(batch, self.pin)

    def _next_decode_batch(self) -> ScheduleBatch | None:
        batch = self.running_batch
        if batch is None:
            return None
        keep = [i for i, r in enumerate(batch.reqs) if not r.finished and not r.is_finishing()]
        if len(keep) < len(batch):
            batch.select(keep, self.pin)
        if not keep:
            self.running_batch = None
            return None
        for req in batch.reqs:
            self._reserve(req, req.kv_committed_len + 2 * self.server_args.slots_per_step)
        lag = self.server_args.accept_width
        bound = max(r.kv_committed_len + r.num_in_flight * lag for r in batch.reqs)
        # Rounded up so that the lag seldom changes a shape: in bf16 the key count decides the last bit.
        batch.max_seq_len = -(-bound // KEY_BLOCK) * KEY_BLOCK
        return batch

    def _new_prefill_batch(self) -> ScheduleBatch | None:
        admitted: list[Request] = []
        num_tokens = 0
        while self.waiting and self.cache.rows.num_free and self._fits(self.waiting[0]):
            num_tokens += len(self.waiting[0].prompt_ids)
            if admitted and num_tokens > self.server_args.max_prefill_tokens:
                break
            req = self.waiting.popleft()
            req.row = self.cache.rows.alloc()
            self.live[req.request_id] = req
            req.kv_committed_len = len(req.prompt_ids)
            self._reserve(req, len(req.prompt_ids) + 2 * self.server_args.slots_per_step)
            admitted.append(req)
        return self._prefill_batch(admitted) if admitted else None

    def _prefill_batch(self, reqs: list[Request]) -> ScheduleBatch:
        lens = tuple(len(r.prompt_ids) for r in reqs)
        rows = host_tensor([r.row for r in reqs], torch.long, self.pin)
        flat = [token for r in reqs for token in r.prompt_ids]
        return ScheduleBatch(
            reqs=reqs,
            forward_mode=ForwardMode.EXTEND,
            rows=rows,
            seq_lens=host_tensor(lens, torch.long, self.pin),
            max_seq_len=max(lens),
            sampling_info=SamplingBatchInfo.from_requests(reqs, self.pin),
            prompt_staging=PromptStaging(
                rows=rows, input_ids=host_tensor(flat, torch.long, self.pin), extend_lens=lens
            ),
            spec_info=rows,
        )

    # -- memory: admission and allocation count in the same function ---------------------------------------

    def _pages_needed(self, req: Request) -> int:
        """The most a request can ever own: its last step starts below prompt + max_new_tokens."""
        longest = len(req.prompt_ids) + req.max_new_tokens
        return self.cache.pages.ceil_pages(longest + 2 * self.server_args.slots_per_step)

    def _fits(self, req: Request) -> bool:
        promised = sum(self._pages_needed(r) for r in self.live.values())
        return promised + self._pages_needed(req) <= self.cache.pages.num_usable

    def _reserve(self, req: Request, num_tokens: int) -> None:
        """Own slots for positions up to `num_tokens`. Host integers only: the device may be one step ahead."""
        missing = self.cache.pages.ceil_pages(num_tokens) - len(req.pages)
        if missing > 0:
            req.pages += self.cache.pages.alloc(missing)

    def _launch_row_writes(self, batch: ScheduleBatch) -> None:
        """Put slots that were allocated since the last step into the row table, on the forward stream."""
        page_size = self.cache.pages.page_size
        rows: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for req in batch.reqs:
            new_pages = req.pages[req.kv_allocated_len // page_size :]
            new_slots = self.cache.pages.slots(new_pages)
            rows += [req.row] * len(new_slots)
            positions += range(req.kv_allocated_len, req.kv_allocated_len + len(new_slots))
            slots += new_slots
            req.kv_allocated_len += len(new_slots)
        if slots:
            written = (host_tensor(values, torch.long, self.pin) for values in (rows, positions, slots))
            self.forward_stream.launch(self.cache.row_table.write, *written, label="row_table")

    # -- giving up -----------------------------------------------------------------------------------------

    def abort_all(self) -> None:
        """Drain the streams, then free what every request owns. The scheduler is as new afterwards."""
        self.forward_stream.synchronize()
        self.copy_stream.synchronize()
        for req in self.live.values():
            req.finish_reason = "abort"
            self.processor.release(req)
        for req in self.waiting:
            req.finish_reason = "abort"
        self.live.clear()
        self.waiting.clear()
        self.batch_record_buf.clear()
        self.running_batch = self.last_batch = None
        self._begin_step()  # a failed step must not poison what comes next


def copy_to_host(verdict: Verdict) -> HostVerdict:
    """Start the download of what the host commits. On a CPU this hands over the tensors themselves."""

    def download(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "cpu":
            return tensor
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return pinned.copy_(tensor, non_blocking=True)

    return HostVerdict(
        predict=download(verdict.predict),
        accept_lens=download(verdict.accept_lens),
        draft_depths=download(verdict.draft_depths),
    )
