"""`python -m spec_v2 doctor`: what works on this machine, and the command that mends what does not. No network.

A check looks and changes nothing. Those of `Need.BASICS` decide the exit code.
"""

import contextlib
import importlib.util
import json
import os
import platform
import re
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from spec_v2.demo_report import align
from spec_v2.models import gguf_cache

PYTHON_FLOOR = "3.11"


class Need(StrEnum):
    """What a check is needed for."""

    BASICS = "basics"
    GPU = "gpu"
    SPEED = "speed"
    PLOTS = "plots"
    NOTEBOOKS = "notebooks"
    MIGRATION = "migration"
    DEVELOPMENT = "development"


class State(StrEnum):
    """How a check ended. ABSENT: not here, and nothing is wrong with that."""

    OK = "ok"
    MISSING = "missing"
    TOO_OLD = "too old"
    BROKEN = "broken"
    ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report. `remedy`: the command that mends it; empty where nothing is to be done."""

    name: str
    state: State
    detail: str
    need: Need
    remedy: str = ""

    @property
    def is_fine(self) -> bool:
        return self.state in (State.OK, State.ABSENT)


PACKAGES = (
    ("torch", "2.11", Need.BASICS),
    ("transformers", "5.17", Need.BASICS),
    ("safetensors", "0", Need.BASICS),
    ("gguf", "0.19", Need.BASICS),
    ("accelerate", "0", Need.BASICS),
    ("tqdm", "4.66", Need.BASICS),
    ("filelock", "0", Need.BASICS),
    ("jaxtyping", "0.3.2", Need.BASICS),
    ("triton", "3.6", Need.GPU),
    ("matplotlib", "3.9", Need.PLOTS),
    ("jupyterlab", "4.4", Need.NOTEBOOKS),
    ("ipywidgets", "8.1", Need.NOTEBOOKS),
    ("libcst", "1.8", Need.MIGRATION),
    ("nox", "2025.10.14", Need.DEVELOPMENT),
)
"""(distribution, lowest version, what it is for); the versions are those of pyproject.toml. "0" is any."""


def run_doctor(as_json: bool) -> tuple[str, int]:
    """(the report, exit code): 0 where the basics work, else 1."""
    checks = list(all_checks())
    works = all(check.is_fine for check in checks if check.need is Need.BASICS)
    if as_json:
        return json.dumps({"basics_work": works, "checks": [asdict(check) for check in checks]}), 1 - works
    return for_humans(checks, works), 1 - works


def all_checks() -> Iterator[Check]:
    """Every check, in the order of the report."""
    yield check_version("python", platform.python_version(), PYTHON_FLOOR, Need.BASICS)
    for name, floor, need in PACKAGES:
        yield check_version(name, installed(name), floor, need)
    yield from check_torch()
    yield from check_default_model()
    yield check_cache_folder()


def for_humans(checks: list[Check], works: bool) -> str:
    """A line for each check, a command under each that failed, and a summary."""
    rows = align([(check.state, check.name, check.detail) for check in checks], right=())
    lines = []
    for check, row in zip(checks, rows, strict=True):
        lines.append(row)
        if check.remedy:
            lines.append(f"    for {check.need}: {check.remedy}")
    lines.append("")
    lines.append(
        "The basics work." if works else "The basics do NOT work: run the commands for basics above."
    )
    return "\n".join(lines)


# -- packages ------------------------------------------------------------------------------------------------


def installed(distribution: str) -> str | None:
    """The version of a package, without importing it; None where it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def check_version(name: str, found: str | None, floor: str, need: Need) -> Check:
    """Whether a version is there and not below `floor`."""
    wanted = f"needs {floor} or newer" if floor != "0" else "any version"
    remedy = f'python -m pip install "{name}>={floor}"' if floor != "0" else f"python -m pip install {name}"
    if name == "python":
        remedy = f"install Python {floor} or newer and make a new virtual environment with it"
    if found is None:
        return Check(name, State.MISSING, wanted, need, remedy)
    if _numbers(found) < _numbers(floor):
        return Check(name, State.TOO_OLD, f"{found}, {wanted}", need, remedy)
    return Check(name, State.OK, f"{found} ({wanted})", need)


def _numbers(text: str) -> list[int]:
    """The release part of a version: 2.13.0+cpu gives 2, 13, 0."""
    match = re.match(r"\d+(\.\d+)*", text)
    return [int(part) for part in match[0].split(".")] if match else []


# -- devices -------------------------------------------------------------------------------------------------


def check_torch() -> Iterator[Check]:
    """Whether torch can be imported, and the devices that it sees."""
    remedy = 'python -m pip install --force-reinstall "torch>=2.11"'
    if installed("torch") is None:
        return  # said already
    try:
        import torch
    except Exception as error:  # noqa: BLE001 - whatever a broken installation raises
        if importlib.util.find_spec("torch_npu") is not None:
            remedy = "export TORCH_DEVICE_BACKEND_AUTOLOAD=0   # torch-npu is here, its drivers are not"
        reason = " ".join(str(error).split())
        yield Check("import torch", State.BROKEN, reason, Need.BASICS, remedy)
        return
    yield Check("cpu", State.OK, f"{torch.get_num_threads()} threads", Need.BASICS)
    yield check_openmp()
    yield check_cuda(remedy)
    yield check_npu()


