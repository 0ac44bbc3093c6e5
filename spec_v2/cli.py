"""The command line: `python -m spec_v2` with `generate`, `info`, `bench`, `train` or `doctor`.

Answers go to stdout; progress, logs, warnings and errors go to stderr. With `--json` stdout holds one JSON
object or, after an error, nothing. Exit codes: 0 done, 1 done and something is wrong (`bench`, `doctor`),
2 a setting or prompt that cannot work, 130 Ctrl-C.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_v2 import __version__
from spec_v2.bench.settings import add_bench_args
from spec_v2.facts import dtype_name, facts_of, versions
from spec_v2.sampling_params import SamplingParams
from spec_v2.server_args import ServerArgs, add_cli_args, from_cli_args
from spec_v2.terminal import messages_on_stderr, stdout_is_for_the_answer
from spec_v2.training.command import add_train_args

if TYPE_CHECKING:
    from spec_v2.completion import Completion
    from spec_v2.engine import Engine

PROGRAM = "spec-v2"
INTERRUPTED = 130
USAGE_ERROR = 2
FORCED = ", forced acceptance: this is not the model's text"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. argparse's own errors leave through SystemExit(2)."""
    options = build_parser().parse_args(argv)
    options.command_line = sys.argv[1:] if argv is None else list(argv)
    run: Callable[[argparse.Namespace], str | tuple[str, int]] = options.run
    try:
        with stdout_is_for_the_answer(), messages_on_stderr(PROGRAM):
            answer = run(options)
    except ValueError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        print(f"{PROGRAM}: interrupted", file=sys.stderr)
        return INTERRUPTED
    text, code = (answer, 0) if isinstance(answer, str) else answer
    print(text)
    return code


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands. Engine settings have SGLang's flag names, see `ServerArgs`."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description="Lossless speculative decoding, one step to a screen.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], Any], text: str) -> argparse.ArgumentParser:
        about = text[0].upper() + text[1:] + "."
        added = commands.add_parser(name, help=text, description=about, allow_abbrev=False)
        added.add_argument("--json", action="store_true", help="one JSON object on stdout, nothing else")
        added.set_defaults(run=run)
        return added

    generate = command("generate", _generate, "complete prompts")
    _add_request_args(generate)
    add_cli_args(generate)
    add_cli_args(command("info", _info, "load the model, show the settings, memory and algorithms"))
    add_bench_args(command("bench", _bench, "measure algorithms and schedules against each other"))
    add_train_args(
        command("train", _train, "train draft models for a target, on texts that it writes itself")
    )
    command("doctor", _doctor, "check what works on this machine, and say how to mend the rest")
    return parser


def engine_from_args(args: ServerArgs) -> "Engine":
    """The engine that a parsed command line describes. Loads the model."""
    from spec_v2.engine import Engine

    settings = asdict(args)
    return Engine(settings.pop("model_path"), **settings)


# -- generate ------------------------------------------------------------------------------------------------


