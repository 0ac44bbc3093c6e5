"""The `k` most probable tokens of each row, ties to the lowest id.

torch.topk leaves the order of ties to the device, so the same tree could differ between devices and batch
sizes. Reads `r * v` numbers `k` times, writes `2 * r * k`.
"""

from spec_v2.kernels.top_k.reference import top_k_reference as top_k

__all__ = ["top_k"]
