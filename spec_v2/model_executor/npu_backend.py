"""Is there an NPU, and is it a real one? torch knows the device type `npu` once torch_npu was imported.

torch imports torch_npu by itself where it is installed, unless TORCH_DEVICE_BACKEND_AUTOLOAD=0. On a machine without
Ascend's drivers that import fails, and `import torch` with it: so torch_npu is no dependency of this package, and is
imported here alone, when somebody asks for the device. Tests put a simulated device in its place, which says so.
"""

import importlib
import importlib.util
import logging
from enum import StrEnum
from functools import cache

import torch

from spec_v2.kernels.paged_attention.host_lens import HostLens
from spec_v2.kernels.paged_attention.npu import why_not
from spec_v2.mem_cache.kv_cache_builder import KvCache
from spec_v2.model_executor.model_runner import ModelRunner

_LOG = logging.getLogger("spec_v2")


class NpuKind(StrEnum):
    """What `npu` means in this process."""

    REAL = "real"
    SIMULATED = "simulated"
    ABSENT = "absent"


def npu_kind() -> NpuKind:
    """What `npu` means now. Imports nothing."""
    npu = getattr(torch, "npu", None)
    if npu is None or not npu.is_available():
        return NpuKind.ABSENT
    return NpuKind.SIMULATED if getattr(npu, "is_simulated", False) else NpuKind.REAL


def load_npu() -> None:
    """Import torch_npu, if nobody has. Raises ValueError that names the device setting, the reason and the remedy."""
    if not hasattr(torch, "npu"):
        if importlib.util.find_spec("torch_npu") is None:
            raise ValueError(
                "device='npu': torch_npu is not installed; on a machine with Ascend drivers install spec-v2[npu], "
                "elsewhere use --device cpu or --device cuda"
            )
        try:
            importlib.import_module("torch_npu")
        except Exception as error:
            raise ValueError(
                f"device='npu': torch_npu is installed but does not load ({' '.join(str(error).split())}); source CANN's "
                "set_env.sh, check that torch_npu's version is torch's, or use --device cpu"
            ) from error
    if npu_kind() is NpuKind.ABSENT:
        raise ValueError(
            "device='npu': torch_npu sees no card; check `npu-smi info` and ASCEND_RT_VISIBLE_DEVICES, or use --device cpu"
        )


def device_name(device: torch.device) -> str:
    """The device as it is reported: a simulated one says so."""
    simulated = device.type == "npu" and npu_kind() is NpuKind.SIMULATED
    return f"{device} (SIMULATED)" if simulated else str(device)


def use_fused_attention(
    cache: KvCache, target: ModelRunner, draft: ModelRunner | None, lens: HostLens
) -> bool:
    """Let Ascend's operator attend over the pools that it can serve. True if it serves any: then `lens` must be kept."""
    for name, pool, runner in (("target", cache.target_pool, target), ("draft", cache.draft_pool, draft)):
        if runner is None or not pool.keys:
            continue
        value_dims = [layer.value_dim for layer in pool.geometry]
        reason = why_not(pool.keys, value_dims, runner.attention_options.values(), lens.page_size)
        if reason:
            _LOG.warning("device='npu': the %s's attention runs on torch's own operators: %s", name, reason)
        else:
            pool.host_lens = lens
    return cache.target_pool.host_lens is not None or cache.draft_pool.host_lens is not None


@cache
def can_pin(device_type: str) -> bool:
    """Whether host memory can be pinned for this kind of device, so that copies do not block the host."""
    if device_type == "cpu":
        return False
    if device_type == "cuda":
        return True
    try:
        torch.empty(1).pin_memory()
    except RuntimeError:  # not by a simulated device
        return False
    return True
