"""Settings of a project: `[tool.legacy_compat]` in the nearest pyproject.toml. The command line goes before them.

[tool.legacy_compat]
target-version = "0.5.14"
exclude = ["vendor/**"]
ignore = ["SV601"]
baseline = "legacy-baseline.json"
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TABLE = "legacy_compat"
KNOWN = {"target-version": str, "exclude": list, "ignore": list, "baseline": str}


@dataclass(frozen=True, slots=True)
class Config:
    """What a pyproject.toml says; `folder` is where it lies, which its paths are relative to."""

    folder: Path
    target: str | None = None
    exclude: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    baseline: Path | None = None


def read_config(start: Path) -> Config:
    """Of the nearest pyproject.toml at or above `start`. Raises ValueError, naming the field, for what it can't mean."""
    here = start.resolve()
    for folder in (here, *here.parents):
        path = folder / "pyproject.toml"
        if path.is_file():
            try:
                table = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {}).get(TABLE, {})
            except (OSError, ValueError):
                return Config(folder)  # not ours to complain about
            return _config(folder, path, table)
    return Config(here)


def _config(folder: Path, path: Path, table: dict[str, Any]) -> Config:
    for name, value in table.items():
        if name not in KNOWN:
            raise ValueError(f"{path}: [tool.{TABLE}] has {name!r}; known are {', '.join(KNOWN)}")
        if not isinstance(value, KNOWN[name]):
            raise ValueError(f"{path}: [tool.{TABLE}] {name} is {value!r}; expected a {KNOWN[name].__name__}")
    baseline = table.get("baseline")
    return Config(
        folder,
        table.get("target-version"),
        tuple(map(str, table.get("exclude", ()))),
        tuple(map(str, table.get("ignore", ()))),
        folder / baseline if baseline else None,
    )
