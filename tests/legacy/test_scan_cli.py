"""The command line of the scanner: exit codes, formats, the table."""

import functools
import json
import re
from pathlib import Path

import pytest

from legacy_compat.cli import main
from legacy_compat.registry import load
from legacy_compat.scan import NOTES, scan
from tests.legacy.scan_tools import S, run, write_tree

ROOT = Path(__file__).parents[2]
V1 = f"from {S}eagle_worker import EAGLEWorker\n"
SAFE = f"from {S}spec_utils import maybe_detect_nan\n"


@pytest.fixture
def tree(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return functools.partial(write_tree, tmp_path)


# --- exit codes and the summary ---


def test_nothing_found_is_said_plainly(tree, capsys):
    tree(a_dot_py="x = 1\n", b_dot_sh="ls\n")
    code, out, _ = run(capsys, "scan")
    assert code == 0
    assert re.fullmatch(r"2 files scanned in \d+\.\d s, 0 matched\.\n", out)


def test_findings_are_counted_and_fail(tree, capsys):
    tree(a_dot_py=V1 + SAFE, b_dot_sh="# SGLANG_ENABLE_SPEC_V2=1\n")
    code, out, _ = run(capsys, "scan", ".")
    assert code == 1
    assert "2 files scanned in" in out
    assert ": 2 errors, 1 note in 2 files.\n" in out
    assert "To be mended: 1 by `fix`, 1 more by `fix --unsafe`.\n" in out
    assert "    from sglang.srt.speculative.eagle_worker import EAGLEWorker\n" + " " * 52 + "^" * 11 in out


@pytest.mark.parametrize(
    ("text", "options", "code"),
    [
        (V1, [], 1),
        (V1, ["--exit-zero"], 0),
        (V1, ["--fail-on", "never"], 0),
        ('os.environ["SGLANG_ENABLE_SPEC_V2"] = "1"\n', [], 1),
        ('os.environ["SGLANG_ENABLE_SPEC_V2"] = "1"\n', ["--fail-on", "error"], 0),
        ("# SGLANG_ENABLE_SPEC_V2\n", [], 0),
        ("# SGLANG_ENABLE_SPEC_V2\n", ["--fail-on", "info"], 1),
        (V1, ["--ignore", "sv101"], 1),  # the module's own row is left
        (V1, ["--ignore", "SV101,SV111"], 0),
        (V1, ["--target-version", "0.5.12.post1"], 0),
        (V1, ["--target-version", "0.5.13"], 1),
        (V1, ["--exclude", "*.py"], 0),
        (V1, ["--exclude", "a.py"], 0),
        (V1, ["--max-file-size", "0.00001"], 0),
    ],
)
def test_exit_codes(tree, capsys, text, options, code):
    tree(a_dot_py=text)
    assert run(capsys, "scan", ".", *options)[0] == code


def test_what_could_not_be_done_is_2(tree, capsys):
    tree(bad_dot_py=f"def f(:\n  import {S}eagle_worker\n", good_dot_py=V1)
    assert run(capsys, "scan", "good.py", "nowhere")[0] == 2
    assert "nowhere: no such file" in run(capsys, "scan", "nowhere")[1]
    assert run(capsys, "scan", "bad.py")[0] == 2  # nothing else parsed
    assert run(capsys, "scan", ".")[0] == 1
    assert run(capsys, "scan", ".", "--strict")[0] == 2
    code, _, err = run(capsys, "scan", ".", "--target-version", "latest")
    assert code == 2
    assert "'latest'" in err
    assert run(capsys, "scan", "good.py", "--baseline", "nowhere.json")[0] == 2
    with pytest.raises(SystemExit) as stopped:
        main(["scan", "--max-file-size", "0"])
    assert stopped.value.code == 2


def test_only_some_severities_are_shown(tree, capsys):
    tree(a_dot_py=V1 + "# SGLANG_ENABLE_SPEC_V2\n")
    _, out, _ = run(capsys, "scan", ".", "--show", "error", "--format", "concise")
    assert out.startswith("a.py:1:49: error SV101 ")
    assert "1 finding below --show not shown" in out
    assert "info" not in out


# --- formats ---


def test_json(tree, capsys):
    tree(a_dot_py=V1)
    code, out, err = run(capsys, "scan", ".", "--format", "json")
    report = json.loads(out)
    assert code == 1
    assert "1 file scanned" in err
    assert report["schema"] == 1
    assert report["summary"] | {"seconds": 0} == {
        "files_scanned": 1, "files_with_findings": 1, "errors": 1, "warnings": 0, "infos": 0, "suppressed": 0,
        "baselined": 0, "skipped": 0, "failed": [], "seconds": 0,
    }  # fmt: skip
    (found,) = report["findings"]
    assert found["path"] == "a.py"
    assert (found["line"], found["column"], found["end_line"], found["end_column"]) == (1, 49, 1, 60)
    assert (found["code"], found["severity"], found["shape"], found["fix"]) == (
        "SV101",
        "error",
        "import",
        "unsafe",
    )
    assert found["replacement"] == S + "eagle_worker_v2.EAGLEWorkerV2"


def test_sarif(tree, capsys):
    folder = tree(a_dot_py=V1, b_dot_sh="sglang serve --mamba-scheduler-strategy x\n", c_dot_ipynb=json.dumps(
        {"cells": [{"cell_type": "code", "source": V1}], "nbformat": 4}))  # fmt: skip
    log = json.loads(run(capsys, "scan", ".", "--format", "sarif")[1])
    assert log["version"] == "2.1.0"
    assert log["$schema"].endswith("/sarif-2.1.0.json")
    (made,) = log["runs"]
    assert set(made) == {"tool", "columnKind", "originalUriBaseIds", "invocations", "results"}
    assert made["columnKind"] == "unicodeCodePoints"
    assert made["originalUriBaseIds"] == {"SRCROOT": {"uri": folder.as_uri() + "/"}}
    assert made["invocations"] == [{"executionSuccessful": True}]
    rules = made["tool"]["driver"]["rules"]
    for result in made["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["level"] in ("error", "warning", "note")
        assert result["message"]["text"]
        (place,) = result["locations"]
        artifact = place["physicalLocation"]["artifactLocation"]
        assert artifact["uriBaseId"] == "SRCROOT"
        region = place["physicalLocation"].get("region")
        if region:
            line = (folder / artifact["uri"]).read_text().splitlines()[region["startLine"] - 1]
            assert place["physicalLocation"]["contextRegion"]["snippet"]["text"] == line
            assert line[region["startColumn"] - 1 : region["endColumn"] - 1] in (
                "EAGLEWorker",
                "--mamba-scheduler-strategy",
            )
    for rule in rules:
        assert set(rule) == {"id", "shortDescription", "fullDescription", "help", "defaultConfiguration"}
        assert rule["defaultConfiguration"]["level"] in ("error", "warning", "note")
    keys = [result["partialFingerprints"]["legacyCompat/v1"] for result in made["results"]]
    assert len(set(keys)) == len(keys)
    (fix,) = [fix for result in made["results"] for fix in result.get("fixes", ())]
    (change,) = fix["artifactChanges"]
    (part,) = change["replacements"]
    assert part["insertedContent"] == {"text": "--mamba-radix-cache-strategy"}
    assert part["deletedRegion"]["startColumn"] == 14


def test_sarif_says_what_failed(tree, capsys):
    tree()
    (made,) = json.loads(run(capsys, "scan", "nowhere", "--format", "sarif")[1])["runs"]
    (invocation,) = made["invocations"]
    assert invocation["executionSuccessful"] is False
    assert "nowhere" in invocation["toolExecutionNotifications"][0]["message"]["text"]


def test_github_annotations_are_escaped(tree, capsys):
    tree(**{"a,b: 50%_dot_py": V1})
    _, out, _ = run(capsys, "scan", ".", "--format", "github")
    assert out.startswith(
        "::error file=a%2Cb%3A 50%25.py,line=1,endLine=1,col=49,endColumn=60,title=SV101 import::"
    )
    assert out.count("\n") == 1


def test_reports_go_to_files(tree, capsys):
    tree(a_dot_py=V1)
    code, out, _ = run(capsys, "scan", ".", "--format", "json", "-o", "report.json")
    assert code == 1
    assert "1 file scanned" in out
    assert json.loads(Path("report.json").read_text())["summary"]["errors"] == 1
    assert len(scan([Path()]).findings) == 1  # a report of ours is no finding


def test_colours_only_on_request(tree, capsys):
    tree(a_dot_py=V1)
    assert "\x1b[" not in run(capsys, "scan", ".")[1]
    assert "\x1b[31;1merror SV101\x1b[0m" in run(capsys, "scan", ".", "--color", "always")[1]


def test_a_long_line_is_cut_around_the_place(tree, capsys):
    tree(a_dot_py="x = '" + "y" * 300 + f"'; import {S}eagle_worker; z = '" + "y" * 300 + "'\n")
    _, out, _ = run(capsys, "scan", ".")
    line, marks = out.splitlines()[1:3]
    assert len(line) < 130
    assert line[marks.index("^") : marks.rindex("^") + 1] == f"{S}eagle_worker"


# --- the table ---


@pytest.mark.parametrize(
    "what", ["SV101", "sv101", "EAGLEWorker", S + "eagle_worker.EAGLEWorker", "SGLANG_ENABLE_SPEC_V2"]
)
def test_explain(capsys, what):
    code, out, _ = run(capsys, "explain", what)
    assert code == 0
    assert re.match(r"SV\d{3}  ", out)


def test_everything_can_be_explained(capsys):
    for code in [row.code for row in load()] + list(NOTES):
        assert run(capsys, "explain", code)[1].startswith(code)


def test_explain_of_a_slip_offers_what_is_near(capsys):
    code, out, _ = run(capsys, "explain", "EagleWorkr")
    assert code == 2
    assert "EAGLEWorker" in out


def test_list_and_docs(tree, capsys):
    tree()
    code, out, err = run(capsys, "list", "EAGLEWorker")
    assert code == 0
    assert "SV101" in out
    assert "rows" in err
    rows = json.loads(run(capsys, "list", "--json")[1])
    assert len(rows) == len(load())
    page = run(capsys, "docs")[1]
    assert "SV101" in page
    assert run(capsys, "docs", "--check", "page.md")[0] == 1
    assert run(capsys, "docs", "--write", "page.md")[0] == 0
    assert run(capsys, "docs", "--check", "page.md")[0] == 0
    assert Path("page.md").read_text(encoding="utf-8") == page


@pytest.mark.parametrize("command", ["scan", "fix", "explain", "list", "docs"])
def test_help_has_examples_where_there_is_a_choice(capsys, command):
    with pytest.raises(SystemExit) as stopped:
        main([command, "--help"])
    assert stopped.value.code == 0
    out = capsys.readouterr().out
    if command in ("scan", "fix"):
        assert f"python -m legacy_compat {command} ." in out
        assert "exit code" in out


def test_this_repository_has_no_error(capsys):
    # but for the notebook that shows what a removed import says
    shown = ("--exclude", "notebooks/05_migrating_from_v1.ipynb")
    assert run(capsys, "scan", ROOT, "--fail-on", "error", *shown)[0] == 0
