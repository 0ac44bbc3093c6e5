"""What chooses how much a step drafts: the protocol of a policy, what it is asked, and what it is told.

Pass a policy of your own as `Engine(..., adaptive_policy=...)`. It never decides what is said, only how fast.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from spec_v2.types import TreeShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """A decode step that is about to be launched.

    `candidates`: what may be chosen, cheapest first; without drafts first of all, where that is allowed.
    `expected_gains`: for each request the drafts that a drafting step should get accepted: what such steps of its own
    got accepted lately, or for NGRAM more where a long match was found.
    """

    batch_size: int
    candidates: Sequence[TreeShape]
    expected_gains: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepObservation:
    """A decode step that has landed.

    `batch_size`: requests that it ran. `num_correct_drafts`: accepted drafts of each one that had not ended when the
    step landed, at least one. `draft_depths`: the longest path that each of their trees offered.
    `max_seq_len`: the host's bound on the lengths. `seconds`: from the landing of the step before, or from its own
    launch where that was later; None where the step also did something that others do not (it read what the draft
    model had missed).
    """

    shape: TreeShape
    batch_size: int
    max_seq_len: int
    num_correct_drafts: Sequence[int]
    draft_depths: Sequence[int]
    seconds: float | None


@runtime_checkable
class AdaptivePolicy(Protocol):
    """Called on the scheduler's thread. Under the overlap schedule a step is chosen before the one before has landed."""

    def choose(self, outlook: Outlook) -> TreeShape:
        """One of `outlook.candidates`, for the whole batch."""
        ...

    def observe(self, step: StepObservation) -> None:
        """Take note of a step."""
        ...
