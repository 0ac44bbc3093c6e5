"""How speculation goes, under the names that engines share: counted once, by one function, from the steps.

Everything counts what the target verified, before a stop cut it. `accept_lens` includes the bonus token,
`draft_depths` is the longest path that a step's tree offered, in drafts.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SpecMetrics:
    """The decode steps of one request, or of many: metrics add up with `+`.

    `forced_acceptance`: some of them accepted what `speculative_simulated_accept_length` says, not what the target
    says. Such numbers tell nothing about a drafter. `settings`: (`num_steps`, `topk`, `num_draft_tokens`) of each step;
    they change where drafting adapts.
    """

    accept_lens: tuple[int, ...] = ()
    draft_depths: tuple[int, ...] = ()
    forced_acceptance: bool = False
    settings: tuple[tuple[int, int, int], ...] = ()

    def __add__(self, other: "SpecMetrics") -> "SpecMetrics":
        return total((self, other))

    @property
    def verify_ct(self) -> int:
        """Decode steps: target forwards over a tree."""
        return len(self.accept_lens)

    @property
    def num_correct_drafts(self) -> int:
        """Accepted drafts in all, bonus tokens excluded."""
        return sum(self.accept_lens) - self.verify_ct

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted drafts / steps: mean tokens per step, bonus included. 0 without a step."""
        return sum(self.accept_lens) / self.verify_ct if self.accept_lens else 0.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted drafts / drafts on the longest paths offered, 0 to 1. 0 where nothing was drafted."""
        offered = sum(self.draft_depths)
        return self.num_correct_drafts / offered if offered else 0.0

    @property
    def acceptance_rate_per_position(self) -> tuple[float, ...]:
        """For each draft position: of the steps whose tree reached it, how many accepted a draft there."""
        deepest = max(self.draft_depths, default=0)
        rates = []
        for position in range(1, deepest + 1):
            reached = sum(depth >= position for depth in self.draft_depths)
            rates.append(sum(accept_len > position for accept_len in self.accept_lens) / reached)
        return tuple(rates)

    @property
    def acceptance_histogram(self) -> dict[int, int]:
        """Accepted drafts in a step -> number of such steps."""
        return dict(sorted(Counter(accept_len - 1 for accept_len in self.accept_lens).items()))

    accept_length = mean_acceptance_length  # SGLang's names for the same two
    accept_rate = draft_acceptance_rate


def total(metrics: Iterable[SpecMetrics]) -> SpecMetrics:
    """All steps of several requests."""
    parts: Sequence[SpecMetrics] = list(metrics)
    return SpecMetrics(
        tuple(n for part in parts for n in part.accept_lens),
        tuple(n for part in parts for n in part.draft_depths),
        any(part.forced_acceptance for part in parts),
        tuple(setting for part in parts for setting in part.settings),
    )
