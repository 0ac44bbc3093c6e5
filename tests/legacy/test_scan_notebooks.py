"""Code inside Markdown and notebooks."""

from tests.legacy.scan_tools import S, notebook, scan_text, worst

V2 = "SGLANG_ENABLE_SPEC_V2"


def test_markdown_prose_and_fences():
    text = f"""\
# Serve

Set `{V2}=1`. Formerly `_overlap_forward_isolation`.

```bash
$ {V2}=1 python -m sglang.launch_server
```

```python
from {S}eagle_worker import EAGLEWorker
```

1. A list

   ```yaml
   env:
     {V2}: "1"
   ```

```python
this is no python: {S}eagle_worker
```
"""
    found = scan_text(text, "README.md", dedent=False)
    assert [(one.span.line, one.severity) for one in found] == [
        (3, "info"), (3, "info"), (6, "warning"), (10, "warning"), (17, "warning"), (21, "info"),
    ]  # fmt: skip
    assert [one.fixable for one in found] == ["manual", "manual", "safe", "unsafe", "safe", "manual"]
    assert found[4].span.column == 6


def test_notebooks_cell_by_cell():
    text = notebook(
        ("markdown", f"Set {V2}=1"),
        ("code", f"%pip install 'sglang[all]==0.5.9'\n!export {V2}=1 A=2\n%env {V2}=1\n"),
        ("code", f"from {S}eagle_worker import EAGLEWorker\nw = EAGLEWorker(1)"),
        ("code", "%%time\nw.capture_for_decode(1)\nfiles = !ls"),
        ("code", f"%%bash\nexport {V2}=0\n"),
        ("code", "this does not parse EAGLEWorker\n"),
        ("code", f"%%html\n<b>{V2}=1</b>\n"),
    )
    found = scan_text(text, "demo.ipynb", dedent=False)
    assert [(one.cell, one.span.line, one.shape, one.severity) for one in found] == [
        (1, 1, "docs", "info"),
        (2, 1, "remark", "warning"),  # the pinned release
        (2, 2, "setting", "warning"),
        (2, 3, "setting", "warning"),
        (3, 1, "import", "error"),
        (4, 2, "attribute", "error"),  # the name comes from another cell
        (5, 2, "setting", "error"),
        (6, 1, "remark", "warning"),
    ]
    assert found[1].code == "SV905"
    assert "0.5.9" in found[1].message


def test_a_pin_of_a_new_release_is_fine():
    text = notebook(("code", "!pip install sglang==0.5.23\n"), ("code", f"import {S}eagle_worker\n"))
    assert [one.code for one in scan_text(text, "demo.ipynb", dedent=False) if one.shape == "remark"] == []


def test_a_notebook_that_is_none():
    found = scan_text(f'{{"cells": "{S}eagle_worker"}}\n', "demo.ipynb")
    assert found[0].code == "SV900"
    assert worst(found) == "warning"
