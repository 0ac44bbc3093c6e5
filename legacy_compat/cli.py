"""`python -m legacy_compat`: scan, fix, explain, list, docs.

Exit codes of scan: 0 nothing at or above --fail-on, 1 something, 2 it could not do what was asked.
Of fix: 0 done, 1 errors or warnings are left to do by hand (with --check and --diff: something would change), 2 as above.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from legacy_compat.explain import explain
from legacy_compat.options import build_parser
from legacy_compat.registry import version_key
from legacy_compat.scan.config import read_config
from legacy_compat.scan.output import as_github, as_json, as_sarif, as_text, counted, summary
from legacy_compat.scan.run import Options, scan
from legacy_compat.scan.suppress import read_baseline, write_baseline


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # file names may hold anything
    arguments = build_parser().parse_args(argv)
    commands = {"scan": _scan, "fix": _fix, "explain": _explain, "list": _list, "docs": _docs}
    try:
        return commands[arguments.command](arguments)
    except BrokenPipeError:  # `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except ValueError as error:
        print(f"legacy_compat: {error}", file=sys.stderr)
        return 2


def _options(arguments: argparse.Namespace) -> tuple[Options, Path | None]:
    """The command line's settings, and below them the project's. Second: the baseline file."""
    paths = [Path(path) for path in arguments.paths]
    start = paths[0] if paths and paths[0].is_dir() else paths[0].parent
    config = read_config(start)
    target = arguments.target_version or config.target
    if target is not None:
        version_key(target)  # raises for what is no release
    options = Options(
        target=target,
        ignore=(*config.ignore, *_codes(arguments.ignore)),
        exclude=(*config.exclude, *arguments.exclude),
        package_root=arguments.package_root,
        strict_results=arguments.strict_results,
        max_size=int(arguments.max_file_size * 2**20),
    )
    return options, config.baseline


def _codes(given: Sequence[str]) -> list[str]:
    return [code.strip() for text in given for code in text.split(",") if code.strip()]


# --- scan ---


def _scan(arguments: argparse.Namespace) -> int:
    options, configured = _options(arguments)
    baseline = Path(arguments.baseline) if arguments.baseline else configured
    use = baseline is not None and not arguments.write_baseline and (arguments.baseline or baseline.exists())
    known = read_baseline(baseline) if use and baseline else None
    report = scan([Path(path) for path in arguments.paths], options, known)
    if arguments.write_baseline:
        accepted = report.at_least("warning")
        write_baseline(Path(arguments.write_baseline), accepted)
        print(f"{len(accepted)} findings written to {arguments.write_baseline}", file=sys.stderr)
        return 2 if report.failed else 0
    shown = dataclasses.replace(report, findings=report.at_least(arguments.show))
    match arguments.format:
        case "json":
            text = as_json(shown)
        case "sarif":
            text = as_sarif(shown)
        case "github":
            text = as_github(shown)
        case kind:
            text = as_text(shown, colour=_colour(arguments), concise=kind == "concise")
    _print(text, arguments.output)
    print(
        summary(report, shown=len(shown.findings)),
        end="",
        file=sys.stderr if _is_data(arguments) else sys.stdout,
    )
    unparsed = [found for found in report.findings if found.code == "SV900"]
    if report.failed or (unparsed and (arguments.strict or not report.parsed)):
        return 2
    if arguments.exit_zero or arguments.fail_on == "never":
        return 0
    return 1 if report.at_least(arguments.fail_on) else 0


def _is_data(arguments: argparse.Namespace) -> bool:
    """Whether standard output holds nothing but the report."""
    return arguments.format in ("json", "sarif", "github") and not arguments.output


def _print(text: str, output: str | None) -> None:
    if output:
        Path(output).write_text(text, encoding="utf-8", errors="backslashreplace")
    else:
        print(text, end="")


def _colour(arguments: argparse.Namespace) -> bool:
    if arguments.color != "auto":
        return bool(arguments.color == "always")
    return sys.stdout.isatty() and not arguments.output and "NO_COLOR" not in os.environ


# --- fix ---


def _fix(arguments: argparse.Namespace) -> int:
    from legacy_compat.fix import Allowed, DirtyTree, NeedsLibcst, diff_of, fix

    options, _ = _options(arguments)
    allowed = Allowed(
        arguments.unsafe, arguments.drop_legacy, frozenset(map(str.upper, _codes(arguments.select)))
    )
    only_show = arguments.diff or arguments.check
    paths = [Path(path) for path in arguments.paths]
    try:
        report = fix(paths, options, allowed, write=not only_show, allow_dirty=arguments.allow_dirty)
    except DirtyTree as error:
        print(
            f"legacy_compat: nothing was changed, because there is work that is not committed: {error}\n"
            "Commit or stash it, so that you can look at what fix did on its own, or pass --allow-dirty.",
            file=sys.stderr,
        )
        return 2
    except NeedsLibcst as error:
        print(f"legacy_compat: {error}", file=sys.stderr)
        return 2
    if arguments.diff:
        text = "".join(map(diff_of, report.changes))
        sys.stdout.flush()
        _write_bytes(text.encode("utf-8", "surrogateescape"))
    talk = sys.stderr if arguments.diff else sys.stdout
    for change in report.changes if not arguments.diff else ():
        print(f"{'would fix' if only_show else 'fixed'} {change.path}: {len(change.made)}", file=talk)
    for path, reason in report.refused:
        print(f"left as it was: {path}: {reason}", file=talk)
    left = dataclasses.replace(report.left, findings=report.left.at_least("warning"))
    if left.findings and not arguments.quiet:
        print("\nLeft to do by hand, or with --unsafe:\n", file=talk)
        print(as_text(left, concise=True), file=talk)
    verb = "would be mended" if only_show else "mended"
    print(
        f"{counted(report.left.scanned, 'file')} scanned: {counted(report.made, 'use')} {verb} in "
        f"{counted(len(report.changes), 'file')}, {len(left.findings)} left.",
        file=talk,
    )
    for line in report.left.failed:
        print(f"could not do: {line}", file=sys.stderr)
    if report.left.failed or report.refused:
        return 2
    return 1 if (report.changes if only_show else left.findings) else 0


def _write_bytes(data: bytes) -> None:
    if hasattr(sys.stdout, "buffer"):
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
    else:  # replaced, as tests do
        sys.stdout.write(data.decode("utf-8", "backslashreplace"))


# --- the table ---


def _explain(arguments: argparse.Namespace) -> int:
    found = explain(arguments.what)
    print(found.text, end="")
    return 0 if found.known else 2


def _list(arguments: argparse.Namespace) -> int:
    from legacy_compat.table_view import list_replacements

    rows = list_replacements(arguments.search, sglang_version=arguments.target_version)
    if arguments.json:
        print(rows.to_json())
        return 0
    for row in rows:
        print(
            f"{row.code}  {row.removed_in:<12} {row.safety:<7} {row.old_path} -> {row.sglang_replacement or '-'}"
        )
    print(f"{len(rows)} rows", file=sys.stderr)
    return 0


def _docs(arguments: argparse.Namespace) -> int:
    from legacy_compat import docs_page

    if arguments.check:
        current = docs_page.is_current(Path(arguments.check))
        print(
            f"{arguments.check} is {'up to date' if current else 'out of date: docs --write makes it anew'}"
        )
        return 0 if current else 1
    if arguments.write:
        changed = docs_page.write(Path(arguments.write))
        print(f"{arguments.write} {'written' if changed else 'is up to date'}")
    else:
        print(docs_page.render(), end="")
    return 0
