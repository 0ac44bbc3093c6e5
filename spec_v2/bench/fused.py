"""What the kernels of a decoder layer take, and a layer as a whole, fused and not: `python -m spec_v2.bench.fused`.

On a GPU every figure is the mean of repeated launches inside a CUDA graph, as in a decode step: it contains what it costs
to start a kernel there. Data stay in the L2 cache where they fit, as a layer's activations do.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from spec_v2.kernels.rms_norm import add_rms_norm, rms_norm
from spec_v2.kernels.rms_norm.reference import add_rms_norm_reference, rms_norm_reference
from spec_v2.kernels.rotary_angles import rotary_angles
from spec_v2.kernels.rotary_angles.reference import rotary_angles_reference
from spec_v2.kernels.rotary_kv_write import rotary_kv_write
from spec_v2.kernels.rotary_kv_write.reference import rotary_kv_write_reference
from spec_v2.kernels.silu_mul import silu_mul
from spec_v2.kernels.silu_mul.reference import silu_mul_reference
from spec_v2.mem_cache.kv_pool import KvPool, RowTable
from spec_v2.model_executor.forward_batch import window_forward_batch
from spec_v2.model_executor.fuse import fuse_layers
from spec_v2.model_executor.model_runner import ModelRunner
from spec_v2.model_executor.packing import pack_projections


@dataclass(frozen=True)
class Shape:
    """A layer's widths."""

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int


SHAPES = (Shape("SmolLM2", 576, 1536, 9, 3, 64), Shape("Llama-8B", 4096, 14336, 32, 8, 128))
TOKENS = (1, 8, 32, 256)
PREFIX_LEN = 512
NUM_LAYERS = 4


@dataclass(frozen=True)
class Case:
    """One operation, our way and torch's, and the bytes it must move."""

    name: str
    ours: Callable[[], object]
    torchs: Callable[[], object]
    num_bytes: int


