"""The registry's table, indexed for the scanner. No removed name is spelled anywhere else in it."""

from __future__ import annotations

import re
from functools import cached_property

from legacy_compat.registry import Removal, load

PARAMETER = re.compile(r"(?P<callee>[\w.]+)\((?P<name>\w+)\)$")
RESULT = re.compile(r"(\w+_\w+) of ")
PUT_TOGETHER = re.compile(
    rb"\b(?:sglang\.srt|speculative)\.(?:[{%]|[\"'](?!\w))"
)  # the beginning of a module path
DOTTED_PATH = re.compile(r"[A-Za-z_]\w*(?:\.\w+)+")
IN_CODE = ("module", "class", "function", "method", "attribute")
ROOT = "sglang"


class Rules:
    """The rows that concern one SGLang release; `target=None` means the newest."""

    def __init__(self, target: str | None = None, ignore: tuple[str, ...] = ()) -> None:
        ignored = {code.upper() for code in ignore}
        self.rows = tuple(
            row for row in load() if row.code not in ignored and (target is None or row.concerns(target))
        )
        in_code = [row for row in self.rows if row.kind in IN_CODE]
        self.paths = {path: row for row in in_code if not _is_kept(row) for path in row.paths}
        self.kept = {
            path: row for row in in_code if _is_kept(row) for path in row.paths
        }  # same name, other result
        self.env = {
            name: row for row in self.rows if row.kind == "env" for name in row.paths if "." not in name
        }
        self.flags = {
            flag: row for row in self.rows if row.kind == "flag" for flag in row.paths if "-" in flag
        }
        self.parameters: dict[str, dict[str, Removal]] = {}
        self.bare_parameters: dict[tuple[str, str], Removal] = {}  # (function's name, parameter)
        for row in self.rows:
            for found in filter(None, map(PARAMETER.match, row.paths if row.kind == "parameter" else ())):
                callee, name = found["callee"].removesuffix(".__init__"), found["name"]
                self.parameters.setdefault(callee, {})[name] = row
                if row.distinctive:
                    self.bare_parameters[callee.rpartition(".")[2], name] = row

    @cached_property
    def fields(self) -> dict[str, Removal]:
        """Flags as fields of ServerArgs, by the row of the field where there is one."""
        spelled = {flag.lstrip("-").replace("-", "_"): row for flag, row in self.flags.items()}
        owners = [names for callee, names in self.parameters.items() if callee.endswith(".ServerArgs")]
        return spelled | {name: row for names in owners for name, row in names.items()}

    @cached_property
    def bare(self) -> dict[str, Removal]:
        """Members that their name alone gives away, whatever object they are asked of."""
        members = ("method", "attribute")
        rows = [row for row in self.rows if row.distinctive and row.kind in members]
        return {path.rpartition(".")[2]: row for row in rows for path in row.paths}

    @cached_property
    def classes(self) -> dict[str, Removal]:
        """Removed classes by their own name."""
        return {row.name: row for row in self.rows if row.kind == "class"}

    @cached_property
    def descriptors(self) -> dict[str, Removal]:
        """Environment variables as attributes of SGLang's `envs`, which have rows of their own."""
        found = {path.rpartition(".")[2]: row for path, row in self.paths.items() if ".envs." in path}
        return {**self.env, **found}

    @cached_property
    def results(self) -> dict[str, Removal]:
        """Fields of a result that hold something else today: behaviours told as `field_name of ...`."""
        rows = [row for row in self.rows if row.kind == "behaviour"]
        return {found[1]: row for row in rows if (found := RESULT.match(row.old_path))}

    @cached_property
    def modules(self) -> dict[str, Removal]:
        """Removed modules by their whole path."""
        return {path: row for path, row in self.paths.items() if row.kind == "module"}

    def nearest(self, path: str) -> tuple[str, Removal] | None:
        """The longest removed part at the front of a dotted path, and its row."""
        while path.startswith(ROOT + "."):
            if row := self.paths.get(path):
                return path, row
            path = path.rpartition(".")[0]
        return None

    def member(self, owner: str, name: str) -> Removal | None:
        """The row of a member of a class or of a name in a module. Inherited ones are aliases in the table."""
        return self.paths.get(f"{owner}.{name}")

    def stays(self, owner: str, row: Removal) -> bool:
        """Whether the class that replaces `owner` still has this member: then the class's finding says it all."""
        replaced = self.paths.get(owner)
        new = replaced.sglang_replacement if replaced else None
        if not new or not row.sglang_replacement:
            return False
        return row.sglang_replacement == f"{new}.{row.name}" or (
            row.severity == "info" and row.kind == "attribute"
        )

    def proven(self, row: Removal, mentions_sglang: bool) -> bool:
        """Whether a distinctive name alone may be taken for SGLang's, in a file that does or doesn't say sglang."""
        return mentions_sglang or row.evidence == "name"

    @cached_property
    def triggers(self) -> tuple[dict[bytes, re.Pattern[bytes]], dict[bytes, tuple[bytes, ...]]]:
        """Words without which a file holds nothing to find; and owners of names, which need a name too."""
        words: set[str] = set()
        pairs: dict[str, set[str]] = {}
        for row in self.rows:
            for path in row.paths if row.kind != "behaviour" else ():
                if row.kind in ("env", "flag"):
                    words.update((path.lstrip("-"), path.lstrip("-").replace("-", "_")))
                elif row.kind != "class" and self.nearest(path.rpartition(".")[0]):
                    continue  # its class's or module's own name is needed to reach it
                elif row.kind in ("module", "class") or (row.distinctive and row.kind != "parameter"):
                    words.add(path.rpartition(".")[2])
                else:
                    owner, _, name = path.rstrip(")").replace("(", ".").rpartition(".")
                    above, _, last = owner.rpartition(".")
                    pairs.setdefault(last, set()).add(name)
                    if row.position is not None or row.trigger != "passed":  # its name need not be there
                        pairs[last].add(above.rpartition(".")[2])
        bounded = {
            word.encode(): re.compile(rb"\b" + re.escape(word.encode()) + rb"(?!\w)")
            for word in sorted(words)
        }
        return bounded, {
            owner.encode(): tuple(map(str.encode, sorted(names))) for owner, names in pairs.items()
        }

    def may_concern(self, data: bytes) -> bool:
        """Whether bytes hold any word, or any owner and name, that a finding needs.

        One `in` for each is quicker than any regex; a regex then only settles where a word ends.
        """
        words, pairs = self.triggers
        if any(word in data and bounded.search(data) for word, bounded in words.items()):
            return True
        if any(word in data for word in (b"import_module", b"__import__")) and PUT_TOGETHER.search(data):
            return True
        return any(owner in data and any(name in data for name in names) for owner, names in pairs.items())


def new_path(row: Removal) -> str | None:
    """The replacement, if it is a dotted path: not a flag, a variable, a parameter or a bare name."""
    new = row.sglang_replacement or ""
    return new if DOTTED_PATH.fullmatch(new) else None


def _is_kept(row: Removal) -> bool:
    """Whether a row is about something that is still where it was."""
    return row.old_path == row.sglang_replacement
