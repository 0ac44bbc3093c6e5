"""What the attention function has to know about one forward, built on the forward stream.

A query sees the prefix of its request and those tokens of this forward's window that `visible` names: its ancestors
in a tree, its predecessors in a chain. Two forms say so. Where a kernel reads KV in place there is a `PagedView`: the
row table, lengths, and the window's mask as bits (for an NPU's operator an `NpuView`). Elsewhere keys are gathered, and a forward is a list of attention
groups: requests that have the same number of query tokens. Decode, draft, verify and draft-extend are one group; a
prefill has one group per request.
"""

import math
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spec_v2.kernels.paged_attention import KERNEL_DTYPES, PagedView, TreeWindow
from spec_v2.kernels.paged_attention.npu import NpuView
from spec_v2.mem_cache.kv_pool import KvPool, RowTable
from spec_v2.model_executor.recurrence import StateView


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """`key_slots` are 0 (padding, finite) where `mask` hides a key of the prefix, so NaN cannot leak in."""

    start: int  # of its tokens in the forward
    key_slots: Int[Tensor, "b m"]
    key_positions: Int[Tensor, "b m"]
    query_positions: Int[Tensor, "b q"]
    mask: Bool[Tensor, "b q m"]
    # what `mask_for` and `bias_for` made for the first layer that asked, for the layers behind it
    made: dict[tuple[object, ...], Tensor] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.start + self.query_positions.numel()

    def mask_for(self, sliding_window: int | None) -> Bool[Tensor, "b q m"]:
        """`mask`, narrowed to keys less than `sliding_window` tokens behind the query."""
        if sliding_window is None:
            return self.mask
        if (sliding_window,) not in self.made:
            distance = self.query_positions[:, :, None] - self.key_positions[:, None, :]
            self.made[sliding_window,] = self.mask & (distance < sliding_window)
        return self.made[sliding_window,]

    def bias_for(
        self, sliding_window: int | None, copies: int, dtype: torch.dtype
    ) -> Float[Tensor, "b 1 rows m"]:
        """What to add to the logits: 0 for a key that is seen, else -inf; `copies` times, one after the other."""
        name = (sliding_window, copies, dtype)
        if name not in self.made:
            mask = self.mask_for(sliding_window)
            bias = torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -math.inf)
            self.made[name] = bias.repeat(1, copies, 1)[:, None]
        return self.made[name]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One forward: where its KV goes (`out_slots`), what its queries see (`paged`, `npu`, or else `groups`), and the
    `states` of recurrent layers (None for models that have none)."""

    kv_pool: KvPool
    out_slots: Int[Tensor, " t"]
    groups: tuple[AttentionGroup, ...] = ()
    paged: PagedView | None = None
    npu: NpuView | None = None
    states: StateView | None = None


def reads_in_place(kv_pool: KvPool) -> bool:
    """Whether attention follows the row table to this pool; by default wherever the kernel runs."""
    if kv_pool.paged_attention is not None:
        return kv_pool.paged_attention
    return bool(kv_pool.keys) and kv_pool.keys[0].is_cuda and kv_pool.keys[0].dtype in KERNEL_DTYPES


def decodes_in_place(kv_pool: KvPool) -> bool:
    """The same for decode steps, in which an NPU's operator can read in place too."""
    return kv_pool.host_lens is not None or reads_in_place(kv_pool)


def _in_place(kv_pool: KvPool, out_slots: Tensor, view: PagedView, keys_ahead: int) -> ForwardBatch:
    """A forward of a decode step that reads its pool in place, by our kernel or an NPU's operator."""
    if kv_pool.host_lens is not None:
        npu = NpuView(view=view, lens=kv_pool.host_lens, keys_ahead=keys_ahead)
        return ForwardBatch(kv_pool, out_slots, npu=npu)
    return ForwardBatch(kv_pool, out_slots, paged=view)


def window_forward_batch(
    *,
    kv_pool: KvPool,
    row_table: RowTable,
    rows: Int[Tensor, " b"],
    prefix_lens: Int[Tensor, " b"],
    max_prefix_len: int,
    window_slots: Int[Tensor, "b win"],
    window_positions: Int[Tensor, "b win"],
    visible: Bool[Tensor, "b q win"] | None = None,
    keys_ahead: int | None = None,
    states: StateView | None = None,
) -> ForwardBatch:
    """Each request runs the last `q` tokens of its window; all of the window's KV is readable.

    Window token `j` is at position `prefix_lens[i] + j` of the request's row. Without `visible` the window is a chain
    and all of it runs. `max_prefix_len` is a host bound on `prefix_lens` (device): shapes never wait for the device.
    `keys_ahead`: keys that count, beyond the step's lengths, for an operator that has those from the host; None where
    `prefix_lens` are these lengths and all of the window counts.
    """
    if decodes_in_place(kv_pool):
        num_queries, window = window_slots.shape[1], None
        if visible is not None:
            num_queries = visible.shape[1]
            window = TreeWindow(
                visible=visible,
                query_positions=window_positions[:, -num_queries:].contiguous(),
                window_positions=window_positions,
            )
        view = PagedView(
            table=row_table.slots,
            rows=rows,
            prefix_lens=prefix_lens,
            max_prefix_len=min(max_prefix_len, row_table.width),
            max_queries=num_queries,
            window=window,
        )
        out_slots = kv_pool.slot_ids(window_slots[:, -num_queries:].flatten())
        ahead = view.window_len if keys_ahead is None else keys_ahead
        return replace(_in_place(kv_pool, out_slots, view, ahead), states=states)

    if visible is None:
        win = window_slots.shape[1]
        visible = torch.ones(win, win, dtype=torch.bool, device=rows.device).tril().expand(len(rows), -1, -1)
    num_queries = visible.shape[1]
    prefix_slots = row_table.prefix(rows, max_prefix_len)
    offsets = torch.arange(prefix_slots.shape[1], device=rows.device)
    in_prefix = offsets < prefix_lens[:, None]
    query_positions = window_positions[:, -num_queries:]
    group = AttentionGroup(
        start=0,
        key_slots=torch.cat([torch.where(in_prefix, prefix_slots, 0), window_slots], 1),
        key_positions=torch.cat([offsets.expand_as(prefix_slots), window_positions], 1),
        query_positions=query_positions,
        mask=torch.cat([in_prefix[:, None, :].expand(-1, num_queries, -1), visible], 2),
    )
    out_slots = kv_pool.slot_ids(window_slots[:, -num_queries:].flatten())
    return ForwardBatch(kv_pool, out_slots, (group,), states=states)


