"""`fix` on files: what it writes and what it refuses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from legacy_compat.cli import main
from legacy_compat.fix import files
from tests.legacy.scan_tools import S

ROOT = Path(__file__).parents[2]
SAFE = "x._overlap_forward_isolation(b)\n"
MENDED = "x._forward_isolation(b, overlap=True)\n"
UNSAFE = f"from {S}eagle_worker import EAGLEWorker\n"
BY_HAND = f"class W:\n    pass\nfrom {S}eagle_worker import get_last_loc_large_page_size_top_k_1\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(capfd, *arguments):
    code = main(["fix", *map(str, arguments)])
    sys.stdout.flush()
    out, err = capfd.readouterr()
    return code, out, err


def git(folder, *arguments):
    settings = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", folder, *settings, *arguments], check=True, capture_output=True)


def test_it_writes_and_says_what_is_left(folder, capfd):
    (folder / "a.py").write_text(SAFE + BY_HAND)
    code, out, _ = run(capfd, ".")
    assert code == 1
    assert (folder / "a.py").read_text() == MENDED + BY_HAND
    assert "fixed a.py: 1\n" in out
    assert "a.py:4:" in out
    assert "1 file scanned: 1 use mended in 1 file, 1 left." in out
    code, out, _ = run(capfd, ".")
    assert "0 uses mended in 0 files, 1 left." in out
    (folder / "a.py").write_text(SAFE)
    assert run(capfd, ".")[0] == 0


def test_check_and_diff_change_nothing(folder, capfd):
    (folder / "sub").mkdir()
    (folder / "sub/a.py").write_text("# first\n" + SAFE)
    (folder / "b.py").write_bytes(b"y = 1\r\n" + SAFE.strip().encode())
    before = {path: path.read_bytes() for path in folder.rglob("*.py")}
    code, out, _ = run(capfd, ".", "--check")
    assert code == 1
    assert "would fix sub/a.py: 1" in out
    code, out, err = run(capfd, ".", "--diff")
    assert code == 1
    assert "2 uses would be mended" in err
    assert {path: path.read_bytes() for path in folder.rglob("*.py")} == before
    (folder / "change.patch").write_text(out, newline="")
    subprocess.run(["git", "apply", "change.patch"], check=True, cwd=folder)
    assert (folder / "sub/a.py").read_text() == "# first\n" + MENDED
    assert (folder / "b.py").read_bytes() == b"y = 1\r\n" + MENDED.strip().encode()
    assert run(capfd, ".", "--check")[0] == 0


def test_unsafe_and_select(folder, capfd):
    (folder / "a.py").write_text(SAFE + UNSAFE)
    run(capfd, ".")
    assert (folder / "a.py").read_text() == MENDED + UNSAFE
    (folder / "a.py").write_text(SAFE + UNSAFE)
    run(capfd, ".", "--unsafe", "--select", "sv101")
    assert (folder / "a.py").read_text() == SAFE + UNSAFE.replace(
        "worker import EAGLEWorker", "worker_v2 import EAGLEWorkerV2"
    )


def test_a_dirty_tree_is_refused(folder, capfd):
    git(folder, "init", "-q")
    (folder / "a.py").write_text(SAFE)
    (folder / "other.txt").write_text("1")
    code, _, err = run(capfd, ".")
    assert code == 2
    assert "a.py (not under git)" in err
    assert "--allow-dirty" in err
    git(folder, "add", ".")
    assert run(capfd, ".")[0] == 2
    git(folder, "commit", "-q", "-m", "x")
    (folder / "other.txt").write_text("2")  # work of another kind, that would be mixed with ours
    code, _, err = run(capfd, ".")
    assert code == 2
    assert "other.txt (changed)" in err
    assert (folder / "a.py").read_text() == SAFE
    assert run(capfd, ".", "--diff")[0] == 1  # looking is free
    git(folder, "commit", "-qam", "y")
    (folder / "new.txt").write_text("untracked, and not ours to touch")
    assert run(capfd, ".")[0] == 0
    assert (folder / "a.py").read_text() == MENDED
    (folder / "a.py").write_text(SAFE + "# mine\n")
    assert run(capfd, ".", "--allow-dirty")[0] == 0
    assert (folder / "a.py").read_text() == MENDED + "# mine\n"


def test_permissions_links_and_leftovers(folder, capfd):
    target = folder / "real/run.sh"
    target.parent.mkdir()
    target.write_text("#!/bin/sh\nexport SGLANG_ENABLE_SPEC_V2=1\n")
    target.chmod(0o755)
    link = folder / "link.sh"
    link.symlink_to("real/run.sh")
    assert run(capfd, "link.sh")[0] == 0
    assert link.is_symlink()
    assert target.read_text() == "#!/bin/sh\n"
    assert target.stat().st_mode & 0o777 == 0o755
    assert sorted(path.name for path in target.parent.iterdir()) == ["run.sh"]


def test_a_failed_write_leaves_the_old_file(folder, monkeypatch):
    path = folder / "a.py"
    path.write_text("old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        files.write_atomically(path, b"new")
    assert path.read_text() == "old"
    assert [found.name for found in folder.iterdir()] == ["a.py"]


def test_a_result_that_would_not_parse_is_not_written(folder, capfd, monkeypatch):
    from legacy_compat.fix import python

    (folder / "a.py").write_text(SAFE)
    (folder / "b.sh").write_text("export SGLANG_ENABLE_SPEC_V2=1\n")
    monkeypatch.setattr(python, "edit_python", lambda *_: "def f(:")
    code, out, _ = run(capfd, ".")
    assert code == 2
    assert "left as it was: a.py: the result would not parse" in out
    assert (folder / "a.py").read_text() == SAFE
    assert (folder / "b.sh").read_text() == ""


def test_yaml_that_would_break_is_not_written(folder):
    from legacy_compat.fix.texts import Refused, check_well_formed

    check_well_formed("a: 1\n", "b: 2\n", "yaml")
    check_well_formed("{{ template }\n", "{{ other }\n", "yaml")
    for language, before, after in (("yaml", "a: 1", "a: ["), ("json", "{}", "{"), ("toml", "a=1", "a=")):
        with pytest.raises(Refused, match=language):
            check_well_formed(before, after, language)


def test_without_libcst_it_says_how_to_get_it(folder):
    (folder / "a.py").write_text(SAFE)
    (folder / "b.sh").write_text("export SGLANG_ENABLE_SPEC_V2=1\n")
    code = "import sys; sys.modules['libcst'] = None; from legacy_compat.cli import main; sys.exit(main(sys.argv[1:]))"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}

    def without(*arguments):
        command = [sys.executable, "-c", code, *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, cwd=folder, env=environment, check=False
        )

    done = without("fix", ".")
    assert done.returncode == 2
    assert done.stderr == "legacy_compat: fixing Python code needs libcst: pip install spec-v2[migrate]\n"
    assert (folder / "b.sh").read_text()  # nothing was begun
    assert without("scan", ".").returncode == 1
    assert without("fix", "b.sh").returncode == 0  # no Python, no libcst
    assert (folder / "b.sh").read_text() == ""


def test_files_that_resist(folder, capfd):
    (folder / "bad.py").write_text(f"def f(:\n  import {S}eagle_worker\n")
    (folder / "bytes.py").write_bytes(b"x = '\xff'\n" + SAFE.encode())
    (folder / "noise.sh").write_bytes(b"export SGLANG_ENABLE_SPEC_V2=1\n# \xff\xfe\n")
    (folder / "wide.sh").write_bytes("# é\nexport SGLANG_ENABLE_SPEC_V2=1\n".encode("utf-16"))
    before = (folder / "bytes.py").read_bytes()
    code, out, _ = run(capfd, ".", "--unsafe")
    assert code == 1
    assert "Traceback" not in out
    assert (folder / "bytes.py").read_bytes() == before
    assert (folder / "noise.sh").read_bytes() == b"# \xff\xfe\n"
    assert (folder / "wide.sh").read_bytes() == "# é\n".encode("utf-16")
    assert run(capfd, "nowhere")[0] == 2
