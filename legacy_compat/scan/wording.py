"""What a finding says. One line each; the row's `changes` and `explain` say the rest."""

from __future__ import annotations

from legacy_compat.registry import Removal

VERBS = {
    "moved": "moved in SGLang {0}",
    "renamed": "was renamed in SGLang {0}",
    "removed": "was removed in SGLang {0}",
    "semantics": "means something else since SGLang {0}",
}
SUBJECTS = {
    "base": "base class {0}",
    "override": "override of {0}",
    "definition": "definition named like {0}",
    "argument": "argument {0}",
    "monkeypatch": "replaced member {0}",
    "string": "string target {0}",
    "path": "path to {0}",
    "probe": "lookup of {0}",
    "name": "class name {0}",
    "comment": "comment on {0}",
    "docs": "text about {0}",
}


def sentence(row: Removal, shape: str, name: str) -> str:
    """`base class sglang...EAGLEWorker was renamed in SGLang 0.5.13; now sglang...EAGLEWorkerV2`"""
    subject = SUBJECTS.get(shape, "{0}").format(name)
    fact = VERBS[row.category].format(row.removed_in)
    return f"{subject} {fact}{successor(row)}"


def successor(row: Removal) -> str:
    if row.sglang_replacement and row.sglang_replacement != row.old_path.partition("(")[0]:
        return f"; now {row.sglang_replacement}"
    return "; nothing replaces it" if row.category == "removed" and not row.sglang_replacement else ""


def setting_sentence(row: Removal, name: str, truth: bool | None) -> str:
    """For an environment variable that is set, by what it is set to."""
    flag = row.sglang_replacement or ""
    if not flag.startswith("-"):
        return sentence(row, "setting", name)
    if truth is True:
        return f"{name} is no longer read since SGLang {row.removed_in}: what it turned on is always on"
    if truth is False:
        return f"{name} is no longer read since SGLang {row.removed_in}: turned off, it now needs {flag}"
    return f"{name} is no longer read since SGLang {row.removed_in}: where it was false, pass {flag}"
