"""Whether code that names something removed also names what replaces it: then it is written for both."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from legacy_compat.registry import Removal
from legacy_compat.scan.python.names import Names
from legacy_compat.scan.rules import Rules


class Siblings:
    """What counts as the newer name of a row: its replacement, and for a class those of its members too.

    A module's or a class's bare name counts as well as its path; a method's bare name would prove nothing.
    """

    def __init__(self, row: Removal, rules: Rules) -> None:
        self.prefixes: set[str] = set()
        self.names: set[str] = set()
        own = _newer(row)
        if own is None:
            return
        self.prefixes.add(own[0])
        members = [other for path, other in rules.paths.items() if path.startswith(f"{row.old_path}.")]
        for found in (own, *filter(None, map(_newer, members))):
            if found[0] == own[0]:  # not what was there all along, such as a data class of another module
                self.names.update(part for part in found[1] if part[:1].isupper() or part == found[1][0])
        self.names -= {part for path in row.paths for part in path.split(".")}

    def __bool__(self) -> bool:
        return bool(self.prefixes)

    def in_text(self, text: str) -> bool:
        if text in self.names:
            return True
        return any(
            text == prefix or text.startswith((f"{prefix}.", f"{prefix}:")) for prefix in self.prefixes
        )

    def in_code(self, nodes: Iterable[ast.AST], names: Names) -> bool:
        """Whether any import, string or name below these nodes is the newer one."""
        for top in nodes:
            for node in ast.walk(top):
                match node:
                    case ast.Import():
                        found = [alias.name for alias in node.names]
                    case ast.ImportFrom():
                        module = names.module_of(node)
                        found = [module, *(f"{module}.{alias.name}" for alias in node.names)]
                    case ast.Constant(value=str(text)):
                        found = [text]
                    case ast.Name(id=name) | ast.Attribute(attr=name):
                        found = [name]
                    case _:
                        continue
                if any(map(self.in_text, found)):
                    return True
        return False


def _newer(row: Removal) -> tuple[str, list[str]] | None:
    """The new path up to where it differs from the old one, and its parts from there on."""
    new = (row.sglang_replacement or "").partition("(")[0]
    if "." not in new:
        return None
    before, after = row.old_path.split("."), new.split(".")
    same = 0
    while same < min(len(before), len(after)) and before[same] == after[same]:
        same += 1
    return ".".join(after[: same + 1]), after[same:]
