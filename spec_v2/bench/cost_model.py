"""What a decode step is made of, from the trace, and the speed-up that follows: S = tau / (v + k c + o).

The unit is a whole step of plain decoding under the same schedule, batch and prompts. v: the target's forward over
the drafts. c: one of the k passes that draft. o: all the rest, the draft model's look at what was accepted and the
time between launches among it. tau: tokens per step. A run's steps are averaged, for NGRAM's steps with and without
drafts differ much, and both count.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spec_v2.observability.trace import Span

GAPS = "gaps"


@dataclass(frozen=True, slots=True)
class StepTimes:
    """The mean decode step of a run, in milliseconds. `parts`: the forward stream's launches by label, and the
    gaps between them; they add up to `step`."""

    num_steps: int
    step: float
    parts: Mapping[str, float]


def decode_steps(spans: Sequence[Span], num_needed: int) -> list[int]:
    """The numbers of the decode steps that gave tokens: under overlap one more may have been on its way.

    `num_needed`: the most decode steps that any request took. Where prompts were computed between decode steps,
    requests began at different times, and all steps count.
    """
    on_device = [s for s in spans if s.lane == "forward"]
    decodes = sorted({s.step for s in on_device if "verify" in s.name.split("+")})
    last_prefill = max((s.step for s in on_device if s.name == "prefill"), default=-1)
    return decodes[:num_needed] if not decodes or last_prefill < decodes[0] else decodes


def step_times(spans: Sequence[Span], num_needed: int) -> StepTimes:
    """The decode steps as the forward stream sees them: from one step's last launch to the next one's."""
    steps = decode_steps(spans, num_needed)
    if not steps:
        return StepTimes(0, 0.0, {})
    on_device = [s for s in spans if s.lane == "forward"]
    start, end = _window(on_device, steps)
    wanted, parts = set(steps), defaultdict[str, float](float)
    for s in on_device:
        if s.step in wanted:
            parts[s.name] += s.duration_us / 1e3 / len(steps)
    step = (end - start) / 1e3 / len(steps)
    return StepTimes(len(steps), step, dict(parts) | {GAPS: step - sum(parts.values())})


def joined_times(runs: Sequence[StepTimes]) -> StepTimes:
    """The mean decode step of several runs."""
    num_steps = sum(run.num_steps for run in runs)
    if num_steps == 0:
        return StepTimes(0, 0.0, {})
    parts = defaultdict[str, float](float)
    for run in runs:
        for label, milliseconds in run.parts.items():
            parts[label] += milliseconds * run.num_steps / num_steps
    return StepTimes(num_steps, sum(run.step * run.num_steps for run in runs) / num_steps, dict(parts))


def decode_seconds(spans: Sequence[Span], num_needed: int) -> float:
    """From when the host had the prompts' first tokens until it had the last token: what a user waits."""
    steps = decode_steps(spans, num_needed)
    start, end = (
        _window([s for s in spans if (s.lane, s.name) == ("host", "process")], steps) if steps else (0, 0)
    )
    return (end - start) / 1e6


def _window(spans: Sequence[Span], steps: Sequence[int]) -> tuple[float, float]:
    """The ends of the last span before these steps and of the last one in them, in microseconds."""
    before = max(s.start_us + s.duration_us for s in spans if s.step < steps[0])
    return before, max(s.start_us + s.duration_us for s in spans if s.step <= steps[-1])


def median_times(runs: Sequence[StepTimes]) -> StepTimes:
    """The run whose step is the median: its parts belong together, which medians of each part would not."""
    return sorted(runs, key=lambda run: run.step)[(len(runs) - 1) // 2]


def cost_model(times: StepTimes, plain: StepTimes, draft_passes: int, tau: float) -> dict[str, Any]:
    """The terms and the predicted speed-up of a contender, against plain decoding's `plain`."""
    verify, draft = times.parts.get("verify", 0.0), times.parts.get("draft", 0.0)
    v, drafting = verify / plain.step, draft / plain.step
    o = (times.step - verify - draft) / plain.step
    return {
        "plain_step_ms": plain.step,
        "step_ms": times.step,
        "parts_ms": dict(times.parts),
        "v": v,
        "k": draft_passes,
        "c": drafting / draft_passes,
        "o": o,
        "tau": tau,
        "predicted_speedup": tau / (v + drafting + o),
    }
