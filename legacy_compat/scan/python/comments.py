"""Comments that name something removed. They break nothing and are never edited: info only."""

from __future__ import annotations

import io
import tokenize

from legacy_compat.scan.finding import Span
from legacy_compat.scan.mentions import mentions
from legacy_compat.scan.python.module import Module


def find_comments(module: Module) -> None:
    if not _may_mention(module):
        return
    for token in comments(module.text):
        line, column = token.start
        for found in mentions(token.string, module.rules):
            if found.row.severity == "info":
                continue
            span = Span(line, column + found.start + 1, line, column + found.end + 1)
            module.emit(module.tree.root, found.row, "comment", found.name, span=span, severity="info")


def _may_mention(module: Module) -> bool:
    """Whether anything after any `#` names something: asking Python's tokenizer takes far longer."""
    after = "\n".join(line.partition("#")[2] for line in module.text.split("\n") if "#" in line)
    return next(mentions(after, module.rules), None) is not None


def comments(text: str) -> list[tokenize.TokenInfo]:
    """All comments of a source that parses."""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(text, newline="").readline))
    except (tokenize.TokenError, SyntaxError, IndentationError):
        return []
    return [token for token in tokens if token.type == tokenize.COMMENT]
