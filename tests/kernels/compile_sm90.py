"""Compiles kernels for Hopper (sm_90) without a GPU, and prints what came out as JSON.

    python -m tests.kernels.compile_sm90 [module ...]

Every test module of this folder may have a function `launches()` that returns calls of Triton wrappers by name. Here
each is made with CPU tensors, and what would launch compiles instead: same wrapper, same argument types, same
specialisation as on a GPU. Triton's interpreter must be off, so this is a process of its own.
"""

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class HopperWithoutGpu:
    """What Triton asks its driver for before it compiles."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


def stack_bytes(cubin):
    """Local memory per thread: what does not fit in registers is spilled there."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return max(int(stack) for stack in re.findall(r"STACK:(\d+)", usage))


def compile_instead_of_launch(compiled):
    """From now on a launch appends what it compiled to `compiled`."""
    driver.set_active(HopperWithoutGpu())
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        target = next(line for line in kernel.asm["ptx"].splitlines() if line.startswith(".target"))
        compiled.append(
            {
                "kernel": f"{self.fn.__module__}.{self.fn.__name__}",
                "target": target.split()[1].rstrip(","),
                "cubin_bytes": len(kernel.asm["cubin"]),
                "shared_bytes": kernel.metadata.shared,
                "stack_bytes": stack_bytes(kernel.asm["cubin"]),
            }
        )

    JITFunction.run = compile_only


def main(modules):
    compiled, results = [], {}
    compile_instead_of_launch(compiled)
    for name in modules:
        launches = getattr(importlib.import_module(name), "launches", dict)
        for case, call in launches().items():
            compiled.clear()
            try:
                call()
                results[f"{name}:{case}"] = {"kernels": list(compiled)}
            except Exception as error:  # noqa: BLE001 - reported by the test, with all others
                results[f"{name}:{case}"] = {
                    "error": f"{type(error).__name__}: {error} {error.__cause__ or ''}"
                }
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    here = Path(__file__).parent
    main(sys.argv[1:] or [f"tests.kernels.{path.stem}" for path in sorted(here.glob("test_*.py"))])
