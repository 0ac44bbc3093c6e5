"""What a decode step costs, measured on the steps that run: S = tau / (v + k c + o).

The unit is a step of plain decoding of the same batch. v: the target over the drafts. c: one of the k passes of the
draft model. o: what a step that drafts costs beside. A step is timed as a whole, so nothing is added to it; the terms
are fitted to the times of the settings that were tried (least squares, drawn towards a first guess while few were).
They say what an untried setting would cost. One that was tried has its own time.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from spec_v2.model_executor.graph_runner import capture_sizes, padded_size
from spec_v2.types import TreeShape

# What one more token costs in a decode step, in steps of one token. On two CPU cores a 135M model's step took 1.3 times
# as long with 12 tokens as with one, 2.2 with 48, 3.1 with 96; on a GPU such steps wait for the same weights.
TOKEN_COST = {"cpu": 0.03, "cuda": 0.002}
DRAFT_PASS_COST = 0.15
OVERHEAD = 0.05
GUESS_WEIGHT = 0.05  # of a guess about the dearest setting, beside one measured time
NUM_TIMES = 5  # newest times that count
FEWEST_TIMES = 3
BUCKETS = capture_sizes(512)


def bucket(batch_size: int) -> int:
    """Batches of about this size share their times."""
    return padded_size(batch_size, BUCKETS) or BUCKETS[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTerms:
    """`plain`: seconds of a plain step. `per_token`, `c` and `o` in plain steps; `v = 1 + per_token * extra tokens`."""

    plain: float
    per_token: float
    c: float
    o: float

    def seconds(self, batch_size: int, shape: TreeShape) -> float:
        v = 1 + self.per_token * batch_size * (shape.num_draft_tokens - 1)
        o = self.o if shape.drafts else 0.0
        return self.plain * (v + draft_passes(shape) * self.c + o)


def draft_passes(shape: TreeShape) -> int:
    """Forwards of the draft model: `num_steps - 1` that grow the tree, and draft-extend."""
    return shape.num_steps


@dataclass(slots=True)
class Times:
    """Newest times of one setting at one batch size, in seconds."""

    newest: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_TIMES))
    bound: int = 0
    num_skipped: int = 0

    def add(self, seconds: float, bound: int, skip: int) -> None:
        if bound != self.bound:  # another shape of the forward: it is set up, or recorded, anew
            self.bound, self.num_skipped = bound, 0
        if self.num_skipped < skip:
            self.num_skipped += 1
        else:
            self.newest.append(seconds)

    def typical(self) -> float | None:
        """The second least: whatever disturbs adds time, but a step that was seen late makes the next look short."""
        return sorted(self.newest)[1] if len(self.newest) >= FEWEST_TIMES else None


class StepCosts:
    """Times of steps by batch size and shape. `token_cost`: the first guess, `skip`: first times that don't count."""

    def __init__(self, token_cost: float, skip: int = 1) -> None:
        self._token_cost = token_cost
        self._skip = skip
        self._times: dict[int, dict[TreeShape, Times]] = {}

    def add(self, batch_size: int, shape: TreeShape, seconds: float, bound: int = 0) -> None:
        """A step of this shape took so long. `bound`: of the sequence lengths that it was made for."""
        times = self._times.setdefault(bucket(batch_size), {})
        times.setdefault(shape, Times()).add(seconds, bound, self._skip)

    def is_measured(self, batch_size: int, shape: TreeShape) -> bool:
        """Whether the setting's own times count."""
        return shape in self._typical(batch_size)

    def seconds(self, batch_size: int, shapes: Sequence[TreeShape]) -> list[float]:
        """What a step of each shape takes; before anything was measured, in plain steps."""
        measured = self._typical(batch_size)
        terms = None if all(shape in measured for shape in shapes) else self.terms(batch_size)
        return [
            terms.seconds(batch_size, shape) if terms and shape not in measured else measured[shape]
            for shape in shapes
        ]

    def terms(self, batch_size: int) -> CostTerms:
        """The terms that fit the times best. Unknowns: plain, and per_token, c and o times plain."""
        measured = self._typical(batch_size)
        # a token more costs less of a step that has many anyway
        guess = np.array(
            [self._token_cost / (1 + self._token_cost * (batch_size - 1)), DRAFT_PASS_COST, OVERHEAD]
        )
        if not measured:
            return CostTerms(plain=1.0, per_token=guess[0], c=guess[1], o=guess[2])
        counts = np.array([_counts(batch_size, shape) for shape in measured])
        times = np.array(list(measured.values()))
        scale = times.mean()
        most = np.maximum(counts[:, 1:].max(0), [batch_size, 1, 1])
        # the guess as equations: the dearest setting's share of each term is what the guess says of it
        drawn = GUESS_WEIGHT * np.column_stack([-guess * most, np.diag(most)]) / scale
        left = np.vstack([counts / times[:, None], drawn])
        right = np.concatenate([np.ones(len(times)), np.zeros(3)])
        plain, *others = np.linalg.lstsq(left, right, rcond=None)[0].tolist()
        plain = max(plain, 1e-3 * scale)
        per_token, c, o = (max(value / plain, 0.0) for value in others)
        return CostTerms(plain=plain, per_token=per_token, c=c, o=o)

    def _typical(self, batch_size: int) -> dict[TreeShape, float]:
        times = self._times.get(bucket(batch_size), {})
        return {shape: typical for shape, own in times.items() if (typical := own.typical()) is not None}


def _counts(batch_size: int, shape: TreeShape) -> tuple[int, int, int, int]:
    """How often plain, per_token, c and o occur in a step."""
    return 1, batch_size * (shape.num_draft_tokens - 1), draft_passes(shape), int(shape.drafts)
