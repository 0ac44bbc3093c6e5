"""Does the table tell the truth about SGLang? Compares it with releases, by reading their source.

    pip download --no-deps --dest wheels sglang==0.5.12.post1    # and so on; unpack each into a folder of that name
    python -m legacy_compat.registry.compare releases/0.5.12.post1 releases/0.5.13 ...

Nothing of SGLang is run. A path leads somewhere if the syntax trees say so: through imports, also of `*`, through
classes and their bases, to what a class defines, annotates or assigns to self, and to parameters. What a path goes on
to from there is taken as right.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from legacy_compat.registry import Removal, load, version_key

PARAMETER = re.compile(r"(.*)\((\w+)\)")


@dataclass(frozen=True)
class Imported:
    """A name that a module has from elsewhere."""

    path: str


@dataclass(frozen=True)
class Defined:
    """A name that a module defines, and the module."""

    node: ast.AST
    module: str


Found = Imported | Defined


class Release:
    """The source of one release."""

    def __init__(self, folder: Path) -> None:
        self.version = folder.name
        self._folder = folder

    def has(self, path: str) -> bool:
        """Whether a dotted path, or a `path.of.function(parameter)`, leads somewhere."""
        if match := PARAMETER.fullmatch(path):
            return match[2] in self._parameters(match[1])
        return self._is_module(path) or self._find(path) is not None

    def _is_module(self, name: str) -> bool:
        return self._tree(name) is not None or self._folder.joinpath(*name.split(".")).is_dir()

    @functools.cache  # noqa: B019 - a release is looked at as long as the program runs
    def _tree(self, module: str) -> ast.Module | None:
        place = self._folder.joinpath(*module.split("."))
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.is_file():
                return ast.parse(file.read_text(encoding="utf-8"))
        return None

    @functools.cache  # noqa: B019
    def _names(self, module: str) -> dict[str, Found]:
        tree = self._tree(module)
        found: dict[str, Found] = {}
        for node in _statements(tree.body if tree else []):
            match node:
                case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                    found[node.name] = Defined(node, module)
                case ast.Assign() | ast.AnnAssign():
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    names = (part for target in targets for part in ast.walk(target))
                    found |= {part.id: Defined(node, module) for part in names if isinstance(part, ast.Name)}
                case ast.Import():
                    found |= {a.asname or a.name.split(".")[0]: Imported(a.name) for a in node.names}
                case ast.ImportFrom():
                    found |= self._imported(node, module)
        return found

    def _imported(self, node: ast.ImportFrom, module: str) -> dict[str, Found]:
        source = node.module or ""
        if node.level:
            is_package = self._folder.joinpath(*module.split("."), "__init__.py").is_file()
            parts = module.split(".")
            parts = parts[: len(parts) - node.level + is_package]
            source = ".".join([*parts, source]) if source else ".".join(parts)
        if node.names[0].name == "*":
            return dict(self._names(source)) if source.startswith("sglang") else {}
        return {a.asname or a.name: Imported(f"{source}.{a.name}") for a in node.names}

    def _find(self, path: str, depth: int = 0) -> Found | None:
        """What a path below a module stands for. Things of other packages count as found."""
        if depth > 20:
            return None  # names that import each other in a circle
        parts = path.split(".")
        for end in range(len(parts), 0, -1):
            module = ".".join(parts[:end])
            if self._is_module(module):
                break
        else:
            return None if parts[0] == "sglang" else Imported(path)
        if end == len(parts):
            return Imported(module)
        found = self._names(module).get(parts[end])
        if isinstance(found, Imported):
            found = self._find(found.path, depth + 1)
        for name in parts[end + 1 :]:
            found = self._member(found, name, depth)
        return found

    def _member(self, owner: Found | None, name: str, depth: int = 0) -> Found | None:
        if isinstance(owner, Imported):
            return self._find(f"{owner.path}.{name}", depth + 1)
        if owner is None:
            return None
        if isinstance(owner.node, ast.Assign) and isinstance(owner.node.value, ast.Call):
            made_by = self._find(f"{owner.module}.{ast.unparse(owner.node.value.func)}", depth + 1)
            return self._member(made_by, name, depth + 1)
        if not isinstance(owner.node, ast.ClassDef):
            return Imported("object, whose class the source does not say")
        for node in ast.walk(owner.node):
            if _gives(node, name):
                return Defined(node, owner.module)
        for base in owner.node.bases:
            parent = self._find(f"{owner.module}.{ast.unparse(base).split('[')[0]}", depth + 1)
            if isinstance(parent, Defined) and (found := self._member(parent, name, depth + 1)):
                return found
        return None

    def _parameters(self, path: str) -> set[str]:
        found = self._find(path)
        if isinstance(found, Defined) and isinstance(found.node, ast.ClassDef):
            fields = {
                node.target.id
                for node in found.node.body
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
            }
            made = self._member(found, "__init__")
            return fields | (_arguments(made.node) if isinstance(made, Defined) else set())
        return _arguments(found.node) if isinstance(found, Defined) else set()


def _statements(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """A module's own statements, those under if, try and with included."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            for part in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                yield from _statements(handler.body)


def _gives(node: ast.AST, name: str) -> bool:
    """Whether a node inside a class gives it, or its instances, an attribute."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return node.name == name
        case ast.Attribute(value=ast.Name(id="self"), ctx=ast.Store()):
            return node.attr == name
        case ast.AnnAssign(target=ast.Name()) | ast.Assign(targets=[ast.Name()]):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            return isinstance(target, ast.Name) and target.id == name
    return False


def _arguments(node: ast.AST) -> set[str]:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return set()
    return {a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}


def disagreements(rows: Sequence[Removal], releases: Sequence[Release]) -> Iterator[str]:
    """What the table says and the releases do not, a line each. Give all the releases that the table names."""
    releases = sorted(releases, key=lambda release: version_key(release.version))
    newest = releases[-1]
    for row in rows:
        if row.kind in ("env", "flag", "behaviour"):
            continue
        for path in row.paths:
            last = next((r.version for r in reversed(releases) if r.has(path)), None)
            if row.category == "semantics" and last == newest.version:
                continue  # the path is still there and means something else
            known = row.last_version in {release.version for release in releases}
            is_wrong = last != row.last_version if known else last is not None
            if path != row.old_path and last is not None:  # an alias may have gone earlier
                is_wrong = version_key(last) >= version_key(row.removed_in)
            if is_wrong:
                yield f"{row.code} {path}: last in {row.last_version}, says the table; {last}, say the releases"
        new = row.sglang_replacement
        if new and new.startswith("sglang.") and not newest.has(new):
            yield f"{row.code} {new}: not in {newest.version}"


def main(folders: Sequence[str]) -> int:
    """Print disagreements. Returns 1 if there are some."""
    found = list(disagreements(load(), [Release(Path(folder)) for folder in folders]))
    sys.stdout.writelines(f"{line}\n" for line in found)
    sys.stdout.write(f"{len(found)} disagreements between {len(load())} rows and {len(folders)} releases\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
