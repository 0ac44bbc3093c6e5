"""For code that is half migrated: a class to write where V1's stood, and the worker factory as V1 people call it."""

from __future__ import annotations

import copyreg
import functools
from typing import Any, NoReturn

from legacy_compat import _removed, registry
from legacy_compat.errors import RemovedV1AttributeError, RemovedV1UsageError
from legacy_compat.registry import Removal


class _StandIn(type):
    """Of these classes there are no instances: whoever makes one, derives from one or patches one is told why."""

    removal: Removal

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:
        for base in bases:
            if isinstance(base, mcs):
                raise RemovedV1UsageError(base.removal)
        return super().__new__(mcs, name, bases, namespace)

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise RemovedV1UsageError(cls.removal)

    def __getattr__(cls, name: str) -> NoReturn:
        row = registry.by_path(f"{cls.removal.old_path}.{name}")
        if row is None:
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
        raise RemovedV1AttributeError(row)

    def __setattr__(cls, name: str, value: Any) -> NoReturn:
        # A patch that changes nothing would be worse than an error.
        raise RemovedV1UsageError(cls.removal)

    def __delattr__(cls, name: str) -> NoReturn:
        raise RemovedV1UsageError(cls.removal)

    def __instancecheck__(cls, instance: Any) -> bool:
        return False

    def __subclasscheck__(cls, subclass: type) -> bool:
        return subclass is cls

    def __repr__(cls) -> str:
        return f"<stand-in for {cls.removal.old_path}, removed in SGLang {cls.removal.removed_in}>"


@functools.cache
def stand_in(name: str) -> type:
    """A class that serves annotations and isinstance (always False) while the code around it is migrated.

    `name` is a removed class, bare (`"EAGLEWorker"`) or with its path. Calling it, deriving from it and assigning
    to its attributes raise RemovedV1UsageError. Raises ValueError if the table has no such class.
    """
    row = registry.by_path(name) or _removed().get(name)
    if row is None or row.kind != "class":
        known = ", ".join(row.name for row in registry.load() if row.kind == "class")
        raise ValueError(f"name={name!r} is no removed class; the removed classes are {known}")
    if name != row.old_path:
        return stand_in(row.old_path)  # one class for all ways to name it
    made: type = _StandIn(row.name, (), {"removal": row, "__doc__": row.changes, "__module__": __name__})
    return made


def _by_name(cls: _StandIn) -> tuple[Any, ...]:
    return stand_in, (cls.removal.old_path,)


# Left alone, pickle would look for the class as an attribute of this module.
copyreg.pickle(_StandIn, _by_name)


def create_worker(algorithm: str, server_args: Any, enable_overlap: bool | None = None) -> type:
    """spec_v2's worker class for an algorithm. Whether steps overlap is no longer asked here.

    Raises RemovedV1UsageError if `enable_overlap` is given, whatever its value: one worker serves both schedules.
    """
    if enable_overlap is not None:
        error = RemovedV1UsageError(registry.by_code("SV302"))
        error.add_note(
            f"Here: leave out enable_overlap={enable_overlap!r}, and make the settings with"
            f" ServerArgs(disable_overlap_schedule={not enable_overlap})."
        )
        raise error
    from spec_v2.spec_info import SpeculativeAlgorithm

    return SpeculativeAlgorithm.from_string(algorithm).create_worker(server_args)
