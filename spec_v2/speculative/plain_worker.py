"""Plain decoding: the round with a tree that is only its root. One path for everything."""

from typing import Any, final

from spec_v2.scheduler.schedule_batch import ScheduleBatch
from spec_v2.scheduler.streams import Pending
from spec_v2.speculative.base_spec_worker import BaseSpecWorker
from spec_v2.speculative.draft_tree import root_only
from spec_v2.types import DraftTree


@final
class PlainWorker(BaseSpecWorker):
    """No drafts: every step emits the bonus token alone."""

    def draft(self, batch: ScheduleBatch, inputs: Pending[Any]) -> Pending[DraftTree]:
        return self.stream.launch(root_only, inputs, label="draft")
