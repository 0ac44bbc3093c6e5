"""Imports point one way, and `import spec_v2` is quick."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import spec_v2

PACKAGE = Path(spec_v2.__file__).parent

# From the bottom up. A part imports from lower layers and from itself; parts of one layer don't know each other.
LAYERS = (
    {"spec_registry", "observability", "sampling_params"},
    {"spec_info"},
    {"types", "server_args"},
    {"adaptive_config", "adaptive_policy"},
    {"speculative_hook", "kernels"},
    {"mem_cache"},
    {"model_executor", "models"},
    {"scheduler"},
    {"speculative"},
    {"completion", "admission"},
    {"streaming"},
    {"engine_parts"},
    {"engine"},
)
# What users run. These may know each other, and nothing in a layer may know them.
FRONT = {
    "bench",
    "doctor",
    "terminal",
    "facts",
    "demo_report",
    "demo",
    "cli",
    "__main__",
    "plots",
    "training",
    "checkpoints",
}

# The scheduler and the workers are neighbours: the scheduler drives whatever has its Worker protocol, and these
# modules are all that a worker may know of the scheduler.
WORKER_INTERFACE = {
    "scheduler.sampling_batch_info",
    "scheduler.schedule_batch",
    "scheduler.future_map",
    "scheduler.streams",
}

LEVEL = {part: level for level, layer in enumerate(LAYERS) for part in layer}
MODULES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


def imports_of(source):
    """Modules of spec_v2 that a module imports, anywhere in it, but for type checking only."""
    found = set()

    def visit(node):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name the whole path"
            module = node.module or ""
            if module == "spec_v2":  # from spec_v2 import a module, or a public name that lies in one
                names = [alias.name for alias in node.names]
                found.update(spec_v2._WHERE.get(name, name) for name in names if name != "__version__")
            elif module.startswith("spec_v2."):
                found.add(module.removeprefix("spec_v2."))
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            found.update(name.removeprefix("spec_v2.") for name in names if name.startswith("spec_v2."))
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(source))
    return found


def faults(module, source):
    """What is wrong with a module's imports. `module`: dotted, without `spec_v2.`"""
    mine = module.split(".")[0]
    if mine == "__init__":
        return []  # its names are loaded on first use
    if mine not in LEVEL and mine not in FRONT:
        return [f"{mine} has no layer: give it one here"]
    found = []
    for other in imports_of(source):
        theirs = other.split(".")[0]
        if theirs == mine or (mine in FRONT and (theirs in FRONT or theirs in LEVEL)):
            continue
        if theirs not in LEVEL or LEVEL[theirs] >= LEVEL[mine]:
            found.append(f"{module} imports {other}, which is not below it")
        if mine == "speculative" and theirs == "scheduler" and other not in WORKER_INTERFACE:
            found.append(f"{module} imports {other}, which is not part of the worker interface")
    return found


def dotted(path):
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_imports_point_down(path):
    assert not faults(dotted(path), (PACKAGE / path).read_text())


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("types", "import spec_v2.kernels.top_k"),
        ("kernels.top_k.reference", "from spec_v2.mem_cache.kv_pool import KvPool"),
        ("mem_cache.kv_pool", "from spec_v2.model_executor.model_runner import ModelRunner"),
        ("model_executor.model_runner", "from spec_v2 import Engine"),
        ("models.loader", "def load():\n    from spec_v2.speculative.verify import verify"),
        ("scheduler.scheduler", "from spec_v2.speculative.plain_worker import PlainWorker"),
        ("scheduler.scheduler", "from spec_v2 import engine"),
        ("speculative.verify", "from spec_v2.scheduler.scheduler import Scheduler"),
        ("speculative.verify", "from spec_v2.scheduler.batch_result_processor import BatchResultProcessor"),
        ("engine", "from spec_v2.cli import main"),
        ("engine", "from spec_v2.plots import timeline"),
        ("unheard_of", ""),
    ],
)
def test_the_rule_notices(module, line):
    assert faults(module, line)


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("speculative.verify", "from spec_v2.scheduler.streams import Pending"),
        ("scheduler.scheduler", "if TYPE_CHECKING:\n    from spec_v2.engine import Engine"),
        ("engine", "from spec_v2.scheduler.scheduler import Scheduler"),
        ("cli", "from spec_v2 import Engine, facts"),
    ],
)
def test_the_rule_allows(module, line):
    assert not faults(module, line)


def test_nothing_here_imports_what_is_built_on_it():
    """legacy_compat imports spec_v2, never the reverse."""
    for path in MODULES:
        tree = ast.parse((PACKAGE / path).read_text())
        names = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
        names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not {name for name in names if name.split(".")[0] in ("legacy_compat", "tests", "pytest")}, (
            path
        )


def loaded_after(statement, names):
    """Which of these modules a fresh interpreter has loaded after the statement."""
    code = f"{statement}\nimport sys\nprint(*[name for name in {names!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=PACKAGE.parent
    )
    return done.stdout.split()


def test_importing_the_package_loads_nothing_heavy():
    assert not loaded_after("import spec_v2", ["torch", "transformers", "triton", "matplotlib", "numpy"])
    assert loaded_after("import spec_v2, json", ["json"]) == ["json"]


def test_importing_the_engine_loads_no_models_kernels_or_plots():
    before = set(
        loaded_after("import torch", ["triton", "matplotlib"])
    )  # what torch brings along is not ours
    assert set(loaded_after("from spec_v2 import Engine", ["triton", "matplotlib", "transformers"])) <= before


def test_every_public_name_can_be_had():
    assert set(spec_v2.__all__) == set(spec_v2._WHERE)
    for name in spec_v2.__all__:
        assert getattr(spec_v2, name).__name__ == name
        assert name in dir(spec_v2)
    with pytest.raises(AttributeError, match="no attribute 'Motor'"):
        spec_v2.Motor  # noqa: B018
