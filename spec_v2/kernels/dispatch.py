"""Which implementation runs, and the checks that all wrappers share."""

import os

import torch
from torch import Tensor

INT32_MAX = 2**31 - 1


def runs_triton(tensor: Tensor) -> bool:
    """Whether an operation on this tensor runs its Triton kernel rather than its reference."""
    return tensor.is_cuda


def runs_npu_operator(tensor: Tensor, name: str) -> bool:
    """Whether torch_npu, or the simulation of it, has an operator of this name for a tensor where it lies."""
    return tensor.device.type == "npu" and hasattr(torch.ops.npu, name)


def debug_kernels() -> bool:
    """Whether kernels check the slots, rows and ids they are given (`SPEC_V2_DEBUG_KERNELS=1`).

    A failed check stops the kernel with the name of the value: `triton.language.device_assert`.
    """
    return os.environ.get("SPEC_V2_DEBUG_KERNELS", "0") not in ("", "0")


def refuse_beyond(bound: int, **values: int) -> None:
    """Raise ValueError, naming the value, where a kernel's index arithmetic has too few bits for it."""
    for name, value in values.items():
        if value > bound:
            raise ValueError(
                f"{name}={value} is more than the kernel can index ({bound}); make the batch, the vocabulary or "
                "the pool smaller"
            )


def ceil_div(a: int, b: int) -> int:
    """`a / b`, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least `n`, and at least 1: what `tl.arange` needs."""
    return 1 << max(n - 1, 0).bit_length()