def reading_forward_batch(
    *,
    kv_pool: KvPool,
    row_table: RowTable,
    rows: Int[Tensor, " b"],
    prefix_lens: Int[Tensor, " b"],
    max_prefix_len: int,
    num_queries: int,
) -> ForwardBatch:
    """`num_queries` tokens of each request read its prefix from where its last token is, and write nothing.

    The padding row has no prefix; its tokens read the padding slot, which is finite.
    """
    last = (prefix_lens - 1).clamp(min=0)[:, None]
    query_positions = last.expand(-1, num_queries)
    nothing = rows[:0]
    if decodes_in_place(kv_pool):
        # the last token is the window: a window's KV must be finite, and what lies behind the prefix need not be
        window = TreeWindow(
            visible=torch.ones(len(rows), num_queries, 1, dtype=torch.bool, device=rows.device),
            query_positions=query_positions.contiguous(),
            window_positions=last,
        )
        view = PagedView(
            table=row_table.slots,
            rows=rows,
            prefix_lens=last[:, 0],
            max_prefix_len=min(max_prefix_len, row_table.width),
            max_queries=num_queries,
            window=window,
        )
        return _in_place(kv_pool, nothing, view, keys_ahead=0)
    slots = row_table.prefix(rows, max_prefix_len)
    offsets = torch.arange(slots.shape[1], device=rows.device)
    seen = offsets <= last
    group = AttentionGroup(
        start=0,
        key_slots=torch.where(seen, slots, 0),
        key_positions=offsets.expand_as(slots),
        query_positions=query_positions,
        mask=seen[:, None].expand(-1, num_queries, -1),
    )
    return ForwardBatch(kv_pool, nothing, (group,))


def extend_forward_batch(
    *,
    kv_pool: KvPool,
    row_table: RowTable,
    rows: Int[Tensor, " b"],
    prefix_lens: tuple[int, ...],
    extend_lens: tuple[int, ...],
    states: StateView | None = None,
) -> ForwardBatch:
    """Prefill: `extend_lens[i]` tokens of request `i` behind its prefix, one request after the other, causal."""
    if reads_in_place(kv_pool):
        return _paged_extend(kv_pool, row_table, rows, prefix_lens, extend_lens, states)
    groups, out_slots, start = [], [], 0
    for i, (prefix, length) in enumerate(zip(prefix_lens, extend_lens, strict=True)):
        slots = row_table.prefix(rows[i : i + 1], prefix + length)
        key_positions = torch.arange(prefix + length, device=slots.device)[None]
        query_positions = key_positions[:, prefix:]
        groups.append(
            AttentionGroup(
                start=start,
                key_slots=slots,
                key_positions=key_positions,
                query_positions=query_positions,
                mask=key_positions[:, None, :] <= query_positions[:, :, None],
            )
        )
        out_slots.append(slots[0, prefix:])
        start += length
    return ForwardBatch(kv_pool, kv_pool.slot_ids(torch.cat(out_slots)), tuple(groups), states=states)


def _paged_extend(
    kv_pool: KvPool,
    row_table: RowTable,
    rows: Int[Tensor, " b"],
    prefix_lens: tuple[int, ...],
    extend_lens: tuple[int, ...],
    states: StateView | None,
) -> ForwardBatch:
    """The same prefill as one view: what the host knows of lengths goes up once, keys stay where they are."""
    spans = list(zip(prefix_lens, extend_lens, strict=True))
    positions = torch.cat([torch.arange(prefix, prefix + length) for prefix, length in spans])
    request = torch.cat([torch.full((length,), i) for i, (_, length) in enumerate(spans)])
    query_starts = torch.tensor((0, *extend_lens)).cumsum(0)
    host = (positions, request, query_starts, torch.tensor(prefix_lens))
    positions, request, query_starts, prefixes = (x.to(rows.device, non_blocking=True) for x in host)
    view = PagedView(
        table=row_table.slots,
        rows=rows,
        prefix_lens=prefixes,
        max_prefix_len=max(prefix_lens),
        max_queries=max(extend_lens),
        query_starts=query_starts,
    )
    slots = row_table.at(rows[request], positions[:, None])[:, 0]
    return ForwardBatch(kv_pool, slots, paged=view, states=states)
