"""Ascend's fused attention operator over our pages, by torch_npu (`npu_fused_infer_attention_score`).

It reads KV in place through a block table, and takes two things that say what a query sees: how many keys each request
has, from the host, and a mask over them, from the device. Lengths are exact, so a page's unused end is never read; the
mask hides what a tree or a sliding window hides.

Limits are those of torch_npu's documentation for A2 and A3 cards. Nothing here has run on such a card: see docs/npu.md.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int32
from torch import Tensor

from spec_v2.kernels.paged_attention import PagedView
from spec_v2.kernels.paged_attention.host_lens import HostLens, KvSpan

DTYPES = (torch.float16, torch.bfloat16)
PAGE_UNIT, LARGEST_PAGE = 128, 512  # tokens
MASK_OF_ALL_KEYS = 1  # the operator's name for it: sparse_mode
LARGEST_BUFFER = 2**31  # numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class NpuView:
    """A `PagedView` and what the operator wants beside it. `keys_ahead`: keys that count, beyond the step's lengths."""

    view: PagedView
    lens: HostLens
    keys_ahead: int
    made: dict[Any, Tensor] = field(default_factory=dict)  # by the first layer that asks, for those behind it

    @property
    def span(self) -> KvSpan:
        return KvSpan(self.keys_ahead, self.num_blocks * self.lens.page_size)

    @property
    def num_blocks(self) -> int:
        """Pages that hold the longest row that the host allows for."""
        view = self.view
        longest = min(view.max_prefix_len + view.window_len, view.table.shape[1])
        return -(-longest // self.lens.page_size)

    def block_table(self) -> Int32[Tensor, "b blocks"]:
        """Page numbers of each row. A row owns whole pages, so a page's first slot names it."""
        if "blocks" not in self.made:
            firsts = self.view.table[:, :: self.lens.page_size][self.view.rows, : self.num_blocks]
            self.made["blocks"] = torch.div(firsts, self.lens.page_size, rounding_mode="floor")
        return self.made["blocks"]

    def hidden(self, sliding_window: int | None) -> Bool[Tensor, "b 1 q m"]:
        """True for a key that a query must not see, over all positions of the block table."""
        if sliding_window not in self.made:
            seen = visible_positions(self.view, self.num_blocks * self.lens.page_size, sliding_window)
            self.made[sliding_window] = ~seen[:, None]
        return self.made[sliding_window]


def visible_positions(view: PagedView, width: int, sliding_window: int | None) -> Bool[Tensor, "b q m"]:
    """Which of a row's first `width` positions each query sees; nothing is read on the host."""
    b, q, prefix = len(view.rows), view.max_queries, view.prefix_lens[:, None]
    places = torch.arange(width, device=view.rows.device).expand(b, -1)
    in_prefix = places < prefix
    if view.window is None:  # a chain, all of which runs
        own = torch.arange(q, device=places.device)
        visible = (own[:, None] >= own).expand(b, -1, -1)
        window_positions = query_positions = prefix + own
    else:
        visible, query_positions = view.window.visible, view.window.query_positions
        window_positions = view.window.window_positions
    node = (places - prefix).clamp(0, view.window_len - 1)
    in_window = ~in_prefix & (places < prefix + view.window_len)
    seen = visible.gather(2, node[:, None].expand(-1, q, -1)) & in_window[:, None] | in_prefix[:, None]
    if sliding_window is not None:
        key_positions = torch.where(in_prefix, places, window_positions.gather(1, node))
        seen = seen & (query_positions[:, :, None] - key_positions[:, None] < sliding_window)
    return seen


def paged_attention_npu(
    query: Float[Tensor, "t heads dim"],
    keys: Float[Tensor, "num_slots kv_heads dim"],
    values: Float[Tensor, "num_slots kv_heads dim"],
    npu: NpuView,
    *,
    scaling: float,
    sliding_window: int | None = None,
) -> Float[Tensor, "t heads dim"]:
    """Attend over pages, `max_queries` queries to a request."""
    (_, heads, dim), kv_heads, page = query.shape, keys.shape[1], npu.lens.page_size
    attended, _ = torch.ops.npu.npu_fused_infer_attention_score(
        query.reshape(len(npu.view.rows), npu.view.max_queries, heads, dim).contiguous(),
        keys.view(-1, page, kv_heads * dim),
        values.view(-1, page, kv_heads * dim),
        atten_mask=npu.hidden(sliding_window),
        actual_seq_lengths_kv=npu.lens.take(npu.span),
        block_table=npu.block_table(),
        block_size=page,
        num_heads=heads,
        num_key_value_heads=kv_heads,
        scale=scaling,
        input_layout="BSND",
        sparse_mode=MASK_OF_ALL_KEYS,
    )
    return attended.view_as(query)  # type: ignore[no-any-return]


def why_not(
    buffers: Iterable[Tensor], value_dims: Iterable[int], options: Iterable[dict[str, Any]], page_size: int
) -> str:
    """Why the operator cannot attend over a pool; empty where it can.

    `buffers`: the keys of each layer. `options`: what each layer passes to its attention.
    """
    if not hasattr(torch.ops.npu, "npu_fused_infer_attention_score"):
        return "torch_npu has no npu_fused_infer_attention_score"
    if page_size % PAGE_UNIT or page_size > LARGEST_PAGE:
        return f"page_size={page_size} is not a multiple of {PAGE_UNIT} up to {LARGEST_PAGE}"
    if any(layer.get("softcap") is not None or layer.get("s_aux") is not None for layer in options):
        return "the model's attention has a softcap or sinks"
    for keys, value_dim in zip(buffers, value_dims, strict=True):
        _, kv_heads, dim = keys.shape
        if keys.dtype not in DTYPES:
            return f"dtype={str(keys.dtype).removeprefix('torch.')} is not float16 or bfloat16"
        if dim % 16 or dim > 512 or dim != value_dim or kv_heads * dim > 65535:
            return f"{kv_heads} KV heads of {dim} (values: {value_dim}) are not what it takes"
        if keys.numel() >= LARGEST_BUFFER:
            return f"a layer's keys are {keys.numel()} numbers, and it counts to {LARGEST_BUFFER - 1}"
    return ""
