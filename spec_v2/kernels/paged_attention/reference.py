"""Plain torch, one request at a time. Read this first."""

from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

if TYPE_CHECKING:
    from spec_v2.kernels.paged_attention import PagedView


def paged_attention_reference(
    query: Float[Tensor, "t heads key_dim"],
    keys: Float[Tensor, "num_slots kv_heads key_dim"],
    values: Float[Tensor, "num_slots kv_heads value_dim"],
    view: "PagedView",
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " heads"] | None = None,
) -> Float[Tensor, "t heads value_dim"]:
    out = query.new_zeros(*query.shape[:2], values.shape[2])
    b, group_size = len(view.rows), query.shape[1] // keys.shape[1]
    starts = range(0, len(query) + 1, max(view.max_queries, 1))
    if view.query_starts is not None:
        starts = view.query_starts.tolist()
    for i in range(b):
        queries = slice(starts[i], starts[i + 1])
        visible = visible_keys(view, i, starts[i + 1] - starts[i], sliding_window)
        slots = view.table[view.rows[i], : visible.shape[1]].long()
        # [kv_heads, group, q, dim] against [kv_heads, 1, m, dim]
        q = query[queries].unflatten(1, (-1, group_size)).permute(1, 2, 0, 3)
        k, v = (pool[slots].transpose(0, 1)[:, None] for pool in (keys, values))
        logits = q @ k.transpose(2, 3) * scaling
        if softcap is not None:
            logits = (logits / softcap).tanh() * softcap
        logits = logits.masked_fill(~visible, -torch.inf)
        if sinks is not None:
            sink = sinks.to(logits.dtype).view(-1, group_size, 1, 1)
            logits = torch.cat([logits, sink.expand(-1, -1, logits.shape[2], 1)], 3)
        weights = logits.softmax(3)[..., : visible.shape[1]]
        weights = weights.masked_fill(~visible, 0)  # nothing visible: 0 and not NaN
        hidden_from_all = ~visible.any(0)
        attended = weights @ v.masked_fill(hidden_from_all[:, None], 0)  # 0 * NaN is NaN
        out[queries] = attended.permute(2, 0, 1, 3).flatten(1, 2)
    return out


def visible_keys(
    view: "PagedView", i: int, num_queries: int, sliding_window: int | None
) -> Bool[Tensor, "q m"]:
    """Which of request `i`'s keys each of its queries sees: its prefix first, then the window."""
    prefix = int(view.prefix_lens[i])
    device = view.table.device
    prefix_positions = torch.arange(prefix, device=device)
    if view.window is None:
        query_positions = window_positions = prefix + torch.arange(num_queries, device=device)
        in_window = torch.ones(num_queries, num_queries, dtype=torch.bool, device=device).tril()
    else:
        query_positions = view.window.query_positions[i]
        window_positions = view.window.window_positions[i]
        in_window = view.window.visible[i]
    visible = torch.cat([in_window.new_ones(num_queries, prefix), in_window], 1)
    if sliding_window is not None:
        key_positions = torch.cat([prefix_positions, window_positions])
        visible = visible & (query_positions[:, None] - key_positions < sliding_window)
    return visible


def pack_visible_reference(
    visible: Bool[Tensor, "b q win"],
    query_positions: Int[Tensor, "b q"],
    window_positions: Int[Tensor, "b win"],
    sliding_window: int | None = None,
) -> Int[Tensor, "b q words"]:
    if sliding_window is not None:
        distance = query_positions[:, :, None] - window_positions[:, None, :]
        visible = visible & (distance < sliding_window)
    b, q, win = visible.shape
    words = -(-win // 64)
    padded = visible.new_zeros(b, q, words * 64)
    padded[:, :, :win] = visible
    bit = torch.ones(64, dtype=torch.int64, device=visible.device) << torch.arange(64, device=visible.device)
    return torch.where(padded.unflatten(2, (words, 64)), bit, 0).sum(3)
