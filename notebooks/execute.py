#!/usr/bin/env python3
"""Run the notebooks from top to bottom and store or check their outputs.

    python notebooks/execute.py                # run all, compare what they print with what is stored
    python notebooks/execute.py --write 01     # run those whose names begin so, and store their outputs

A stored notebook carries the hash of its cells, so that outputs of other code are noticed without running anything. Cells
tagged `varies` print times, which are not compared; the outputs of cells tagged `widget` are not stored, as they mean nothing
without a kernel.
"""

import argparse
import base64
import hashlib
import io
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from PIL import Image

FOLDER = Path(__file__).parent
SECONDS = 180  # for a cell
ENV = {
    "HF_HUB_OFFLINE": "1",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",
}


def paths(prefixes: Sequence[str] = ()) -> list[Path]:
    """The notebooks whose names begin with one of `prefixes`; all if there is none."""
    return [p for p in sorted(FOLDER.glob("*.ipynb")) if not prefixes or p.name.startswith(tuple(prefixes))]


def read(path: Path) -> Any:
    """A notebook as nbformat has it."""
    return nbformat.read(path, as_version=4)


def sources_hash(notebook: Any) -> str:
    """The hash of all cells' kinds, tags and sources."""
    cells = [[c.cell_type, c.metadata.get("tags", []), c.source] for c in notebook.cells]
    return hashlib.sha256(json.dumps(cells).encode()).hexdigest()


def execute(notebook: Any) -> Any:
    """Run a copy of it in its folder and return that. Raises nbclient's CellExecutionError where a cell fails."""
    fresh = nbformat.from_dict(json.loads(json.dumps(notebook)))
    root = str(FOLDER.parent)
    env = os.environ | ENV | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    NotebookClient(
        fresh,
        timeout=SECONDS,
        kernel_name="python3",
        coalesce_streams=True,
        resources={"metadata": {"path": str(FOLDER)}},
    ).execute(env=env)
    return tidy(fresh)


def tidy(notebook: Any) -> Any:
    """Leave out what differs from run to run, and note the hash."""
    for number, cell in enumerate(notebook.cells, start=1):
        cell.id = f"cell-{number:02d}"
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code" and "widget" in cell.metadata.get("tags", []):
            cell.outputs = []
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                output.data["image/png"] = smaller(output.data["image/png"])
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        "spec_v2": {"sources_sha256": sources_hash(notebook)},
    }
    return nbformat.from_dict(notebook)


def smaller(png: str) -> str:
    """The same picture in 256 colours, which is all that a drawing needs: less than half of the bytes."""
    image = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    packed = io.BytesIO()
    few = image.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(packed, "png", optimize=True)
    return base64.b64encode(packed.getvalue()).decode()


def printed(notebook: Any) -> Iterator[tuple[str, str]]:
    """(cell, what it printed or showed as text) of the cells whose outputs do not vary."""
    for cell in notebook.cells:
        if cell.cell_type != "code" or {"varies", "widget"} & set(cell.metadata.get("tags", [])):
            continue
        texts = [out.get("text") or out.get("data", {}).get("text/plain", "") for out in cell.outputs]
        yield cell.id, re.sub(r"0x[0-9a-f]+", "0x", "".join(texts))


def differences(stored: Any, fresh: Any) -> list[str]:
    """Cells that print something else than what is stored."""
    pairs = zip(printed(stored), printed(fresh), strict=True)
    return [f"{cell}: stored {old!r}, now {new!r}" for (cell, old), (_, new) in pairs if old != new]


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the notebooks and store or check their outputs.")
    parser.add_argument("names", nargs="*", help="how names begin, such as 01; all if not given")
    parser.add_argument("--write", action="store_true", help="store the outputs instead of comparing them")
    args = parser.parse_args()
    status = 0
    for path in paths(args.names):
        stored = read(path)
        fresh = execute(stored)
        if args.write:
            nbformat.write(fresh, path)
            print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB")
            continue
        found = differences(stored, fresh)
        print(f"{path.name}: {'as stored' if not found else ''}", *found, sep="\n  ")
        status |= bool(found)
    return status


if __name__ == "__main__":
    sys.exit(main())
