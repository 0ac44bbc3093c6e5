"""The report of a suite as far as it has come: added to row by row, saved whole, and taken up again by --resume."""

import json
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from spec_v2.bench.figures import spread
from spec_v2.bench.suite_figures import verdict_of
from spec_v2.bench.suite_report import row_line
from spec_v2.bench.suite_rows import Row
from spec_v2.bench.suite_settings import SuiteSettings
from spec_v2.facts import machine, versions


class SuiteRecord:
    """`report` is what becomes JSON. Progress goes to stderr, with the seconds since the beginning."""

    def __init__(self, name: str, settings: SuiteSettings, command_line: Sequence[str]) -> None:
        self._start = time.monotonic()
        self._repetitions = settings.repetitions
        self._place = None if settings.out is None else Path(settings.out) / f"{name}.json"
        self.report: dict[str, Any] = {
            "suite": name,
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

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self._start

    def say(self, text: str) -> None:
        sys.stderr.write(f"[{self.seconds:6.1f} s] {text}\n")

    def saved(self) -> dict[str, Any]:
        """The report, after it was written to the folder of --out: whole or not at all, so that a killed run keeps it."""
        self.report["seconds"] = round(self.seconds, 1)
        if self._place is not None:
            unfinished = self._place.with_suffix(".part")
            unfinished.write_text(json.dumps(self.report))
            unfinished.replace(self._place)
        return self.report

    def take_over(self, wanted: Sequence[str]) -> set[str]:
        """Keep those rows of an earlier report that are complete; returns their names.

        Raises ValueError where it was measured with other settings.
        """
        if self._place is None or not self._place.exists():
            return set()
        earlier = json.loads(self._place.read_text())
        if earlier["engine_settings"] != self.report["engine_settings"]:
            raise ValueError(
                f"--resume: {self._place} was measured with {earlier['engine_settings']}, not with "
                f"{self.report['engine_settings']}; give the same flags, or another --out"
            )
        complete = [row for row in earlier["rows"] if len(row["values"]) >= self._repetitions]
        kept = [row for row in complete if row["name"] in wanted]
        self.report |= {name: earlier[name] for name in ("device", "hardware")}
        self.report |= {"rows": kept, "kept_from": earlier["date"] if kept else None}
        return {row["name"] for row in kept}

    def add(
        self, row: Row, values: Sequence[float], guess: float | None, note: str, cells: Mapping[str, Any]
    ) -> None:
        """A row with the repetitions that there are, in place of what it was before."""
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

    def tell(self, rows: Sequence[Row]) -> None:
        """Say what these rows have come to."""
        names = {row.name for row in rows}
        for added in self.report["rows"]:
            if added["name"] in names:
                self.say(row_line(added))

    def list_rows(self, where: str, rows: Sequence[Row], reason: str) -> None:
        """Put rows among the `skipped` or `failed` ones."""
        for row in rows:
            self._forget(row.name)
            self.list_one(where, row.name, row.text, reason)

    def list_one(self, where: str, name: str, text: str, reason: str) -> None:
        self.report[where].append({"name": name, "text": text, "reason": reason})
        self.say(f"{where}: {name}: {reason}")

    def _forget(self, name: str) -> None:
        self.report["rows"] = [row for row in self.report["rows"] if row["name"] != name]
