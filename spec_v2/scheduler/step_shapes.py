"""The shape of each decode step: always the same, or what a policy chooses from a few candidates."""

from collections.abc import Mapping, Sequence

from spec_v2.adaptive_policy import AdaptivePolicy, Outlook
from spec_v2.scheduler.schedule_batch import Request
from spec_v2.types import TreeShape


class StepShapes:
    """Asks the policy. `candidates`: from which batch size on what may be chosen, cheapest first.

    Without a policy every step has the last candidate. Under the overlap schedule a shape is chosen while a step of
    another shape runs: whatever one leaves for the next one has the width of the largest.
    """

    def __init__(
        self, candidates: Mapping[int, Sequence[TreeShape]], policy: AdaptivePolicy | None = None
    ) -> None:
        self.candidates = candidates
        self.policy = policy

    def next(self, reqs: Sequence[Request]) -> TreeShape:
        """The shape of these requests' next step. Raises ValueError where the policy names none of the candidates."""
        candidates = self._for(len(reqs))
        if self.policy is None:
            return candidates[-1]
        gains = [req.expected_gain() for req in reqs]
        chosen = self.policy.choose(
            Outlook(batch_size=len(reqs), candidates=candidates, expected_gains=gains)
        )
        if chosen not in candidates:
            raise ValueError(
                f"adaptive_policy={type(self.policy).__name__} chose {chosen!r} for {len(reqs)} requests; return one of "
                f"outlook.candidates, here {', '.join(str(shape.setting) for shape in candidates)}"
            )
        return chosen

    def _for(self, batch_size: int) -> Sequence[TreeShape]:
        sizes = [size for size in self.candidates if size <= batch_size]
        return self.candidates[max(sizes) if sizes else min(self.candidates)]
