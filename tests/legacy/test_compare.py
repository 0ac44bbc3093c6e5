"""The comparison of the table with releases sees what is there and what is not."""

import dataclasses

import pytest

from legacy_compat.registry import by_code, compare
from legacy_compat.registry.compare import Release, disagreements

OLD = {
    "sglang/__init__.py": "",
    "sglang/srt/a.py": """
from sglang.srt.b import Base, moved as renamed
from sglang.srt import utils
from sglang.srt.utils import *
import torch.nn as nn
if nn:
    CONSTANT = 1
else:
    OTHER: int = 2
try:
    import missing
except ImportError:
    missing = None
class Config:
    FLAG = 1
    field: int = 0
config = Config()
class Worker(Base, Generic[T]):
    def __init__(self, gpu_id, *, nccl_port):
        self.topk, self.device = 1, gpu_id
        self.draft_worker = None
    def verify(self, batch, /, flag=None): ...
""",
    "sglang/srt/b.py": """
from sglang.srt.circle import name_of_a_circle
class Base:
    def inherited(self): ...
def moved(x): ...
""",
    "sglang/srt/circle.py": "from sglang.srt.b import name_of_a_circle",
    "sglang/srt/utils/__init__.py": "from .common import *\nfrom . import common as c",
    "sglang/srt/utils/common.py": "def helper(): ...",
    "sglang/srt/namespace/inner.py": "x = 1",
}


@pytest.fixture
def release(tmp_path):
    return make(tmp_path / "0.5.12.post1", OLD)


def make(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Release(folder)


@pytest.mark.parametrize(
    "path",
    [
        "a",
        "namespace",
        "namespace.inner.x",
        "a.Worker",
        "a.Worker.verify",
        "a.Worker.topk",
        "a.Worker.device",
        "a.Worker.inherited",
        "a.Worker.draft_worker.anything",
        "a.Base.inherited",
        "a.renamed",
        "a.helper",
        "a.utils.helper",
        "a.utils.c.helper",
        "utils.helper",
        "a.CONSTANT",
        "a.OTHER",
        "a.missing",
        "a.nn",
        "a.config.FLAG",
        "a.config.field",
        "a.Worker(gpu_id)",
        "a.Worker(nccl_port)",
        "a.Worker.verify(batch)",
        "a.Worker.verify(flag)",
        "a.Config(field)",
        "b.moved(x)",
        "a.renamed(x)",
    ],
)
def test_what_is_there(release, path):
    assert release.has(f"sglang.srt.{path}")


@pytest.mark.parametrize(
    "path",
    [
        "c",
        "a.worker",
        "a.Worker.draft",
        "a.Worker.gpu_id",
        "a.moved",
        "b.name_of_a_circle",
        "a.config.NO_FLAG",
        "a.Worker(tp_rank)",
        "a.Worker(topk)",
        "a.Worker.verify(other)",
        "a.nothing(x)",
        "a.CONSTANT(x)",
        "namespace.inner.y",
        "a.Generic",
    ],
)
def test_what_is_not(release, path):
    assert not release.has(f"sglang.srt.{path}")


ROW = dataclasses.replace(
    by_code("SV101"),
    old_path="sglang.srt.a.Worker",
    aliases=("sglang.srt.a.Base",),
    sglang_replacement="sglang.srt.b.New",
)
AFTER = {"sglang/srt/a.py": "class Other: ...", "sglang/srt/b.py": "class Base: ...\nclass New: ..."}


@pytest.fixture
def releases(tmp_path, release):
    return [make(tmp_path / "0.5.13", AFTER), release]  # in any order


def test_a_true_row(releases):
    assert list(disagreements([ROW], releases)) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"old_path": "sglang.srt.a.Other"},
            "SV101 sglang.srt.a.Other: last in 0.5.12.post1, says the table; 0.5.13",
        ),
        ({"old_path": "sglang.srt.a.Typo"}, "says the table; None, say the releases"),
        (
            {"aliases": ("sglang.srt.b.Base",)},
            "SV101 sglang.srt.b.Base: last in 0.5.12.post1, says the table; 0.5.13",
        ),
        (
            {"aliases": ("sglang.srt.b.Typo",)},
            "SV101 sglang.srt.b.Typo: last in 0.5.12.post1, says the table; None",
        ),
        ({"last_version": "unreleased"}, "last in unreleased, says the table; 0.5.12.post1"),
        ({"sglang_replacement": "sglang.srt.a.Worker"}, "SV101 sglang.srt.a.Worker: not in 0.5.13"),
    ],
)
def test_a_false_row(releases, change, said):
    (line,) = disagreements([dataclasses.replace(ROW, **change)], releases)
    assert said in line


@pytest.mark.parametrize(
    "change",
    [
        {
            "old_path": "sglang.srt.b.Base",
            "aliases": (),
            "category": "semantics",
        },  # still there, and different
        {"old_path": "sglang.srt.a.never", "aliases": (), "last_version": "unreleased"},
        {"kind": "env", "old_path": "VARIABLE", "aliases": ()},
        {"sglang_replacement": "--a-flag"},
    ],
)
def test_what_cannot_be_false(releases, change):
    assert list(disagreements([dataclasses.replace(ROW, **change)], releases)) == []


def test_the_command(releases, tmp_path, capsys, monkeypatch):
    folders = [str(tmp_path / version) for version in ("0.5.12.post1", "0.5.13")]
    monkeypatch.setattr(compare, "load", lambda: (ROW,))
    assert compare.main(folders) == 0
    assert capsys.readouterr().out == "0 disagreements between 1 rows and 2 releases\n"
    monkeypatch.setattr(
        compare, "load", lambda: (ROW, dataclasses.replace(ROW, old_path="sglang.srt.a.Other"))
    )
    assert compare.main(folders) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "1 disagreements between 2 rows and 2 releases"