def kernel_cases(shape: Shape, t: int, dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """The operations of one layer for `t` tokens."""

    def randn(*sizes: int) -> Tensor:
        return torch.randn(*sizes, device=device).to(dtype)

    x, residual, weight = randn(t, shape.hidden), randn(t, shape.hidden), randn(shape.hidden)
    row = t * shape.hidden * dtype.itemsize
    yield Case(
        "rms_norm", partial(rms_norm, x, weight, 1e-5), partial(rms_norm_reference, x, weight, 1e-5), 2 * row
    )
    args = (x, residual, weight, 1e-5)
    yield Case("add_rms_norm", partial(add_rms_norm, *args), partial(add_rms_norm_reference, *args), 4 * row)

    gate, up = randn(t, 2 * shape.intermediate).chunk(2, -1)
    yield Case(
        "silu_mul",
        partial(silu_mul, gate, up),
        partial(silu_mul_reference, gate, up),
        3 * t * shape.intermediate * dtype.itemsize,
    )

    positions = torch.arange(t, device=device)
    inv_freq = torch.rand(shape.head_dim // 2, device=device)
    angle_args = (positions, inv_freq, 1.0, dtype)
    angle_bytes = 2 * t * shape.head_dim * dtype.itemsize
    yield Case(
        "rotary_angles",
        partial(rotary_angles, *angle_args),
        partial(rotary_angles_reference, *angle_args),
        angle_bytes,
    )

    heads = [shape.heads, shape.kv_heads, shape.kv_heads]
    query, key, value = randn(t, sum(heads), shape.head_dim).split(heads, 1)
    pool = [randn(2 * t, shape.kv_heads, shape.head_dim) for _ in range(2)]
    slots = torch.randperm(2 * t, device=device)[:t]
    rotary_args = (query, key, value, rotary_angles(*angle_args), slots, *pool)
    yield Case(
        "rotary_kv_write",
        partial(rotary_kv_write, *rotary_args),
        partial(rotary_kv_write_reference, *rotary_args),
        2 * t * sum(heads) * shape.head_dim * dtype.itemsize + angle_bytes,
    )


def model_step(
    shape: Shape, batch_size: int, *, fuse: bool, num_layers: int, dtype: torch.dtype, device: torch.device
) -> Callable[[], object]:
    """One decode step of a random model with packed projections."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=num_layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=2 * PREFIX_LEN,
    )
    with device:
        model = LlamaForCausalLM(config).to(device, dtype).eval().requires_grad_(False)
    pack_projections(model)
    if fuse:
        print(f"    {fuse_layers(model, on_cpu=True)}")
    runner = ModelRunner(model, 2 * PREFIX_LEN)
    num_slots = 1 + batch_size * (PREFIX_LEN + 1)
    table = RowTable(1 + batch_size, PREFIX_LEN + 1, device)
    table.slots[1:] = torch.arange(1, num_slots).view(batch_size, -1)
    positions = torch.full((batch_size, 1), PREFIX_LEN, device=device)
    rows = torch.arange(1, 1 + batch_size, device=device)
    batch = window_forward_batch(
        kv_pool=KvPool(runner.geometry, num_slots, dtype, device),
        row_table=table,
        rows=rows,
        prefix_lens=positions[:, 0],
        max_prefix_len=PREFIX_LEN,
        window_slots=table.at(rows, positions),
        window_positions=positions,
        visible=torch.ones(batch_size, 1, 1, dtype=torch.bool, device=device),
    )
    ids = torch.zeros(batch_size, dtype=torch.long, device=device)
    return partial(runner.forward, ids, positions.flatten(), batch)


def microseconds(fn: Callable[[], object], device: torch.device) -> float:
    """Of one call: in a CUDA graph on a GPU, else as it is."""
    if device.type == "cuda":
        from triton.testing import do_bench_cudagraph

        return 1e3 * float(do_bench_cudagraph(fn))
    fn()
    start = time.perf_counter()
    for _ in range(10):
        fn()
    return 1e5 * (time.perf_counter() - start)


def num_kernels(fn: Callable[[], object]) -> int:
    """How many kernels one call launches on the GPU."""
    from torch.profiler import ProfilerActivity, profile

    fn()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
        fn()
        torch.cuda.synchronize()
    return sum(e.device_type.name == "CUDA" for e in profiler.events())


@torch.no_grad()
def bench_kernels(shapes: Sequence[Shape], tokens: Sequence[int], device: torch.device) -> None:
    """A line per kernel, shape and number of tokens."""
    print(f"{'kernel':16} {'shape':9} {'tokens':>6} {'us':>8} {'GB/s':>8} {'torch us':>9} {'ratio':>6}")
    for shape in shapes:
        for t in tokens:
            for case in kernel_cases(shape, t, torch.bfloat16, device):
                ours, torchs = (microseconds(fn, device) for fn in (case.ours, case.torchs))
                rate = case.num_bytes / ours / 1e3
                print(
                    f"{case.name:16} {shape.name:9} {t:6} {ours:8.2f} {rate:8.1f} {torchs:9.2f} {torchs / ours:6.2f}"
                )


@torch.no_grad()
def bench_layers(
    shapes: Sequence[Shape], tokens: Sequence[int], device: torch.device, num_layers: int = NUM_LAYERS
) -> None:
    """A decode step of a few layers, by layer: embedding, last norm, LM head and angles are shared among them."""
    print(f"one of {num_layers} layers in a decode step behind {PREFIX_LEN} tokens")
    for shape in shapes:
        for batch_size in tokens:
            for fuse in (False, True):
                step = model_step(
                    shape, batch_size, fuse=fuse, num_layers=num_layers, dtype=torch.bfloat16, device=device
                )
                us = microseconds(step, device) / num_layers
                kernels = f"{num_kernels(step) / num_layers:6.1f} kernels" if device.type == "cuda" else ""
                print(
                    f"{shape.name:9} batch {batch_size:4} {'fused' if fuse else 'own':5} {us:8.1f} us {kernels}"
                )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m spec_v2.bench.fused", description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--what", choices=("kernels", "layers", "both"), default="both")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    device = torch.device("cuda")
    if args.what != "layers":
        bench_kernels(SHAPES, args.tokens, device)
    if args.what != "kernels":
        bench_layers(SHAPES, args.tokens, device)


if __name__ == "__main__":
    main()
