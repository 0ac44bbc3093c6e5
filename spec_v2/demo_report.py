"""What the demo says: tables of its runs, and a verdict on every output that is not plain decoding's."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spec_v2.completion import Completion
from spec_v2.observability.metrics import total

MAX_TIE_ULPS = 4


@dataclass(frozen=True, slots=True)
class Run:
    """One prompt under one algorithm and schedule. `seconds`: wall time, the prompt's forward included."""

    prompt: str
    prompt_ids: tuple[int, ...]
    algorithm: str
    schedule: str
    completion: Completion
    seconds: float

    @property
    def output_ids(self) -> tuple[int, ...]:
        return self.completion.output_ids


# -- verdicts ------------------------------------------------------------------------------------------------


def reference_of(run: Run, runs: Sequence[Run]) -> Run:
    """What a run is compared with: the first run of the same prompt, which is plain decoding."""
    return next(r for r in runs if r.prompt == run.prompt)


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """The first place where two outputs differ; None where they are equal."""
    for place, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return place
    return None if len(left) == len(right) else min(len(left), len(right))


def ulp(value: float, eps: float) -> float:
    """The distance between neighbouring floats at `value`, for a dtype with this `eps`."""
    return eps * 2.0 ** math.floor(math.log2(max(abs(value), 2.0**-20)))


def tie_note(run: Run, reference: Run, target: Any) -> tuple[str, bool]:
    """(what to say about a run's text, whether it is wrong). It is wrong where it parts and there is no tie.

    `target` is the model as transformers runs it; the common text goes through it once. The margin is how far
    the lower of the two tokens lies below the highest logit. bfloat16 keeps 8 bits of a number, so the order
    of additions alone moves a logit by some units in the last place: that is a tie. The units are those of the row's
    largest logit by magnitude, as all of them come from one hidden state and its rounding (docs/decisions/0009).
    """
    import torch

    if run is reference:
        return "(compared with)", False
    ours, plain = run.output_ids, reference.output_ids
    place = first_difference(ours, plain)
    if place is None:
        return "same", False
    if place >= min(len(ours), len(plain)):
        return f"NOT the same: one ends at token {place}, the other goes on", True
    ids = torch.tensor([[*run.prompt_ids, *plain[:place]]], device=target.device)
    with torch.no_grad():
        logits = target(input_ids=ids, use_cache=False).logits[0, -1].float()
    top = float(logits.max())
    margin = top - float(logits[[ours[place], plain[place]]].min())
    limit = MAX_TIE_ULPS * ulp(float(logits.abs().max()), torch.finfo(target.dtype).eps)
    where = f"parts at token {place}, margin {margin:.3g}"
    if margin > limit:
        return f"{where}: NOT a tie, the limit is {limit:.3g}", True
    return f"{where}: a bf16 tie", False


def compare_exactly(runs: Sequence[Run]) -> tuple[str, int]:
    """(what to say, how many runs are wrong): every run of a prompt against the first, plain decoding."""
    plain = runs[0].output_ids
    wrong = [
        f"{run.algorithm}, {run.schedule} parts at token {first_difference(run.output_ids, plain)}"
        for run in runs
        if run.output_ids != plain
    ]
    if wrong:
        return f"NOT equal: {'; '.join(wrong)}", len(wrong)
    return f"{len(runs)} of {len(runs)} runs give the same {len(plain)} tokens", 0


# -- tables --------------------------------------------------------------------------------------------------


def align(rows: Sequence[Sequence[str]], right: Sequence[int]) -> list[str]:
    """Rows as lines with columns of equal width; the columns in `right` are flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "   ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def block(prompt: str, text: str, noted_runs: Sequence[tuple[Run, str]]) -> str:
    """The table of one prompt: its runs, each with what `tie_note` said."""
    rows = [("", "schedule", "tokens/s", "accept length", "accept rate", "text")]
    for run, note in noted_runs:
        done = run.completion
        rate = "-" if run.algorithm == "plain" else f"{done.spec.accept_rate:.2f}"
        speed, length = done.completion_tokens / run.seconds, f"{done.spec.accept_length:.2f}"
        rows.append((run.algorithm, run.schedule, f"{speed:.1f}", length, rate, note))
    plain = noted_runs[0][0].completion
    lines = [
        f'{prompt}: "{shortened(text)}"',
        f'  answer: "{shortened(plain.text)}" ({plain.completion_tokens} tokens)',
    ]
    return "\n".join([*lines, *(f"  {line}" for line in align(rows, right=(2, 3, 4))), ""])


def summary(runs: Sequence[Run]) -> str:
    """One line per algorithm and schedule, over all prompts."""
    rows = [("", "schedule", "tokens/s", "accept length")]
    for algorithm, schedule in dict.fromkeys((r.algorithm, r.schedule) for r in runs):
        mine = [r for r in runs if (r.algorithm, r.schedule) == (algorithm, schedule)]
        tokens, seconds = sum(len(r.output_ids) for r in mine), sum(r.seconds for r in mine)
        length = total(r.completion.spec for r in mine).mean_acceptance_length
        rows.append((algorithm, schedule, f"{tokens / seconds:.1f}", f"{length:.2f}"))
    return "\n".join(["all prompts", *(f"  {line}" for line in align(rows, right=(2, 3)))])


def shortened(text: str) -> str:
    """The beginning of a text, on one line."""
    flat = " ".join(text.split())
    return flat if len(flat) <= 76 else flat[:73] + "..."
