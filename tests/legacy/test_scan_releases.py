"""SGLang's own releases: the last one with V1 is full of findings, the newest one has no error.

pip download --no-deps sglang==0.5.12.post1 sglang==0.5.23    # one after the other; then unzip each wheel
SGLANG_TREES=folder pytest tests/legacy/test_scan_releases.py  # that holds 0.5.12.post1/ and 0.5.23/
"""

import ast
import os
import shutil
from pathlib import Path

import pytest

from legacy_compat.fix import Allowed, fix
from legacy_compat.scan import Options, scan

TREES = Path(os.environ.get("SGLANG_TREES", "no such folder"))
pytestmark = pytest.mark.skipif(
    not TREES.is_dir(), reason="needs unpacked SGLang releases: SGLANG_TREES is not a folder (see this file)"
)
OLD, NEW = TREES / "0.5.12.post1", TREES / "0.5.23"


def test_the_newest_release_has_no_error():
    report = scan([NEW])
    assert report.scanned > 4000
    assert [found for found in report.findings if found.severity == "error"] == []


def test_the_last_release_with_v1_knows_itself():
    report = scan([OLD])
    assert not report.failed
    speculative = OLD / "sglang/srt/speculative"
    own = {Path(found.path).name for found in report.findings if found.severity == "error"}
    assert {"spec_info.py", "multi_layer_eagle_worker.py", "scheduler.py"} <= own
    removed = [found for found in report.findings if found.shape == "remark" and found.code.startswith("SV1")]
    assert {Path(found.path) for found in removed} == {
        speculative / f"{name}.py"
        for name in ("eagle_worker", "multi_layer_eagle_worker", "standalone_worker")
    }
    assert report.count("error") > 400


def test_code_for_that_release_is_fine_with_it():
    assert scan([OLD], Options(target="0.5.12")).findings == []


def test_fix_leaves_sources_that_parse(tmp_path):
    shutil.copytree(OLD / "sglang/srt", tmp_path / "sglang/srt")
    before = scan([tmp_path]).count("error")
    report = fix([tmp_path], Options(), Allowed(unsafe=True, drop_legacy=True), write=True, allow_dirty=True)
    assert not report.refused
    assert report.made > 80
    for change in report.changes:
        ast.parse(change.path.read_bytes())
    assert scan([tmp_path]).count("error") < before
    again = fix([tmp_path], Options(), Allowed(unsafe=True, drop_legacy=True), write=True, allow_dirty=True)
    assert again.changes == []
