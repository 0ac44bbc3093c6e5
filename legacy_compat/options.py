"""The command line of `python -m legacy_compat`."""

from __future__ import annotations

import argparse
from typing import Any

from legacy_compat.scan.finding import SEVERITIES
from legacy_compat.scan.output import FORMATS

SCAN_EXAMPLES = """\
examples:
  python -m legacy_compat scan .                                    look at everything below here
  python -m legacy_compat scan src scripts --format concise         one line for each finding
  python -m legacy_compat scan . --target-version 0.5.13            code that is to run on SGLang 0.5.13
  python -m legacy_compat scan . --format sarif -o legacy.sarif     for code scanning
  python -m legacy_compat scan . --write-baseline known.json        accept what is there today ...
  python -m legacy_compat scan . --baseline known.json              ... and hear only of what is new

silence a line:  x = old()  # sv: ignore[SV101]      or  # noqa: SV101
silence a file:  # sv: ignore-file

exit code: 0 nothing at or above --fail-on, 1 something, 2 could not do what was asked
"""
FIX_EXAMPLES = """\
examples:
  python -m legacy_compat fix . --diff             show what would change, as a patch
  python -m legacy_compat fix .                    make the safe changes
  python -m legacy_compat fix . --unsafe           also those that want to be looked over
  python -m legacy_compat fix . --check            for CI: exit code 1 if anything would change
  python -m legacy_compat fix . --drop-legacy      take out the V1 branch of guarded imports

Python code is edited with libcst: pip install spec-v2[migrate]

exit code: 0 done, 1 errors or warnings are left (with --check or --diff: something would change),
2 could not do what was asked, or left a file alone
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m legacy_compat",
        description="Finds and mends code that still uses SGLang's speculative decoding V1. Scanned code is only read.",
        epilog="`python -m legacy_compat COMMAND --help` has examples.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _scan(commands.add_parser("scan", **_about("find what uses removed names", SCAN_EXAMPLES)))
    _fix(commands.add_parser("fix", **_about("mend what can be mended without guessing", FIX_EXAMPLES)))
    _table(commands)
    return parser


def _about(text: str, examples: str = "") -> dict[str, Any]:
    """Arguments of a sub-command's parser."""
    return {
        "help": text,
        "description": text[0].upper() + text[1:] + ".",
        "epilog": examples,
        "formatter_class": argparse.RawDescriptionHelpFormatter,
    }


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths", nargs="*", default=["."], metavar="PATH", help="files or folders (default: here)"
    )
    parser.add_argument(
        "--target-version",
        metavar="X.Y.Z",
        help="SGLang release the code is to run on (default: the newest known)",
    )
    parser.add_argument(
        "--ignore", action="append", default=[], metavar="CODES", help="codes to leave out, comma-separated"
    )
    parser.add_argument(
        "--exclude",
        action="append",
        default=[],
        metavar="GLOB",
        help="files or folders to leave out; repeatable",
    )
    parser.add_argument(
        "--max-file-size",
        type=_megabytes,
        default=8.0,
        metavar="MIB",
        help="larger files are skipped (default: 8)",
    )
    parser.add_argument(
        "--package-root",
        metavar="DIR",
        help="folder that holds the sglang package, for relative imports (default: from the path)",
    )
    parser.add_argument(
        "--strict-results",
        action="store_true",
        help="also note fields of results that mean something else today",
    )


def _megabytes(text: str) -> float:
    value = float(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _scan(parser: argparse.ArgumentParser) -> None:
    _common(parser)
    parser.add_argument(
        "--format", choices=FORMATS, default="text", help="how to show findings (default: text)"
    )
    parser.add_argument("-o", "--output", metavar="FILE", help="write the report there")
    parser.add_argument(
        "--show",
        choices=SEVERITIES,
        default="info",
        help="leave out what is below (default: info, which is all)",
    )
    parser.add_argument(
        "--fail-on",
        choices=(*SEVERITIES, "never"),
        default="warning",
        help="exit code 1 from here on (default: warning)",
    )
    parser.add_argument("--exit-zero", action="store_true", help="exit code 0 whatever is found")
    parser.add_argument("--strict", action="store_true", help="exit code 2 if any file could not be parsed")
    parser.add_argument("--baseline", metavar="FILE", help="findings that are known, and not shown")
    parser.add_argument("--write-baseline", metavar="FILE", help="write all errors and warnings of now there")
    parser.add_argument(
        "--color", choices=("auto", "always", "never"), default="auto", help="(default: auto)"
    )


def _fix(parser: argparse.ArgumentParser) -> None:
    _common(parser)
    parser.add_argument(
        "--diff", action="store_true", help="show a unified diff on standard output; change nothing"
    )
    parser.add_argument("--check", action="store_true", help="say what would change; change nothing")
    parser.add_argument("--unsafe", action="store_true", help="also make changes that want to be looked over")
    parser.add_argument(
        "--drop-legacy", action="store_true", help="collapse try/except that falls back to a removed name"
    )
    parser.add_argument(
        "--select",
        action="append",
        default=[],
        metavar="CODES",
        help="mend these codes only, comma-separated",
    )
    parser.add_argument(
        "--allow-dirty", action="store_true", help="even if there is work that is not committed"
    )
    parser.add_argument("--quiet", action="store_true", help="don't list what is left")


def _table(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("explain", **_about("say all about one code or name"))
    parser.add_argument(
        "what", metavar="CODE_OR_NAME", help="SV101, a dotted path, or a name such as EAGLEWorker"
    )
    parser = commands.add_parser("list", **_about("list the table of removals"))
    parser.add_argument("search", nargs="?", default="", help="only rows in which this occurs")
    parser.add_argument(
        "--target-version", metavar="X.Y.Z", help="only rows that concern this SGLang release"
    )
    parser.add_argument("--json", action="store_true", help="all fields, as JSON")
    parser = commands.add_parser("docs", **_about("print the migration page made from the table"))
    parser.add_argument("--write", metavar="FILE", help="write it there")
    parser.add_argument("--check", metavar="FILE", help="exit code 1 if that file is not up to date")
