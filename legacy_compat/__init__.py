"""For code that was written for speculative decoding V1, which SGLang has removed.

    from legacy_compat import EAGLEWorker    # an error that says what to use instead
    legacy_compat.list_replacements()        # the whole table; in a notebook it draws itself
    legacy_compat.install()                  # from here on, importing an old sglang module explains itself
    python -m legacy_compat scan .           # where your files use what is gone

`registry` holds the table that everything here is made from. Nothing here needs sglang, torch or spec_v2.
"""

from __future__ import annotations

import functools
import importlib
import sys
from typing import TYPE_CHECKING, Any

from legacy_compat import registry

if TYPE_CHECKING:
    from legacy_compat.errors import (
        RemovedV1AttributeError,
        RemovedV1Error,
        RemovedV1ImportError,
        RemovedV1ModuleNotFoundError,
        RemovedV1UsageError,
        RemovedV1Warning,
    )
    from legacy_compat.registry import Removal
    from legacy_compat.shims import install, uninstall
    from legacy_compat.stand_ins import create_worker, stand_in
    from legacy_compat.table_view import list_replacements

_WHERE = {
    "RemovedV1AttributeError": "errors",
    "RemovedV1Error": "errors",
    "RemovedV1ImportError": "errors",
    "RemovedV1ModuleNotFoundError": "errors",
    "RemovedV1UsageError": "errors",
    "RemovedV1Warning": "errors",
    "create_worker": "stand_ins",
    "install": "shims",
    "list_replacements": "table_view",
    "stand_in": "stand_ins",
    "uninstall": "shims",
}

__all__ = [
    "RemovedV1AttributeError",
    "RemovedV1Error",
    "RemovedV1ImportError",
    "RemovedV1ModuleNotFoundError",
    "RemovedV1UsageError",
    "RemovedV1Warning",
    "create_worker",
    "install",
    "list_replacements",
    "stand_in",
    "uninstall",
]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(f"legacy_compat.{_WHERE[name]}"), name)
    # Python itself asks for __path__, __wrapped__ and the like; those get a plain answer.
    row = None if name.startswith("__") else _removed().get(name)
    if row is None:
        raise AttributeError(f"module 'legacy_compat' has no attribute {name!r}")
    from legacy_compat.errors import error_for

    raise error_for(row, sys._getframe(1), __name__)


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})


@functools.cache
def _removed() -> dict[str, Removal]:
    """Rows by bare name, where that says enough: module level, and members that only one thing ever had."""
    found: dict[str, Removal] = {}
    module_level = ("class", "function", "module")
    for row in registry.load():
        if row.kind in module_level or row.distinctive:
            found.setdefault(row.name, row)
    return found
