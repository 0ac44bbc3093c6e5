"""What keeps findings quiet: comments, baselines, settings of a project."""

import functools
import json
from pathlib import Path

import pytest

from legacy_compat.scan import scan
from tests.legacy.scan_tools import S, run, write_tree

ROOT = Path(__file__).parents[2]
V1 = f"from {S}eagle_worker import EAGLEWorker\n"


@pytest.fixture
def tree(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return functools.partial(write_tree, tmp_path)


@pytest.mark.parametrize(
    ("comment", "silent"),
    [
        ("# sv: ignore[SV101]", True),
        ("# sv: ignore", True),
        ("# SV: Ignore[ sv101 , SV102 ]", True),
        ("# noqa: SV101", True),
        ("# noqa: F401, SV101", True),
        ("# noqa:SV101", True),
        ("# noqa", True),
        ("# type: ignore  # sv: ignore[SV101]", True),
        ("# sv: ignore[SV102]", False),
        ("# noqa: F401", False),
        ("# noqa: E501,F401", False),
        ("# no qa", False),
    ],
)
def test_comments_silence_a_line(tree, capsys, comment, silent):
    tree(a_dot_py=V1.rstrip() + f"  {comment}\n")
    code, out, _ = run(capsys, "scan", ".")
    assert code == (0 if silent else 1)
    assert ("1 finding silenced by comments" in out) == silent


def test_comments_silence_the_next_line_or_the_file(tree, capsys):
    tree(
        a_dot_sh="# sv: ignore\nSGLANG_ENABLE_SPEC_V2=1 \\\n  cmd\n",
        b_dot_md="<!-- sv: ignore-file -->\n\nSGLANG_ENABLE_SPEC_V2\n",
        c_dot_py=f"# sv: ignore-file[SV101]\nx = 1\n{V1}import {S}standalone_worker\n",
        d_dot_yaml='env:\n  SGLANG_ENABLE_SPEC_V2: "1"  # sv: ignore[SV601]\n',
        e_dot_ipynb=json.dumps({"cells": [{"cell_type": "code", "source": f"x = 1\n{V1.rstrip()}  # noqa"}]}),
    )
    report = scan([Path()])
    assert [(found.path, found.code) for found in report.findings] == [("c.py", "SV113")]


def test_a_baseline_keeps_what_is_known_quiet(tree, capsys):
    tree(a_dot_py=V1)
    assert run(capsys, "scan", ".", "--write-baseline", "known.json")[0] == 0
    assert run(capsys, "scan", ".", "--baseline", "known.json")[0] == 0
    tree(a_dot_py="import os\n\n\nif os:\n    " + V1)  # moved and indented
    code, out, _ = run(capsys, "scan", ".", "--baseline", "known.json")
    assert code == 0
    assert "1 finding known from the baseline" in out
    tree(a_dot_py=V1 + V1)  # one more of the same
    code, out, _ = run(capsys, "scan", ".", "--baseline", "known.json")
    assert code == 1
    assert "1 error" in out
    tree(known_dot_json="[]")
    code, _, err = run(capsys, "scan", ".", "--baseline", "known.json")
    assert code == 2
    assert "--write-baseline" in err


def test_settings_of_a_project(tree, capsys):
    tree(
        pyproject_dot_toml='[tool.legacy_compat]\nexclude = ["vendor"]\ntarget-version = "0.5.13"\nignore = ["SV101", "SV111"]\n',
        vendor__a_dot_py=f"import {S}standalone_worker\n",
        b_dot_py="if batch.is_spec_v2: ...\n" + V1,
    )
    assert run(capsys, "scan", ".")[0] == 0
    assert run(capsys, "scan", ".", "--target-version", "0.5.14")[0] == 1
    tree(pyproject_dot_toml='[tool.legacy_compat]\nexclud = ["vendor"]\n')
    code, _, err = run(capsys, "scan", ".")
    assert code == 2
    assert "'exclud'" in err
