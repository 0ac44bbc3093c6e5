"""From samples to figures, one cell for each case and contender. Everything here fits into JSON.

A ratio is taken within each repetition, where both ran one after the other, and its median is the figure.
"""

import statistics
from collections.abc import Sequence
from typing import Any

from spec_v2.bench.contenders import Contender, EngineContender, Sample
from spec_v2.bench.cost_model import cost_model, median_times
from spec_v2.bench.measure import Case, Samples
from spec_v2.demo_report import Run, tie_note
from spec_v2.observability.metrics import total

Spread = dict[str, float]


def spread(values: Sequence[float]) -> Spread:
    """Median, least and greatest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def ratio(mine: Sequence[Sample], theirs: Sequence[Sample]) -> dict[str, Spread]:
    """How many times as fast, decoding alone and as a whole."""
    pairs = list(zip(mine, theirs, strict=True))
    return {
        "decode": spread([a.decode_rate / b.decode_rate for a, b in pairs]),
        "whole": spread([a.whole_rate / b.whole_rate for a, b in pairs]),
    }


def cells_of(
    samples: Samples, contenders: Sequence[Contender], max_new_tokens: int, model: Any
) -> list[dict[str, Any]]:
    """All cells in the order of the runs. `model`: the target as transformers runs it, to judge near ties."""
    by_name = {contender.name: contender for contender in contenders}
    return [
        cell_of(case, by_name[name], samples, contenders, max_new_tokens)
        | texts_of(case, name, samples, model)
        for case, name in samples
    ]


def cell_of(
    case: Case, contender: Contender, samples: Samples, contenders: Sequence[Contender], max_new_tokens: int
) -> dict[str, Any]:
    """The figures of one contender in one case."""
    mine = samples[case, contender.name]
    spec = total(c.spec for sample in mine for c in sample.completions)
    plain = _plain_for(case, contender, samples, contenders)
    others = [c.name for c in contenders if c.algorithm is None and (case, c.name) in samples]
    ratios = {name: ratio(mine, samples[case, name]) for name in others if name != contender.name}
    return {
        "prompts": case.kind,
        "batch_size": case.batch_size,
        "num_prompts": len(case.prompts),
        "contender": contender.name,
        "algorithm": contender.algorithm,
        "schedule": contender.schedule,
        "decode_tokens_per_second": spread([sample.decode_rate for sample in mine]),
        "whole_tokens_per_second": spread([sample.whole_rate for sample in mine]),
        "mean_acceptance_length": spec.mean_acceptance_length if spec.verify_ct else None,
        "draft_acceptance_rate": spec.draft_acceptance_rate if sum(spec.draft_depths) else None,
        "acceptance_rate_per_position": list(spec.acceptance_rate_per_position),
        "forced_acceptance": spec.forced_acceptance,
        "ratios": ({"plain": ratio(mine, plain)} if plain else {}) | ratios,
        "cost_model": _cost_model(contender, mine, plain),
        "token_counts_equal": all(
            c.completion_tokens == max_new_tokens or (c.finish_reason == "stop" and not case.ignore_eos)
            for sample in mine
            for c in sample.completions
        ),
        "repetitions": [_raw(sample) for sample in mine],
    }


def _plain_for(
    case: Case, contender: Contender, samples: Samples, contenders: Sequence[Contender]
) -> list[Sample]:
    """Plain decoding's samples under the same schedule; none for a contender that is not ours."""
    for other in contenders:
        if other.algorithm == "none" and other.schedule == contender.schedule:
            return samples[case, other.name]
    return []


def _cost_model(
    contender: Contender, mine: Sequence[Sample], plain: Sequence[Sample]
) -> dict[str, Any] | None:
    if not plain or not isinstance(contender, EngineContender):
        return None
    ours, theirs = (median_times([s.steps for s in part if s.steps is not None]) for part in (mine, plain))
    tau = total(c.spec for sample in mine for c in sample.completions).mean_acceptance_length
    model = cost_model(ours, theirs, contender.draft_passes, tau)
    return model | {"measured_speedup": ratio(mine, plain)["decode"]["median"]}


def _raw(sample: Sample) -> dict[str, Any]:
    return {
        "tokens": sample.tokens,
        "first_tokens": sample.first_tokens,
        "whole_seconds": sample.whole_seconds,
        "decode_seconds": sample.decode_seconds,
        "decode_steps": sample.steps.num_steps if sample.steps is not None else None,
    }


def texts_of(case: Case, name: str, samples: Samples, model: Any) -> dict[str, Any]:
    """How the texts of the last repetition compare with those of the case's first contender, prompt by prompt.

    Where acceptance is forced there is nothing to compare: the drafts are the text.
    """
    reference = next(other for place, other in samples if place == case)
    parted = []
    forced = any(
        c.spec.forced_acceptance for other in (name, reference) for c in samples[case, other][-1].completions
    )
    for i in range(0 if forced else len(case.prompts)):
        mine, theirs = (_run_of(case, i, other, samples) for other in (name, reference))
        note, is_wrong = tie_note(mine, theirs, model) if name != reference else ("same", False)
        if note != "same":
            parted.append({"prompt": i, "note": note, "is_tie": not is_wrong})
    return {"texts_compared_with": reference, "texts_that_differ": parted}


def _run_of(case: Case, i: int, name: str, samples: Samples) -> Run:
    sample = samples[case, name][-1]
    return Run(case.kind, case.prompts[i], name, "", sample.completions[i], sample.whole_seconds)
