"""A linear layer of at most 16 tokens, `x @ weight.T + bias`: what decode and verify of few requests spend their time on.

Such a product reads every weight once and does next to nothing with it, so all that counts is how many bytes are on
their way at a time. Sums in fp32, rounded once, after the bias. For one shape of `x` the result is the same bits every
time, and a token's does not depend on the others.

Bytes moved: the weight once, `n * k` numbers; `x` once per program, from the L2 cache.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from spec_v2.kernels import dispatch
from spec_v2.kernels.few_token_linear.reference import few_token_linear_reference, one_token_gated_reference

__all__ = ["MAX_TOKENS", "few_token_linear", "one_token_gated"]

MAX_TOKENS = 16
KERNEL_DTYPES = (torch.bfloat16, torch.float16)


def few_token_linear(
    x: Float[Tensor, "t k"], weight: Float[Tensor, "n k"], bias: Float[Tensor, " n"] | None = None
) -> Float[Tensor, "t n"]:
    """Any strides. More tokens, other dtypes and other devices take the reference. ValueError where dtypes differ."""
    _check(x, weight, bias)
    if _takes_kernel(x):
        from spec_v2.kernels.few_token_linear.triton_kernel import few_token_linear_triton

        return few_token_linear_triton(x, weight, bias)
    return few_token_linear_reference(x, weight, bias)


def one_token_gated(x: Float[Tensor, "1 k"], weight: Float[Tensor, "i2 k"]) -> Float[Tensor, "1 i"]:
    """`silu(gate) * up` of a SwiGLU layer, `weight` the gate's rows and then as many of up; rounded as in `silu_mul`.

    One launch instead of two. (With more tokens the two were faster: a program then holds two blocks of weights.)
    """
    _check(x, weight, None)
    if _takes_kernel(x):
        from spec_v2.kernels.few_token_linear.triton_kernel import one_token_gated_triton

        return one_token_gated_triton(x, weight)
    return one_token_gated_reference(x, weight)


def _takes_kernel(x: Tensor) -> bool:
    return dispatch.runs_triton(x) and x.dtype in KERNEL_DTYPES and len(x) <= MAX_TOKENS


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if x.dtype != weight.dtype or (bias is not None and bias.dtype != weight.dtype):
        raise ValueError(f"x is {x.dtype}, weight {weight.dtype}: convert them to one dtype")
