"""`install()`: importing an old sglang module, or an old name of a module that is left, explains itself.

Nothing is replaced and no module is made up: what imports without the shims imports with them, the same object.
`importlib.util.find_spec`, hasattr and `except ImportError` (or ModuleNotFoundError) answer as before; only the
message of what fails anyway is another. With an SGLang that still has V1 nothing happens at all.
"""

from __future__ import annotations

import dis
import os
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any, cast

from legacy_compat.errors import RemovedV1ModuleNotFoundError, RemovedV1Warning, error_for
from legacy_compat.registry import by_path, load


def install() -> None:
    """Make old imports explain themselves, and warn of each variable of V1 that is set. Twice is once."""
    if _finder in sys.meta_path:
        return
    sys.meta_path.insert(0, _finder)
    for name in sorted(_finder.watched & sys.modules.keys()):
        _finder.attach(sys.modules[name])
    _check_environment()


def uninstall() -> None:
    """Put everything back as it was before `install`. Without one, nothing happens."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    _finder.detach_all()


def _check_environment() -> None:
    """Newer releases of SGLang ignore a removed variable in silence."""
    for row in load():
        if row.kind == "env" and row.old_path in os.environ:
            warnings.warn(
                f"{row.code}: {row.old_path}={os.environ[row.old_path]!r} is not read any more since SGLang"
                f" {row.removed_in}. {row.changes}",
                RemovedV1Warning,
                stacklevel=3,
            )


class _Finder:
    """Finds nothing of its own. It is asked first, so that it hears of every import, and most it lets pass."""

    def __init__(self) -> None:
        rows = load()
        self.removed_modules = {path for row in rows if row.kind == "module" for path in row.paths}
        # the packages and modules that are left and have lost something
        owners = {
            path.rpartition(".")[0]
            for row in rows
            if row.kind in ("module", "class", "function", "attribute")
            for path in row.paths
        }
        self.watched = {name for name in owners - self.removed_modules if name.rpartition(".")[2].islower()}
        self.above = {
            name[:dot] for name in self.removed_modules for dot in range(len(name)) if name[dot] == "."
        }
        self._former: dict[str, tuple[ModuleType, Any, Any]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not (fullname in self.removed_modules or fullname in self.watched or fullname in self.above):
            return None
        chain, importer = _import_chain(sys._getframe(1))
        if not chain:
            return None  # a probe: somebody wants to know, and nothing is being imported
        spec = _others_find(fullname, path, target)
        if spec is None:
            self._explain(fullname, chain, importer)
        elif fullname in self.watched and spec.loader is not None:
            spec.loader = cast(Loader, _AttachAfterwards(spec.loader))
        return spec

    def _explain(self, fullname: str, chain: list[str], importer: FrameType | None) -> None:
        """Raise if what fails here is the import of something that V1's removal took away."""
        wanted = [f"{chain[-1]}.{name}" for name in _from_list(importer)] + chain[::-1]
        row = next((row for name in wanted if (row := by_path(name))), None)
        if row is None:
            return
        parent = sys.modules.get(fullname.rpartition(".")[0])
        if parent is not None and parent.__name__ in self.watched:
            # A package without __init__.py had no loader that could do it. And importlib passes over the error
            # below if it was trying a name of a `from` list; then this is who is asked.
            self.attach(parent)
        error = RemovedV1ModuleNotFoundError(row, name=fullname)
        if fullname in self.above and fullname not in self.removed_modules:
            error.add_note(f"(Here, {fullname} itself is not installed.)")
        raise error

    def attach(self, module: ModuleType) -> None:
        """Give a module a `__getattr__` that knows what it lost; the one it has, if any, is asked first."""
        name = module.__name__
        if name in self._former:
            return
        former = module.__dict__.get("__getattr__")

        def explain(attribute: str) -> Any:
            row = by_path(f"{name}.{attribute}")
            if (
                row is not None
                and row.kind == "module"
                and _others_find(f"{name}.{attribute}", module.__path__)
            ):
                row = None  # it is there, and only has not been imported yet
            if former is not None:
                try:
                    return former(attribute)
                except AttributeError:
                    if row is None:
                        raise
            if row is None:
                raise AttributeError(
                    f"module {name!r} has no attribute {attribute!r}", name=attribute, obj=module
                )
            raise error_for(row, sys._getframe(1), name) from None

        module.__dict__["__getattr__"] = explain
        self._former[name] = (module, former, explain)

    def detach_all(self) -> None:
        for module, former, explain in self._former.values():
            if module.__dict__.get("__getattr__") is not explain:
                continue  # somebody has put another one there since
            if former is None:
                del module.__dict__["__getattr__"]
            else:
                module.__dict__["__getattr__"] = former
        self._former.clear()


class _AttachAfterwards:
    """Stands for a module's loader until the module has run; then the loader is back in its place."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        if _finder in sys.meta_path:
            _finder.attach(module)


def _others_find(
    fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
) -> ModuleSpec | None:
    for finder in sys.meta_path:
        if finder is not _finder and hasattr(finder, "find_spec"):
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                return spec
    return None


# A finder is not told why it is asked, so the next two look at the import system's own frames. They must, because
# a probe by `importlib.util.find_spec` has to get its None, and because where sglang is not installed at all,
# "sglang" is all that a finder ever hears of `import sglang.srt.speculative.eagle_worker`. Where frames look
# different, nothing is found in them, and Python's plain error stands.


def _import_chain(frame: FrameType | None) -> tuple[list[str], FrameType | None]:
    """The modules whose import led here, innermost first, and the frame that began it: the importer's."""
    chain: list[str] = []
    while frame is not None and frame.f_code.co_filename == "<frozen importlib._bootstrap>":
        if frame.f_code.co_name == "_find_and_load_unlocked":
            chain.append(frame.f_locals["name"])
        frame = frame.f_back
    return chain, frame


def _from_list(frame: FrameType | None) -> tuple[str, ...]:
    """The names of the `from ... import` statement that the frame is executing, if it is executing one."""
    if frame is None:
        return ()
    before: Any = None
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.offset == frame.f_lasti:
            found = before.argval if instruction.opname == "IMPORT_NAME" else None
            return found if isinstance(found, tuple) else ()
        if instruction.opname != "EXTENDED_ARG":
            before = instruction
    return ()


_finder = _Finder()
