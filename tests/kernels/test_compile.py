"""Every kernel compiles for sm_90, on any machine: one process compiles what `launches()` of each test module calls."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def kernels_in_tree():
    """Dotted names of the Triton functions that are launched somewhere: those that get a grid, `kernel[grid](...)`."""
    jitted, given_a_grid = {}, set()
    for path in (ROOT / "spec_v2/kernels").rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and any(
                "triton.jit" in ast.unparse(d) for d in node.decorator_list
            ):
                jitted[f"{module}.{node.name}"] = node.name
        given_a_grid |= {
            ast.unparse(node.value) for node in ast.walk(tree) if isinstance(node, ast.Subscript)
        }
    return {dotted for dotted, name in jitted.items() if name in given_a_grid}


@pytest.fixture(scope="module")
def compiled():
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.kernels.compile_sm90"],
        capture_output=True, text=True, cwd=ROOT, env=env, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.slow
def test_every_launch_compiles_for_hopper(compiled):
    assert not {case: result["error"] for case, result in compiled.items() if "error" in result}
    for case, result in compiled.items():
        assert result["kernels"], f"{case} launches nothing"
        for kernel in result["kernels"]:
            assert kernel["target"] in ("sm_90", "sm_90a"), (case, kernel)
            assert kernel["cubin_bytes"] > 0
            assert kernel["stack_bytes"] <= 64, (
                case,
                kernel,
            )  # a few words; more, and registers live in memory
            assert kernel["shared_bytes"] <= 227 * 1024, (case, kernel)  # what a program of an H200 can have


@pytest.mark.slow
def test_every_kernel_is_among_them(compiled):
    seen = {kernel["kernel"] for result in compiled.values() for kernel in result.get("kernels", ())}
    assert kernels_in_tree() == seen
