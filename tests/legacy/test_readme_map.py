"""The README's map of legacy_compat is the tree."""

import re

from tests.legacy.pythons import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
LINE = re.compile(r"(?P<indent>(?: {2}){1,3})(?P<names>[\w.]+/?(?:  [\w.]+)*) {2,}(?P<clause>\S.*)")


def files_in_map():
    block = re.search(r"^```text\nlegacy_compat/\n(.*?)^```", README, re.MULTILINE | re.DOTALL)[1]
    folders = []
    for line in block.splitlines():
        match = LINE.fullmatch(line)
        assert match, line
        depth = len(match["indent"]) // 2
        del folders[depth - 1 :]
        if match["names"].endswith("/"):
            folders.append(match["names"])
        else:
            yield from ("".join(folders) + name for name in match["names"].split())


def test_the_map_is_the_tree():
    listed = list(files_in_map())
    package = ROOT / "legacy_compat"
    there = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    described_by_their_folder = {
        f"{name}/__init__.py" for name in ("scan", "scan/python", "scan/plain", "scan/output", "fix")
    }
    assert len(listed) == len(set(listed))
    assert set(listed) == there - described_by_their_folder
