"""What `bench --suite` can be told. Nothing here needs torch."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from spec_v2.server_args import flag_of, from_cli_args

SUITES = ("h200", "cpu")
FEWEST_REPETITIONS = 3
_OWN = ("rows", "time_limit", "out", "resume", "traces")
_CHOSEN_BY_THE_SUITE = (
    "algorithms",
    "schedules",
    "batch_sizes",
    "prompts",
    "max_new_tokens",
    "against",
    "draft_model",
)
_CHOSEN_FOR_ENGINES = (
    "model_path", "tokenizer_path", "dtype", "context_length", "max_running_requests", "disable_radix_cache",
    "disable_overlap_schedule", "enable_multi_layer_eagle",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteSettings:
    """`rows`: names, or none for all. `time_limit`: seconds after which no case is started. `out`: a folder.
    `resume`: keep the rows that are in it already. `traces`: a folder for traces of a few steps.
    `engine`: settings that all engines get, beside those of their row."""

    suite: str
    rows: tuple[str, ...] = ()
    time_limit: float | None = None
    out: str | None = None
    resume: bool = False
    traces: str | None = None
    repetitions: int = FEWEST_REPETITIONS
    device: str | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)


def add_suite_args(parser: argparse.ArgumentParser) -> None:
    """The flags that only a suite has."""
    group = parser.add_argument_group("a suite: a fixed table of figures")
    group.add_argument("--suite", choices=SUITES, help="the table to measure, in place of the flags above")
    group.add_argument("--rows", type=_names, default=(), metavar="NAME,NAME", help="of its rows, these only")
    group.add_argument(
        "--time-limit",
        type=_seconds,
        metavar="SECONDS",
        help="start nothing more after this long, and list it",
    )
    group.add_argument(
        "--out",
        metavar="FOLDER",
        help="rewrite the report there after each repetition, so that a killed run keeps it",
    )
    group.add_argument(
        "--resume", action="store_true", help="keep the rows that the report in --out has, measure the others"
    )
    group.add_argument(
        "--traces", metavar="FOLDER", help="write a few steps of both schedules there, for ui.perfetto.dev"
    )


def suite_settings(options: argparse.Namespace, defaults: argparse.Namespace) -> SuiteSettings:
    """The settings of a suite. Raises ValueError naming a flag that the suite would not heed.

    `defaults`: what an empty command line gives.
    """
    args = from_cli_args(options)
    ignored = [name for name in _CHOSEN_BY_THE_SUITE if getattr(options, name) != getattr(defaults, name)]
    given = {s.name: getattr(args, s.name) for s in fields(args) if getattr(args, s.name) != s.default}
    ignored += [name for name in given if name in _CHOSEN_FOR_ENGINES or name.startswith("speculative_")]
    if ignored:
        raise ValueError(f"{flag_of(ignored[0])}: --suite {options.suite} chooses this itself; leave it out")
    if options.repetitions < FEWEST_REPETITIONS:
        raise ValueError(
            f"--repetitions {options.repetitions}: a suite's figures are medians; give at least {FEWEST_REPETITIONS}"
        )
    for flag, folder in (("--out", options.out), ("--traces", options.traces)):
        if folder is not None and not Path(folder).is_dir():
            raise ValueError(f"{flag} {folder}: give a folder that exists")
    if options.resume and options.out is None:
        raise ValueError("--resume needs the report of an earlier run: name its folder with --out")
    return SuiteSettings(
        suite=options.suite,
        rows=options.rows,
        time_limit=options.time_limit,
        out=options.out,
        resume=options.resume,
        traces=options.traces,
        repetitions=options.repetitions,
        device=given.pop("device", None),
        engine=given,
    )


def refuse_without_suite(options: argparse.Namespace) -> None:
    """A suite's own flag without a suite would be ignored. Raises ValueError."""
    for name in _OWN:
        if getattr(options, name):
            raise ValueError(
                f"{flag_of(name)} is for --suite; name one of {', '.join(SUITES)}, or leave it out"
            )


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return value
