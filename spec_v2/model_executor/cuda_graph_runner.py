"""Recorded launches on CUDA: one CUDA graph each, all in one memory pool, captured and replayed on the forward stream."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, final

import torch

from spec_v2.model_executor.graph_runner import GraphRunner


@final
class CudaGraphRunner(GraphRunner):
    """CUDA graphs that share a pool: they are replayed in the order in which they were captured."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, fn: Callable[..., Any], args: Sequence[Any]) -> tuple[Callable[[], None], Any]:
        graph = torch.cuda.CUDAGraph()
        # thread_local: downloads on the copy stream go on meanwhile
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            outputs = fn(*args)
        finally:
            with warnings.catch_warnings():
                warnings.filterwarnings(
                    "ignore", message="The CUDA Graph is empty"
                )  # it made empty tensors only
                graph.capture_end()
        return graph.replay, outputs
