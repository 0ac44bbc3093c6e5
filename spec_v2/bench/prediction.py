"""How long a step must take at least: its bytes at the speed of a copy, or its arithmetic at the speed of a product.

Printed before a row is measured, beside what is measured. The model knows no launches, so a small model on a GPU,
whose step is a few hundred kernels of a microsecond each, is far above it; a large one should come near.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Hardware:
    """Measured here: bytes per second of a copy, read and written together, and the rate of a large product."""

    copy_bytes_per_second: float
    flops_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """What a forward reads and computes. Weights of the embedding count only where the output layer is tied to it."""

    num_weights: int
    bytes_per_weight: int
    kv_bytes_per_token: int
    attention_flops_per_key: int  # for one token
    vocab_size: int

    def seconds(self, hardware: Hardware, batch_size: int, tokens: int, context: int) -> float:
        """One forward of `tokens` per request behind `context` cached ones: memory or arithmetic, whichever is more."""
        rows = batch_size * tokens
        moved = self.num_weights * self.bytes_per_weight
        moved += (batch_size * context + rows) * self.kv_bytes_per_token
        moved += rows * self.vocab_size * self.bytes_per_weight
        computed = rows * (2 * self.num_weights + self.attention_flops_per_key * context)
        return max(moved / hardware.copy_bytes_per_second, computed / hardware.flops_per_second)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """A decode step: one target forward over `num_nodes`; with a drafter `num_steps - 1` forwards over `topk` tokens
    and one over the `accept_width` tokens that a step can emit."""

    target: ModelCost
    draft: ModelCost | None
    num_nodes: int
    num_steps: int
    topk: int
    accept_width: int

    def seconds(self, hardware: Hardware, batch_size: int, context: int) -> float:
        whole = self.target.seconds(hardware, batch_size, self.num_nodes, context)
        if self.draft is None:
            return whole
        grow = self.draft.seconds(hardware, batch_size, self.topk, context)
        extend = self.draft.seconds(hardware, batch_size, self.accept_width, context)
        return whole + (self.num_steps - 1) * grow + extend


def cost_of(model: Any, embedding: nn.Module) -> ModelCost:
    """The cost of a transformers causal LM, or of a head with its interface, before its weights are rearranged."""
    config = model.config
    output = model.lm_head.weight
    weights = [p for p in model.parameters() if p.dim() == 2 and (p is output or p is not embedding.weight)]
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    itemsize = output.dtype.itemsize
    return ModelCost(
        num_weights=sum(p.numel() for p in weights),
        bytes_per_weight=itemsize,
        kv_bytes_per_token=2 * config.num_hidden_layers * config.num_key_value_heads * width * itemsize,
        attention_flops_per_key=4 * config.num_hidden_layers * config.num_attention_heads * width,
        vocab_size=output.shape[0],
    )


def measure_hardware(device: torch.device, dtype: torch.dtype) -> Hardware:
    """Copy and multiply until it is known how fast that is: a fraction of a second on a GPU."""
    num_bytes, side = (2 << 30, 8192) if device.type == "cuda" else (1 << 27, 768)
    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copying = seconds_of(lambda: target.copy_(source), device)
    # random numbers: a GPU multiplies ones at a higher clock than it could keep up with weights
    left = torch.randn(side, side, device=device).to(dtype)
    multiplying = seconds_of(lambda: left @ left, device)
    return Hardware(2 * num_bytes / copying, 2 * side**3 / multiplying)


def seconds_of(run: Callable[[], Any], device: torch.device, repetitions: int = 5) -> float:
    """The median time of a call, after one that does not count. On CUDA by events of the current stream."""
    run()
    times: list[float] = []
    for _ in range(repetitions):
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        else:
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
    return statistics.median(times)
