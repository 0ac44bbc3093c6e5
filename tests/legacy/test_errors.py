"""Removed names explain themselves, in words that fit on a screen, and everything that probes for them goes on."""

import subprocess
import sys
from pathlib import Path

import pytest

import legacy_compat
from legacy_compat import errors, registry
from legacy_compat.errors import RemovedV1Error, explain
from tests.legacy.pythons import ROOT, pythons, run

PROBES = Path(__file__).parent / "probes"
TABLE = registry.load()


@pytest.mark.parametrize(("version", "python"), pythons(), ids=[version for version, _ in pythons()])
def test_how_names_behave(version, python):
    assert "errors_travel" in run(python, PROBES / "errors.py")


def test_what_a_user_sees():
    done = subprocess.run(
        [sys.executable, "-c", "from legacy_compat import EAGLEWorker"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-8:] == [
        "legacy_compat.errors.RemovedV1ImportError: SV101: SGLang 0.5.13 removed the class"
        " sglang.srt.speculative.eagle_worker.EAGLEWorker (last in 0.5.12.post1).",
        "SGLang:  sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2",
        "spec_v2: spec_v2.speculative.eagle_worker_v2.EAGLEWorkerV2",
        "Change:  V1 was the draft TpModelWorker; V2 has one, in .draft_worker. Overrides of draft() and the",
        "         like belong on EagleDraftWorker.",
        "Find it: python -m legacy_compat scan .",
        'Or stay: pip install "sglang==0.5.12.post1"',
        "More:    docs/migration.md#sv101, or python -m legacy_compat explain SV101",
    ]


def test_every_message_says_all_and_keeps_to_eight_lines():
    for row in TABLE:
        lines = explain(row).splitlines()
        assert len(lines) <= 8, row.code
        assert lines[0].startswith(f"{row.code}: SGLang {row.removed_in} "), row.code
        assert row.old_path in lines[0], row.code
        assert lines[1] == f"SGLang:  {row.sglang_replacement or 'nothing takes its place'}", row.code
        assert lines[2] == f"spec_v2: {row.spec_v2_replacement or 'nothing like it in this release'}", (
            row.code
        )
        scan = lines.index("Find it: python -m legacy_compat scan .")
        assert "Change: " + row.changes == " ".join(" ".join(lines[3:scan]).split()), row.code
        assert all(len(line) <= 100 for line in lines[3:]), row.code
        assert lines[-1] == (
            f"More:    docs/migration.md#{row.code.lower()}, or python -m legacy_compat explain {row.code}"
        )


def test_one_can_only_stay_where_there_was_a_release():
    assert 'Or stay: pip install "sglang==0.5.12.post1"' in explain(registry.by_code("SV101"))
    for row in TABLE:
        assert ("Or stay" in explain(row)) == (row.last_version[0].isdigit()), row.code
    assert "it was on the development branch only" in explain(registry.by_code("SV301"))


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("EAGLEWorker", "SV101"),
        ("MultiLayerEagleWorker", "SV102"),
        ("StandaloneWorker", "SV103"),
        ("DFlashWorker", "SV802"),
        ("FrozenKVMTPWorker", "SV838"),
        ("BaseDraftWorker", "SV104"),
        ("EagleVerifyOutput", "SV201"),
        ("ModelWorkerBatch", "SV315"),
        ("FutureIndices", "SV360"),
        ("eagle_worker", "SV111"),
        ("_overlap_forward_isolation", "SV301"),
        ("is_spec_v2", "SV306"),
        ("SGLANG_ENABLE_SPEC_V2", "SV601"),
        ("add_output_logprobs_for_spec_v1", "SV345"),
        ("v1_spec_info_filtered", "SV313"),
    ],
)
def test_names_that_can_be_asked_for(name, code):
    with pytest.raises(ImportError) as caught:
        __import__("legacy_compat", fromlist=[name])
    error = caught.value
    assert isinstance(error, errors.RemovedV1ImportError)
    assert (error.code, error.removal) == (code, registry.by_code(code))
    assert not hasattr(legacy_compat, name)


def test_every_removed_class_can_be_asked_for():
    for row in TABLE:
        if row.kind == "class":
            with pytest.raises(errors.RemovedV1AttributeError):
                getattr(legacy_compat, row.name)


@pytest.mark.parametrize("name", ["update", "draft", "verify", "topk", "positions", "device", "ps"])
def test_words_that_say_nothing_by_themselves_are_plain(name):
    with pytest.raises(AttributeError, match=f"'legacy_compat' has no attribute '{name}'"):
        getattr(legacy_compat, name)


def test_no_part_of_the_package_bears_a_removed_name():
    """Importing a submodule binds its name; a removed name must not be hidden by one."""
    parts = {path.stem for path in Path(legacy_compat.__file__).parent.iterdir()}
    assert not parts & legacy_compat._removed().keys()


def test_the_fields_that_errors_share():
    row = registry.by_code("SV132")
    for kind in (
        errors.RemovedV1ImportError,
        errors.RemovedV1ModuleNotFoundError,
        errors.RemovedV1AttributeError,
        errors.RemovedV1UsageError,
    ):
        error = kind(row)
        assert isinstance(error, RemovedV1Error)
        assert error.code == "SV132"
        assert error.removed == "sglang.srt.speculative.eagle_worker.EAGLEWorker.draft"
        assert error.replacement == "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.draft"
        assert error.hint == row.changes
    assert errors.RemovedV1UsageError(registry.by_code("SV520")).replacement is None
    waits = registry.by_path("sglang.srt.managers.schedule_batch.ScheduleBatch.maybe_wait_verify_done")
    assert waits.sglang_replacement is None
    assert (
        errors.RemovedV1UsageError(waits).replacement
        == "spec_v2.scheduler.future_map.FutureMap.publish_ready"
    )
    for kind, builtin in (
        (errors.RemovedV1ImportError, ImportError),
        (errors.RemovedV1ModuleNotFoundError, ModuleNotFoundError),
        (errors.RemovedV1AttributeError, AttributeError),
        (errors.RemovedV1UsageError, RuntimeError),
    ):
        assert issubclass(kind, builtin)
    assert not issubclass(errors.RemovedV1ImportError, ModuleNotFoundError)
