"""Guarded fallbacks are notes, tables for several versions are notes, and a failure that is hidden is an error."""

import pytest

from tests.legacy.scan_tools import S, at, code_of, scan_text, worst

V1 = f"from {S}eagle_worker import EAGLEWorker as W"
V2 = f"from {S}eagle_worker_v2 import EAGLEWorkerV2 as W"


# --- try ---


@pytest.mark.parametrize(
    "text",
    [
        f"try:\n    {V2}\nexcept ImportError:\n    {V1}\n",
        f"try:\n    {V1}\nexcept ImportError:\n    {V2}\n",
        f"try:\n    {V1}\nexcept (ImportError, AttributeError) as error:\n    log(error)\n    {V2}\n",
        f"try:\n    {V1}\nexcept ModuleNotFoundError:\n    from mine import W\n",
        f"try:\n    {V1}\nexcept ImportError:\n    class W:\n        def verify(self): return 1\n",
        f"def f():\n    try:\n        {V1}\n    except ImportError:\n        W = None\n    if W is None:\n        {V2}\n    return W\n",
        f"try:\n    {V2}\nexcept ImportError:\n    try:\n        {V1}\n    except ImportError:\n        W = None\n",
    ],
)
def test_fallbacks_are_notes(text):
    found = scan_text(text)
    assert found
    assert worst(found) == "info", found


@pytest.mark.parametrize(
    ("handler", "habit"),
    [
        ("except ImportError:\n    print('hook not installed')", "only calls print()"),
        ("except ImportError:\n    pass", "does nothing"),
        ("except:\n    W = None", "sets W = None"),
        ("except Exception as error:\n    log.warning(error)", "only calls log.warning()"),
        ("except (OSError, ImportError):\n    HAS_EAGLE = False", "sets HAS_EAGLE = False"),
        ("except ImportError:\n    class W: pass", "goes on"),
        ("except ImportError:\n    if strict:\n        raise\n    log('off')", "only calls log()"),
    ],
)
def test_a_hidden_failure_is_an_error_that_says_how(handler, habit):
    (found,) = scan_text(f"try:\n    {V1}\n{handler}\n")
    assert found.severity == "error"
    assert habit in found.note
    assert found.fixable == "manual"


def test_a_swallowed_removal_in_a_function():
    (found,) = scan_text(f"""\
        def install():
            try:
                from {S[:-1]} import eagle_worker
            except ImportError:
                return
            eagle_worker.EAGLEWorker.draft = mine
        """)[:1]
    assert found.severity == "error"
    assert "returns" in found.note


@pytest.mark.parametrize(
    "handler",
    [
        "except ImportError:\n    raise",
        "except ImportError as e:\n    raise SystemExit(1) from e",
        "except ValueError:\n    pass",
    ],
)
def test_a_handler_that_fails_or_does_not_catch_hides_nothing(handler):
    (found,) = scan_text(f"try:\n    {V1}\n{handler}\n")
    assert (found.severity, found.note) == ("error", "")


def test_suppress_and_importorskip_hide_it():
    (found,) = scan_text(f"import contextlib\nwith contextlib.suppress(ImportError):\n    {V1}\n")
    assert "suppress" in found.note
    (found,) = scan_text(f"import pytest\npytest.importorskip('{S}eagle_worker')\n")
    assert found.severity == "error"
    assert "skipped" in found.note


# --- versions ---


@pytest.mark.parametrize(
    "text",
    [
        "from packaging.version import parse\nif parse(sglang.__version__) < parse('0.5.13'):\n    {V1}\n",
        "if parse(sglang.__version__) >= parse('0.5.13'):\n    pass\nelse:\n    {V1}\n",
        "if SGLANG_VERSION < (0, 5, 13):\n    {V1}\n",
        "if (0, 5, 12) >= version:\n    {V1}\n",
        "OLD = Version(sglang.__version__) < Version('0.5.13')\nif OLD and other:\n    {V1}\n",
        "if not sglang_version >= '0.5.13':\n    {V1}\n",
        "def f():\n    if version >= '0.5.13':\n        return new()\n    {V1}\n    return W\n",
        "NEW_API = (0, 5, 13)\nif version_tuple < NEW_API:\n    {V1}\n",
        "if version == '0.5.12.post1':\n    {V1}\n",
    ],
)
def test_version_checks_are_notes(text):
    (found,) = scan_text(text.replace("{V1}", V1))
    assert (found.severity, found.fixable) == ("info", "manual"), text


