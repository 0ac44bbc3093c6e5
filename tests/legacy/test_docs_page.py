"""docs/migration.md says what the table says, and its code does what it says."""

import contextlib
import io
import os
import re
import subprocess
import sys

import pytest

from legacy_compat import docs_page, registry
from legacy_compat.errors import anchor
from legacy_compat.options import build_parser
from tests.legacy.pythons import ROOT

PAGE = ROOT / "docs" / "migration.md"
TEXT = docs_page.render()
BLOCK = r"((?:(?!```).*\n)+)```\n"
EXAMPLES = re.findall(rf"^```python\n{BLOCK}\n```text\n{BLOCK}", TEXT, re.MULTILINE)


def test_the_page_is_current():
    assert docs_page.is_current(PAGE), "python -m legacy_compat docs --write docs/migration.md"


def test_writing(tmp_path):
    page = tmp_path / "page.md"
    assert not docs_page.is_current(page)
    assert docs_page.write(page)
    assert not docs_page.write(page)
    assert page.read_bytes() == PAGE.read_bytes()
    page.write_text(TEXT.replace("SV101", "SV100"), encoding="utf-8")
    assert not docs_page.is_current(page)


@pytest.mark.parametrize(("code", "said"), EXAMPLES, ids=["error", "pattern"])
def test_examples_print_what_they_say(code, said):
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "<example>", "exec"), {"__name__": "example"})  # noqa: S102 - our own document
    finally:
        sys.modules.pop("engine", None)
    assert printed.getvalue() == said


def test_every_code_has_its_place():
    places = re.findall(r'<a id="(sv\d{3})"></a>\*\*(SV\d{3})\*\*', TEXT)
    assert places == [(row.code.lower(), row.code) for row in registry.load()]
    assert {anchor(row) for row in registry.load()} == {f"docs/migration.md#{place}" for place, _ in places}


def test_an_entry_says_all():
    entries = dict(
        re.findall(
            r'^- <a id="sv\d+"></a>\*\*(SV\d+)\*\* (.*?)(?=\n- |\n\n|\Z)', TEXT, re.MULTILINE | re.DOTALL
        )
    )
    for row in registry.load():
        entry = entries[row.code].replace("\\", "")
        words = (*row.paths, row.removed_in, row.safety, row.changes, row.source_pr)
        missing = [
            word
            for word in (*words, row.sglang_replacement, row.spec_v2_replacement)
            if word and word not in entry
        ]
        assert not missing, (row.code, missing)
        assert ("spec_v2: nothing" in entry) == (row.spec_v2_replacement is None), row.code


def test_links_within_lead_somewhere():
    for target in re.findall(r"\]\(#([^)]+)\)", TEXT):
        assert f'<a id="{target}"></a>' in TEXT


def test_names_are_shown_as_they_are():
    """Outside code, a star or an underscore at a word's end would be read as emphasis."""
    entries = TEXT[TEXT.index('<a id="sv1"></a>') :]
    prose = re.sub(r"`[^`]*`|\*\*SV\d+\*\*", "", entries)
    assert not re.findall(r"(?<!\\)\*|(?<![\w\\])_|(?<!\\)_(?!\w)", prose)


def test_the_traps_are_told():
    for word in (
        "enable_overlap",
        "is_spec_v2",
        "_overlap_forward_isolation",
        "pr_fix_toggle",
        "ImportError",
    ):
        assert re.search(rf"^- \*\*.*{word}", TEXT, re.MULTILINE), word


def test_the_commands_exist():
    commands = re.findall(r"^\$ python -m legacy_compat (.*?)(?: {2,}#.*)?$", TEXT, re.MULTILINE)
    assert len(commands) == 3
    for command in (*commands, "docs --write docs/migration.md", "explain SV101", "scan ."):
        build_parser().parse_args(command.split())


def test_the_hook_that_the_page_names_is_there():
    (hook,) = re.findall(r"^- id: (\S+)", (ROOT / ".pre-commit-hooks.yaml").read_text(), re.MULTILINE)
    assert f"- id: {hook}" in TEXT


def test_the_hook_runs_without_installing_anything(tmp_path):
    """As pre-commit does: the file itself, from another folder, with arguments and the names of changed files."""
    entry, arguments = re.search(
        r"entry: (\S+)\n  args: \[(.*)\]", (ROOT / ".pre-commit-hooks.yaml").read_text()
    ).groups()
    old, new = tmp_path / "old.py", tmp_path / "new.py"
    old.write_text("from sglang.srt.speculative.eagle_worker import EAGLEWorker\n")
    new.write_text("from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2\n")
    command = [sys.executable, "-I", ROOT / entry, *arguments.split(", ")]
    bad = subprocess.run([*command, old, new], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (bad.returncode, bad.stderr) == (1, "")
    assert "old.py:1:" in bad.stdout
    assert "SV101" in bad.stdout
    good = subprocess.run([*command, new], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (good.returncode, good.stderr) == (0, "")
    assert os.access(ROOT / entry, os.X_OK)
