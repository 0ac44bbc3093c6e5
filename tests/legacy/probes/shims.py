# ruff: noqa: BLE001, PT017, S102 - no pytest here, and code in strings is what is tested
"""What `install()` does to imports, case by case. Plain asserts: this runs on every Python of the machine.

shims.py absent      no sglang anywhere
shims.py new         a tree like SGLang's after V1, given as second argument
shims.py namespace   the same without __init__.py files
shims.py old         a tree that still has V1
shims.py first-import, first-patch    after V1 again, where this is the first thing that happens
"""

import copy
import importlib
import importlib.util
import inspect
import os
import pickle
import sys
import warnings
from pathlib import Path
from unittest import mock

import legacy_compat

S = "sglang.srt.speculative."
OLD = S + "eagle_worker"
IMPORTS = {
    "from sglang.srt.speculative import eagle_worker": "SV111",
    f"import {OLD}": "SV111",
    f"import {OLD} as ew": "SV111",
    f"from {OLD} import EAGLEWorker": "SV101",
    f"from {OLD} import helper, EAGLEWorker as W": "SV101",
    f"from {OLD} import (get_last_loc_large_page_size_top_k_1,)": "SV520",
    f"from {OLD} import *": "SV111",
    "\n".join(f"name_{n} = {n}" for n in range(400)) + f"\nfrom {OLD} import EAGLEWorker": "SV101",
    "from sglang.srt.speculative import eagle_worker_v2, standalone_worker": "SV113",
    f"import importlib; importlib.import_module('{OLD}')": "SV111",
    f"__import__('{OLD}', fromlist=['eagle_worker'])": "SV111",
    f"import {S}triton_ops.cache_locs": "SV503",
    f"def f():\n    from {S}multi_layer_eagle_worker import MultiLayerEagleWorker\nf()": "SV102",
    f"from {S}eagle_info import EagleDraftInput, EagleVerifyOutput": "SV201",
    "from sglang.srt.managers.schedule_batch import ModelWorkerBatch": "SV315",
    "from sglang.srt.managers import scheduler_output_processor_mixin": "SV343",
}


def fails(code):
    try:
        exec(code, {})
    except Exception as error:
        return error
    raise AssertionError(f"{code!r} raised nothing")


def explains():
    for code, expected in IMPORTS.items():
        error = fails(code)
        assert isinstance(error, legacy_compat.RemovedV1ImportError), (code, repr(error))
        assert error.code == expected, (code, error.code)
        assert str(error).startswith(expected)


def keeps_the_class_of_error(installed):
    """Whatever `except` clause caught it without the shims catches it with them."""
    for code in IMPORTS:
        with_shims = fails(code)
        legacy_compat.uninstall()
        plain = fails(code)
        legacy_compat.install()
        assert isinstance(with_shims, type(plain)), (code, plain)
        assert "SV" not in str(plain)
        if not installed:
            assert with_shims.name == plain.name == "sglang"
            assert with_shims.__notes__ == ["(Here, sglang itself is not installed.)"]
        else:
            assert with_shims.name == plain.name
            assert not hasattr(with_shims, "__notes__")


def probes_answer_as_before(installed):
    for name in (OLD, S + "eagle_worker_v2", S + "base_spec_worker", S + "nowhere", "sglang", "nowhere"):
        assert (
            "base_spec_worker" not in name or name not in sys.modules
        )  # what was imported is not looked for
        with_shims = probe(name)
        legacy_compat.uninstall()
        assert with_shims == probe(name), name
        legacy_compat.install()
    assert sys.modules.get(OLD) is None
    if installed:
        import sglang.srt.speculative as package
        from sglang.srt.speculative import eagle_info

        for module, name in ((package, "eagle_worker"), (eagle_info, "EagleVerifyOutput")):
            assert not hasattr(module, name)
            assert getattr(module, name, None) is None
            assert name not in dir(module)
            assert not [key for key in vars(module) if key.lower().startswith("eagleworker")]


def probe(name):
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        return str(error)
    return spec and (spec.name, type(spec.loader))


def other_imports_are_left_alone():
    error = fails("import no_such_module_at_all")
    assert str(error) == "No module named 'no_such_module_at_all'"
    error = fails("import sglang.srt.speculative.no_such_module")
    assert "SV" not in str(error)
    error = fails("import sgl_jax.srt.speculative.eagle_worker")
    assert str(error) == "No module named 'sgl_jax'"


def guarded_fallback():
    try:
        from sglang.srt.speculative.eagle_worker import EAGLEWorker as W
    except ModuleNotFoundError:
        W = "fallback"
    assert W == "fallback"
    modules = []
    for name in (OLD, S + "standalone_worker", "json"):
        try:
            modules.append(importlib.import_module(name))
        except ImportError:
            continue
    assert [module.__name__ for module in modules] == ["json"]


def pickles():
    for loads in (pickle.loads, pickle._loads):
        try:
            loads(f"c{OLD}\nEAGLEWorker\n.".encode())
        except legacy_compat.RemovedV1ImportError as error:
            assert error.code in ("SV101", "SV111")
        else:
            raise AssertionError(loads)


# --- with a tree ---


def patches():
    for target, code in (
        (f"{OLD}.EAGLEWorker.verify", "SV111"),
        (f"{S}eagle_info.EagleVerifyOutput.create_idle", "SV201"),
    ):
        try:
            mock.patch(target).start()
        except legacy_compat.RemovedV1AttributeError as error:
            assert error.code == code
        else:
            raise AssertionError(target)


