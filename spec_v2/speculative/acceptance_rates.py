"""How often drafts are accepted, depth by depth, and how many tokens a step of another shape would give."""

from collections import defaultdict
from collections.abc import Hashable, Sequence

from spec_v2.types import TreeShape

FIRST_GUESS = 0.6  # of a drafter nobody has seen; too low a guess would never be tried
TREE_MISSES = 0.6  # a tree misses that share of what a chain misses, until it was tried
GUESS_WEIGHT = 1.0  # a guess counts as much as one draft that was tried
FORGETTING = 0.1  # of what is not seen in a step, in shares of `alpha`
CHAIN: Hashable = "chain"


class AcceptanceRates:
    """Moving averages of "a draft at this depth is accepted, given that the one above it was".

    Chains of all lengths share their rates; each shape of tree has its own. Drafts that were tried weigh by their
    number, so a large batch tells more than a small one. `alpha`: what a step forgets of the steps before. What is
    not tried is forgotten ten times as slowly, down to a guess from its neighbours: so it is tried again some day.
    """

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha
        # kind -> for each depth [accepted, tried], both discounted
        self._counts: dict[Hashable, defaultdict[int, list[float]]] = {}

    def update(
        self, shape: TreeShape, num_correct_drafts: Sequence[int], draft_depths: Sequence[int]
    ) -> None:
        """Take in a step that drafted: what was accepted of each request, and the longest path it was offered."""
        mine = self._of(_kind(shape))
        seen = {
            depth: self._tried(depth, num_correct_drafts, draft_depths)
            for depth in range(1, max(draft_depths, default=0) + 1)
        }
        for counts in self._counts.values():
            for depth, pair in counts.items():
                is_seen = counts is mine and seen.get(depth, 0) > 0
                keep = 1 - self.alpha * (1 if is_seen else FORGETTING)
                pair[0], pair[1] = pair[0] * keep, pair[1] * keep
        for depth, tried in seen.items():
            mine[depth][0] += sum(n >= depth for n in num_correct_drafts)
            mine[depth][1] += tried

    def rate(self, shape: TreeShape, depth: int) -> float:
        """The probability that a draft at `depth` (1 is below the root) is accepted once its parent was."""
        return self._rate(_kind(shape), depth)

    def expected_tokens(self, shape: TreeShape) -> float:
        """Tau: tokens of a step, the bonus included."""
        tokens, reached = 1.0, 1.0
        for depth in range(1, shape.longest_path + 1):
            reached *= self.rate(shape, depth)
            tokens += reached
        return tokens

    def _rate(self, kind: Hashable, depth: int) -> float:
        accepted, tried = self._of(kind)[depth]
        return (accepted + GUESS_WEIGHT * self._guess(kind, depth)) / (tried + GUESS_WEIGHT)

    def _guess(self, kind: Hashable, depth: int) -> float:
        """A chain's depth: as the one above. A tree's: as the chain's, with fewer misses. The other way round too."""
        if kind != CHAIN and self._is_known(CHAIN):
            return 1 - TREE_MISSES * (1 - self._rate(CHAIN, depth))
        if depth > 1:
            return self._rate(kind, depth - 1)
        trees = [other for other in self._counts if other != CHAIN and self._is_known(other)]
        misses = TREE_MISSES * (1 - FIRST_GUESS)
        if trees:
            accepted, tried = self._counts[trees[-1]][1]
            misses = 1 - accepted / tried
        return 1 - (misses if kind != CHAIN else min(misses / TREE_MISSES, 1.0))

    def _is_known(self, kind: Hashable) -> bool:
        return kind in self._counts and self._counts[kind][1][1] >= GUESS_WEIGHT

    def _of(self, kind: Hashable) -> defaultdict[int, list[float]]:
        return self._counts.setdefault(kind, defaultdict(lambda: [0.0, 0.0]))

    @staticmethod
    def _tried(depth: int, num_correct_drafts: Sequence[int], draft_depths: Sequence[int]) -> int:
        pairs = zip(num_correct_drafts, draft_depths, strict=True)
        return sum(correct >= depth - 1 and offered >= depth for correct, offered in pairs)


def _kind(shape: TreeShape) -> Hashable:
    return shape.setting if shape.is_tree else CHAIN
