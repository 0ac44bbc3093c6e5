"""Programmatic dependent launch: a kernel is on its place, with its weights on their way, before the one ahead has ended.

Between two kernels of a step a GPU drains and fills again, which takes about as long as a short kernel runs. On Hopper a
kernel launched with `launch_pdl` may start as soon as every program of the kernel ahead has called
`gdc_launch_dependents`; its `gdc_wait` returns when that kernel, and with it all before it, has ended and its stores can
be seen. So the rule for a kernel with PDL: nothing that an earlier kernel of the step may have written is read, and nothing at
all is stored, before `after_kernel_ahead`; and every program calls it.
"""

from functools import cache
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

HOPPER = (9, 0)


@triton.jit
@no_type_check
def after_kernel_ahead(PDL: tl.constexpr):
    """Wait for all that was launched before, and let the next kernel come in."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
@no_type_check
def prefetch_l2(ptrs):
    """Bring the cache lines of these addresses to the L2 cache. Nothing waits for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [ptrs.to(tl.int64)],
        tl.int32,
        is_pure=False,
        pack=1,
    )


def pdl_options(tensor: Tensor) -> dict[str, bool]:
    """Launch options of a kernel that has a `PDL` parameter."""
    on = _has_pdl(tensor.device)
    return {"PDL": on, "launch_pdl": on}


@cache
def _has_pdl(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= HOPPER
