"""What an engine is made of and what it runs on, as plain values: `info`, the demo and reports print them."""

import os
import platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_v2 import __version__

if TYPE_CHECKING:
    from spec_v2.engine import Engine


def versions() -> dict[str, str | None]:
    """This package, Python and the libraries below; None for one that is not installed."""
    found: dict[str, str | None] = {"spec_v2": __version__, "python": platform.python_version()}
    for name in ("torch", "transformers", "triton"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def machine() -> str:
    """Processor, the cores that this process may use, and the operating system."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{_processor()}, {cores} cores, {platform.system()} on {platform.machine()}"


def dtype_name(engine: "Engine") -> str:
    """The engine's dtype as the flag `--dtype` spells it."""
    return str(engine.dtype).removeprefix("torch.")


def facts_of(engine: "Engine") -> dict[str, Any]:
    """The settings as resolved, the model, the place and the memory of an engine. All of it fits into JSON."""
    import torch

    from spec_v2.mem_cache.kv_pool import bytes_per_slot
    from spec_v2.mem_cache.state_pool import bytes_per_state
    from spec_v2.spec_info import available

    cache, args = engine.scheduler.cache, engine.server_args
    config = engine.model.config.get_text_config()
    target_bytes, draft_bytes = (
        bytes_per_slot(pool.geometry, engine.dtype) for pool in (cache.target_pool, cache.draft_pool)
    )
    state_bytes, draft_state_bytes = (
        bytes_per_state(pool.geometry, engine.dtype) for pool in (cache.target_states, cache.draft_states)
    )
    capacity = cache.pages.num_usable * cache.pages.page_size
    return {
        "server_args": asdict(args) | {"schedule": args.schedule},
        "model": {
            "name": args.model_path,
            "class": type(engine.model).__name__,
            "parameters": sum(p.numel() for p in engine.model.parameters()),
            "layers": config.num_hidden_layers,
            "attention_heads": config.num_attention_heads,
            "recurrent_layers": len(cache.target_states.geometry),
            "kv_heads": max(g.num_kv_heads for g in cache.target_pool.geometry),
            "vocabulary": config.vocab_size,
            "context_length": engine.context_length,
            "dtype": dtype_name(engine),
            "kv_bytes_per_token": target_bytes,
            "draft_kv_bytes_per_token": draft_bytes,
            "state_bytes_per_request": state_bytes,
            "draft_state_bytes_per_request": draft_state_bytes,
        },
        "device": engine.device_name,
        "threads": args.num_threads or torch.get_num_threads(),
        "kv_pool": {"tokens": capacity, "bytes": capacity * (target_bytes + draft_bytes)},
        "state_pool": {
            "requests": cache.rows.num_rows - 1,
            "snapshots": cache.snapshots.num_rows - cache.snapshots.first,
            "bytes": cache.target_states.num_rows * (state_bytes + draft_state_bytes),
        },
        "algorithms": available(),
        "versions": versions(),
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux: the line below has a less precise name
    return platform.processor() or "unknown processor"
