"""Builds everything that holds KV or recurrent states: pools for target and draft, row table, allocators.

There is no `enable_overlap` parameter: what is built does not depend on the schedule.
"""

import os
from dataclasses import dataclass

import torch

from spec_v2.mem_cache.allocator import PageAllocator, RowAllocator
from spec_v2.mem_cache.kv_pool import KvPool, LayerGeometry, RowTable, bytes_per_slot
from spec_v2.mem_cache.prefix_cache import PrefixCache
from spec_v2.mem_cache.state_pool import StateGeometry, StatePool, bytes_per_state

CPU_KV_BUDGET_BYTES = 2 << 30
FREE_FRACTION = 0.6  # of a card's memory
LARGEST_POOL = 2**31  # slots
SNAPSHOTS_PER_REQUEST = 2  # states that the prefix cache may keep, at most a quarter of the memory


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCache:
    """One slot space, two pools. `draft_pool` has no layers where the algorithm has no draft KV.

    The state pools hold nothing but for models with recurrent layers. Their first rows are the requests', then come
    those of snapshots, which `snapshots` hands out.
    """

    target_pool: KvPool
    draft_pool: KvPool
    target_states: StatePool
    draft_states: StatePool
    snapshots: RowAllocator
    row_table: RowTable
    pages: PageAllocator
    rows: RowAllocator
    prefix: PrefixCache

    @property
    def has_states(self) -> bool:
        """Whether target or draft model has recurrent layers."""
        return bool(self.target_states or self.draft_states)

    def forget_owners(self) -> None:
        """Everything is free again. Only for when no request is left."""
        self.pages.reset()
        self.rows.reset()
        self.snapshots.reset()
        self.prefix.reset()


def build_kv_cache(
    *,
    target_geometry: tuple[LayerGeometry, ...],
    draft_geometry: tuple[LayerGeometry, ...],
    dtype: torch.dtype,
    device: torch.device,
    page_size: int,
    max_running_requests: int,
    context_length: int,
    slots_per_step: int,
    workspace_bytes: int = 0,
    max_total_tokens: int | None = None,
    mem_fraction: float | None = None,
    lookahead: int = 0,
    prefix_cache: bool = False,
    target_states: dict[int, StateGeometry] | None = None,
    draft_states: dict[int, StateGeometry] | None = None,
) -> KvCache:
    """Size and allocate the cache.

    `slots_per_step`: row positions one decode step may write. `workspace_bytes`: what the largest step needs beside
    the cache, left alone where the pool takes its share of the memory. A row is wide enough for a full context and
    two steps' reserve. `max_total_tokens` is the pool's size in tokens; None takes `mem_fraction` of the memory
    (by default 2 GiB on a CPU, 60% of what is free on a card), at most what all rows can hold. `lookahead`:
    tokens behind a cached page that its draft KV depends on. `target_states`, `draft_states`: what recurrent layers
    keep per request, by layer number; states take their room before KV does. Raises ValueError where the pool would not
    hold a single page, or more slots than a row table can name, or where there is no room for the states.
    """
    geometries = (target_states or {}, draft_states or {})
    num_snapshots, state_bytes = _size_states(
        geometries, dtype, device, max_running_requests, mem_fraction, prefix_cache
    )
    num_state_rows = 1 + max_running_requests + num_snapshots
    row_width = context_length + 2 * slots_per_step + page_size
    if max_total_tokens is None:
        slot_bytes = bytes_per_slot(target_geometry, dtype) + bytes_per_slot(draft_geometry, dtype)
        budget = _budget_bytes(device, mem_fraction) - state_bytes
        if device.type != "cpu" or mem_fraction is not None:
            budget = _without_workspace(budget, workspace_bytes)
        max_total_tokens = min(max_running_requests * row_width, budget // max(slot_bytes, 1))
    num_pages = max_total_tokens // page_size
    if num_pages < 1:
        raise ValueError(
            f"max_total_tokens={max_total_tokens} holds no page of page_size={page_size} tokens; "
            "raise --max-total-tokens or lower --page-size"
        )
    num_slots = (num_pages + 1) * page_size  # page 0 is padding
    if num_slots > LARGEST_POOL:
        raise ValueError(
            f"max_total_tokens={max_total_tokens}: row tables hold 32-bit slot numbers; "
            f"use --max-total-tokens {LARGEST_POOL - page_size} or less"
        )
    pages = PageAllocator(num_pages + 1, page_size)
    snapshots = RowAllocator(num_state_rows, first=1 + max_running_requests)
    return KvCache(
        target_pool=KvPool(target_geometry, num_slots, dtype, device),
        draft_pool=KvPool(draft_geometry, num_slots, dtype, device),
        target_states=StatePool(geometries[0], num_state_rows, dtype, device),
        draft_states=StatePool(geometries[1], num_state_rows, dtype, device),
        snapshots=snapshots,
        row_table=RowTable(max_running_requests + 1, row_width, device),
        pages=pages,
        rows=RowAllocator(max_running_requests + 1),
        prefix=PrefixCache(
            pages, lookahead=lookahead, enabled=prefix_cache, snapshots=snapshots if any(geometries) else None
        ),
    )


def _size_states(
    geometries: tuple[dict[int, StateGeometry], ...],
    dtype: torch.dtype,
    device: torch.device,
    max_running_requests: int,
    mem_fraction: float | None,
    prefix_cache: bool,
) -> tuple[int, int]:
    """(snapshots, bytes of all states). Raises ValueError where the running requests' alone do not fit."""
    row_bytes = sum(bytes_per_state(g, dtype) for g in geometries)
    if not row_bytes:
        return 0, 0
    budget = _budget_bytes(device, mem_fraction)
    running_bytes = (1 + max_running_requests) * row_bytes
    if running_bytes >= budget:
        raise ValueError(
            f"max_running_requests={max_running_requests}: their recurrent states need {running_bytes / 2**30:.1f} GiB, "
            f"{row_bytes / 2**20:.1f} MiB each, and {budget / 2**30:.1f} GiB are there for states and KV; lower "
            "--max-running-requests or raise --mem-fraction-static"
        )
    most = SNAPSHOTS_PER_REQUEST * max_running_requests if prefix_cache else 0
    num_snapshots = min(most, (budget - running_bytes) // 4 // row_bytes)
    return num_snapshots, running_bytes + num_snapshots * row_bytes


def _without_workspace(budget: int, workspace_bytes: int) -> int:
    if budget <= workspace_bytes:
        raise ValueError(
            f"max_running_requests: one step's logits would need {workspace_bytes / 2**30:.1f} GiB, and "
            f"{max(budget, 0) / 2**30:.1f} GiB are there for them and the KV pool; lower --max-running-requests or "
            "--speculative-num-draft-tokens, or raise --mem-fraction-static"
        )
    return budget - workspace_bytes


def _budget_bytes(device: torch.device, fraction: float | None) -> int:
    if device.type != "cpu":
        free, _ = torch.get_device_module(device).mem_get_info(device)
        return int(free * (fraction or FREE_FRACTION))
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return int(physical * fraction) if fraction else min(CPU_KV_BUDGET_BYTES, physical // 4)
