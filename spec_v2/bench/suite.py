"""`bench --suite NAME`: a fixed table of figures, case by case, within a time limit.

What a case needs is opened, everybody runs once to warm up, then all take turns for at least three repetitions; rows
are medians of these. The report is rewritten after each repetition. A case that cannot run, or that the time limit leaves no room for, is listed with its reason.
"""

import difflib
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from spec_v2.bench.contenders import Contender, Prompts
from spec_v2.bench.figures import spread
from spec_v2.bench.measure import Case, measure, num_runs
from spec_v2.bench.measure import Samples as CaseSamples
from spec_v2.bench.prediction import Hardware, measure_hardware
from spec_v2.bench.settings import ORACLE
from spec_v2.bench.suite_figures import Samples, cell_of, predicted, values_of, verdict_of
from spec_v2.bench.suite_models import LLAMA_8B, SMOLLM2, ModelPlan
from spec_v2.bench.suite_probes import PROBES
from spec_v2.bench.suite_report import for_humans, guess_line, row_line
from spec_v2.bench.suite_rows import CPU_ROWS, ENTRIES, H200_ROWS, Row, in_cases
from spec_v2.bench.suite_settings import SuiteSettings
from spec_v2.bench.suite_traces import record_traces
from spec_v2.bench.workshop import Missing, Workshop
from spec_v2.facts import machine, versions
from spec_v2.models.gguf_cache import quiet_transformers

FIRST_TOKENS = 4  # before anything is measured: does it run at all?
CPU_NEW_TOKENS = 48  # short: a row of the cpu suite takes a minute on two cores


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """Rows, the models that they are about, and the kind of device that they are meant for.

    `traced`: by model, the contender whose steps `--traces` records.
    """

    name: str
    rows: tuple[Row, ...]
    plans: Mapping[str, ModelPlan]
    device_type: str
    traced: Mapping[str, str] = field(default_factory=dict)


def suite_named(name: str) -> Suite:
    """The suite called `h200` or `cpu`."""
    if name == "h200":
        plans = {"8b": LLAMA_8B, "smollm2": SMOLLM2}
        traced = dict.fromkeys(plans, "chain k=3")
        return Suite(name=name, rows=H200_ROWS, plans=plans, device_type="cuda", traced=traced)
    short = {"smollm2": replace(SMOLLM2, new_tokens=CPU_NEW_TOKENS)}
    return Suite(name=name, rows=CPU_ROWS, plans=short, device_type="cpu", traced={"smollm2": "STANDALONE"})


def run_suite(settings: SuiteSettings, as_json: bool, command_line: Sequence[str]) -> tuple[str, int]:
    """(the answer, exit code): 1 where a row failed. Rows that were skipped are no failure."""
    with quiet_transformers():
        report = SuiteRun(suite_named(settings.suite), settings, command_line).report_all()
    return (json.dumps(report) if as_json else for_humans(report)), 1 if report["failed"] else 0


