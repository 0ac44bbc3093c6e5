"""The `k` largest of each row, ties to the lowest id: of given numbers, or of logits with their probabilities.

torch.topk leaves the order of ties to the device, so the same tree could differ between devices and batch sizes.
The order is that of torch.argmax, taken `k` times: NaN above everything, -0 equal to 0.

Bytes moved: `r * v` numbers are read once, whatever `k` is; candidates and outputs are small beside them. Rows are
split over several programs, so one row of a large vocabulary is read by many multiprocessors; a second launch merges.
"""

from jaxtyping import Float, Int
from torch import Tensor

from spec_v2.kernels import dispatch
from spec_v2.kernels.top_k.reference import top_k_probs_reference, top_k_reference

__all__ = ["top_k", "top_k_probs"]


def top_k(values: Float[Tensor, "r v"], k: int) -> tuple[Float[Tensor, "r k"], Int[Tensor, "r k"]]:
    """Values and ids, best first; ids of one row are distinct. `k = 1` is the arg-max.

    Raises ValueError unless `1 <= k <= v`.
    """
    _check_k(values, k)
    if dispatch.runs_triton(values):
        from spec_v2.kernels.top_k.triton_kernel import top_k_triton

        return top_k_triton(values, k)
    return top_k_reference(values, k)


def top_k_probs(
    logits: Float[Tensor, "r v"], k: int, id_map: Int[Tensor, " v"] | None = None
) -> tuple[Float[Tensor, "r k"], Int[Tensor, "r k"]]:
    """Softmax probabilities (fp32) and ids of the `k` largest logits of each row, best first.

    A row without a softmax (NaN, +inf, nothing but -inf) gives ids `0 .. k - 1` with probability 0: it loses its
    drafts and nothing else. `id_map`: the ids to report, for a head whose vocabulary is a part of the target's.
    Raises ValueError unless `1 <= k <= v`.
    """
    _check_k(logits, k)
    if dispatch.runs_triton(logits):
        from spec_v2.kernels.top_k.triton_kernel import top_k_probs_triton

        return top_k_probs_triton(logits, k, id_map)
    return top_k_probs_reference(logits, k, id_map)


def _check_k(values: Tensor, k: int) -> None:
    if not 1 <= k <= values.shape[1]:
        raise ValueError(f"k={k}: a row has {values.shape[1]} numbers; take 1 to that many of them")
