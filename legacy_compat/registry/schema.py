"""Checks the table against `schema.json`, and says which row and field is wrong.

It understands as much of JSON Schema as that file uses; editors and other tools read the same file.
"""

from __future__ import annotations

import re
from typing import Any

TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "null": type(None),
}


def check(value: Any, schema: dict[str, Any], where: str = "table") -> None:
    """Raise ValueError, naming the place, the value and what was expected, if `value` does not fit `schema`."""
    wanted = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if not any(isinstance(value, TYPES[name]) for name in wanted):
        raise ValueError(f"{where} is {value!r}; expected {' or '.join(wanted)}")
    if isinstance(value, str):
        _check_text(value, schema, where)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            name = item.get("code", index) if isinstance(item, dict) else index
            check(item, schema["items"], f"{where}[{name}]")
    elif isinstance(value, dict):
        _check_fields(value, schema, where)


def _check_text(value: str, schema: dict[str, Any], where: str) -> None:
    if "enum" in schema and value not in schema["enum"]:
        raise ValueError(f"{where} is {value!r}; use one of {', '.join(schema['enum'])}")
    if "pattern" in schema and not re.search(schema["pattern"], value):
        raise ValueError(f"{where} is {value!r}; it must match {schema['pattern']}")


def _check_fields(value: dict[str, Any], schema: dict[str, Any], where: str) -> None:
    fields = schema["properties"]
    missing = [name for name in schema["required"] if name not in value]
    if missing:
        raise ValueError(f"{where} lacks {', '.join(missing)}")
    unknown = [name for name in value if name not in fields]
    if unknown:
        raise ValueError(f"{where} has {', '.join(unknown)}; known fields are {', '.join(fields)}")
    for name, item in value.items():
        check(item, fields[name], f"{where}.{name}")
