"""Notebooks: light, small, explained, stored with the outputs of their own code, and they run from top to bottom.

The default run executes the quick ones; `nox -s notebooks` executes all.
"""

import copy
import importlib.util
from pathlib import Path

import nbformat
import pytest

FOLDER = Path(__file__).parent.parent / "notebooks"
PATHS = sorted(FOLDER.glob("*.ipynb"))
QUICK = ("01", "05")
MOST_BYTES = 400_000
MOST_LINES = 17

_spec = importlib.util.spec_from_file_location("execute", FOLDER / "execute.py")
execute = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(execute)


@pytest.fixture(params=PATHS, ids=lambda path: path.stem)
def path(request):
    return request.param


@pytest.fixture
def notebook(path):
    return execute.read(path)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def has_tag(cell, tag):
    return tag in cell.metadata.get("tags", [])


def test_there_are_notebooks_in_order():
    numbers = [path.name[:2] for path in PATHS]
    assert numbers == [f"{i:02d}" for i in range(1, len(PATHS) + 1)]
    assert len(PATHS) >= 5


def test_outputs_are_those_of_this_code(notebook):
    assert notebook.metadata.spec_v2.sources_sha256 == execute.sources_hash(notebook), (
        "the cells were edited after the outputs were stored: nox -s notebooks -- --write"
    )


def test_it_was_run_once_from_top_to_bottom(notebook):
    counts = [cell.execution_count for cell in code_cells(notebook)]
    assert counts == list(range(1, len(counts) + 1))
    nbformat.validate(notebook)


def test_nothing_went_wrong_and_nothing_tells_of_the_machine(notebook):
    for cell in code_cells(notebook):
        for output in cell.outputs:
            assert output.output_type != "error"
            assert output.get("name") != "stderr", output.text
            said = str(output.get("text", "")) + str({**output.get("data", {}), "image/png": ""})
            assert not any(place in said for place in ("/tmp", "/home", "/root", "/work", "site-packages")), (
                said
            )
        if has_tag(cell, "widget"):
            assert not cell.outputs


def test_it_is_small_and_light(path, notebook):
    assert path.stat().st_size < MOST_BYTES
    for cell in code_cells(notebook):
        assert len(cell.source.splitlines()) <= MOST_LINES, cell.source


def test_each_figure_is_explained(notebook):
    cells = notebook.cells
    for i, cell in enumerate(cells):
        if cell.cell_type == "code" and any("image/png" in out.get("data", {}) for out in cell.outputs):
            assert cells[i + 1].cell_type == "markdown", f"nobody explains the figure of {cell.source!r}"


def test_it_begins_with_what_it_needs(notebook):
    head = notebook.cells[0]
    assert head.cell_type == "markdown"
    assert head.source.startswith("# ")
    for words in ("pip install", "no network", "no GPU", "minute"):
        assert words in head.source, words


def test_there_is_a_static_picture_after_each_widget(notebook):
    cells = notebook.cells
    for i, cell in enumerate(cells):
        if has_tag(cell, "widget"):
            shown = [out.get("data", {}) for out in cells[i + 1].get("outputs", [])]
            assert any("image/png" in data for data in shown), cell.source


def runs():
    for path in PATHS:
        marks = [pytest.mark.model, pytest.mark.slow]
        marks += [] if path.name.startswith(QUICK) else [pytest.mark.notebook]
        yield pytest.param(path, id=path.stem, marks=marks)


@pytest.mark.parametrize("path", list(runs()))
def test_it_runs_and_says_what_is_stored(path):
    stored = execute.read(path)
    fresh = execute.execute(stored)
    assert not execute.differences(stored, fresh)
    for cell in code_cells(fresh):
        assert not [out.text for out in cell.outputs if out.get("name") == "stderr"]


# --- the checks notice


def a_notebook():
    return execute.read(PATHS[0])


def test_an_edited_cell_changes_the_hash():
    edited = a_notebook()
    edited.cells[1].source += "\n# one more line"
    assert execute.sources_hash(edited) != execute.sources_hash(a_notebook())


def test_another_output_is_noticed_unless_it_may_vary():
    stored = a_notebook()
    fresh = copy.deepcopy(stored)
    cell = next(c for c in code_cells(fresh) if any(out.get("name") == "stdout" for out in c.outputs))
    output = next(out for out in cell.outputs if out.get("name") == "stdout")
    output.text += "something else"
    [found] = execute.differences(stored, fresh)
    assert found.startswith(cell.id)
    assert "something else" in found
    for notebook in (stored, fresh):
        next(c for c in notebook.cells if c.id == cell.id).metadata["tags"] = ["varies"]
    assert not execute.differences(stored, fresh)


def test_tidying_twice_changes_nothing():
    once = execute.tidy(a_notebook())
    assert execute.tidy(copy.deepcopy(once)) == once
