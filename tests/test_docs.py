"""The documentation holds: its links lead somewhere, its commands parse, its names exist, and its code runs."""

import importlib
import re
import shlex
from pathlib import Path

import pytest

from spec_v2.cli import build_parser

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    if not {"_build", "notebooks"} & set(path.relative_to(ROOT).parts)
)
NAMES = [path.relative_to(ROOT).as_posix() for path in PAGES]
CODE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
CONSOLE = re.compile(r"^```(?:console|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
QUICK = ("docs/how-to/own-model.md", "docs/how-to/own-algorithm.md")
SLOW = ("docs/tutorial.md", "docs/adaptive.md", "docs/index.md")  # on the default model


def text_of(name):
    return (ROOT / name).read_text(encoding="utf-8")


def commands_of(text):
    """Command lines of all console blocks, with lines that end in a backslash joined and comments cut off."""
    for block in CONSOLE.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            line = line.removeprefix("$ ").strip()
            if line.startswith("python -m "):
                yield shlex.split(line.partition(" > ")[0], comments=True)


def test_pages_are_found():
    assert {"README.md", "docs/index.md", *QUICK, *SLOW} <= set(NAMES)
    assert len(NAMES) > 30


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name):
    text = re.sub(r"`[^`\n]*`", "", BLOCK.sub("", text_of(name)))
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if "://" not in target:
            assert ((ROOT / name).parent / target).exists(), target


@pytest.mark.parametrize("name", NAMES)
def test_commands_parse(name):
    sessions = set(re.findall(r"^def (\w+)\(session", (ROOT / "noxfile.py").read_text(), re.MULTILINE))
    for _, _, module, *arguments in commands_of(text_of(name)):
        if module == "spec_v2" and "..." not in " ".join(arguments):
            build_parser().parse_args(arguments)
        elif module == "nox" and arguments[:1] == ["-s"]:
            assert arguments[1].partition("(")[0] in sessions, arguments


@pytest.mark.parametrize("name", [name for name in NAMES if name != "docs/migration.md"])
def test_dotted_names_import(name):
    for dotted in re.findall(r"`(spec_v2(?:\.[A-Za-z_]\w*)+)`", text_of(name)):
        found, rest = importlib.import_module("spec_v2"), dotted.split(".")[1:]
        for i, part in enumerate(rest):
            try:
                found = importlib.import_module(".".join(["spec_v2", *rest[: i + 1]]))
            except ModuleNotFoundError:
                found = getattr(found, part)


def run_page(name, tmp_path, monkeypatch):
    """All Python blocks of a page, one after the other in one namespace, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    for code in CODE.findall(text_of(name)):
        exec(compile(code, name, "exec"), names)  # noqa: S102 - our own documents
    return names


@pytest.fixture(autouse=True)
def _forget_registrations(monkeypatch):
    from spec_v2 import spec_registry

    monkeypatch.setattr(spec_registry, "_registered", {})


@pytest.mark.parametrize("name", QUICK)
def test_code_runs(name, tmp_path, monkeypatch):
    assert run_page(name, tmp_path, monkeypatch)["done"].completion_tokens > 0


@pytest.mark.model
@pytest.mark.docs
@pytest.mark.parametrize("name", SLOW)
def test_code_on_the_default_model_runs(name, tmp_path, monkeypatch):
    made = run_page(name, tmp_path, monkeypatch)
    if name == "docs/tutorial.md":
        assert made["fast"].spec.accept_length > 1.5
        assert {"tree.png", "timeline.png", "trace.json.gz"} <= {p.name for p in tmp_path.iterdir()}
