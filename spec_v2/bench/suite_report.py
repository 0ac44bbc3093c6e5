"""What a suite prints for people: a line for each row, then what was left out, then what the words mean."""

from typing import Any

from spec_v2.bench.report import FORCED
from spec_v2.bench.suite_rows import PEERS, Row
from spec_v2.demo_report import align


def row_line(row: dict[str, Any]) -> str:
    """One row in one line, for the progress."""
    measured = row["measured"]
    marks = [f"{title} {_number(row[title])}" for title in ("must", "aim") if row[title] is not None]
    verdict = f" -> {row['verdict']}" if row["verdict"] else ""
    forced = f" ({FORCED})" if row["forced_acceptance"] else ""
    line = f"{row['name']}: {_number(measured['median'])} {row['unit']}{forced}"
    return f"{line}, predicted {_number(row['predicted'])}; {', '.join(marks)}{verdict}".rstrip("; ")


def guess_line(row: Row, guess: float | None) -> str:
    """What a row is expected to give, said before it is measured."""
    said = "no prediction" if guess is None else f"predicted {_number(guess)} {row.figure.unit}"
    return f"{row.name}: {said}"


def for_humans(report: dict[str, Any]) -> str:
    """The whole report as aligned text."""
    parts = [_head(report)]
    if report["rows"]:
        parts += [*(f"  {line}" for line in _table(report["rows"])), ""]
        parts += [f"  {row['name']:<26}{_what(row)}" for row in report["rows"]]
        parts.append("")
    for where in ("skipped", "failed"):
        parts += [f"  {where:<10}{row['name']}: {row['reason']}" for row in report[where]]
    return "\n".join([*parts, "", *_legend(report)])


def _table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        ["", "measured", "min..max", "unit", "must", "aim", "predicted", "reached", "", "peers, elsewhere"]
    ]
    for row in rows:
        measured = row["measured"]
        lines.append(
            [
                row["name"],
                _number(measured["median"]),
                f"{_number(measured['min'])}..{_number(measured['max'])}",
                row["unit"],
                _number(row["must"]),
                _number(row["aim"]),
                _number(row["predicted"]),
                row["verdict"] or "-",
                "forced" if row["forced_acceptance"] else "",
                row["peers"] or "-",
            ]
        )
    return align(lines, right=(1, 2, 4, 5, 6))


def _what(row: dict[str, Any]) -> str:
    beside = [f"{name} {_cell_text(cell)}" for name, cell in row["contenders"].items()]
    return f"{row['text']}; {row['model']}" + "".join(f"; {text}" for text in beside)


def _cell_text(cell: dict[str, Any]) -> str:
    speed = f"{_number(cell['decode_tokens_per_second']['median'])} tok/s"
    tau = cell["mean_acceptance_length"]
    return (
        speed if tau is None else f"{speed} (tau {tau:.2f}{', forced' if cell['forced_acceptance'] else ''})"
    )


def _head(report: dict[str, Any]) -> str:
    found = ", ".join(f"{name} {number}" for name, number in report["versions"].items() if number)
    load = " ".join(f"{value:.2f}" for value in report["load_average"])
    lines = [
        f"  command   {report['command']}",
        f"  machine   {report['machine']}; load average before the first run {load}",
        f"  date      {report['date']}, {report['seconds']:.0f} s",
        f"  versions  {found}",
        f"  runs      greedy; a warm-up, then {report['repetitions']} repetitions in turn, medians",
    ]
    if report["hardware"] is not None:
        copy, flops = (report["hardware"][name] for name in ("copy_bytes_per_second", "flops_per_second"))
        lines.append(
            f"  device    {report['device']}: copy {copy / 1e9:.0f} GB/s, bfloat16 product {flops / 1e12:.2f} TFLOP/s"
        )
    return "\n".join([*lines, ""])


def _legend(report: dict[str, Any]) -> list[str]:
    lines = [
        "  measured   decoding only, without the prompts' forward; ms: of one decode step",
        "  predicted  bytes at the speed of the copy above, or arithmetic at that of the product; no launches",
        "  reached    the better of aim and must that the median meets",
    ]
    if any(row["peers"] for row in report["rows"]):
        lines.append(f"  peers      {PEERS}")
    if any(row["forced_acceptance"] for row in report["rows"]):
        lines.append(
            f"  forced     {FORCED}: tau was chosen, whatever the target said; texts are not the model's"
        )
    if any(row["unit"] == "ms" and row["name"].startswith("exposed") for row in report["rows"]):
        lines.append("  exposed    milliseconds of a step in which the forward stream had nothing to run")
    if any("ORACLE" in str(row["contenders"]) or "oracle" in row["name"] for row in report["rows"]):
        lines.append(
            "  oracle     drafts replay a recorded plain run: no drafter, the most that drafts can gain"
        )
    return lines


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 100 else f"{value:.3g}"
