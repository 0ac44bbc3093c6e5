"""`bench --suite NAME`: a fixed table of figures, case by case, within a time limit.

What a case needs is opened, everybody runs once to warm up, then all take turns for at least three repetitions; rows
are medians of these. The report is rewritten after each repetition. A case that cannot run, or that the time limit leaves no room for, is listed with its reason.
"""

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from spec_v2.bench.contenders import Contender, Prompts
from spec_v2.bench.measure import Case, measure, num_runs
from spec_v2.bench.measure import Samples as CaseSamples
from spec_v2.bench.prediction import Hardware, measure_hardware
from spec_v2.bench.settings import ORACLE
from spec_v2.bench.suite_figures import Samples, cell_of, predicted, values_of
from spec_v2.bench.suite_models import LLAMA_8B, SMOLLM2, ModelPlan
from spec_v2.bench.suite_probes import PROBES
from spec_v2.bench.suite_record import SuiteRecord
from spec_v2.bench.suite_report import for_humans, guess_line
from spec_v2.bench.suite_rows import CPU_ROWS, ENTRIES, H200_ROWS, Row, in_cases
from spec_v2.bench.suite_settings import SuiteSettings
from spec_v2.bench.suite_traces import record_traces
from spec_v2.bench.workshop import Missing, Workshop
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
    """One run of a suite. Raises ValueError for an unknown row."""

    def __init__(self, suite: Suite, settings: SuiteSettings, command_line: Sequence[str]) -> None:
        self._suite, self._settings = suite, settings
        self.rows = chosen_rows(suite, settings.rows)
        self.device = torch.device(settings.device or suite.device_type)
        self._record = SuiteRecord(suite.name, settings, command_line)
        if settings.resume:
            kept = self._record.take_over([row.name for row in self.rows])
            self.rows = [row for row in self.rows if row.name not in kept]

    def report_all(self) -> dict[str, Any]:
        """Measure what can be measured."""
        reason = self._unfit_device()
        if reason:
            self._record.list_rows("skipped", self.rows, reason)
        if reason or not self.rows:
            return self._record.saved()
        self._record.report["device"] = _device_name(self.device)
        hardware = measure_hardware(self.device, torch.bfloat16)
        self._record.report["hardware"] = asdict(hardware)
        workshop = Workshop(self._suite.plans, self.device, self._settings.engine)
        try:
            traced: set[str] = set()
            for rows in in_cases(self.rows):
                if rows[0].model not in traced:
                    traced.add(rows[0].model)
                    self._trace(rows[0].model, workshop)
                self._one_case(rows, workshop, hardware)
                self._record.saved()
        finally:
            workshop.clear()
        return self._record.saved()

    # -- one case ----------------------------------------------------------------------------------------

    def _one_case(self, rows: list[Row], workshop: Workshop, hardware: Hardware) -> None:
        if self._is_late():
            reason = f"not started: the time limit of {self._settings.time_limit:g} s was reached"
            self._record.list_rows("skipped", rows, reason)
            return
        try:
            if rows[0].figure.entries:
                self._compare(rows, workshop, hardware)
            else:
                self._probe(rows[0], workshop.plan(rows[0].model), hardware)
        except Missing as reason:
            self._record.list_rows("skipped", rows, str(reason))
        except Exception as error:  # noqa: BLE001 - the other cases may still run
            self._record.list_rows("failed", rows, f"{type(error).__name__}: {error}")

    def _compare(self, rows: list[Row], workshop: Workshop, hardware: Hardware) -> None:
        model_name, batch_size = rows[0].model, rows[0].batch_size
        self._record.say(f"{model_name}, batch {batch_size}: loading")
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
                self._record.say(guess_line(row, guesses[row.name]))

            def note(samples: Samples) -> None:
                cells = {name: cell_of(samples[name]) for name in opened}
                for row in rows:
                    mine = {name: cells[name] for name in row.entries if name in cells}
                    self._record.add(row, values_of(row.figure, samples), guesses[row.name], model.note, mine)
                self._record.saved()

            samples = self._measure(Case(model.note, tuple(prompts)), opened, plan, note)
        _check_lengths(samples, plan.new_tokens)
        self._record.tell(rows)

    def _open(
        self, rows: list[Row], prompts: Prompts, workshop: Workshop, closing: ExitStack
    ) -> tuple[dict[str, Contender], dict[str, tuple[str, str]]]:
        """The contenders of a case by name, after a few tokens each; and of the others, whether they were skipped or
        failed, and why. So one that does not work takes its own rows away and no others."""
        opened: dict[str, Contender] = {}
        absent: dict[str, tuple[str, str]] = {}
        names = dict.fromkeys(name for row in rows for name in row.entries)
        for name in sorted(names, key=lambda name: ENTRIES[name].algorithm == ORACLE):  # it records another
            self._record.say(f"opening {name}")
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
                self._record.list_rows(absent[name][0], [row], absent[name][1])
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
                self._record.say(f"{done} of {total} runs")

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
        self._record.say(f"{row.name}: measuring")
        result = PROBES[row.figure.kind](
            plan, hardware, self.device, batch_size=row.batch_size, repetitions=self._settings.repetitions
        )
        self._record.add(row, result.values, result.floor, f"{plan.name}; {result.note}", {})
        self._record.tell([row])

    def _trace(self, model_name: str, workshop: Workshop) -> None:
        """Write the traces of a model, where they are wanted."""
        entry, name = self._suite.traced.get(model_name), f"trace-{model_name}"
        if self._settings.traces is None or entry is None or self._is_late():
            return
        self._record.say(f"{name}: {entry}, overlap and sync")
        try:
            workshop.check_room(model_name, 1, [entry])
            self._record.report["traces"] += record_traces(
                workshop, model_name, entry, Path(self._settings.traces)
            )
        except Missing as reason:
            self._record.list_one("skipped", name, f"trace of {entry}", str(reason))
        except Exception as error:  # noqa: BLE001 - the rows may still be measured
            self._record.list_one("failed", name, f"trace of {entry}", f"{type(error).__name__}: {error}")

    def _is_late(self) -> bool:
        limit = self._settings.time_limit
        return limit is not None and self._record.seconds >= limit

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
