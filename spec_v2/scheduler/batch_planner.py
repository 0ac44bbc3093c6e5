"""What runs next, and who owns which pages for it. Host integers only.

Admission, allocation and retraction count in pages, by the same functions: a request owns pages for its final
KV and for two steps of drafts, since the device may be one step ahead of what the host knows.
"""

from collections import deque
from collections.abc import Sequence

import torch

from spec_v2.mem_cache.kv_cache_builder import KvCache
from spec_v2.model_executor.graph_runner import padded_size
from spec_v2.model_executor.npu_backend import can_pin
from spec_v2.scheduler.future_map import MOST_UNREAD
from spec_v2.scheduler.sampling_batch_info import SamplingBatchInfo, host_tensor
from spec_v2.scheduler.schedule_batch import Request, ScheduleBatch
from spec_v2.scheduler.state_plan import plan_states
from spec_v2.scheduler.step_shapes import StepShapes
from spec_v2.server_args import ServerArgs
from spec_v2.types import CountReset, ForwardMode, PromptStaging, TreeShape

KEY_BLOCK = 64
SMALLEST_BOUND = 512
TOKENS_AHEAD = 32


class BatchPlanner:
    """Owns the queues. `next_batch` prefills what can be admitted, else decodes what runs."""

    def __init__(
        self,
        server_args: ServerArgs,
        cache: KvCache,
        device: torch.device,
        shapes: StepShapes,
        sizes: Sequence[int] = (),
    ) -> None:
        self.server_args = server_args
        self.shapes = shapes
        self.cache = cache
        self.sizes = sizes  # batch sizes that decode steps are recorded for
        self.pin = can_pin(device.type)
        self.waiting: deque[Request] = deque()
        self.live: dict[int, Request] = {}
        self.running_batch: ScheduleBatch | None = None
        self.last_batch: ScheduleBatch | None = None
        self.chunked: Request | None = None  # its prompt is partly computed
        self.widths: deque[int] = deque(
            [1], maxlen=3
        )  # most tokens per request of this step and those in flight
        self.is_short = False  # something was retracted: admit nothing until something finishes
        # then a step without drafts is not read by the draft model, until one drafts again
        self.leaves_unread = bool(server_args.speculative_adaptive) and server_args.algorithm.has_draft_kv()
        self.keeps_known_ids = server_args.algorithm.keeps_history()
        # looked up once: asked for every request in every step, they were half of the host's time at batch 32
        self.slots_per_step = server_args.slots_per_step

    # -- which batch ---------------------------------------------------------------------------------------

    def next_batch(self) -> ScheduleBatch | None:
        """The batch of the next step, or None where nothing is to be launched."""
        last = self.last_batch
        after_prefill = last is not None and last.forward_mode.is_extend()
        if last is not None and after_prefill:
            self._merge_into_running(last)
        if self.chunked is not None and after_prefill:  # a long prompt and the running requests take turns
            self.last_batch = self._decode_batch() or self._prefill_batch()
        else:
            self.last_batch = self._prefill_batch() or self._decode_batch()
        return self.last_batch

    def _merge_into_running(self, batch: ScheduleBatch) -> None:
        complete = [i for i, r in enumerate(batch.reqs) if r is not self.chunked and r.row]
        batch.select(complete, self.pin)
        batch.forward_mode = ForwardMode.DECODE
        if self.running_batch is None:
            self.running_batch = batch
        elif complete:
            self.running_batch.merge(batch, self.pin)

    def _decode_batch(self) -> ScheduleBatch | None:
        batch = self.running_batch
        if batch is None:
            return None
        keep = [r for r in batch.reqs if r.row and not r.finished and not r.is_finishing()]
        self._make_room(keep)
        if len(keep) < len(batch):
            kept = set(keep)  # a list would be searched a thousand times in a batch of a thousand
            batch.select([i for i, r in enumerate(batch.reqs) if r in kept], self.pin)
        if not keep:
            self.running_batch = None
            return None
        ahead = self._pages_ahead(len(keep))
        for req in keep:
            needed = self._decode_pages(req)
            if needed > len(req.pages):
                most = self._pages_for(len(req.prompt_ids) + req.max_new_tokens)
                self._own(req, max(needed, min(needed + ahead, most)))
        batch.shape = self.shapes.next(keep)
        batch.catches_up = self.leaves_unread and self._note_unread(keep, batch.shape)
        # what each step in flight may add to a length that the host knows
        self.widths.append(batch.shape.longest_path + 1)
        lag = max(self.widths)
        bound = max(r.kv_committed_len + r.num_in_flight * lag for r in keep)
        self._fix_shape(batch, bound)
        return batch

    def _fix_shape(self, batch: ScheduleBatch, bound: int) -> None:
        """Rounded up, so that few shapes occur: recorded steps have powers of two as bounds of their lengths."""
        size = padded_size(len(batch), self.sizes) if batch.sampling_info.has_fixed_shape else None
        batch.pad_to(size, self.pin)
        if batch.padded:
            batch.max_seq_len = max(SMALLEST_BOUND, 1 << (bound - 1).bit_length())
        else:
            # the lag seldom changes a shape then: in bf16 the key count decides the last bit
            batch.max_seq_len = -(-bound // KEY_BLOCK) * KEY_BLOCK

    def _note_unread(self, reqs: list[Request], shape: TreeShape) -> bool:
        """Count what the draft model has not read after this step; whether it first reads what it has missed so far:
        in time for drafts, and before there is no more room to keep it."""
        most = max(req.num_unread for req in reqs)
        reads = most == MOST_UNREAD or (shape.drafts and most > 0)
        for req in reqs:
            req.num_unread = (0 if reads else req.num_unread) + (not shape.drafts)
        return reads

    # -- prefill -------------------------------------------------------------------------------------------

    def _prefill_batch(self) -> ScheduleBatch | None:
        budget = self.server_args.max_prefill_tokens
        chunk = self.server_args.chunked_prefill_size
        budget = budget if chunk is None else min(budget, chunk)
        reqs: list[Request] = []
        spans: list[tuple[int, int]] = []
        while budget > 0 and (req := self.chunked or self._admit_next(budget, first=not reqs)) is not None:
            start, end = req.kv_committed_len, len(req.fill_ids)
            if chunk is not None:
                end = min(end, start + budget)
            self.chunked = req if end < len(req.fill_ids) else None
            req.kv_committed_len = end
            budget -= end - start
            reqs.append(req)
            spans.append((start, end))
            if self.chunked is not None:
                break
        return self._extend_batch(reqs, spans) if reqs else None

    def _admit_next(self, budget: int, first: bool) -> Request | None:
        """Give the oldest waiting request a row and pages, if they are there; without chunking, if it fits `budget`."""
        if not self.waiting or not self.cache.rows.num_free or (self.is_short and self.live):
            return None
        req = self.waiting[0]
        if self.live and (req.on_trial or next(iter(self.live.values())).on_trial):
            return None  # whoever is on trial runs alone
        req.fill_ids = req.prompt_ids + tuple(req.output_ids)
        prefix = self.cache.prefix.match(req.fill_ids)
        num_cached = len(prefix) * self.cache.pages.page_size
        if (
            self.server_args.chunked_prefill_size is None
            and not first
            and len(req.fill_ids) - num_cached > budget
        ):
            return None
        self.cache.prefix.lock(prefix)
        wanted = self._pages_for(len(req.fill_ids)) - len(prefix)
        headroom = self.cache.pages.ceil_pages(self.slots_per_step) * len(self.live)
        if wanted + headroom > self.num_available:
            self.cache.prefix.unlock(prefix)
            return None
        self.is_short = False
        self.live[req.request_id] = req  # first: at any time a request is in one of both
        self.waiting.popleft()
        req.row = self.cache.rows.alloc()
        req.cached_path = prefix
        req.pages = [node.page for node in prefix]
        req.cached_tokens = max(req.cached_tokens, num_cached)
        req.kv_committed_len = req.prefill_start = num_cached
        req.state_row = prefix[-1].state_row if prefix else 0
        req.fork_len = len(self.cache.prefix.known(req.fill_ids)) * self.cache.pages.page_size
        self._own(req, wanted + len(prefix))
        return req

    def _extend_batch(self, reqs: list[Request], spans: list[tuple[int, int]]) -> ScheduleBatch:
        def host(values: list[int]) -> torch.Tensor:
            return host_tensor(values, torch.long, self.pin)

        rows = host([r.row for r in reqs])
        chunks = [r.fill_ids[start:end] for r, (start, end) in zip(reqs, spans, strict=True)]
        next_ids = [
            r.fill_ids[end] if end < len(r.fill_ids) else -1 for r, (_, end) in zip(reqs, spans, strict=True)
        ]
        known = [t for r, (_, end) in zip(reqs, spans, strict=True) for t in r.fill_ids[:end]]
        return ScheduleBatch(
            reqs=reqs,
            forward_mode=ForwardMode.EXTEND,
            rows=rows,
            seq_lens=host([end for _, end in spans]),
            max_seq_len=max(end for _, end in spans),
            sampling_info=SamplingBatchInfo.from_requests(reqs, self.pin),
            prompt_staging=PromptStaging(
                rows=rows,
                input_ids=host([t for chunk in chunks for t in chunk]),
                prefix_lens=tuple(start for start, _ in spans),
                extend_lens=tuple(end - start for start, end in spans),
                resumed_lens=tuple(
                    start - r.prefill_start for r, (start, _) in zip(reqs, spans, strict=True)
                ),
                next_ids=host(next_ids),
                known_ids=host(known if self.keeps_known_ids else []),
                count_reset=self._count_reset(reqs),
                states=plan_states(reqs, spans, self.cache.prefix) if self.cache.has_states else None,
            ),
            spec_info=rows,
        )

    def _count_reset(self, batch: list[Request]) -> CountReset | None:
        """For requests with penalties: what they are counted from. A chunk emits nothing, so it may be set again."""
        reqs = [r for r in batch if r.params.penalises]
        if not reqs:
            return None

        def host(values: list[int]) -> torch.Tensor:
            return host_tensor(values, torch.long, self.pin)

        return CountReset(
            rows=host([r.row for r in reqs]),
            prompt_rows=host([r.row for r in reqs for _ in r.prompt_ids]),
            prompt_tokens=host([t for r in reqs for t in r.prompt_ids]),
            output_rows=host([r.row for r in reqs for _ in r.output_ids]),
            output_tokens=host([t for r in reqs for t in r.output_ids]),
        )

    # -- memory --------------------------------------------------------------------------------------------

    @property
    def num_available(self) -> int:
        """Pages that can be had now: free ones, and cached ones that nobody uses."""
        return self.cache.pages.num_free + self.cache.prefix.num_evictable

    def check_fits(self, req: Request) -> None:
        """Raise ValueError where the pool could not hold the request even alone."""
        needed = self._pages_for(len(req.prompt_ids) + req.max_new_tokens)
        usable, page_size = self.cache.pages.num_usable, self.cache.pages.page_size
        if needed > usable:
            raise ValueError(
                f"max_total_tokens={usable * page_size} is too small for one request: {len(req.prompt_ids)} prompt "
                f"tokens and max_new_tokens={req.max_new_tokens} need {needed * page_size} slots, drafts included; "
                "raise --max-total-tokens or lower max_new_tokens"
            )

    def _pages_for(self, num_tokens: int) -> int:
        """Pages of a request with `num_tokens` of final KV: this step's drafts, and a step the host has not seen."""
        return self.cache.pages.ceil_pages(num_tokens + 2 * self.slots_per_step)

    def _decode_pages(self, req: Request) -> int:
        return max(self._pages_for(req.kv_committed_len), len(req.pages))

    def _pages_ahead(self, num_requests: int) -> int:
        """Pages to take beyond what a step needs, so that the row table is not written in every step; only of a pool
        that has far more."""
        pages = self.cache.pages.ceil_pages(TOKENS_AHEAD)
        return pages if self.cache.pages.num_free >= 2 * pages * num_requests else 0

    def _own(self, req: Request, num_pages: int) -> None:
        missing = num_pages - len(req.pages)
        if missing > self.cache.pages.num_free:
            self.cache.prefix.evict(missing - self.cache.pages.num_free)
        req.pages += self.cache.pages.alloc(missing)

    def _make_room(self, keep: list[Request]) -> None:
        """Retract requests until the others can take their step. Shortest output first, then longest prompt."""
        while sum(self._decode_pages(r) - len(r.pages) for r in keep) > self.num_available:
            candidates = [*keep, self.chunked] if self.chunked is not None else keep
            victim = min(candidates, key=lambda r: (len(r.output_ids), -len(r.prompt_ids)))
            if victim is self.chunked:
                self.chunked = None
            else:
                keep.remove(victim)
            self.retract(victim)

    def retract(self, req: Request) -> None:
        """Take a running request's memory; it waits, first in line, and goes on from the tokens the host knows."""
        self.keep_prefix(req)
        self.put_back(req)
        self.is_short = True

    def put_back(self, req: Request) -> None:
        """The same for another reason than a full pool, and what it has computed is shared with nobody."""
        self.release(req)
        req.epoch += 1  # what is in flight for it is dropped when it lands
        req.num_in_flight = 0
        self.waiting.appendleft(req)
        del self.live[req.request_id]
        running = self.running_batch
        if running is not None and req in running.reqs:  # else it would be in there twice when it comes back
            running.select([i for i, other in enumerate(running.reqs) if other is not req], self.pin)

    def keep_prefix(self, req: Request) -> None:
        """Let others share the pages whose KV is final: up to the newest token that the host knows and, of those in
        flight too, all but the ones that the draft model has not read."""
        final = req.kv_committed_len + min(req.num_in_flight - req.num_unread, 0)
        known = final + (self.cache.prefix.lookahead > 0)  # draft KV knows the token behind
        tokens = (req.prompt_ids + tuple(req.output_ids))[:known]
        self.cache.prefix.insert(tokens, req.pages, req.cached_path)
        req.snapshots = [s for s in req.snapshots if not self.cache.prefix.keep_snapshot(tokens, *s)]

    def release(self, req: Request) -> None:
        """Free all that a request owns. A step in flight may still write it: the next owner is queued behind."""
        shared = len(req.cached_path)
        self.cache.prefix.unlock(req.cached_path)
        self.cache.pages.free(req.pages[shared:])
        self.cache.rows.free(req.row)
        for _, row in req.snapshots:
            self.cache.snapshots.free(row)
        req.disown()

    def finish(self, req: Request) -> None:
        """A request has its finish reason: give everything back."""
        if req.row:
            if req.error is None:  # what a failed request has computed is shared with nobody
                self.keep_prefix(req)
            self.release(req)
            del self.live[req.request_id]
            self.is_short = False
        elif req in self.waiting:
            self.waiting.remove(req)
        if req is self.chunked:
            self.chunked = None

    def try_first(self) -> None:
        """Whoever is on trial goes before the others that wait."""
        self.waiting = deque(sorted(self.waiting, key=lambda req: not req.on_trial))

    def put_back_all(self) -> None:
        """All requests that have not finished wait, to go on from the tokens the host knows.

        Nothing is undone piece by piece: an error or interrupt may come between any two lines, and after it nobody
        knows which KV was written. So all owners and all prefixes are forgotten at once.
        """
        everyone = {id(req): req for req in (*self.live.values(), *self.waiting)}.values()
        for req in everyone:
            req.disown()
            req.epoch += 1
            req.num_in_flight = 0
        self.waiting = deque(req for req in everyone if not req.finished)
        self.try_first()
        self.live.clear()
        self.running_batch = self.last_batch = self.chunked = None
        self.is_short = False
        self.cache.forget_owners()

    def clear(self) -> None:
        """Give up all requests."""
        for req in (*self.live.values(), *self.waiting):
            req.finish_reason = req.finish_reason or "abort"
        self.put_back_all()
