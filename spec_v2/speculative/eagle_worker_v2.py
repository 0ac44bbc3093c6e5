"""EAGLE (Li et al. 2024, arXiv 2401.15077): a head that drafts from the target's hidden states."""

from typing import final

from spec_v2.speculative.model_draft_worker import ModelDraftWorker


@final
class EAGLEWorkerV2(ModelDraftWorker):
    """Drafts chains and trees with a head over (token `p + 1`, target hidden state of `p`)."""

    @property
    def shifted(self) -> bool:
        return True
