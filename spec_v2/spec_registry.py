"""Algorithms of one's own: a worker class under a name, run by the same scheduler in both schedules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spec_v2.server_args import ServerArgs


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomAlgorithm:
    """A registered algorithm. It answers what `SpeculativeAlgorithm` answers.

    `worker`: a subclass of `spec_v2.speculative.base_spec_worker.BaseSpecWorker`. `draft_model`: whether a
    draft model with KV of its own is needed. `shifted`: whether draft slot p holds (token p+1, hidden p), as in
    EAGLE; otherwise the draft runs one position ahead, as in STANDALONE. `reads_history`: whether the worker
    reads known tokens from `FutureMap.history`.
    """

    name: str
    worker: type
    draft_model: bool = False
    shifted: bool = False
    reads_history: bool = False

    def is_none(self) -> bool:
        return False

    def is_ngram(self) -> bool:
        return False

    def is_eagle(self) -> bool:
        return self.draft_model and self.shifted

    def needs_draft_model(self) -> bool:
        return self.draft_model

    def has_draft_kv(self) -> bool:
        return self.draft_model

    def keeps_history(self) -> bool:
        return self.reads_history

    def carries_draft_hidden_states(self) -> bool:
        return self.is_eagle()

    def draft_is_shifted(self) -> bool:
        return self.is_eagle()

    def draft_runs_ahead(self) -> bool:
        return self.draft_model and not self.shifted

    def uses_tree_path(self, topk: int) -> bool:
        return topk > 1

    def can_adapt(self) -> bool:
        return bool(getattr(self.worker, "follows_shape", False))

    def create_worker(self, server_args: ServerArgs) -> type:
        return self.worker


_registered: dict[str, CustomAlgorithm] = {}


def add(algorithm: CustomAlgorithm) -> None:
    """Keep a registered algorithm; an earlier one of the same name is replaced."""
    _registered[algorithm.name] = algorithm


def registered() -> dict[str, CustomAlgorithm]:
    """The registered algorithms by upper-case name."""
    return dict(_registered)
