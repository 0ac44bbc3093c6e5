"""The notebooks in a real JupyterLab: they run, a widget moves, an interrupt leaves the engine usable. `nox -s lab`."""

from pathlib import Path

import pytest

from tests.lab.conftest import ROOT, text_of

pytestmark = [pytest.mark.lab, pytest.mark.slow, pytest.mark.model]

NAMES = [path.name for path in sorted((ROOT / "notebooks").glob("*.ipynb"))]
WITH_WIDGET = "02_tree_drafting.ipynb"

ENGINE = """\
from spec_v2 import Engine, SamplingParams
SHAPE = dict(speculative_num_steps=3, speculative_eagle_topk=1, speculative_num_draft_tokens=4)
engine = Engine("smollm2-135m", dtype="float32", speculative_algorithm="EAGLE3", **SHAPE)
def text(tokens):
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    return engine.generate("1, 2, 3, 4, 5,", params, progress=False)[0].text
before = text(16)
print(before)
"""


def assert_all_ran(lab):
    cells = lab.cells()
    assert cells
    for cell in cells:
        assert cell["count"] is not None, f"did not run: {cell['source']}"
        assert not [o for o in cell["outputs"] if o["output_type"] == "error"], text_of(cell)
        assert not [o for o in cell["outputs"] if o.get("name") == "stderr"], text_of(cell)
    assert lab.errors == []
    assert lab.outside == [], "a notebook loads something from another place"


@pytest.mark.parametrize("name", [name for name in NAMES if name != WITH_WIDGET])
def test_it_runs(lab, name):
    lab.open(name)
    lab.run_all()
    assert_all_ran(lab)
    lab.screenshots(Path(name).stem)


def test_a_widget_redraws_the_tree(lab):
    lab.open(WITH_WIDGET)
    lab.run_all()
    assert_all_ran(lab)
    lab.screenshots(Path(WITH_WIDGET).stem)
    # what the widget calls, told apart by what it was called with
    lab.run_new_cell(
        "seen = []\ndef note(budget=16):\n    seen.append(budget)\n    show(budget=budget)\n"
        "ipywidgets.interact(note, budget=(2, 32));"
    )
    handle = lab.page.locator(".jp-Cell").last.locator(".noUi-handle")
    handle.wait_for()
    handle.focus()
    for _ in range(3):
        handle.press("ArrowRight")
    lab.page.wait_for_timeout(1500)
    seen = text_of(lab.run_new_cell("print(seen)"))
    assert seen.startswith("[16, 17"), seen
    assert seen.rstrip().endswith("19]"), seen
    assert lab.errors == []


def test_an_interrupt_leaves_the_engine_usable(lab):
    lab.write("interrupt.ipynb", ENGINE)
    lab.run_all()
    assert_all_ran(lab)
    before = text_of(lab.cells()[0])
    assert len(before) > 16
    lab.run_new_cell("print('begun'); text(7000); print('never here')", wait=False)
    lab.wait_until(lambda cells: "begun" in text_of(cells[-1]), "the cell does not begin")
    lab.page.wait_for_timeout(1500)
    lab.command("notebook:interrupt-kernel")
    lab.wait_until(
        lambda cells: any(o.get("ename") == "KeyboardInterrupt" for o in cells[-1]["outputs"]),
        "the interrupt does not arrive",
    )
    assert "never here" not in text_of(lab.cells()[-1])
    assert text_of(lab.run_new_cell("print(text(16))")) == before
    assert text_of(lab.run_new_cell("engine.scheduler.has_requests")) == "False"
    stored = lab.stored("interrupt.ipynb")
    assert "".join(stored["cells"][2]["outputs"][0]["text"]) == before


def test_what_results_look_like(lab):
    """Tables and lists that results draw of themselves, and that JupyterLab takes nothing out of them."""
    lab.write("reprs.ipynb", ENGINE, *(source for source, _ in REPRS))
    lab.run_all()
    assert_all_ran(lab)
    for cell, (_, wanted) in zip(lab.cells()[1:], REPRS, strict=True):
        assert wanted in "".join(cell["outputs"][-1]["data"]["text/html"])
    rendered = lab.page.locator(".jp-RenderedHTMLCommon.jp-OutputArea-output")
    for number, (_, wanted) in enumerate(REPRS):
        assert wanted in rendered.nth(number).inner_html()
    lab.screenshots("reprs")


REPRS = [
    ("engine.generate('The capital of France is', SamplingParams(max_new_tokens=24), progress=False)[0]",
     "<table"),
    ("with engine.record_steps() as steps:\n    text(16)\nsteps[0]", "<ul"),
    ("from spec_v2.speculative import draft_tree as drafting\nseen, build = [], drafting.build_tree\n"
     "def spy(**given):\n    seen.append(build(**given))\n    return seen[-1]\n"
     "drafting.build_tree = spy\n_ = text(8)\ndrafting.build_tree = build\nseen[0]", "<ul"),
    ("engine.trace", "<table"),
    ("engine.server_args", "<table"),
    ("import legacy_compat\nlegacy_compat.list_replacements('eagle_worker.EAGLEWorker')[:8]", "<table"),
]  # fmt: skip
