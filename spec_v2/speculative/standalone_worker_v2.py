"""STANDALONE (Leviathan et al. 2023, arXiv 2211.17192): an independent small LM drafts."""

from typing import final

from spec_v2.speculative.model_draft_worker import ModelDraftWorker


@final
class StandaloneWorkerV2(ModelDraftWorker):
    """The draft LM sees the sequence as it is: slot p, position p, token p."""

    @property
    def shifted(self) -> bool:
        return False