def _add_request_args(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompts and sampling")
    group.add_argument(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="text to continue; - reads it from stdin; may be repeated",
    )
    group.add_argument(
        "--prompt-file",
        action="append",
        default=[],
        metavar="PATH",
        help="a UTF-8 file that holds one prompt; may be repeated",
    )
    defaults = SamplingParams()
    for name, kind, text in (
        ("max_new_tokens", int, "most tokens to generate for a prompt"),
        ("temperature", float, "0 takes the most likely token"),
        ("top_p", float, "sample among the likely tokens that together have this probability"),
        ("top_k", int, "sample among this many likely tokens; -1 is all"),
    ):
        default = getattr(defaults, name)
        group.add_argument(
            "--" + name.replace("_", "-"),
            type=kind,
            default=default,
            metavar="N" if kind is int else "X",
            help=f"{text} (default: {default})",
        )
    group.add_argument("--seed", type=int, metavar="N", help="fixes what is sampled")
    group.add_argument("--ignore-eos", action="store_true", help="go on past the end-of-sequence token")
    group.add_argument("--trace", metavar="PATH", help="write what ran when, for ui.perfetto.dev")


def _generate(options: argparse.Namespace) -> str:
    prompts = _prompts(options)
    params = SamplingParams(
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        seed=options.seed,
        ignore_eos=options.ignore_eos,
    )
    trace = _writable(options.trace)
    with engine_from_args(from_cli_args(options)) as engine:
        engine.trace.separate_launches = trace is not None
        start = time.perf_counter()
        completions = engine.generate(prompts, params)
        seconds = time.perf_counter() - start
        if trace is not None:
            print(f"{PROGRAM}: trace written to {engine.trace.to_perfetto(trace)}", file=sys.stderr)
        if options.json:
            return json.dumps(_report(engine, completions, seconds))
        return _for_humans(engine, prompts, completions, seconds)


def _prompts(options: argparse.Namespace) -> list[str]:
    """The prompts in the order of their flags, `--prompt` first."""
    sources = [*options.prompt, *options.prompt_file]
    if sources.count("-") > 1:
        raise ValueError("stdin can hold one prompt only: give --prompt - once")
    prompts = [_read_stdin() if text == "-" else text for text in options.prompt]
    prompts += [_read_stdin() if path == "-" else _read_file(path) for path in options.prompt_file]
    if not prompts:
        raise ValueError("no prompt: give --prompt TEXT, --prompt-file PATH, or --prompt - to read stdin")
    for number, prompt in enumerate(prompts, 1):
        if not prompt:
            raise ValueError(f"prompt {number} is empty: give it at least one character")
    return prompts


def _read_stdin() -> str:
    return _without_last_newline(sys.stdin.read())


def _read_file(path: str) -> str:
    try:
        return _without_last_newline(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--prompt-file {path}: {error}") from error


def _without_last_newline(text: str) -> str:
    """Editors and echo end a text with a newline that its author did not mean as part of the prompt."""
    return text.removesuffix("\n").removesuffix("\r")


def _writable(path: str | None) -> Path | None:
    """Checked first: nobody wants to learn after a long run that the trace has no place."""
    if path is None:
        return None
    file = Path(path)
    if file.is_dir() or not file.parent.is_dir():
        raise ValueError(f"--trace {path}: give a file in a folder that exists")
    if not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ValueError(f"--trace {path}: no permission to write there; give another path")
    return file


def _report(engine: "Engine", completions: Sequence["Completion"], seconds: float) -> dict[str, Any]:
    args = engine.server_args
    return {
        "model": args.model_path,
        "device": engine.device_name,
        "dtype": dtype_name(engine),
        "schedule": args.schedule,
        "speculative_algorithm": args.speculative_algorithm,
        "completions": [
            {
                "text": c.text,
                "output_ids": list(c.output_ids),
                "finish_reason": c.finish_reason,
                **({"error": c.error} if c.error else {}),
                "prompt_tokens": c.prompt_tokens,
                "completion_tokens": c.completion_tokens,
                "spec_verify_ct": c.spec.verify_ct,
                "spec_accept_length": round(c.spec.accept_length, 4),
                "spec_accept_rate": round(c.spec.accept_rate, 4),
                "forced_acceptance": c.spec.forced_acceptance,
            }
            for c in completions
        ],
        "tokens_per_second": round(sum(c.completion_tokens for c in completions) / seconds, 2),
        "versions": versions(),
    }


def _for_humans(
    engine: "Engine", prompts: Sequence[str], completions: Sequence["Completion"], seconds: float
) -> str:
    lines = []
    for number, (prompt, c) in enumerate(zip(prompts, completions, strict=True), 1):
        if len(prompts) > 1:
            lines.append(f"--- {number}: {_shortened(prompt)}")
        lines.append(c.text)
        if c.error:
            lines.append(f"[error: {c.error}]")
        lines.append(
            f"[{c.prompt_tokens} prompt tokens, {c.completion_tokens} new, ended by {c.finish_reason}, "
            f"{c.spec.verify_ct} decode steps, accept length {c.spec.accept_length:.2f}, "
            f"accept rate {c.spec.accept_rate:.2f}{FORCED if c.spec.forced_acceptance else ''}]"
        )
    args, total = engine.server_args, sum(c.completion_tokens for c in completions)
    lines.append(
        f"[{args.speculative_algorithm or 'no speculation'}, {args.schedule} schedule, {dtype_name(engine)} on "
        f"{engine.device_name}: {total} tokens in {seconds:.2f} s, {total / seconds:.1f} tokens/s]"
    )
    return "\n".join(lines)


def _shortened(prompt: str) -> str:
    first = " ".join(prompt.split())
    return first if len(first) <= 60 else first[:57] + "..."


# -- info ----------------------------------------------------------------------------------------------------


def _info(options: argparse.Namespace) -> str:
    with engine_from_args(from_cli_args(options)) as engine:
        facts = facts_of(engine)
    if options.json:
        return json.dumps(facts)
    lines: list[str] = []
    for title, value in facts.items():
        if isinstance(value, dict):
            lines.append(title)
            lines += [f"  {name:<36}{_shown(entry)}" for name, entry in value.items()]
        else:
            lines.append(f"{title:<38}{_shown(value)}")
    return "\n".join(lines)


def _shown(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "-" if value is None else str(value)


# -- bench, train and doctor ----------------------------------------------------------------------------------------


def _bench(options: argparse.Namespace) -> tuple[str, int]:
    from spec_v2.bench.command import run_bench

    return run_bench(options)


def _train(options: argparse.Namespace) -> str:
    from spec_v2.training.command import run_train

    return run_train(options)


def _doctor(options: argparse.Namespace) -> tuple[str, int]:
    from spec_v2.doctor import run_doctor

    return run_doctor(options.json)
