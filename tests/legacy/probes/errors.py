# ruff: noqa: BLE001, PT017, S102 - no pytest here, and code in strings is what is tested
"""How removed names behave, case by case. Plain asserts: this runs on every Python of the machine."""

import copy
import doctest
import importlib
import inspect
import pickle
import sys
import traceback
import types
from unittest import mock

import legacy_compat
from legacy_compat import errors

FACT = "SV101: SGLang 0.5.13 removed the class sglang.srt.speculative.eagle_worker.EAGLEWorker"


def raised(kind, do):
    """The error that `do` raises, which has to be of exactly this class."""
    try:
        do()
    except Exception as error:
        assert type(error) is kind, repr(error)
        return error
    raise AssertionError(f"{do} raised nothing")


def run(code):
    return lambda: exec(code, {})


def attribute():
    error = raised(errors.RemovedV1AttributeError, lambda: legacy_compat.EAGLEWorker)
    assert str(error).startswith(FACT)
    assert isinstance(error, AttributeError)
    assert error.name == "EAGLEWorker"


def from_import():
    for code in (
        "from legacy_compat import EAGLEWorker",
        "from legacy_compat import EAGLEWorker as W",
        "from legacy_compat import list_replacements, EAGLEWorker",
        "def f():\n    from legacy_compat import EAGLEWorker\nf()",
        "class C:\n    from legacy_compat import EAGLEWorker",
        "__import__('legacy_compat', fromlist=['EAGLEWorker'])",
    ):
        error = raised(errors.RemovedV1ImportError, run(code))
        assert str(error).startswith(FACT), code
        assert error.name == "legacy_compat"


def in_a_function_of_an_unlucky_name():
    def _handle_fromlist():
        return legacy_compat.EAGLEWorker

    raised(errors.RemovedV1AttributeError, _handle_fromlist)


def nothing_is_suggested():
    """Python would add "Did you mean: 'create_worker'?" to the message about eagle_worker."""
    error = raised(errors.RemovedV1AttributeError, lambda: legacy_compat.eagle_worker)
    assert "Did you mean" not in "".join(traceback.format_exception(error))


def from_a_module_that_is_no_package():
    module = sys.modules["plain_module"] = types.ModuleType("plain_module")
    row = legacy_compat.registry.by_code("SV101")

    def lookup(name):
        if name != "EAGLEWorker":
            raise AttributeError(name)
        raise errors.error_for(row, sys._getframe(1), "plain_module")

    module.__getattr__ = lookup
    error = raised(errors.RemovedV1ImportError, run("from plain_module import EAGLEWorker"))
    assert str(error).startswith(FACT)
    raised(errors.RemovedV1AttributeError, run("import plain_module; plain_module.EAGLEWorker"))
    assert not hasattr(module, "EAGLEWorker")


def many_times():
    """The interpreter rewrites instructions that run often; a wide one has a prefix. Neither may matter."""

    def warm():
        from legacy_compat import EAGLEWorker  # noqa: F401

    def read():
        return legacy_compat.EAGLEWorker

    for _ in range(200):
        raised(errors.RemovedV1ImportError, warm)
        raised(errors.RemovedV1AttributeError, read)
    names = "\n".join(f"name_{n} = {n}" for n in range(400))  # the 401st name needs a prefixed instruction
    raised(errors.RemovedV1ImportError, run(f"{names}\nfrom legacy_compat import EAGLEWorker"))
    raised(errors.RemovedV1ImportError, run(f"{names}\nfrom plain_module import EAGLEWorker"))
    raised(errors.RemovedV1AttributeError, run(f"{names}\nimport plain_module\nplain_module.EAGLEWorker"))


def under_a_tracer():
    """Debuggers and coverage tools replace instructions too."""
    former = sys.gettrace()
    sys.settrace(lambda frame, event, arg: sys.gettrace())
    try:
        raised(errors.RemovedV1ImportError, run("from plain_module import EAGLEWorker"))
        raised(errors.RemovedV1ImportError, run("from legacy_compat import EAGLEWorker"))
    finally:
        sys.settrace(former)


def probes_of_features():
    assert not hasattr(legacy_compat, "EAGLEWorker")
    assert getattr(legacy_compat, "EAGLEWorker", None) is None
    names = ("EagleDraftWorker", "EAGLEWorker", "RemovedV1Error")
    found = [n for n in names if getattr(legacy_compat, n, None) is not None]
    assert found == ["RemovedV1Error"]
    assert importlib.util.find_spec("legacy_compat.EAGLEWorker") is None


def fallbacks():
    try:
        from legacy_compat import EAGLEWorker
    except ImportError:
        EAGLEWorker = "fallback"
    assert EAGLEWorker == "fallback"


def lists_of_names():
    assert "EAGLEWorker" not in dir(legacy_compat)
    assert "EAGLEWorker" not in vars(legacy_compat)
    assert "EAGLEWorker" not in dict(inspect.getmembers(legacy_compat))
    assert not [name for name in vars(legacy_compat) if name.lower().startswith("eagle")]
    space = {}
    exec("from legacy_compat import *", space)
    assert set(legacy_compat.__all__) <= set(space)
    assert "EAGLEWorker" not in space
    assert set(legacy_compat.__all__) <= set(dir(legacy_compat))


def python_itself_asks():
    for name in ("__wrapped__", "__isabstractmethod__", "__eagle_worker__", "__fspath__"):
        error = raised(AttributeError, lambda name=name: getattr(legacy_compat, name))
        assert "SV" not in str(error)
    inspect.unwrap(legacy_compat)
    assert doctest.DocTestFinder().find(legacy_compat)
    error = raised(AttributeError, lambda: legacy_compat.EAGLEWorkerV3)
    assert str(error) == "module 'legacy_compat' has no attribute 'EAGLEWorkerV3'"
    for ipython in ("_repr_html_", "_ipython_display_", "_ipython_canary_method_should_not_exist_"):
        assert not hasattr(legacy_compat, ipython)


def mocks():
    error = raised(errors.RemovedV1AttributeError, mock.patch("legacy_compat.EAGLEWorker.draft").start)
    assert str(error).startswith(FACT)
    assert "EAGLEWorker" not in dir(mock.create_autospec(legacy_compat))


def unpickling():
    """Python looks the class up from C and words the error itself; the class is AttributeError at least."""
    old = b"clegacy_compat\nEAGLEWorker\n."
    for loads in (pickle.loads, pickle._loads):
        try:
            loads(old)
        except AttributeError:
            continue
        raise AssertionError(loads)


def errors_travel():
    for error in (
        raised(errors.RemovedV1ImportError, run("from legacy_compat import EAGLEWorker")),
        raised(errors.RemovedV1AttributeError, lambda: legacy_compat.EAGLEWorker),
        errors.RemovedV1UsageError(legacy_compat.registry.by_code("SV302")),
        errors.RemovedV1ModuleNotFoundError(legacy_compat.registry.by_code("SV111"), name="x"),
    ):
        for twin in (pickle.loads(pickle.dumps(error)), copy.copy(error), copy.deepcopy(error)):
            assert type(twin) is type(error)
            assert str(twin) == str(error)
            assert twin.removal == error.removal
            assert getattr(twin, "name", None) == getattr(error, "name", None)


if __name__ == "__main__":
    for check in (
        attribute,
        from_import,
        in_a_function_of_an_unlucky_name,
        nothing_is_suggested,
        from_a_module_that_is_no_package,
        many_times,
        under_a_tracer,
        probes_of_features,
        fallbacks,
        lists_of_names,
        python_itself_asks,
        mocks,
        unpickling,
        errors_travel,
    ):
        check()
        print(check.__name__)
