"""What the scheduler knows on the host: requests, and the batch that a step runs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from spec_v2.mem_cache.prefix_cache import Node
from spec_v2.observability.step_log import StepTensors
from spec_v2.sampling_params import SamplingParams
from spec_v2.scheduler.sampling_batch_info import SamplingBatchInfo, host_tensor
from spec_v2.scheduler.stop_strings import StopStrings
from spec_v2.scheduler.streams import Event, Pending
from spec_v2.types import (
    DraftTree,
    ForwardMode,
    HostVerdict,
    NextDraft,
    PackedVerdict,
    PromptStaging,
    TreeShape,
    Verdict,
)

PROMISING_MATCH_LEN = 4
GAIN_WEIGHT = 0.25  # from the first guess, two steps in vain stop a single request from drafting on a CPU


@dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """One prompt on its way to a completion. Host state only; lengths in tokens.

    `kv_committed_len` lags the device by the steps in flight. A row owns positions `0..kv_allocated_len-1`.
    """

    request_id: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    max_new_tokens: int  # what the request asked for, cut to what the context holds
    stop_token_ids: frozenset[int]
    stop_strings: StopStrings | None = None

    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    finish_reason: str | None = None
    matched_stop: int | str | None = None
    error: str | None = None  # why it ended, where the reason is "error"
    num_failures: int = 0  # failed steps that it was part of, lately
    failed_at: int = 0  # tokens of its output at the last of them
    on_trial: bool = False  # it runs alone, to see whether it is what fails
    fill_ids: tuple[int, ...] = ()  # what its prefill runs: the prompt, and after a retraction its output
    row: int = 0
    pages: list[int] = field(default_factory=list)
    cached_path: list[Node] = field(default_factory=list)  # nodes that own the first of its pages
    cached_tokens: int = 0
    prefill_start: int = 0  # tokens that were cached when its prefill began
    state_row: int = 0  # whose state its next chunk goes on from: none, a snapshot's, or its own row's
    fork_len: int = 0  # tokens whose KV was known at its admission, with a snapshot to go on from or not
    snapshots: list[tuple[int, int]] = field(
        default_factory=list
    )  # (tokens, row), not yet the prefix cache's
    epoch: int = 0  # counts retractions; results of an earlier epoch are dropped
    kv_committed_len: int = 0
    kv_allocated_len: int = 0
    num_in_flight: int = 0
    num_unread: int = 0  # newest tokens that the draft model has not read, steps in flight included
    step_lens: list[int] = field(default_factory=list)  # tokens of each step in the output, prefills too
    draft_gain: float = 0.5  # accepted drafts per step that drafted, a moving average
    match_len: int = 0  # NGRAM: tokens of the newest match that the host knows
    is_forced: bool = False  # its steps accepted by force, not what the target says
    accept_lens: list[int] = field(default_factory=list)
    draft_depths: list[int] = field(default_factory=list)
    settings: list[tuple[int, int, int]] = field(default_factory=list)  # of each decode step

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def fail(self, error: str) -> None:
        """End with finish_reason "error". What it has said stays said."""
        self.finish_reason, self.error = "error", error

    def disown(self) -> None:
        """Forget what it owned, for whoever has taken it back."""
        self.pages, self.cached_path, self.snapshots, self.row = [], [], [], 0
        self.kv_committed_len = self.kv_allocated_len = self.num_unread = 0

    def is_finishing(self) -> bool:
        """True where the steps in flight reach `max_new_tokens` for certain: each emits at least one token."""
        return len(self.output_ids) + self.num_in_flight >= self.max_new_tokens

    def expected_gain(self) -> float:
        """Drafts that a drafting step would get accepted: as lately, or what a long match promises."""
        promise = self.match_len / 2 if self.match_len >= PROMISING_MATCH_LEN else 0.0
        return max(self.draft_gain, promise)

    def note_step(self, num_correct_drafts: int, match_len: int, *, drafted: bool) -> None:
        """Remember how a step went: a moving average over the steps that drafted."""
        self.match_len = match_len
        if drafted:
            self.draft_gain += GAIN_WEIGHT * (num_correct_drafts - self.draft_gain)

    def commit(self, tokens: Sequence[int]) -> None:
        """Append a step's tokens up to the earliest cut: a stop token or string, else the length.

        Nothing stops an answer before `min_new_tokens`.
        """
        for token in tokens:
            self.output_ids.append(token)
            if len(self.output_ids) >= self.params.min_new_tokens:
                self._look_for_stop(token)
            if self.finish_reason is None and len(self.output_ids) >= self.max_new_tokens:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                return

    def _look_for_stop(self, token: int) -> None:
        if token in self.stop_token_ids:
            self.matched_stop = token
        elif self.stop_strings is not None:
            self.matched_stop = self.stop_strings.find(self.output_ids)
        if self.matched_stop is not None:
            self.finish_reason = "stop"


@dataclass(slots=True, kw_only=True)
class ScheduleBatch:
    """The requests of a step. Workers rebind its fields during a step; isolation puts all of them back.

    `rows`: row numbers, in host memory. `seq_lens`: KV-ready lengths before the step; None means that they
    are to be gathered from the rows. `max_seq_len`: a host bound on them. `spec_info`: between steps the row
    numbers; within a step whatever the worker last made.
    """

    reqs: list[Request]
    forward_mode: ForwardMode
    rows: Int[Tensor, " b"]
    seq_lens: Tensor | Pending[Tensor] | None
    max_seq_len: int
    sampling_info: SamplingBatchInfo
    padded: bool = False  # filled up with row 0 to a size that launches are recorded for
    shape: TreeShape | None = None  # of this decode step; None for a prefill
    catches_up: bool = False  # the draft model first reads what it has missed in steps without drafts
    prompt_staging: PromptStaging | None = None
    input_ids: Any = None
    spec_info: Any = None

    def __len__(self) -> int:
        return len(self.reqs)

    def select(self, keep: Sequence[int], pin: bool) -> None:
        """Keep the requests at these places. Nothing on the device is touched."""
        self._set_requests([self.reqs[i] for i in keep], pin)

    def merge(self, other: "ScheduleBatch", pin: bool) -> None:
        """Append the requests of `other`."""
        self._set_requests(self.reqs + other.reqs, pin)

    def copy(self) -> "ScheduleBatch":
        """What result processing needs of a batch that goes on changing."""
        return ScheduleBatch(
            reqs=list(self.reqs),
            forward_mode=self.forward_mode,
            rows=self.rows,
            seq_lens=self.seq_lens,
            max_seq_len=self.max_seq_len,
            sampling_info=self.sampling_info,
            shape=self.shape,
            catches_up=self.catches_up,
        )

    def pad_to(self, size: int | None, pin: bool) -> None:
        """Fill up with row 0 to `size` rows; None: no more rows than requests."""
        if len(self.rows) != (size or len(self)):
            self._set_requests(self.reqs, pin, size or len(self))
        self.padded = size is not None

    def _set_requests(self, reqs: list[Request], pin: bool, size: int = 0) -> None:
        self.reqs = reqs
        padding = max(size - len(reqs), 0)
        self.rows = host_tensor([r.row for r in reqs] + [0] * padding, torch.long, pin)
        self.spec_info = self.rows
        self.seq_lens = None
        self.sampling_info = SamplingBatchInfo.from_requests(reqs, pin, padding)


@dataclass(slots=True, kw_only=True)
class GenerationBatchResult:
    """What one forward left behind. The host looks at `host` only, and only after `copy_done`."""

    verdict: Pending[Verdict]
    new_seq_lens: Tensor | Pending[Tensor] | None  # after a prefill: the batch's own object
    next_draft: Pending[NextDraft]
    tree: Pending[DraftTree] | None = None  # None for a prefill
    step: int = -1
    launched_at: float = 0.0  # by the scheduler's clock, in seconds
    epochs: tuple[int, ...] = ()
    # held until it is processed: the copy stream reads it, and the forward stream would get its memory again
    packed: Pending[PackedVerdict] | None = None
    host: Pending[HostVerdict] | None = None
    noted: Pending[StepTensors] | None = None  # while steps are recorded for a person to look at
    copy_done: Event | None = None
