"""Attention of one forward's queries over paged KV: decode, tree verify, tree draft, draft-extend and prefill.

Key `p` of request `i` is in slot `table[rows[i], p]`. Its first `prefix_lens[i]` keys come from earlier forwards;
the tokens of this forward's window follow at positions `prefix_lens[i] ..` of the row. A query sees its whole prefix, and
of the window its ancestors (`TreeWindow`) or, without a tree, the tokens before it and itself.

    logits = scaling * query @ key          over the keys that the query sees
    logits = softcap * tanh(logits / softcap)   with a softcap
    weights = softmax(logits)               with sinks one more logit per head, which takes weight and gives nothing
    out = weights @ value                   0 for a query that sees no key and has no sink

Lengths stay on the device; the host knows bounds only, so a launch can be captured in a CUDA graph and replayed with
other lengths below those bounds. What a hidden key or value holds never matters, NaN included; only the KV of this
forward's own window is taken to be finite.

Bytes moved, at least: each request's keys and values once per KV head and query tile (`rows of a tile` below),
`(prefix + window) * kv_heads * (key_dim + value_dim) * itemsize`, plus queries and output. All query heads of a KV head
and all query tokens of a request are rows of one tile, up to 128 of them, so a verify of 8 tokens with 4 heads per KV
head reads what a decode step reads. Split contexts also move `8 * splits * (value_dim + 2)` bytes per query and head.

Online softmax: Milakov and Gimelshein 2018, arXiv 1805.02867; its tiled form: Dao 2023, arXiv 2307.08691; splits over the
keys: Flash-Decoding (Dao et al. 2023); tree masks: SpecInfer (Miao et al. 2023, arXiv 2305.09781).
"""

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from spec_v2.kernels import dispatch
from spec_v2.kernels.paged_attention.reference import pack_visible_reference, paged_attention_reference

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeWindow:
    """Which tokens of its request's window each query sees. The queries are the window's last `q` tokens.

    Positions count tokens from the start of the request, as a sliding window does: a node's is its parent's plus 1.
    """

    visible: Bool[Tensor, "b q win"]
    query_positions: Int[Tensor, "b q"]
    window_positions: Int[Tensor, "b win"]
    # packed masks by sliding window, each made by the first layer that asks for it
    packed: dict[int | None, Tensor] = field(default_factory=dict)

    def bits(self, sliding_window: int | None) -> Int[Tensor, "b q words"]:
        """Bit `j % 64` of word `j // 64`: the query sees window token `j`."""
        if sliding_window not in self.packed:
            self.packed[sliding_window] = pack_visible(
                self.visible, self.query_positions, self.window_positions, sliding_window
            )
        return self.packed[sliding_window]


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedView:
    """What the queries of one forward see; made once, read by every layer.

    Queries lie one request after the other. Without `query_starts` each request has `max_queries` of them; with it,
    request `i` has those from `query_starts[i]` up to `query_starts[i + 1]`, at most `max_queries`. `max_prefix_len`
    bounds `prefix_lens`; it decides how work is split, never what is seen.
    """

    table: Int[Tensor, "num_rows width"]
    rows: Int[Tensor, " b"]
    prefix_lens: Int[Tensor, " b"]
    max_prefix_len: int
    max_queries: int
    query_starts: Int[Tensor, " b+1"] | None = None
    window: TreeWindow | None = None
    # where the splits of one layer meet; the next layer on the same stream meets there again
    scratch: dict[tuple[int, ...], tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)

    @property
    def window_len(self) -> int:
        """Tokens of the longest window."""
        return self.max_queries if self.window is None else self.window.visible.shape[2]


def paged_attention(
    query: Float[Tensor, "t heads key_dim"],
    keys: Float[Tensor, "num_slots kv_heads key_dim"],
    values: Float[Tensor, "num_slots kv_heads value_dim"],
    view: PagedView,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " heads"] | None = None,
) -> Float[Tensor, "t heads value_dim"]:
    """Attend. Any strides, but a head of `keys` or `values` and a row of the table lie in one piece.

    `sliding_window`: a query sees keys less than that many positions behind it. The result does not depend on
    the other requests of the batch as long as the number of splits is the same, and is the same bits every time.
    float64 and other devices take the reference. Raises ValueError for sizes or dtypes that don't fit.
    """
    _check(query, keys, values, view)
    if scaling <= 0 or (softcap is not None and softcap <= 0):
        raise ValueError(f"scaling={scaling}, softcap={softcap}: both must be positive")
    if dispatch.runs_triton(query) and query.dtype in KERNEL_DTYPES:
        from spec_v2.kernels.paged_attention.triton_kernel import paged_attention_triton

        return paged_attention_triton(query, keys, values, view, scaling, sliding_window, softcap, sinks)
    return paged_attention_reference(query, keys, values, view, scaling, sliding_window, softcap, sinks)


def pack_visible(
    visible: Bool[Tensor, "b q win"],
    query_positions: Int[Tensor, "b q"],
    window_positions: Int[Tensor, "b win"],
    sliding_window: int | None = None,
) -> Int[Tensor, "b q words"]:
    """A window's mask as int64 words, narrowed to what a sliding window leaves of it. Any strides."""
    if dispatch.runs_triton(visible):
        from spec_v2.kernels.paged_attention.pack_kernel import pack_visible_triton

        return pack_visible_triton(visible, query_positions, window_positions, sliding_window)
    return pack_visible_reference(visible, query_positions, window_positions, sliding_window)


def _check(query: Tensor, keys: Tensor, values: Tensor, view: PagedView) -> None:
    if query.shape[1] % keys.shape[1]:
        raise ValueError(f"heads={query.shape[1]} is not a multiple of kv_heads={keys.shape[1]}")
    if not query.dtype == keys.dtype == values.dtype:
        raise ValueError(f"query is {query.dtype}, keys {keys.dtype}, values {values.dtype}: give one dtype")
    if keys.stride(2) != 1 or values.stride(2) != 1 or view.table.stride(1) != 1:
        raise ValueError(
            f"strides of keys are {keys.stride()}, of values {values.stride()}, of the row table {view.table.stride()}: "
            "the last must be 1"
        )
    if view.query_starts is None and len(query) != len(view.rows) * view.max_queries:
        raise ValueError(
            f"query has {len(query)} tokens, but {len(view.rows)} requests have max_queries={view.max_queries} each; "
            "give query_starts where they differ"
        )
    if view.query_starts is not None and view.window is not None:
        raise ValueError(
            "a tree window has the same number of queries in each request: leave query_starts out"
        )
