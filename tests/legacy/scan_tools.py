"""What the scanner's and the fixer's tests share: scan or fix one text as if it were a file."""

import json
import textwrap
from pathlib import Path

from legacy_compat.cli import main
from legacy_compat.fix.run import fix_bytes
from legacy_compat.fix.texts import Allowed
from legacy_compat.scan.rules import Rules
from legacy_compat.scan.run import Options, scan_bytes

S = "sglang.srt.speculative."
_rules = {}


def rules(target=None):
    return _rules.setdefault(target, Rules(target))


def scan_text(text, name="user/plugin.py", *, target=None, dedent=True, **options):
    """All findings of one text; bytes are taken as they are."""
    data = text if isinstance(text, bytes) else (textwrap.dedent(text) if dedent else text).encode()
    found, _ = scan_bytes(name, data, rules(target), Options(target=target, **options))
    return found.kept


def fix_text(text, name="user/plugin.py", *, unsafe=False, drop_legacy=False, target=None, dedent=True):
    """A text after `fix`, as str; bytes come back as bytes."""
    data = text if isinstance(text, bytes) else (textwrap.dedent(text) if dedent else text).encode()
    allowed = Allowed(unsafe, drop_legacy)
    after, _ = fix_bytes(name, data, rules(target), Options(target=target), allowed)
    again, _ = fix_bytes(name, after, rules(target), Options(target=target), allowed)
    assert again == after, "a second run changes the file again"
    return after if isinstance(text, bytes) else after.decode()


def told(findings):
    """(severity, shape, code) of each."""
    return [(found.severity, found.shape, found.code) for found in findings]


def at(findings, line):
    return [found for found in findings if found.span.line == line]


def worst(findings):
    order = ("info", "warning", "error")
    return max((found.severity for found in findings), key=order.index, default="none")


def code_of(path):
    """The code of a dotted path, so that no test has to know it."""
    return rules().paths[path].code


def write_tree(folder, **files):
    """Files below a folder; in a keyword `__` stands for a slash and `_dot_` for a dot."""
    for name, text in files.items():
        path = Path(folder) / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return Path(folder)


def run(capsys, *arguments):
    """The command line: (exit code, standard output, standard error)."""
    code = main([*map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def notebook(*cells):
    """A notebook of (kind, text) cells, as Jupyter writes it."""
    made = [
        {"cell_type": kind, "metadata": {}, "source": text.splitlines(keepends=True)}
        | ({"outputs": [], "execution_count": None} if kind == "code" else {})
        for kind, text in cells
    ]
    return json.dumps({"cells": made, "metadata": {}, "nbformat": 4, "nbformat_minor": 5}, indent=1)
