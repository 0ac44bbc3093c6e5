"""What the documentation says is true: its code gives its output, its map is the tree, its names exist."""

import contextlib
import importlib
import io
import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
EXAMPLE = re.compile(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^```console\n\$ python -m spec_v2 (.*?)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)


def output_of(code):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "<example>", "exec"), {"__name__": "example"})  # noqa: S102 - our own documents
    return printed.getvalue()


# --- code ---


def test_every_python_block_has_its_output():
    assert len(EXAMPLE.findall(README)) == README.count("```python") == 2
    assert len(EXAMPLE.findall(ARCHITECTURE)) == ARCHITECTURE.count("```python") == 1


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLE.findall(README), ids=["first", "head"])
def test_readme_examples_print_what_they_say(example):
    code, said = example
    assert output_of(code) == said


def test_the_first_example_is_ten_lines_at_most():
    code, _ = EXAMPLE.findall(README)[0]
    assert len(code.strip().splitlines()) <= 10


@pytest.mark.model
@pytest.mark.slow
def test_readme_command_prints_what_it_says(capsys):
    from spec_v2.cli import main

    ((command, said),) = COMMAND.findall(README)
    assert main(shlex.split(command)) == 0

    def timeless(text):
        return re.sub(r"in [0-9.]+ s, [0-9.]+ tokens/s", "in T", text)

    assert timeless(capsys.readouterr().out) == timeless(said)


@pytest.mark.parametrize("example", EXAMPLE.findall(ARCHITECTURE))
def test_the_worked_tree_is_what_the_functions_give(example):
    code, said = example
    assert output_of(code) == said


# --- map ---


LINE = re.compile(r"(?P<indent> +)(?P<names>[\w.]+/?(?:  [\w.]+/?)*)(?: {2,}(?P<clause>\S.*))?")


def files_in_map():
    """Paths below spec_v2/ that the README's map lists; a folder of `kernels` stands for its files."""
    block = re.search(r"^```text\nspec_v2/\n(.*?)^```", README, re.MULTILINE | re.DOTALL)[1]
    folder, found = "", []
    for line in block.splitlines():
        match = LINE.fullmatch(line)
        names = [name for name in match["names"].split() if name.endswith((".py", "/"))]
        is_folder = names[0].endswith("/") and len(match["indent"]) == 2
        if len(match["indent"]) == 2:
            folder = names[0] if is_folder else ""
        assert match["clause"] or is_folder, line
        found += [] if is_folder else [folder + name for name in names]
    return found


def test_the_map_is_the_tree():
    package = ROOT / "spec_v2"
    listed = files_in_map()
    assert len(listed) == len(set(listed))
    kernels = {
        path.parent.relative_to(package).as_posix() + "/" for path in package.glob("kernels/*/__init__.py")
    }
    files = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if path.name != "__init__.py" and path.parent.parent.name != "kernels"
    }
    assert set(listed) == files | kernels | {"__init__.py"}


# --- names and links ---

DOCUMENTS = [pytest.param(README, id="README"), pytest.param(ARCHITECTURE, id="architecture")]


@pytest.mark.parametrize("text", DOCUMENTS)
def test_dotted_names_import(text):
    for name in re.findall(r"`(spec_v2(?:\.\w+)+)`", text):
        module, _, last = name.rpartition(".")
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            assert hasattr(importlib.import_module(module), last), name


@pytest.mark.parametrize("text", DOCUMENTS)
def test_identifiers_exist(text):
    """Words in backticks that look like ours, with an underscore or in CamelCase, occur in the source."""
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "spec_v2").rglob("*.py"))
    not_ours = {"logit_bias", "min_p"}
    quoted = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))
    words = {word for part in quoted for word in re.findall(r"[A-Za-z_]\w+", part)}
    ours = {w for w in words if ("_" in w or re.match(r"[A-Z][a-z]+[A-Z]", w)) and w not in not_ours}
    assert [w for w in sorted(ours) if not re.search(rf"\b{w}\b", source)] == []


@pytest.mark.parametrize(("file", "text"), [("README.md", README), ("docs/architecture.md", ARCHITECTURE)])
def test_links_lead_somewhere(file, text):
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if "://" not in target:
            assert ((ROOT / file).parent / target).exists(), target


def test_nox_sessions_of_the_readme_exist():
    sessions = set(re.findall(r"^def (\w+)\(session", (ROOT / "noxfile.py").read_text(), re.MULTILINE))
    named = set(re.findall(r"nox -s (\w+)", README))
    assert named == {"demo", "docs", "tests"} <= sessions