class SuiteRun:
    """One run of a suite: the report as far as it has come, and the clock. Raises ValueError for an unknown row."""

    def __init__(self, suite: Suite, settings: SuiteSettings, command_line: Sequence[str]) -> None:
        self._suite, self._settings = suite, settings
        self._start = time.monotonic()
        self.rows = chosen_rows(suite, settings.rows)
        self.device = torch.device(settings.device or suite.device_type)
        self.report: dict[str, Any] = {
            "suite": suite.name,
            "command": shlex.join(["spec-v2", *command_line]),
            "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
            "machine": machine(),
            "load_average": list(os.getloadavg()),
            "versions": versions(),
            "device": None,
            "hardware": None,
            "engine_settings": dict(settings.engine),
            "repetitions": settings.repetitions,
            "seconds": 0.0,
            "rows": [],
            "skipped": [],
            "failed": [],
            "traces": [],
            "kept_from": None,
        }
        if settings.resume:
            self._take_over(self._place)

    def report_all(self) -> dict[str, Any]:
        """Measure what can be measured."""
        reason = self._unfit_device()
        if reason:
            self._list("skipped", self.rows, reason)
        if reason or not self.rows:
            return self._saved()
        self.report["device"] = _device_name(self.device)
        hardware = measure_hardware(self.device, torch.bfloat16)
        self.report["hardware"] = asdict(hardware)
        workshop = Workshop(self._suite.plans, self.device, self._settings.engine)
        try:
            traced: set[str] = set()
            for rows in in_cases(self.rows):
                if rows[0].model not in traced:
                    traced.add(rows[0].model)
                    self._trace(rows[0].model, workshop)
                self._one_case(rows, workshop, hardware)
                self._saved()
        finally:
            workshop.clear()
        return self._saved()

    # -- one case ----------------------------------------------------------------------------------------

    def _one_case(self, rows: list[Row], workshop: Workshop, hardware: Hardware) -> None:
        if self._is_late():
            reason = f"not started: the time limit of {self._settings.time_limit:g} s was reached"
            self._list("skipped", rows, reason)
            return
        try:
            if rows[0].figure.entries:
                self._compare(rows, workshop, hardware)
            else:
                self._probe(rows[0], workshop.plan(rows[0].model), hardware)
        except Missing as reason:
            self._list("skipped", rows, str(reason))
        except Exception as error:  # noqa: BLE001 - the other cases may still run
            self._list("failed", rows, f"{type(error).__name__}: {error}")

    def _compare(self, rows: list[Row], workshop: Workshop, hardware: Hardware) -> None:
        model_name, batch_size = rows[0].model, rows[0].batch_size
        self._say(f"{model_name}, batch {batch_size}: loading")
        workshop.check_room(model_name, batch_size, [name for row in rows for name in row.entries])
        model = workshop.model(model_name)
        plan = model.plan
        with ExitStack() as closing:
            prompts = model.prompts(batch_size)
            opened, absent = self._open(rows, prompts, workshop, closing)
            rows = [row for row in rows if not self._lacks(row, absent)]
            if not rows:
                return
            context = plan.prompt_tokens + plan.new_tokens // 2
            costs = {name: workshop.step_cost(name, model_name) for name in opened}
            guesses = {row.name: predicted(row, costs, hardware, context) for row in rows}
            for row in rows:
                self._say(guess_line(row, guesses[row.name]))

            def note(samples: Samples) -> None:
                cells = {name: cell_of(samples[name]) for name in opened}
                for row in rows:
                    mine = {name: cells[name] for name in row.entries if name in cells}
                    self._add(row, values_of(row.figure, samples), guesses[row.name], model.note, mine)
                self._saved()

            samples = self._measure(Case(model.note, tuple(prompts)), opened, plan, note)
        _check_lengths(samples, plan.new_tokens)
        self._tell(rows)

    def _open(
        self, rows: list[Row], prompts: Prompts, workshop: Workshop, closing: ExitStack
    ) -> tuple[dict[str, Contender], dict[str, tuple[str, str]]]:
        """The contenders of a case by name, after a few tokens each; and of the others, whether they were skipped or
        failed, and why. So one that does not work takes its own rows away and no others."""
        opened: dict[str, Contender] = {}
        absent: dict[str, tuple[str, str]] = {}
        names = dict.fromkeys(name for row in rows for name in row.entries)
        for name in sorted(names, key=lambda name: ENTRIES[name].algorithm == ORACLE):  # it records another
            self._say(f"opening {name}")
            try:
                contender = workshop.open(name, rows[0].model, rows[0].batch_size, opened, closing)
                contender.run(prompts, FIRST_TOKENS)
                opened[name] = contender
            except Missing as reason:
                absent[name] = ("skipped", str(reason))
            except Exception as error:  # noqa: BLE001 - the others may still run
                absent[name] = ("failed", f"{name}: {type(error).__name__}: {error}")
        return opened, absent

    def _lacks(self, row: Row, absent: Mapping[str, tuple[str, str]]) -> bool:
        """Whether the row cannot be measured without a contender that is absent; then it is listed."""
        for name in row.figure.entries:
            if name in absent:
                self._list(absent[name][0], [row], absent[name][1])
                return True
        return False

    def _measure(
        self,
        case: Case,
        opened: Mapping[str, Contender],
        plan: ModelPlan,
        note: Callable[[Samples], None],
    ) -> Samples:
        """All samples by contender; `note` gets those that there are after each repetition."""
        contenders = list(opened.values())
        total, done = num_runs(contenders, [case], self._settings.repetitions), 0

        def one_more() -> None:
            nonlocal done
            done += 1
            if done % len(contenders) == 0:
                self._say(f"{done} of {total} runs")

        def by_name(samples: CaseSamples) -> Samples:
            return {name: samples[case, contender.name] for name, contender in opened.items()}

        samples = measure(
            contenders,
            [case],
            max_new_tokens=plan.new_tokens,
            repetitions=self._settings.repetitions,
            done=one_more,
            round_done=lambda samples: note(by_name(samples)),
        )
        return by_name(samples)

    def _probe(self, row: Row, plan: ModelPlan, hardware: Hardware) -> None:
        self._say(f"{row.name}: measuring")
        result = PROBES[row.figure.kind](
            plan, hardware, self.device, batch_size=row.batch_size, repetitions=self._settings.repetitions
        )
        self._add(row, result.values, result.floor, f"{plan.name}; {result.note}", {})
        self._tell([row])

    def _trace(self, model_name: str, workshop: Workshop) -> None:
        """Write the traces of a model, where they are wanted."""
        entry, name = self._suite.traced.get(model_name), f"trace-{model_name}"
        if self._settings.traces is None or entry is None or self._is_late():
            return
        self._say(f"{name}: {entry}, overlap and sync")
        try:
            workshop.check_room(model_name, 1, [entry])
            self.report["traces"] += record_traces(workshop, model_name, entry, Path(self._settings.traces))
        except Missing as reason:
            self._list_one("skipped", name, f"trace of {entry}", str(reason))
        except Exception as error:  # noqa: BLE001 - the rows may still be measured
            self._list_one("failed", name, f"trace of {entry}", f"{type(error).__name__}: {error}")

    # -- the report --------------------------------------------------------------------------------------

    def _add(
        self, row: Row, values: Sequence[float], guess: float | None, note: str, cells: Mapping[str, Any]
    ) -> None:
        measured = spread(values)
        forced = row.figure.entries and cells[row.figure.entries[0]]["forced_acceptance"]
        added = {
            "name": row.name,
            "text": row.text,
            "model": note,
            "batch_size": row.batch_size,
            "unit": row.figure.unit,
            "higher_is_better": row.figure.higher_is_better,
            "must": row.must,
            "aim": row.aim,
            "peers": row.peers,
            "predicted": guess,
            "measured": measured,
            "values": list(values),
            "verdict": verdict_of(row, measured["median"]),
            "forced_acceptance": bool(forced),
            "contenders": dict(cells),
        }
        self._forget(row.name)
        self.report["rows"].append(added)

    def _tell(self, rows: Sequence[Row]) -> None:
        names = {row.name for row in rows}
        for added in self.report["rows"]:
            if added["name"] in names:
                self._say(row_line(added))

    def _forget(self, name: str) -> None:
        """Take out what an earlier repetition, or a case that failed after it, has added."""
        self.report["rows"] = [row for row in self.report["rows"] if row["name"] != name]

    def _list(self, where: str, rows: Sequence[Row], reason: str) -> None:
        for row in rows:
            self._forget(row.name)
            self._list_one(where, row.name, row.text, reason)

    def _list_one(self, where: str, name: str, text: str, reason: str) -> None:
        self.report[where].append({"name": name, "text": text, "reason": reason})
        self._say(f"{where}: {name}: {reason}")

    @property
    def _place(self) -> Path:
        return Path(self._settings.out or ".") / f"{self._suite.name}.json"

    def _take_over(self, place: Path) -> None:
        """Keep the rows of an earlier report that are complete. Raises ValueError where it is of other settings."""
        if not place.exists():
            return
        earlier = json.loads(place.read_text())
        if earlier["engine_settings"] != self.report["engine_settings"]:
            raise ValueError(
                f"--resume: {place} was measured with {earlier['engine_settings']}, not with "
                f"{self.report['engine_settings']}; give the same flags, or another --out"
            )
        wanted = {row.name for row in self.rows}
        kept = [
            row
            for row in earlier["rows"]
            if row["name"] in wanted and len(row["values"]) >= self._settings.repetitions
        ]
        self.report |= {name: earlier[name] for name in ("device", "hardware")}
        self.report |= {"rows": kept, "kept_from": earlier["date"] if kept else None}
        names = {row["name"] for row in kept}
        self.rows = [row for row in self.rows if row.name not in names]

    def _saved(self) -> dict[str, Any]:
        """The report, after it was written to the folder of --out: whole or not at all, so that a killed run keeps it."""
        self.report["seconds"] = round(time.monotonic() - self._start, 1)
        if self._settings.out is not None:
            unfinished = self._place.with_suffix(".part")
            unfinished.write_text(json.dumps(self.report))
            unfinished.replace(self._place)
        return self.report

    def _say(self, text: str) -> None:
        sys.stderr.write(f"[{time.monotonic() - self._start:6.1f} s] {text}\n")

    def _is_late(self) -> bool:
        limit = self._settings.time_limit
        return limit is not None and time.monotonic() - self._start >= limit

    def _unfit_device(self) -> str:
        if self.device.type == "cuda" and not torch.cuda.is_available():
            return "needs a CUDA device, and this machine has no usable one"
        return ""


def chosen_rows(suite: Suite, names: Sequence[str]) -> list[Row]:
    """The rows of these names, in the suite's order; all without a name. Raises ValueError for an unknown one."""
    known = [row.name for row in suite.rows]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            guess = f"did you mean {near[0]}?" if near else f"its rows are {', '.join(known)}"
            raise ValueError(f"--rows {name}: no row of --suite {suite.name}; {guess}")
    return [row for row in suite.rows if not names or row.name in names]


def _check_lengths(samples: Samples, wanted: int) -> None:
    for name, runs in samples.items():
        for done in (done for sample in runs for done in sample.completions):
            if done.completion_tokens != wanted:
                raise RuntimeError(
                    f"{name} gave {done.completion_tokens} tokens where {wanted} were asked for"
                )


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
