"""What `fix` does inside Markdown and notebooks, and that nothing else of them changes."""

import json

import pytest

from tests.legacy.scan_tools import S, fix_text, notebook

V2 = "SGLANG_ENABLE_SPEC_V2"


def check(name, before, after, **options):
    assert fix_text(before, name, dedent=False, **options) == after


def test_markdown_changes_in_its_blocks_alone():
    before = f"""\
Set `{V2}=1`, or `{S}eagle_worker`.

- a list

  ```bash
  $ export {V2}=1
  $ {V2}=1 sglang serve
  ```

```python
from {S}spec_utils import maybe_detect_nan
...
```
"""
    after = f"""\
Set `{V2}=1`, or `{S}eagle_worker`.

- a list

  ```bash
  $ sglang serve
  ```

```python
from sglang.srt.utils.async_probe import maybe_detect_nan
...
```
"""
    check("README.md", before, after)


def test_notebooks_change_in_their_sources_alone():
    book = json.loads(
        notebook(
            ("markdown", f"```bash\n{V2}=1 serve\n```"),
            ("code", f"%env {V2}=1\n!export {V2}=1 A=2\nx = 1\n"),
            ("code", f"from {S}eagle_worker import EAGLEWorker\n# é"),
            ("code", "%time w = 1\nif x:\n    !ls\ny = EAGLEWorker"),
            ("code", "not python"),
        )
    )
    book["cells"][2]["outputs"] = [{"output_type": "stream", "text": [f"{V2}=1 é\n"]}]
    book["metadata"] = {"z": 1, "a": [1.50, True]}
    before = json.dumps(book, indent=2, ensure_ascii=False) + "\n\n"
    after = fix_text(before, "a.ipynb", unsafe=True, dedent=False)
    new = json.loads(after)
    assert ["".join(cell["source"]) for cell in new["cells"]] == [
        "```bash\nserve\n```",
        "!export A=2\nx = 1\n",
        f"from {S}eagle_worker_v2 import EAGLEWorkerV2\n# é",
        "%time w = 1\nif x:\n    !ls\ny = EAGLEWorkerV2",
        "not python",
    ]
    for cell, old in zip(new["cells"], book["cells"], strict=True):
        cell["source"] = old["source"]
    assert json.dumps(new, indent=2, ensure_ascii=False) + "\n\n" == before
    assert after.endswith("}\n\n")


@pytest.mark.parametrize("cell", ["%time w = EAGLEWorker(1)", "not python: EAGLEWorker"])
def test_a_name_that_a_magic_line_uses_stays(cell):
    before = notebook(("code", f"from {S}eagle_worker import EAGLEWorker\nEAGLEWorker(1)"), ("code", cell))
    new = json.loads(fix_text(before, "a.ipynb", unsafe=True, dedent=False))
    imported, used = "".join(new["cells"][0]["source"]).split("\n")
    assert imported == f"from {S}eagle_worker_v2 import EAGLEWorkerV2 as EAGLEWorker"
    assert used == "EAGLEWorker(1)"
    assert "".join(new["cells"][1]["source"]) == cell


def test_a_notebook_of_strings_and_odd_layout():
    before = '{"cells":[{"cell_type":"code","source":"x._overlap_forward_isolation(b)\\n","outputs":[]}] ,"nbformat":4}'
    after = before.replace("_overlap_forward_isolation(b)", "_forward_isolation(b, overlap=True)")
    check("a.ipynb", before, after)


def test_a_line_that_begins_with_a_percent_sign_may_be_python():
    before = notebook(("code", "x = (10\n% y._overlap_forward_isolation(b))"))
    new = json.loads(fix_text(before, "a.ipynb", dedent=False))
    assert "".join(new["cells"][0]["source"]) == "x = (10\n% y._forward_isolation(b, overlap=True))"
