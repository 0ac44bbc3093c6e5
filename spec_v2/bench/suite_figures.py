"""From a case's samples to the figures of its rows, and what the byte model says they ought to be."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spec_v2.bench.contenders import Sample
from spec_v2.bench.cost_model import GAPS, median_times
from spec_v2.bench.figures import spread
from spec_v2.bench.prediction import Hardware, StepCost
from spec_v2.bench.suite_rows import ENTRIES, Figure, Row
from spec_v2.observability.metrics import total

Samples = Mapping[str, Sequence[Sample]]


def step_ms(sample: Sample) -> float:
    """Wall milliseconds per decode step: from the prompts' first tokens on the host to the last token there."""
    assert sample.steps is not None
    return 1e3 * sample.decode_seconds / sample.steps.num_steps


def exposed_ms(sample: Sample) -> float:
    """Milliseconds of a step in which the forward stream had nothing to run: a step's length on the stream's own
    clock, without the launches in it."""
    assert sample.steps is not None
    return sample.steps.parts[GAPS]


def values_of(figure: Figure, samples: Samples) -> list[float]:
    """The figure in each repetition."""
    mine = samples[figure.entries[0]]
    if figure.kind == "times":
        others = samples[figure.entries[1]]
        return [a.decode_rate / b.decode_rate for a, b in zip(mine, others, strict=True)]
    per_sample: dict[str, Callable[[Sample], float]] = {
        "speed": lambda sample: sample.decode_rate,
        "step": step_ms,
        "exposed": exposed_ms,
    }
    return [per_sample[figure.kind](sample) for sample in mine]


def cell_of(samples: Sequence[Sample]) -> dict[str, Any]:
    """What a contender did in a case, for the JSON."""
    spec = total(done.spec for sample in samples for done in sample.completions)
    steps = [sample.steps for sample in samples if sample.steps is not None]
    return {
        "decode_tokens_per_second": spread([sample.decode_rate for sample in samples]),
        "whole_tokens_per_second": spread([sample.whole_rate for sample in samples]),
        "step_ms": spread([step_ms(sample) for sample in samples]) if steps else None,
        "parts_ms": dict(median_times(steps).parts) if steps else None,
        "mean_acceptance_length": spec.mean_acceptance_length if spec.verify_ct else None,
        "forced_acceptance": spec.forced_acceptance,
        "decode_seconds": [sample.decode_seconds for sample in samples],
        "decode_steps": [sample.steps.num_steps for sample in samples if sample.steps is not None],
    }


def predicted(
    row: Row, costs: Mapping[str, StepCost | None], hardware: Hardware, context: int
) -> float | None:
    """The row's figure if every step took its bytes or its arithmetic and nothing else; None where it is unknown."""
    seconds: list[float] = []
    for name in row.figure.entries:
        cost, tau = costs.get(name), accept_length_of(name)
        if cost is None or tau is None:
            return None
        seconds.append(cost.seconds(hardware, row.batch_size, context) / tau)  # per token of a request
    kind = row.figure.kind
    if kind == "exposed":
        return 0.0
    if kind == "times":
        return seconds[1] / seconds[0]
    if kind == "speed":
        return row.batch_size / seconds[0]
    tau = accept_length_of(row.figure.entries[0])
    return None if tau is None else 1e3 * seconds[0] * tau


def accept_length_of(name: str) -> float | None:
    """Tokens per step that a contender is bound to accept; None where the text decides."""
    settings = ENTRIES[name].settings
    forced = settings.get("speculative_simulated_accept_length")
    if forced is not None:
        return float(forced)
    if settings.get("speculative_algorithm") is None:
        return 1.0
    # the text of a random target repeats itself, and NGRAM without a will of its own drafts all of it
    return (
        float(settings["speculative_num_draft_tokens"])
        if settings.get("speculative_adaptive") is False
        else None
    )


def verdict_of(row: Row, value: float) -> str | None:
    """ "aim", "must" or "below must"; None where nothing was set."""

    def reaches(mark: float | None) -> bool:
        return mark is not None and (value >= mark if row.figure.higher_is_better else value <= mark)

    if reaches(row.aim):
        return "aim"
    if row.must is None:
        return None
    return "must" if reaches(row.must) else "below must"
