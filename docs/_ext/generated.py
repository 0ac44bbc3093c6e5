"""Parts of the reference that are made from the code: settings with their flags, and the command line's own help.

`{settings-table}` is ServerArgs as a table; `{help} bench` is what `python -m spec_v2 bench --help` prints. Docstrings list
fields as lines of `name: meaning`, which become lists.
"""

import argparse
import os
import re
from dataclasses import fields
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive

from spec_v2.cli import build_parser
from spec_v2.server_args import ServerArgs

FIELD = re.compile(r"([a-z_0-9]+(?:, [a-z_0-9]+)*): (\S.*)")


class Help(Directive):
    """A command's help; without a name that of the whole program."""

    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        os.environ["COLUMNS"] = "96"
        parser = build_parser()
        if self.arguments:
            [commands] = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
            parser = commands.choices[self.arguments[0]]
        text = parser.format_help()
        return [nodes.literal_block(text, text, language="text")]


class SettingsTable(Directive):
    """Field, default and meaning of each engine setting."""

    def run(self) -> list[nodes.Node]:
        rows = [(f.name, repr(f.default), str(f.metadata["help"])) for f in fields(ServerArgs)]
        return [table_of(("field", "default", "meaning"), rows, (30, 15, 55))]


def table_of(head: tuple[str, ...], rows: list[tuple[str, ...]], widths: tuple[int, ...]) -> nodes.table:
    """A table whose columns hold code, but for the last one."""
    table, group = nodes.table(), nodes.tgroup(cols=len(widths))
    table += group
    group += [nodes.colspec(colwidth=width) for width in widths]
    for part, some in ((nodes.thead(), [head]), (nodes.tbody(), rows)):
        group += part
        for cells in some:
            row = nodes.row()
            part += row
            for column, text in enumerate(cells):
                is_code = some is rows and column < len(cells) - 1
                entry = nodes.entry()
                entry += nodes.paragraph("", "", nodes.literal(text, text) if is_code else nodes.Text(text))
                row += entry
    return table


def list_fields(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Lines of `name: meaning` that follow a blank line or one another, with what is indented below them."""
    in_list = False
    for i, line in enumerate(lines):
        match = FIELD.fullmatch(line)
        if match and (in_list or i == 0 or not lines[i - 1].strip()):
            in_list = True
            lines[i] = f"* **{match[1]}**: {match[2]}"
        elif in_list and line.startswith("    "):
            lines[i] = f"  {line.strip()}"
        else:
            in_list = False


def setup(app: Any) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", list_fields)
    app.add_directive("help", Help)
    app.add_directive("settings-table", SettingsTable)
    return {"parallel_read_safe": True}
