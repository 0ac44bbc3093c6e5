"""Adaptive speculation: how much the next step drafts, so that most tokens come per second.

A policy is asked before each step of a batch and told about each step that has landed (`adaptive_policy`). Drafts
belong to their request and the target decides what is said, so a policy changes the speed and never a token. The
candidates are few and fixed (`adaptive_config`), each no larger than the setting that memory is reserved for.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

from spec_v2.adaptive_config import AdaptiveConfig, candidate_settings, read_config
from spec_v2.adaptive_policy import AdaptivePolicy, Outlook, StepObservation
from spec_v2.server_args import ServerArgs
from spec_v2.speculative.acceptance_rates import AcceptanceRates
from spec_v2.speculative.step_costs import TOKEN_COST, StepCosts, bucket
from spec_v2.types import ROOT_ONLY, TreeShape

FIRST_LOOK = 8
LAST_LOOK = 64  # as often as a draft model must read what it has missed
UNTRIED_CREDIT = 1.1  # predictions are a few percent wrong, and what is not tried is never measured
RECORDING_STEPS = 6  # of a new shape run as they are or are being recorded, before it is replayed


def largest_shape(args: ServerArgs) -> TreeShape:
    """The shape of the resolved arguments: every step's without a policy, and what memory is reserved for."""
    return TreeShape(
        num_steps=args.num_steps,
        topk=args.topk,
        num_draft_tokens=args.num_draft_tokens,
        longest_path=args.longest_path,
        is_tree=args.is_tree,
        rejection_sampling=args.speculative_use_rejection_sampling,
        simulated_accept_length=args.speculative_simulated_accept_length,
    )


def candidate_shapes(args: ServerArgs) -> dict[int, tuple[TreeShape, ...]]:
    """From which batch size on which shapes may be chosen, cheapest first; the largest alone where nothing adapts."""
    largest = largest_shape(args)
    if not args.speculative_adaptive:
        return {1: (largest,)}
    if args.algorithm.is_ngram():
        return {1: (ROOT_ONLY, largest)}

    def shape(num_steps: int, topk: int, num_draft_tokens: int) -> TreeShape:
        if num_steps == 0:
            return ROOT_ONLY
        return replace(
            largest,
            num_steps=num_steps,
            topk=topk,
            num_draft_tokens=num_draft_tokens,
            longest_path=min(num_steps, num_draft_tokens - 1),
            is_tree=args.algorithm.uses_tree_path(topk),
        )

    settings = candidate_settings(args, read_config(args))
    return {size: tuple(shape(*one) for one in some) for size, some in settings.items()}


def default_policy(args: ServerArgs, device_type: str, *, records: bool) -> AdaptivePolicy | None:
    """The policy of an engine that was given none; None where it does not adapt. `records`: steps become graphs."""
    if not args.speculative_adaptive:
        return None
    token_cost = TOKEN_COST.get(device_type, TOKEN_COST["cuda"])
    if args.algorithm.is_ngram():
        return MatchPolicy(token_cost)
    return SpeedPolicy(read_config(args), StepCosts(token_cost, skip=RECORDING_STEPS if records else 1))


@final
class MatchPolicy:
    """NGRAM: draft where the drafts that should get accepted are worth what the others cost.

    A match is known before the step, so each step is decided by itself. The cost is a constant: drafting is a look
    at the text, and v is nearly all of it.
    """

    def __init__(self, token_cost: float) -> None:
        self.token_cost = token_cost

    def choose(self, outlook: Outlook) -> TreeShape:
        narrow, wide = outlook.candidates[0], outlook.candidates[-1]
        extra_tokens = outlook.batch_size * (wide.num_draft_tokens - 1)
        gain = sum(outlook.expected_gains) / outlook.batch_size
        return wide if gain >= self.token_cost * extra_tokens else narrow

    def observe(self, step: StepObservation) -> None:
        """Nothing to note: requests remember how their own steps went."""