def what_is_left_is_untouched(namespace):
    info = importlib.import_module(S + "eagle_info")
    assert info.EagleDraftInput.__module__ == S + "eagle_info"
    assert inspect.getsource(info.EagleDraftInput).startswith("class EagleDraftInput")
    assert type(info.__loader__).__name__ == type(info.__spec__.loader).__name__ == "SourceFileLoader"
    again = importlib.reload(info)
    assert again is info
    assert isinstance(
        fails(f"from {S}eagle_info import EagleVerifyOutput"), legacy_compat.RemovedV1ImportError
    )
    error = fails(f"from {S}eagle_info import EagleDraftOutput")
    assert "cannot import name 'EagleDraftOutput'" in str(error)
    error = fails(f"import {S}eagle_info as i; i.EagleDraftInpu")
    assert str(error) == f"module '{S}eagle_info' has no attribute 'EagleDraftInpu'"
    assert error.name == "EagleDraftInpu"
    assert error.obj is info
    assert importlib.import_module(S + "eagle_worker_v2").EAGLEWorkerV2.__name__ == "EAGLEWorkerV2"


def own_getattr_comes_first():
    utils = importlib.import_module(S + "spec_utils")
    assert utils.lazy == 7
    assert utils.get_target_cache_loc == "kept alive by the module itself"
    error = fails(f"import {S}spec_utils as u; u.nothing_of_the_kind")
    assert str(error) == "nothing_of_the_kind is not here"
    error = fails(f"import {S}spec_utils as u; u.assign_draft_cache_locs")
    assert isinstance(error, legacy_compat.RemovedV1AttributeError)
    legacy_compat.uninstall()
    assert utils.__getattr__.__module__ == S + "spec_utils"
    legacy_compat.install()


def a_module_that_uninstalls():
    """Imports can be under way while the shims go."""
    module = importlib.import_module(S + "adaptive_spec_params")
    assert "__getattr__" not in vars(module)
    assert legacy_compat.shims._finder not in sys.meta_path
    legacy_compat.install()


def everything_goes_back():
    legacy_compat.uninstall()
    finders = list(sys.meta_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
        del sys.modules[name]
    info = importlib.import_module(S + "eagle_info")
    before, spec = copy.copy(vars(info)), copy.copy(vars(info.__spec__))
    legacy_compat.install()
    legacy_compat.install()  # twice is once
    assert len(sys.meta_path) == len(finders) + 1
    assert isinstance(
        fails(f"from {S}eagle_info import EagleVerifyOutput"), legacy_compat.RemovedV1ImportError
    )
    utils = importlib.import_module(S + "spec_utils")
    legacy_compat.uninstall()
    legacy_compat.uninstall()
    assert sys.meta_path == finders
    assert vars(info) == before
    assert vars(info.__spec__) == spec
    assert "SV" not in str(fails(f"import {S}spec_utils as u; u.assign_draft_cache_locs"))
    assert type(utils.__loader__).__name__ == type(utils.__spec__.loader).__name__ == "SourceFileLoader"
    assert "SV" not in str(fails(f"from {S}eagle_info import EagleVerifyOutput"))
    # what somebody else has put there since stays
    legacy_compat.install()
    utils.__getattr__ = len
    legacy_compat.uninstall()
    assert utils.__getattr__ is len


def with_v1_nothing_happens():
    from sglang.srt.speculative import eagle_worker
    from sglang.srt.speculative.eagle_worker import EAGLEWorker

    assert EAGLEWorker is eagle_worker.EAGLEWorker
    with mock.patch(f"{OLD}.EAGLEWorker.verify") as patched:
        assert EAGLEWorker.verify is patched
    assert "EAGLEWorker" in vars(eagle_worker)


# --- without install, and the environment ---


def never_on_by_default():
    finders = list(sys.meta_path)
    import legacy_compat.shims  # noqa: F401

    assert sys.meta_path == finders
    for code in IMPORTS:
        assert "SV" not in str(fails(code)), code


def warns_of_variables():
    os.environ["SGLANG_ENABLE_SPEC_V2"] = "0"
    os.environ["SGLANG_ENABLE_OVERLAP_PLAN_STREAM"] = "1"  # still there
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        legacy_compat.install()
        legacy_compat.install()
        legacy_compat.uninstall()
    (warning,) = caught
    assert warning.category is legacy_compat.RemovedV1Warning
    assert warning.filename == __file__
    assert str(warning.message).startswith("SV601: SGLANG_ENABLE_SPEC_V2='0'")
    assert "--disable-overlap-schedule" in str(warning.message)
    del os.environ["SGLANG_ENABLE_SPEC_V2"]


def first_import():
    error = fails("from sglang.srt.speculative import eagle_worker")
    assert type(error) is legacy_compat.RemovedV1ImportError
    assert error.code == "SV111"
    assert error.name == "sglang.srt.speculative"


def main(kind, tree=None):
    if tree:
        sys.path.insert(0, str(Path(tree)))
    if kind.startswith("first"):
        legacy_compat.install()
        first_import() if kind == "first-import" else patches()
        return
    warns_of_variables()
    if kind != "old":
        never_on_by_default()
    legacy_compat.install()
    if kind == "old":
        with_v1_nothing_happens()
        return
    if tree:
        patches()
    explains()
    keeps_the_class_of_error(installed=tree is not None)
    probes_answer_as_before(installed=tree is not None)
    other_imports_are_left_alone()
    guarded_fallback()
    pickles()
    if tree:
        what_is_left_is_untouched(kind == "namespace")
        own_getattr_comes_first()
        a_module_that_uninstalls()
        everything_goes_back()


if __name__ == "__main__":
    main(*sys.argv[1:])
    print("ok")
