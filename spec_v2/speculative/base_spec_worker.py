"""The round that all workers share: draft, verify, publish, draft-extend.

A worker runs on the scheduler thread and only launches. It may rebind any field of the batch on its way, as
isolation puts them back, but never writes into the batch's tensors; what it launches gets frozen inputs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from operator import attrgetter
from typing import Any, ClassVar

from torch import Tensor

from spec_v2.mem_cache.kv_cache_builder import KvCache
from spec_v2.model_executor.model_runner import ModelRunner
from spec_v2.scheduler.future_map import FutureMap
from spec_v2.scheduler.schedule_batch import GenerationBatchResult, ScheduleBatch
from spec_v2.scheduler.streams import Pending, Stream
from spec_v2.server_args import ServerArgs
from spec_v2.speculative.adaptive import largest_shape
from spec_v2.speculative.catch_up import catch_up, forget, remember
from spec_v2.speculative.draft_tree import no_draft
from spec_v2.speculative.verify import PrefillOutput, prefill_target, verify
from spec_v2.types import DraftTree, ForwardMode, NextDraft, TreeShape, Verdict

OnPublish = Callable[[Pending[Verdict]], Pending[Tensor]]


class BaseSpecWorker(ABC):
    """Abstract: a concrete worker says how it drafts and what it keeps for its next draft.

    `follows_shape`: it drafts what `shape_for` says; otherwise always `shape`, the largest, and nothing can adapt.
    """

    follows_shape: ClassVar[bool] = False

    def __init__(
        self,
        *,
        stream: Stream,
        target: ModelRunner,
        draft: ModelRunner | None,
        cache: KvCache,
        future_map: FutureMap,
        server_args: ServerArgs,
    ) -> None:
        self.stream = stream
        self.target = target
        self.draft_runner = draft
        self.cache = cache
        self.future_map = future_map
        self.server_args = server_args
        self.shape = largest_shape(server_args)

    def forward_batch_generation(self, batch: ScheduleBatch, on_publish: OnPublish) -> GenerationBatchResult:
        """One step of the batch: a prefill, or one round of speculation."""
        if batch.forward_mode.is_extend():
            return self._prefill(batch, on_publish)
        inputs = self.catch_up(batch, batch.spec_info) if batch.catches_up else batch.spec_info
        tree = self.draft(batch, inputs)
        verdict = self.verify(batch, inputs, tree)
        new_seq_lens = on_publish(verdict)
        next_draft = self.draft_extend(batch, inputs, verdict)
        return GenerationBatchResult(
            verdict=verdict, new_seq_lens=new_seq_lens, next_draft=next_draft, tree=tree
        )

    def shape_for(self, batch: ScheduleBatch) -> TreeShape:
        """The tree of this batch's step. Settings change between steps of the whole batch only."""
        return batch.shape or self.shape

    def catch_up(self, batch: ScheduleBatch, inputs: Pending[Any]) -> Pending[Any]:
        """Launch the draft model over what steps without drafts have left unread; the inputs with first levels for all.

        A worker that lets `draft_extend` read in each step has left nothing.
        """
        return inputs

    @abstractmethod
    def draft(self, batch: ScheduleBatch, inputs: Pending[Any]) -> Pending[DraftTree]:
        """Launch whatever makes this step's tree."""

    def verify(
        self, batch: ScheduleBatch, inputs: Pending[Any], tree: Pending[DraftTree]
    ) -> Pending[Verdict]:
        """Launch the target over the tree."""
        batch.forward_mode, batch.input_ids = ForwardMode.TARGET_VERIFY, tree
        return self.stream.launch(
            verify,
            self.target,
            self.cache,
            inputs,
            tree,
            self.shape_for(batch),
            batch.sampling_info,
            self.future_map.token_counts,
            batch.max_seq_len,
            self.keeps_target_hidden,
            label="verify",
        )

    def draft_extend(
        self, batch: ScheduleBatch, inputs: Pending[Any], verdict: Pending[Verdict]
    ) -> Pending[NextDraft]:
        """Launch what prepares the next draft. A worker without a draft model has nothing to prepare."""
        return self.stream.launch(self._no_draft, verdict, label="draft_extend")

    def prefill_draft(
        self, batch: ScheduleBatch, output: Pending[PrefillOutput], verdict: Pending[Verdict]
    ) -> Pending[NextDraft]:
        """Launch the drafter's side of a prefill."""
        return self.stream.launch(self._no_draft, verdict, label="draft_extend")

    @property
    def keeps_target_hidden(self) -> bool:
        """Whether the drafter wants the target's hidden states."""
        return False

    # -- for workers whose draft model has KV: what steps without drafts leave unread ------------------------

    def _remember(
        self, batch: ScheduleBatch, inputs: Pending[Any], verdict: Pending[Verdict]
    ) -> Pending[NextDraft]:
        """In place of draft-extend, where the step does not draft."""
        return self.stream.launch(remember, self.future_map.unread, inputs, verdict, label="draft_extend")

    def _forget(self, batch: ScheduleBatch) -> None:
        """Before a prefill: the rows' last owners may have left something."""
        if self.server_args.speculative_adaptive:
            self.stream.launch(forget, self.future_map.unread, batch.rows, label="unread")

    def _catch_up(
        self, inputs: Pending[Any], draft_extend: Callable[..., NextDraft], *rest: Any
    ) -> Pending[Any]:
        parts = (self.future_map.unread, draft_extend, self.draft_runner, self.cache, inputs)
        return self.stream.launch(catch_up, *parts, *rest, label="catch_up")

    def _prefill(self, batch: ScheduleBatch, on_publish: OnPublish) -> GenerationBatchResult:
        output = self.stream.launch(
            prefill_target,
            self.target,
            self.cache,
            batch.spec_info,
            batch.sampling_info,
            self.future_map.token_counts,
            self.keeps_target_hidden,
            label="prefill",
        )
        verdict = self.stream.launch(attrgetter("verdict"), output, label="verdict")
        on_publish(verdict)
        next_draft = self.prefill_draft(batch, output, verdict)
        # the lengths a prefill ends with are those it began with: the same object
        return GenerationBatchResult(verdict=verdict, new_seq_lens=batch.seq_lens, next_draft=next_draft)

    def _no_draft(self, verdict: Verdict) -> NextDraft:
        return no_draft(len(verdict.accept_lens), verdict.accept_lens.device, self.target.dtype)