@dataclass(slots=True)
class _Place:
    """Where the policy stands for batches of about one size.

    `num_steps`: landed ones at the current setting, since it was last compared. `since_look`, `look_after`: steps
    without drafts since one was tried, and after how many one is tried again.
    """

    candidates: Sequence[TreeShape]
    current: TreeShape
    wait: int
    num_steps: int = 0
    since_look: int = 0
    look_after: int = FIRST_LOOK

    @property
    def is_looking(self) -> bool:
        """A look has just paid."""
        return not self.current.drafts and self.look_after == 1

    def move_to(self, shape: TreeShape) -> None:
        self.current, self.since_look, self.look_after = shape, 0, FIRST_LOOK


@final
class SpeedPolicy:
    """The setting with the most tokens per second: expected tokens (moving averages) by measured seconds.

    It starts with the largest candidate, then times the cheapest one, and from then on compares all of them every
    `update_interval` steps. It moves where another is faster by `hysteresis`, at the earliest when the current one
    has times of its own. Where plain decoding is
    fastest it drafts the cheapest way every now and then, to see whether that pays again: after 8 steps, then 16, 32,
    64; and once a look has paid, at every step, until the averages have followed or a look fails.
    """

    def __init__(self, config: AdaptiveConfig, costs: StepCosts) -> None:
        self.config = config
        self.costs = costs
        self.rates = AcceptanceRates(config.ema_alpha)
        self._places: dict[int, _Place] = {}

    def choose(self, outlook: Outlook) -> TreeShape:
        place = self._place(outlook)
        cheapest = next((shape for shape in place.candidates if shape.drafts), None)
        if place.current.drafts or cheapest is None:
            return place.current
        place.since_look += 1
        if place.since_look < place.look_after:
            return place.current
        place.since_look = 0
        return cheapest

    def observe(self, step: StepObservation) -> None:
        if step.shape.drafts:
            self.rates.update(step.shape, step.num_correct_drafts, step.draft_depths)
        if step.seconds is not None:
            self.costs.add(step.batch_size, step.shape, step.seconds, step.max_seq_len)
        place = self._places.get(bucket(step.batch_size))
        if place is None:
            return
        if step.shape == place.current:
            place.num_steps += 1
        elif step.shape.drafts and not place.current.drafts:
            self._judge_look(place, step)
        is_due = place.num_steps >= place.wait and self.costs.is_measured(step.batch_size, place.current)
        if is_due or place.is_looking:
            self._compare(place, step.batch_size)

    def speeds(self, batch_size: int, shapes: Sequence[TreeShape]) -> list[float]:
        """Expected tokens per second of one request, S in other units."""
        seconds = self.costs.seconds(batch_size, shapes)
        return [self.rates.expected_tokens(s) / time for s, time in zip(shapes, seconds, strict=True)]

    def _place(self, outlook: Outlook) -> _Place:
        key, shapes = bucket(outlook.batch_size), outlook.candidates
        if key not in self._places:
            speeds = self.speeds(outlook.batch_size, shapes)
            # acceptance may be known from batches of other sizes
            start = shapes[speeds.index(max(speeds))] if self._places else shapes[-1]
            self._places[key] = _Place(shapes, start, self.config.warmup_batches)
        return self._places[key]

    def _judge_look(self, place: _Place, step: StepObservation) -> None:
        tokens = 1 + sum(step.num_correct_drafts) / len(step.num_correct_drafts)
        looking, plain = self.costs.seconds(step.batch_size, (step.shape, place.current))
        later = min(max(2 * place.look_after, FIRST_LOOK), LAST_LOOK)
        place.look_after = 1 if tokens * plain > looking else later

    def _compare(self, place: _Place, batch_size: int) -> None:
        place.num_steps, place.wait = 0, self.config.update_interval
        cheapest = place.candidates[0]
        if not self.costs.is_measured(batch_size, cheapest):  # between two times the others can be told
            place.move_to(cheapest)
            return
        speeds = [
            speed * (1 if self.costs.is_measured(batch_size, shape) else UNTRIED_CREDIT)
            for speed, shape in zip(self.speeds(batch_size, place.candidates), place.candidates, strict=True)
        ]
        mine, best = speeds[place.candidates.index(place.current)], max(speeds)
        if best > (1 + self.config.hysteresis) * mine:
            place.move_to(place.candidates[speeds.index(best)])
