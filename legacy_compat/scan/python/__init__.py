"""Python files. Reading order:

    tree.py         a syntax tree that knows what stands around each node
    names.py        what binds each name, scope by scope
    values.py       which strings an expression can give
    resolve.py      from an expression to the dotted paths it may stand for
    versions.py  siblings.py  guards.py     what makes a use harmless, or its failure silent
    module.py       one file: what the finders below ask, and where they put what they find
    imports.py  members.py  calls.py  strings.py  environment.py  comments.py     the finders

Nothing here imports or runs the code that it looks at.
"""

from __future__ import annotations

import ast
import warnings

from legacy_compat.scan.finding import Finding
from legacy_compat.scan.python.calls import find_calls
from legacy_compat.scan.python.comments import find_comments
from legacy_compat.scan.python.environment import find_environment
from legacy_compat.scan.python.imports import find_imports
from legacy_compat.scan.python.members import find_classes, find_members
from legacy_compat.scan.python.module import Module, module_path
from legacy_compat.scan.python.strings import find_annotations, find_strings
from legacy_compat.scan.rules import Rules

# The first finding of a row at a place stays, so the finder that knows most about a place comes first.
FINDERS = (
    find_imports,
    find_classes,
    find_calls,
    find_environment,
    find_members,
    find_annotations,
    find_strings,
    find_comments,
)


def parse(text: str) -> ast.Module:
    """Raises SyntaxError for whatever Python can't parse, however it says so."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the scanned code's own: invalid escapes and the like
        try:
            return ast.parse(text)
        except (ValueError, RecursionError, MemoryError) as error:
            raise SyntaxError(str(error) or type(error).__name__) from None


def scan_python(
    path: str,
    text: str,
    rules: Rules,
    *,
    package_root: str | None = None,
    strict_results: bool = False,
    hidden: str = "",
) -> list[Finding]:
    """All findings of one source, in order of place. Raises SyntaxError if it does not parse.

    `hidden` is code that uses the same names and is not part of the source: a notebook's magic lines.
    """
    module = Module(path, text, parse(text), rules, module_path(path, package_root))
    module.strict_results, module.hidden = strict_results, hidden
    try:
        for find in FINDERS:
            find(module)
    except RecursionError:  # a sum of thousands of parts, as generators write them
        raise SyntaxError("its expressions nest too deep") from None
    if module.own_row:
        message = (
            f"this file is {module.where} itself, which SGLang {module.own_row.removed_in} no longer has"
        )
        module.say(module.tree.root, module.own_row.code, "info", message)
    return sorted(
        module.findings.values(), key=lambda found: (found.span.line, found.span.column, found.code)
    )


__all__ = ["module_path", "parse", "scan_python"]
