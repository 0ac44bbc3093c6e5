"""Trees that resist: loops, pipes, large files, names that are no text; and nothing that is scanned runs."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from legacy_compat.scan import Options, scan
from tests.legacy.scan_tools import S, run, write_tree

ROOT = Path(__file__).parents[2]
V1 = f"from {S}eagle_worker import EAGLEWorker\n"


@pytest.fixture
def tree(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return functools.partial(write_tree, tmp_path)


def test_links_pipes_and_folders_of_tools(tree, capsys):
    folder = tree(
        src__a_dot_py=V1,
        dot_venv__b_dot_py=V1,
        env__pyvenv_dot_cfg="",
        env__lib__c_dot_py=V1,
        node_modules__d_dot_py=V1,
        elsewhere__e_dot_py=V1,
    )
    (folder / "dot_venv").rename(folder / ".venv")
    (folder / "src/loop").symlink_to(folder)
    (folder / "src/self").symlink_to("self")
    (folder / "src/dangling").symlink_to("nowhere")
    (folder / "src/root").symlink_to("/")
    os.link(folder / "src/a.py", folder / "src/same.py")
    (folder / "src/link.py").symlink_to("a.py")
    os.mkfifo(folder / "src/pipe")
    report = scan([Path()])
    assert sorted(found.path for found in report.findings) == ["elsewhere/e.py", "src/a.py"]
    assert not report.failed
    assert scan([folder / ".venv"]).count("error") == 1  # named, so looked at


def test_large_files_are_told_only_if_they_matter(tree):
    tree(big_dot_py=V1 + "#" * 2_000_000, dull_dot_py="#" * 2_000_000)
    report = scan([Path()], Options(max_size=1_000_000))
    assert [(found.code, found.severity) for found in report.findings] == [("SV902", "info")]
    assert report.skipped == 2
    assert scan([Path()]).count("error") == 1


def test_names_that_are_no_text(tree, capsys):
    folder = tree()
    (folder / os.fsdecode(b"bad\xff.py")).write_text(V1)
    (folder / "with space%.py").write_text(V1)
    for form in ("text", "concise", "json", "sarif", "github"):
        code, out, _ = run(capsys, "scan", ".", "--format", form)
        assert code == 1
        out.encode()
        if form in ("json", "sarif"):
            json.loads(out)
    log = json.loads(run(capsys, "scan", ".", "--format", "sarif")[1])
    uris = {
        result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
        for result in log["runs"][0]["results"]
    }
    assert uris == {"bad%FF.py", "with%20space%25.py"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read(tree, capsys):
    folder = tree(a_dot_py=V1)
    (folder / "a.py").chmod(0)
    code, out, _ = run(capsys, "scan", ".")
    assert code == 2
    assert "SV901" in out


def test_nothing_of_the_scanned_code_runs(tree):
    tree(
        sglang__init_dot_py="raise SystemExit('imported')\n",
        conftest_dot_py="raise SystemExit('imported')\n",
        a_dot_py=V1 + "raise SystemExit('run')\n",
    )
    command = [sys.executable, "-m", "legacy_compat", "scan", ".", "--exit-zero"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "1 error" in done.stdout


def test_the_command_needs_neither_torch_nor_libcst():
    code = (
        "import sys; from legacy_compat.cli import main; main(['scan', 'legacy_compat', '--exit-zero'])\n"
        "assert not {'torch', 'libcst', 'spec_v2', 'sglang', 'yaml'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr


def test_a_pipe_that_closes_early(tree):
    tree(**{f"f{number}_dot_py": V1 * 50 for number in range(20)})
    command = f"{sys.executable} -m legacy_compat scan . | head -1"
    done = subprocess.run(
        command,
        shell=True,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout.count("\n") == 1
