"""What `--backend npu` runs on: Ascend hardware where there is any, else the simulation."""

import importlib.util

import torch


def choose_npu() -> None:
    """Give this process the device type `npu`. Raises RuntimeError where torch_npu is installed and does not work."""
    if hasattr(torch, "npu"):  # torch has loaded torch_npu by itself, or somebody was here before
        return
    if importlib.util.find_spec("torch_npu") is None:
        from tests.npu.simulated_device import install

        install()
        return
    from spec_v2.model_executor.npu_backend import load_npu

    try:
        load_npu()
    except ValueError as error:
        raise RuntimeError(
            f"{error}. To test on the simulated device instead, use an environment without torch-npu"
        ) from error


def describe_npu() -> str:
    """For the head of a report, so that nobody takes the simulation for hardware."""
    if getattr(torch.npu, "is_simulated", False):
        return "SIMULATED device, no hardware: see docs/npu.md"
    return f"{torch.npu.get_device_name()}, real hardware"
