"""Requests on paged KV for the tests of attention: scattered slots, and NaN in every slot that no query may see."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from spec_v2.kernels.paged_attention import PagedView, TreeWindow
from spec_v2.kernels.paged_attention.reference import paged_attention_reference, visible_keys
from tests.kernels.support import DEVICE, seeded


@dataclass
class Case:
    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    view: PagedView

    def to(self, dtype):
        cast = {name: getattr(self, name).to(dtype) for name in ("query", "keys", "values")}
        return replace(self, **cast)


def make_case(
    prefix_lens,
    queries,
    *,
    window=None,
    heads=4,
    kv_heads=2,
    key_dim=16,
    value_dim=None,
    dtype=torch.float32,
    max_prefix_len=None,
    seed=0,
):
    """`queries`: tokens per request, or a list of them (prefill). `window`: tokens of a tree window, or None: causal."""
    generator = seeded(seed)
    b, ragged = len(prefix_lens), isinstance(queries, list)
    lens = queries if ragged else [queries] * b
    longest = max(p + (window or q) for p, q in zip(prefix_lens, lens, strict=True))
    width, value_dim = longest + 9, value_dim or key_dim
    num_slots = 2 * b * width + 1
    # Row 0 is padding, each request's row holds slots in no order, and a row without an owner lies between.
    table = torch.zeros(2 * b + 1, width, dtype=torch.int32)
    rows = 2 * torch.randperm(b, generator=generator) + 1
    table[rows] = (torch.randperm(num_slots - 1, generator=generator)[: b * width] + 1).view(b, width).int()
    keys = torch.randn(num_slots, kv_heads, key_dim, generator=generator).to(dtype)
    values = torch.randn(num_slots, kv_heads, value_dim, generator=generator).to(dtype)
    unused = torch.ones(num_slots, dtype=torch.bool)
    for row, prefix, q in zip(rows, prefix_lens, lens, strict=True):
        unused[table[row, : prefix + (window or q)].long()] = False
    keys[unused], values[unused] = torch.nan, torch.nan
    query = torch.randn(sum(lens), heads, key_dim, generator=generator).to(dtype)
    prefixes = torch.tensor(prefix_lens)
    starts = torch.tensor([0, *lens]).cumsum(0) if ragged else None
    view = PagedView(
        table=table.to(DEVICE),
        rows=rows.to(DEVICE),
        prefix_lens=prefixes.to(DEVICE),
        max_prefix_len=max(prefix_lens) if max_prefix_len is None else max_prefix_len,
        max_queries=max(lens),
        query_starts=None if starts is None else starts.to(DEVICE),
        window=None if window is None else tree_window(generator, prefixes, queries, window),
    )
    return Case(query.to(DEVICE), keys.to(DEVICE), values.to(DEVICE), view)


def tree_window(generator, prefixes, queries, window, device=DEVICE):
    """Random trees: each node's parent is an earlier node or nobody. The queries are the last nodes."""
    b = len(prefixes)
    visible = torch.eye(window, dtype=torch.bool, device="cpu").repeat(b, 1, 1)
    depths = torch.zeros(b, window, dtype=torch.long, device="cpu")
    for i in range(b):
        for node in range(1, window):
            parent = int(torch.randint(-1, node, (), generator=generator, device="cpu"))
            if parent >= 0:
                visible[i, node] |= visible[i, parent]
                depths[i, node] = depths[i, parent] + 1
    positions = (prefixes.cpu()[:, None] + depths).to(device)
    return TreeWindow(
        visible=visible[:, -queries:].to(device),
        query_positions=positions[:, -queries:],
        window_positions=positions,
    )


def mend_interpreter(monkeypatch):
    """Triton 3.6's interpreter hands `range` arrays of one element, which numpy 2.4 no longer takes for integers.

    A loop that Triton is to pipeline has to be a `for` over a range.
    """
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor, *scope):
        patch_tensor(tensor, *scope)
        monkeypatch.setattr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


def exact(case, **options):
    """The reference in float64, of the very numbers that the kernel gets."""
    wide = case.to(torch.float64)
    return paged_attention_reference(wide.query, wide.keys, wide.values, wide.view, **options)


def torch_attention(case, *, scaling, sliding_window=None, softcap=None, sinks=None):
    """torch's own attention in the dtype of the case, one request at a time; NaN nowhere in its sight."""
    view, group = case.view, case.query.shape[1] // case.keys.shape[1]
    out, start = [], 0
    starts = None if view.query_starts is None else view.query_starts.tolist()
    for i in range(len(view.rows)):
        q = view.max_queries if starts is None else starts[i + 1] - starts[i]
        mask = visible_keys(view, i, q, sliding_window)
        slots = view.table[view.rows[i], : mask.shape[1]].long()
        query = case.query[start : start + q].transpose(0, 1)
        key, value = (x[slots].transpose(0, 1).repeat_interleave(group, 0) for x in (case.keys, case.values))
        if softcap is None and sinks is None:
            attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
        else:
            logits = query @ key.transpose(1, 2) * scaling
            if softcap is not None:
                logits = (logits / softcap).tanh() * softcap
            logits = logits.masked_fill(~mask, -torch.inf)
            if sinks is not None:
                logits = torch.cat([logits, sinks.to(logits.dtype)[:, None, None].expand(-1, q, 1)], 2)
            attended = logits.float().softmax(2).to(query.dtype)[..., : mask.shape[1]] @ value
        out.append(attended.transpose(0, 1))
        start += q
    return torch.cat(out)
