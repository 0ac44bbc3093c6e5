"""What `bench` prints for people: a table for each case, and below it what the steps are made of."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from spec_v2.bench.settings import ORACLE
from spec_v2.demo_report import align

Cell = dict[str, Any]
FORCED = "forced acceptance"


def for_humans(report: dict[str, Any]) -> str:
    """The whole report as aligned text."""
    parts = [_head(report)]
    for (kind, batch_size), group in groupby(
        report["cells"], key=lambda cell: (cell["prompts"], cell["batch_size"])
    ):
        cells = list(group)
        count = cells[0]["num_prompts"]
        parts.append(f'{f"{count} " * (count > batch_size)}"{kind}" prompts, {batch_size} at a time\n')
        parts.append(_indented(speed_table(cells)))
        if steps := [cell for cell in cells if cell["cost_model"] is not None]:
            parts.append("")
            parts.append(_indented(cost_table(steps)))
        parts += ["", *_texts(cells)]
    parts.append(_legend(report))
    return "\n".join(parts)


def speed_table(cells: Sequence[Cell]) -> list[str]:
    """Speed, acceptance and ratios; one line for each contender."""
    against = list(dict.fromkeys(name for cell in cells for name in cell["ratios"]))
    header = ["", "tokens/s", "min..max", "whole", "tau", "rate"]
    rows = [[*header, *(name.rpartition(" ")[2] for name in against)]]
    for cell in cells:
        decode, whole = cell["decode_tokens_per_second"], cell["whole_tokens_per_second"]
        ratios = [cell["ratios"].get(name) for name in against]
        rows.append(
            [
                _label(cell),
                f"{decode['median']:.1f}",
                f"{decode['min']:.1f}..{decode['max']:.1f}",
                f"{whole['median']:.1f}",
                _number(cell["mean_acceptance_length"]),
                _number(cell["draft_acceptance_rate"]),
                *(_number(r and r["decode"]["median"]) for r in ratios),
            ]
        )
    return align(rows, right=range(1, len(rows[0])))


def cost_table(cells: Sequence[Cell]) -> list[str]:
    """Milliseconds of a step, the model's terms, and the speed-up that they predict beside the measured one."""
    rows = [["ms per step", "all", "verify", "draft", "rest", "v", "k", "c", "o", "predicted", "measured"]]
    for cell in cells:
        model = cell["cost_model"]
        verify, draft = (model["parts_ms"].get(name, 0.0) for name in ("verify", "draft"))
        times = [model["step_ms"], verify, draft, model["step_ms"] - verify - draft]
        rows.append(
            [
                _label(cell),
                *(f"{time:.2f}" for time in times),
                _number(model["v"]),
                str(model["k"]),
                f"{model['c']:.3f}",
                f"{model['o']:.3f}",
                _number(model["predicted_speedup"]),
                _number(model["measured_speedup"]),
            ]
        )
    return align(rows, right=range(1, len(rows[0])))


def _label(cell: Cell) -> str:
    return f"{cell['contender']} ({FORCED})" if cell["forced_acceptance"] else str(cell["contender"])


def _texts(cells: Sequence[Cell]) -> list[str]:
    """What is to be said about the texts and their lengths; one line where all is well."""
    lines = []
    for cell in cells:
        for parted in cell["texts_that_differ"]:
            lines.append(f"  text {parted['prompt'] + 1} of {cell['contender']}: {parted['note']}")
        if not cell["token_counts_equal"]:
            lines.append(
                f"  {cell['contender']} did NOT give as many tokens as were asked for: do not compare it"
            )
    reference = cells[0]["texts_compared_with"]
    forced = any(cell["forced_acceptance"] for cell in cells)
    whose = f"all texts but those of {FORCED} are" if forced else "all texts are"
    return [*(lines or [f"  {whose} those of {reference}, token by token"]), ""]


def _head(report: dict[str, Any]) -> str:
    found = ", ".join(f"{name} {number}" for name, number in report["versions"].items() if number)
    load = " ".join(f"{value:.2f}" for value in report["load_average"])
    settings = report["settings"]
    return "\n".join(
        (
            f"  command   {report['command']}",
            f"  machine   {report['machine']}; load average before the first run {load}",
            f"  date      {report['date']}",
            f"  versions  {found}",
            f"  model     {report['model']}, {report['dtype']} on {report['device']}, {report['threads']} threads",
            f"  runs      greedy, {settings['max_new_tokens']} tokens for each prompt, {settings['repetitions']} "
            "repetitions, contenders in turn",
            "",
        )
    )


def _legend(report: dict[str, Any]) -> str:
    lines = [
        "  tokens/s   median of the repetitions, from the first token to the last; whole: with the prompts' forward",
        "  tau, rate  tokens per decode step, the target's own included; accepted drafts of those offered",
        "  plain ...  times as fast as plain decoding under the same schedule, as transformers' generate ...; decoding only",
        "  predicted  tau / (v + k c + o), in plain steps: verification, k draft passes, all the rest of a step",
    ]
    if any(cell["forced_acceptance"] for cell in report["cells"]):
        lines.append(
            f"  {FORCED}: tau was chosen, not measured, whatever the target said; texts are not the model's"
        )
    if any(cell["algorithm"] == ORACLE for cell in report["cells"]):
        lines.append(
            f"  {ORACLE}: drafts replay the text of a plain run; no drafter, the most that drafts can gain"
        )
    if report["device"] == "cpu":
        lines.append("  On a CPU overlap is no speed-up: the host and the model share the cores.")
    if any(cell["texts_that_differ"] for cell in report["cells"]):
        lines.append(
            "  Tie: both tokens' logits are as close as the dtype rounds; a batch of another shape may swap them."
        )
    return "\n".join(lines)


def _indented(lines: Sequence[str]) -> str:
    return "\n".join(f"  {line}" for line in lines)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