def check_openmp() -> Check:
    """Whether helper threads can be let go; without it decoding on a CPU is slower, and right all the same."""
    from spec_v2.scheduler.openmp import _pause

    if _pause() is not None:
        return Check("OpenMP", State.OK, "torch's library can let go of helper threads", Need.SPEED)
    remedy = 'python -m pip install --force-reinstall "torch>=2.11"   # the wheels for Linux bring one'
    detail = "torch's library has no omp_pause_resource_all: CPU decoding is slower"
    return Check("OpenMP", State.MISSING, detail, Need.SPEED, remedy)


def check_cuda(remedy: str) -> Check:
    """The CUDA cards that torch can use; a card that it cannot use is worth a word."""
    import torch

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    if usable:
        cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        detail = ", ".join(f"{card.name} {card.total_memory / 2**30:.0f} GiB" for card in cards)
        return Check("cuda", State.OK, detail, Need.GPU)
    if shutil.which("nvidia-smi") is None:
        return Check("cuda", State.ABSENT, "no NVIDIA driver here", Need.GPU)
    if torch.version.cuda is None:
        return Check("cuda", State.MISSING, "a driver, but this torch is a CPU build", Need.GPU, remedy)
    reason = " ".join(str(said[0].message).split()) if said else "torch finds no card"
    return Check("cuda", State.BROKEN, reason, Need.GPU, "nvidia-smi   # shows driver and cards")


def check_npu() -> Check:
    """Which NPU there is: a real one, one that tests simulate, or one whose plug-in does not work."""
    import torch

    from spec_v2.model_executor.npu_backend import NpuKind, load_npu, npu_kind

    if npu_kind() is NpuKind.SIMULATED:
        return Check("npu", State.OK, "SIMULATED in this process: no hardware, no speed", Need.GPU)
    if importlib.util.find_spec("torch_npu") is None:
        return Check("npu", State.ABSENT, "torch-npu is not installed", Need.GPU)
    try:
        load_npu()
    except ValueError as error:
        reason, _, remedy = str(error).removeprefix("device='npu': ").partition("; ")
        return Check("npu", State.BROKEN, reason, Need.GPU, f"# {remedy}")
    card = torch.get_device_module("npu").get_device_name()
    return Check("npu", State.OK, f"{card}, torch-npu {installed('torch-npu')}", Need.GPU)


# -- the default model ---------------------------------------------------------------------------------------


def check_default_model() -> Iterator[Check]:
    """The package that carries the default model, and whether it is converted already."""
    known = gguf_cache.PACKAGED_MODELS[0]
    found, gguf = installed(known.distribution), _gguf_file(known)
    if found is None or gguf is None:
        detail = f"{known.distribution} {known.version} carries {known.name}"
        yield Check(known.name, State.MISSING, detail, Need.BASICS, known.install_command)
        return
    if _numbers(found) < _numbers(known.version):
        detail = f"{known.distribution} {found}, needs {known.version} or newer"
        yield Check(known.name, State.TOO_OLD, detail, Need.BASICS, known.install_command)
        return
    detail = f"{known.distribution} {found}, {_size(gguf)}"
    yield Check(known.name, State.OK, detail, Need.BASICS)
    folder = gguf_cache.cache_root() / known.name
    if (folder / "stamp.json").is_file():
        size = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
        yield Check("converted model", State.OK, f"{folder}, {size:.0f} MB", Need.BASICS)
    else:
        detail = f"not in {folder} yet; the first load makes it, in about 20 s"
        yield Check("converted model", State.ABSENT, detail, Need.BASICS)


def _gguf_file(known: gguf_cache.PackagedModel) -> Path | None:
    """The model file, without importing the package that it lies in."""
    spec = importlib.util.find_spec(known.package)
    files = [Path(folder) / known.gguf_name for folder in (spec and spec.submodule_search_locations) or ()]
    return next((file for file in files if file.is_file()), None)


def _size(file: Path) -> str:
    return f"{file.stat().st_size / 1e6:.0f} MB"


def check_cache_folder() -> Check:
    """Whether converted models can be written where they are kept."""
    root = gguf_cache.cache_root()
    existing = next(folder for folder in (root, *root.absolute().parents) if folder.exists())
    remedy = "export SPEC_V2_CACHE=/path/to/a/folder/that/you/can/write"
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return Check(
            "cache folder", State.BROKEN, f"no permission to write to {existing}", Need.BASICS, remedy
        )
    free = "?"
    with contextlib.suppress(OSError):
        free = f"{shutil.disk_usage(existing).free / 1e9:.0f}"
    return Check("cache folder", State.OK, f"{root}, {free} GB free", Need.BASICS)
