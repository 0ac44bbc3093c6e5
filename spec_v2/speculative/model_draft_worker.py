"""Workers that draft with a model of their own KV: EAGLE's head and STANDALONE's small LM differ by one shift."""

from abc import abstractmethod
from typing import Any

from spec_v2.model_executor.model_runner import ModelRunner
from spec_v2.scheduler.schedule_batch import ScheduleBatch
from spec_v2.scheduler.streams import Pending
from spec_v2.speculative.base_spec_worker import BaseSpecWorker
from spec_v2.speculative.draft_extend import draft_extend, prefill_draft
from spec_v2.speculative.draft_tree import grow_tree, root_only
from spec_v2.speculative.verify import PrefillOutput
from spec_v2.types import DraftTree, ForwardMode, NextDraft, Verdict


class ModelDraftWorker(BaseSpecWorker):
    """Abstract: drafts a chain (topk 1) or a tree with `num_steps - 1` forwards of the draft model.

    A step that does not draft leaves the draft model alone: what it should have read is remembered, and read in one
    forward at the beginning of the next step that drafts. What is left for the next step is always as wide as
    the largest shape needs, as that step's shape is chosen later.
    """

    follows_shape = True

    @property
    @abstractmethod
    def shifted(self) -> bool:
        """Whether draft slot `p` holds token `p + 1` together with the target's hidden state of `p`."""

    @property
    def keeps_target_hidden(self) -> bool:
        return self.shifted

    @property
    def _draft(self) -> ModelRunner:
        assert self.draft_runner is not None
        return self.draft_runner

    def catch_up(self, batch: ScheduleBatch, inputs: Pending[Any]) -> Pending[Any]:
        sampling = batch.sampling_info.sampling
        return self._catch_up(inputs, draft_extend, self.shape, sampling, self.shifted, batch.max_seq_len)

    def draft(self, batch: ScheduleBatch, inputs: Pending[Any]) -> Pending[DraftTree]:
        batch.forward_mode = ForwardMode.DRAFT
        shape = self.shape_for(batch)
        if not shape.drafts:
            batch.spec_info = self.stream.launch(root_only, inputs, label="draft")
            return batch.spec_info  # type: ignore[no-any-return]
        batch.spec_info = self.stream.launch(
            grow_tree,
            self._draft,
            self.cache,
            inputs,
            shape,
            batch.sampling_info.sampling,
            self.shifted,
            batch.max_seq_len,
            label="draft",
        )
        return batch.spec_info  # type: ignore[no-any-return]

    def draft_extend(
        self, batch: ScheduleBatch, inputs: Pending[Any], verdict: Pending[Verdict]
    ) -> Pending[NextDraft]:
        batch.forward_mode, batch.spec_info = ForwardMode.DRAFT_EXTEND, verdict
        if not self.shape_for(batch).drafts:
            return self._remember(batch, inputs, verdict)
        return self.stream.launch(
            draft_extend,
            self._draft,
            self.cache,
            inputs,
            verdict,
            self.shape,
            batch.sampling_info.sampling,
            self.shifted,
            batch.max_seq_len,
            label="draft_extend",
        )

    def prefill_draft(
        self, batch: ScheduleBatch, output: Pending[PrefillOutput], verdict: Pending[Verdict]
    ) -> Pending[NextDraft]:
        self._forget(batch)
        return self.stream.launch(
            prefill_draft,
            self._draft,
            self.cache,
            batch.spec_info,
            output,
            self.shape,
            batch.sampling_info.sampling,
            self.shifted,
            label="draft_extend",
        )