@pytest.mark.parametrize(
    "text",
    [
        "if version >= '0.5.13':\n    {V1}\n",  # the wrong way round
        "if version < '0.5.20':\n    {V1}\n",  # lets 0.5.13 through
        "if version < '0.5.13':\n    pass\nelse:\n    {V1}\n",
        "if speed < '0.5.13':\n    {V1}\n",  # not about a version
        "if version < '0.5.13' or force:\n    {V1}\n",
        "if version <= '0.5.13':\n    {V1}\n",
        "if version >= '0.5.13':\n    print('new')\n{V1}\n",
    ],
)
def test_version_checks_that_let_newer_releases_through_are_not(text):
    (found,) = scan_text(text.replace("{V1}", V1))
    assert found.severity == "error", text


# --- probes ---


def test_find_spec_with_and_without_another_way():
    probe = f"import importlib.util\nif importlib.util.find_spec('{S}eagle_worker'):\n    {V1}\n"
    found = scan_text(probe)
    assert [one.severity for one in found] == ["error", "error"]
    assert all("nothing" in one.note for one in found)
    found = scan_text(f"{probe}else:\n    {V2}\n")
    assert worst(at(found, 3)) == "info"


def test_hasattr_and_getattr_answer_quietly():
    found = scan_text(f"""\
        import {S}base_spec_worker as base
        if hasattr(base, "BaseDraftWorker"): ...
        cls = getattr(base, "BaseDraftWorker", None)
        cls = getattr(base, "BaseDraftWorker")
        """)
    assert [(one.severity, bool(one.note)) for one in found] == [
        ("error", True),
        ("error", True),
        ("error", False),
    ]
    assert not scan_text(f"import {S}base_spec_worker as base\nhasattr(base, 'EagleDraftWorkerBase')\n")


# --- tables ---


@pytest.mark.parametrize(
    ("table", "severity"),
    [
        (f"('{S}eagle_worker', '{S}eagle_worker_v2')", "info"),
        (f"('{S}eagle_worker',)", "error"),
        (f"(('{S}eagle_worker', 'EAGLEWorker'), ('{S}eagle_worker_v2', 'EAGLEWorkerV2'))", "info"),
        (
            f"{{'0.5.12': '{S}eagle_worker.EAGLEWorker', '0.5.13': '{S}eagle_worker_v2.EAGLEWorkerV2'}}",
            "info",
        ),
        (f"[('{S}eagle_worker', 'EAGLEWorker'), ('{S}standalone_worker', 'StandaloneWorker')]", "error"),
    ],
)
def test_tables_for_several_versions_are_notes(table, severity):
    text = f"""\
import importlib
for mod in {table}:
    try:
        importlib.import_module(mod)
    except Exception as error:
        log.debug(error)
"""
    assert worst(scan_text(text)) == severity


def test_a_name_probe_over_two_versions():
    text = f"import {S}eagle_worker_v2 as m\nfound = [getattr(m, n, None) for n in ('EagleDraftWorker', 'EAGLEWorker')]\n"
    assert worst(scan_text(text)) in ("none", "info")


# --- type checking ---


def test_type_checking_imports_are_warnings_that_stay_by_hand():
    found = scan_text(f"import typing as t\nif t.TYPE_CHECKING:\n    {V1}\ndef f(w: 'W'): ...\n")
    assert [(one.severity, one.fixable) for one in found] == [("warning", "manual")]


def test_an_annotation_that_nothing_imports():
    (found,) = scan_text("import sglang\ndef patch(w: 'EAGLEWorker'): ...\n")
    assert (found.severity, found.code) == ("warning", code_of(S + "eagle_worker.EAGLEWorker"))
