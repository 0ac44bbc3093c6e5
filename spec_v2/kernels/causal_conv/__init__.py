"""The short causal convolution in front of a recurrence, over sequences or trees, and the window that it leaves behind.

Each channel is a weighted sum of its newest `k` inputs. `taps` says where each of them is, oldest first: a number of 0 or
more is a token of this forward, -1 is the newest input before it, -2 the one before that, in the window of the request's
row. So prompts, chains and trees are one operation: in a tree the taps of a node follow its own path.

Bytes moved by `causal_conv`: reads and writes `t * c` numbers once (neighbours read the same inputs, from cache), and
`8 * t * k` bytes of indices. `save_windows` moves `2 * p * s * (k - 1) * c` numbers.
"""

from jaxtyping import Float, Int
from torch import Tensor

from spec_v2.kernels import floats
from spec_v2.kernels.causal_conv.reference import causal_conv_reference, save_windows_reference

__all__ = ["causal_conv", "save_windows"]


def causal_conv(
    x: Float[Tensor, "tokens c"],
    windows: Float[Tensor, "rows before c"],
    rows: Int[Tensor, " t"],
    taps: Int[Tensor, "t k"],
    weight: Float[Tensor, "c k"],
    bias: Float[Tensor, " c"] | None,
    silu: bool,
) -> Float[Tensor, "t c"]:
    """One output per row of `taps`; `before` is `k - 1`. `rows`: whose window its negative taps read; `silu`: whether SiLU follows.

    Summed in fp32 (float64 stays float64) and rounded to the dtype of `x` before SiLU, as transformers does.
    """
    if floats.runs_triton(x):
        from spec_v2.kernels.causal_conv.triton_kernel import causal_conv_triton

        return causal_conv_triton(x, windows, rows, taps, weight, bias, silu)
    return causal_conv_reference(x, windows, rows, taps, weight, bias, silu)


def save_windows(
    x: Float[Tensor, "tokens c"],
    windows: Float[Tensor, "rows before c"],
    start_rows: Int[Tensor, " p"],
    taps: Int[Tensor, "t k"],
    save_tokens: Int[Tensor, "p s"],
    save_rows: Int[Tensor, "p s"],
) -> None:
    """Put the newest `k - 1` inputs as of token `save_tokens[i, j]` into row `save_rows[i, j]`. Row 0: nothing is put.

    `start_rows[i]` is the row that the negative taps of those tokens read. It may be a target of `i`, but of no other.
    """
    if floats.runs_triton(x):
        from spec_v2.kernels.causal_conv.triton_kernel import save_windows_triton

        return save_windows_triton(x, windows, start_rows, taps, save_tokens, save_rows)
    return save_windows_reference(x, windows, start_rows, taps, save_tokens, save_rows)
