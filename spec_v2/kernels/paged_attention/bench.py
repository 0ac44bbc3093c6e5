"""Times the kernel on this GPU, against what copying memory reaches here.

    python -m spec_v2.kernels.paged_attention.bench [--scenario verify ...] [--quick] [--json FILE]

A scenario runs as a model would: one launch per layer, each layer with KV of its own so that nothing is in the cache
from the layer before, all layers in one CUDA graph. Reported are milliseconds per layer and the bytes that have to
move (keys and values of all requests once, queries, output) per second. Slots are scattered page by page.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spec_v2.kernels.paged_attention import PagedView, TreeWindow
from spec_v2.kernels.paged_attention.reference import paged_attention_reference
from spec_v2.kernels.paged_attention.tiling import Tiling, choose_splits, choose_tiling, num_sms
from spec_v2.kernels.paged_attention.triton_kernel import paged_attention_triton

CACHE_BYTES = 256 << 20  # layers together read more than any cache holds
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Scenario:
    """`queries` tokens of each of `batch` requests behind `context` tokens; `bound` is what the host knows of those."""

    batch: int
    context: int
    queries: int = 1
    tree: bool = True
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    bound: int = 0
    uneven: bool = False  # contexts from almost nothing up to twice `context`

    @property
    def pairs(self) -> int:
        return self.queries * self.heads // self.kv_heads

    @property
    def max_context(self) -> int:
        return max(self.bound, self.context * (2 if self.uneven else 1))

    def contexts(self) -> list[int]:
        if not self.uneven:
            return [self.context] * self.batch
        return [max(1, round(2 * self.context * i / (self.batch - 1))) for i in range(self.batch)]


SMOL = Scenario(1, 300, bound=2048, heads=9, kv_heads=3, dim=64)
SCENARIOS = {
    "verify": Scenario(32, 4096, 8),  # the one that counts
    "verify uneven": Scenario(32, 4096, 8, uneven=True),
    "verify batch 1": Scenario(1, 1024, 8),
    "verify batch 8": Scenario(8, 2048, 8),
    "verify 64 nodes": Scenario(1, 1024, 64),
    "verify 4 nodes": Scenario(32, 4096, 4),
    "decode": Scenario(32, 4096),
    "decode batch 128": Scenario(128, 1024),
    "decode batch 1, 300": Scenario(1, 300),
    "decode batch 1, 300 of 128k": Scenario(1, 300, bound=131_072),
    "decode batch 32, 300 of 32k": Scenario(32, 300, bound=32_768),
    "decode batch 1, 4k": Scenario(1, 4096),
    "decode batch 1, 32k": Scenario(1, 32_768),
    "SmolLM2 decode batch 1": SMOL,
    "SmolLM2 verify batch 1": replace(SMOL, queries=4),
    "SmolLM2 decode batch 64": replace(SMOL, batch=64, context=512),
    "prefill": Scenario(1, 0, 4096, tree=False),
    "prefill behind a prefix": Scenario(8, 4096, 512, tree=False),
}
TILINGS = {
    16: ((16, 64, 4, 3), (16, 32, 4, 3), (16, 32, 4, 5), (16, 64, 4, 4), (16, 64, 2, 3), (16, 128, 4, 3)),
    32: ((32, 64, 4, 3), (32, 32, 4, 3), (32, 32, 4, 5), (32, 64, 4, 4), (32, 64, 8, 3), (64, 64, 4, 3)),
    64: ((64, 64, 4, 3), (64, 32, 4, 4), (64, 64, 4, 4), (64, 64, 8, 3), (32, 64, 4, 3)),
    128: ((128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 2), (128, 128, 8, 3), (64, 64, 4, 3)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Times attention over paged KV on this GPU.")
    parser.add_argument(
        "--scenario", nargs="*", default=[], help="only those whose name contains one of these"
    )
    parser.add_argument("--quick", action="store_true", help="only what would be chosen")
    parser.add_argument(
        "--page-size", type=int, default=1, help="tokens whose slots are neighbours (default: 1)"
    )
    parser.add_argument("--json", type=Path, help="also write all figures to this file")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    copy = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}: copies {copy / 1e12:.2f} TB/s, read and written")
    results = []
    for name, scenario in SCENARIOS.items():
        if args.scenario and not any(part in name for part in args.scenario):
            continue
        print(f"\n{name}: {describe(scenario)}")
        results += run_scenario(name, scenario, copy, args.page_size, args.quick)
    if args.json:
        record = {"device": torch.cuda.get_device_name(), "copy_bytes_per_s": copy, "results": results}
        args.json.write_text(json.dumps(record, indent=1))


def describe(s: Scenario) -> str:
    bound = f" (at most {s.bound})" if s.bound else ""
    return f"batch {s.batch}, context {s.context}{bound}, {s.queries} queries, {s.heads}/{s.kv_heads} heads of {s.dim}"


def run_scenario(name: str, s: Scenario, copy: float, page_size: int, quick: bool) -> list[dict[str, Any]]:
    setup = Setup(s, page_size)
    want = setup.exact()
    rows = []
    for tiling, splits in choices(s, quick):
        try:
            got = setup.first_request(paged_attention_triton, tiling=tiling, num_splits=splits)
            seconds = seconds_of_graph(partial(setup.all_layers, tiling, splits)) / setup.num_layers
        except Exception as error:  # noqa: BLE001 - one setting that does not fit should not end the table
            print(f"  {label(tiling, splits)}  {type(error).__name__}: {str(error)[:80]}")
            continue
        off = float((got.float() - want).abs().max())
        rate = setup.bytes_moved / seconds
        row = {"scenario": name, **asdict(tiling), "splits": splits, "ms": seconds * 1e3, "error": off}
        row |= {"bytes_per_s": rate, "of_copy": rate / copy, "flop_per_s": setup.flop / seconds}
        rows.append(row)
        print(
            f"  {label(tiling, splits)}  {seconds * 1e3:8.4f} ms  {rate / 1e9:6.0f} GB/s  {rate / copy:4.0%} of copy  "
            f"{setup.flop / seconds / 1e12:4.0f} TFLOP/s  max error {off:.4f}{'' if rows[1:] else '  <- default'}"
        )
    return rows


def label(t: Tiling, splits: int) -> str:
    merged = f", {'fused' if t.fused else 'merged'} from {t.min_split_blocks} blocks" if splits > 1 else ""
    return f"{t.block_m:3d} x {t.block_n:3d}, {t.num_warps} warps, {t.num_stages} stages, {splits:2d} splits{merged:22}"


def choices(s: Scenario, quick: bool) -> Iterator[tuple[Tiling, int]]:
    """The default first; then other tilings at its splits, other splits at its tiling, both ways of merging."""
    tiling = choose_tiling(s.pairs, s.dim, s.dim, DTYPE.itemsize)
    tiles = s.batch * s.kv_heads * -(-s.pairs // tiling.block_m)
    splits = choose_splits(tiles, s.max_context + s.queries, num_sms(torch.device("cuda")))
    yield tiling, splits
    if splits > 1:
        yield replace(tiling, fused=not tiling.fused), splits
    if quick:
        return
    for numbers in TILINGS[tiling.block_m]:
        other = Tiling(*numbers, fused=tiling.fused, min_split_blocks=tiling.min_split_blocks)
        if other != tiling:
            yield other, splits
    if s.context:
        for n in sorted({1, 2, 4, splits // 2, splits * 2} - {0, splits}):
            yield tiling, n
        for blocks in (1, 2, 8):
            if splits > 1:
                yield replace(tiling, min_split_blocks=blocks), splits


class Setup:
    """The tensors of a scenario: layers of KV, one view of them."""

    def __init__(self, s: Scenario, page_size: int) -> None:
        lens = s.contexts()
        width = -(-(max(lens) + s.queries) // page_size) * page_size
        num_pages = s.batch * width // page_size
        pages = torch.randperm(num_pages, device="cuda") + 1
        slots = pages[:, None] * page_size + torch.arange(page_size, device="cuda")
        table = torch.zeros(s.batch + 1, max(width, s.bound + s.queries), dtype=torch.int32, device="cuda")
        table[1:, :width] = slots.view(s.batch, width)
        kv_bytes = (sum(lens) + s.batch * s.queries) * s.kv_heads * s.dim * 2 * DTYPE.itemsize
        self.num_layers = min(512, max(2, -(-CACHE_BYTES // kv_bytes)))
        shape = (self.num_layers, (num_pages + 1) * page_size, s.kv_heads, s.dim)
        self.keys, self.values = (torch.randn(shape, dtype=DTYPE, device="cuda") for _ in range(2))
        t = s.batch * s.queries
        self.query = torch.randn(t, s.heads, s.dim, dtype=DTYPE, device="cuda")
        prefix_lens = torch.tensor(lens, device="cuda")
        self.view = PagedView(
            table=table,
            rows=torch.arange(1, s.batch + 1, device="cuda"),
            prefix_lens=prefix_lens,
            max_prefix_len=s.max_context,
            max_queries=s.queries,
            window=binary_trees(prefix_lens, s.queries) if s.tree else None,
        )
        self.scaling = s.dim**-0.5
        self.bytes_moved = kv_bytes + 2 * self.query.numel() * DTYPE.itemsize
        keys_seen = sum(lens) * s.queries + s.batch * s.queries * (s.queries if s.tree else s.queries / 2)
        self.flop = 4 * keys_seen * s.heads * s.dim

    def all_layers(self, tiling: Tiling, num_splits: int) -> None:
        for keys, values in zip(self.keys, self.values, strict=True):
            paged_attention_triton(
                self.query, keys, values, self.view, self.scaling, tiling=tiling, num_splits=num_splits
            )

    def first_request(self, attend: Callable[..., Tensor], **options: Any) -> Tensor:
        v = self.view
        window = v.window and TreeWindow(
            visible=v.window.visible[:1],
            query_positions=v.window.query_positions[:1],
            window_positions=v.window.window_positions[:1],
        )
        view = replace(v, rows=v.rows[:1], prefix_lens=v.prefix_lens[:1], window=window, scratch={})
        return attend(
            self.query[: v.max_queries], self.keys[0], self.values[0], view, self.scaling, **options
        )

    def exact(self) -> Tensor:
        """The reference of the first request, in fp32."""

        def in_fp32(query: Tensor, keys: Tensor, values: Tensor, *rest: Any) -> Tensor:
            return paged_attention_reference(query.float(), keys.float(), values.float(), *rest)

        return self.first_request(in_fp32)


def binary_trees(prefix_lens: Tensor, n: int) -> TreeWindow:
    node = torch.arange(n)
    visible = torch.eye(n, dtype=torch.bool)
    for j in range(1, n):
        visible[j] |= visible[(j - 1) // 2]
    depths = (node + 1).log2().floor().long()
    positions = prefix_lens[:, None] + depths.to(prefix_lens.device)
    return TreeWindow(
        visible=visible.to(prefix_lens.device).expand(len(prefix_lens), n, n),
        query_positions=positions,
        window_positions=positions,
    )


def seconds_of_graph(launch: Callable[[], object], repeats: int = 15) -> float:
    """Median time of one replay of a captured graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launch()  # compiles, and allocates what a capture may not
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        launch()
    times = []
    for _ in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return float(statistics.median(times[3:]))


def copy_bandwidth() -> float:
    """Bytes per second, read and written, of copying 2 GiB on the device."""
    source = torch.randint(256, (2 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds_of_graph(lambda: target.copy_(source))


if __name__ == "__main__":
    main()
