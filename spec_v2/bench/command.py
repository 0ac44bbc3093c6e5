"""`bench` from its flags to its answer."""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from spec_v2.bench.contenders import Contender, EngineContender
from spec_v2.bench.figures import cells_of
from spec_v2.bench.measure import Case, measure, num_runs
from spec_v2.bench.opening import open_engines, open_transformers
from spec_v2.bench.prompts import prompt_ids
from spec_v2.bench.report import for_humans
from spec_v2.bench.settings import BenchSettings, bench_defaults, settings_from
from spec_v2.bench.suite_settings import refuse_without_suite, suite_settings
from spec_v2.facts import dtype_name, machine, versions
from spec_v2.models.gguf_cache import quiet_transformers
from spec_v2.observability.progress import progress_bar


def run_bench(options: argparse.Namespace) -> tuple[str, int]:
    """(the answer, exit code): 1 where a contender did not give the tokens that were asked for."""
    if options.suite is not None:
        from spec_v2.bench.suite import run_suite

        return run_suite(suite_settings(options, bench_defaults()), options.json, options.command_line)
    refuse_without_suite(options)
    report = bench(settings_from(options), options.command_line)
    equal = all(cell["token_counts_equal"] for cell in report["cells"])
    return (json.dumps(report) if options.json else for_humans(report)), 0 if equal else 1


def bench(settings: BenchSettings, command_line: Sequence[str]) -> dict[str, Any]:
    """Load everybody, run everybody in turn, and give all figures of this one run."""
    with quiet_transformers():
        with ExitStack() as closing:
            engines = open_engines(settings, closing)
            for ours in engines:
                ours.engine.trace.separate_launches = True  # v, c and o are launches of their own
            contenders: list[Contender] = [*engines]
            if settings.against:
                contenders += open_transformers(settings, engines)
            cases = cases_of(settings, engines[0])
            facts = _facts(settings, engines, command_line)
            total = num_runs(contenders, cases, settings.repetitions)
            names = ", ".join(c.name for c in contenders)
            sys.stderr.write(f"{total} runs of {len(cases)} cases: {names}\n")
            with progress_bar(total, "run", None) as bar:
                samples = measure(
                    contenders,
                    cases,
                    max_new_tokens=settings.max_new_tokens,
                    repetitions=settings.repetitions,
                    done=lambda: bar.update(1),
                )
        # closed, an engine has given the model its own attention back: now it can say what is a tie
        model = engines[0].engine.model
        return facts | {"cells": cells_of(samples, contenders, settings.max_new_tokens, model)}


def cases_of(settings: BenchSettings, contender: EngineContender) -> list[Case]:
    """Every kind of prompt at every batch size. Raises ValueError for what has no tokenizer or too short a context."""
    engine = contender.engine
    if engine.tokenizer is None:
        raise ValueError(
            f"--model {engine.server_args.model_path} has no tokenizer; name one with --tokenizer-path"
        )
    cases = [
        Case(
            kind,
            tuple(prompt_ids(engine.tokenizer, kind, settings.num_prompts or batch_size)),
            batch_size,
            ignore_eos=kind != "heldout",
        )
        for kind in settings.prompts
        for batch_size in settings.batch_sizes
    ]
    longest = max(len(prompt) for case in cases for prompt in case.prompts)
    if longest + settings.max_new_tokens > engine.context_length:
        raise ValueError(
            f"--max-new-tokens {settings.max_new_tokens}: with a prompt of {longest} tokens that is more than the "
            f"context of {engine.context_length}; give {engine.context_length - longest} or less"
        )
    return cases


def _facts(
    settings: BenchSettings, engines: Sequence[EngineContender], command_line: Sequence[str]
) -> dict[str, Any]:
    """All that a reader needs to judge the figures, or to get them again."""
    import torch

    engine, args = engines[0].engine, settings.server_args
    return {
        "command": shlex.join(["spec-v2", *command_line]),
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "machine": machine(),
        "load_average": list(os.getloadavg()),
        "versions": versions(),
        "model": args.model_path,
        "dtype": dtype_name(engine),
        "device": engine.device_name,
        "threads": args.num_threads or torch.get_num_threads(),
        "settings": asdict(settings),
        "engines": {e.name: asdict(e.engine.server_args) for e in engines},
    }
