"""Products of few tokens: as close to the truth as torch's, every token by itself, whatever the shapes."""

import pytest
import torch

from spec_v2.kernels.few_token_linear import MAX_TOKENS, few_token_linear, one_token_gated
from spec_v2.kernels.few_token_linear.triton_kernel import (
    choose_cut,
    few_token_linear_triton,
    one_token_gated_triton,
)
from spec_v2.kernels.silu_mul.reference import silu_mul_reference
from tests.kernels.accuracy import bf16_rounds_as_on_a_gpu, randn  # noqa: F401
from tests.kernels.support import DEVICE, INTERPRETED, assert_same, spread

# The interpreter multiplies the bits of bf16 as if they were integers; the path of one token multiplies in fp32.
DTYPES = [torch.float16] if INTERPRETED else [torch.bfloat16, torch.float16]
# (features, inputs) of SmolLM2, of Llama-8B, and of an EAGLE-3 head for it
WIDTHS = [
    (960, 576),
    (3072, 576),
    (49152, 576),
    (576, 1536),
    (4096, 4096),
    (6144, 4096),
    (28672, 4096),
    (4096, 14336),
]


def launches():
    """What compiles for sm_90: every cut in use, with a bias and without."""
    found = {}
    for n, k in [*WIDTHS, (6144, 8192), (50, 100)]:
        for t in (1, 2):
            weight, x = (
                torch.zeros(1, dtype=torch.bfloat16).expand(n, k),
                torch.zeros(t, k, dtype=torch.bfloat16),
            )
            bias = torch.zeros(n, dtype=torch.bfloat16) if n < 4096 else None
            found[f"{t} {n} {k}"] = lambda x=x, w=weight, b=bias: few_token_linear_triton(x, w, b)
            if t == 1:
                found[f"gated {n} {k}"] = lambda x=x, w=weight: one_token_gated_triton(x, w)
    return found


def case(t, n, k, dtype):
    return randn(t, k, dtype=dtype, seed=1), randn(n, k, dtype=dtype, seed=2), randn(n, dtype=dtype, seed=3)


def relative_error(got, truth):
    return float((got.double() - truth).norm() / truth.norm())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("t", [1, 2, 7, 16])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (37, 100), (65, 577), (33, 1100), (70, 2100)])
def test_as_close_to_the_truth_as_torch(t, n, k, dtype):
    x, weight, bias = case(t, n, k, dtype)
    for b in (None, bias):
        got = few_token_linear_triton(x, weight, b)
        truth = x.double() @ weight.double().T + (0 if b is None else b.double())
        want = torch.nn.functional.linear(x, weight, b)
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        assert relative_error(got, truth) <= 2 * relative_error(want, truth) + torch.finfo(dtype).eps / 4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (37, 100), (33, 1100), (70, 2100)])
def test_gated_is_the_product_and_then_the_gate(n, k, dtype):
    x, weight, _ = case(1, 2 * n, k, dtype)
    got = one_token_gated_triton(x, weight / k**0.5)
    product = few_token_linear_triton(x, weight / k**0.5, None)
    want = silu_mul_reference(*product.chunk(2, -1))
    assert (got.dtype, got.shape) == (dtype, (1, n))
    # the same sums in another order of roundings at most: an ulp of each factor
    torch.testing.assert_close(
        got, want, rtol=4 * torch.finfo(dtype).eps, atol=1e-3 * float(want.abs().max())
    )
    assert_same(
        one_token_gated(x.double(), weight.double()).isfinite().all(), torch.tensor(True, device=DEVICE)
    )


@pytest.mark.skipif(INTERPRETED, reason="takes too long in the interpreter")
@pytest.mark.parametrize("t", [1, 5, 16])
@pytest.mark.parametrize(("n", "k"), WIDTHS)
def test_widths_in_use(t, n, k):
    x, weight, _ = case(t, n, k, torch.bfloat16)
    truth = x.double() @ weight.double().T
    assert relative_error(few_token_linear_triton(x, weight, None), truth) <= 2**-8


@pytest.mark.parametrize("t", [1, 4])
def test_any_strides(t):
    x, weight, bias = case(t, 40, 200, torch.float16)
    want = few_token_linear_triton(x, weight, bias)
    assert_same(few_token_linear_triton(spread(x), spread(weight), bias), want)


def test_a_token_does_not_depend_on_the_others_and_poison_stays_where_it_is():
    x, weight, _ = case(9, 40, 200, torch.float16)
    want = few_token_linear_triton(x, weight, None)
    poisoned = x.clone()
    poisoned[3] = torch.nan
    got = few_token_linear_triton(poisoned, weight, None)
    others = torch.arange(9, device=DEVICE) != 3
    assert_same(got[others], want[others])
    assert got[3].isnan().all()
    assert_same(few_token_linear_triton(x[4:7], weight, None), want[4:7])


@pytest.mark.parametrize("t", [1, 3])
def test_nothing_is_written_beyond_the_output(t, monkeypatch):
    """Neither features nor tokens are a multiple of a program's."""
    x, weight, _ = case(t, 41, 96, torch.float16)
    want = few_token_linear_triton(x, weight, None)
    home = torch.full((20, 41), 7.0, dtype=torch.float16, device=DEVICE)
    monkeypatch.setattr(torch, "empty", lambda *sizes, **kwargs: home[:t])
    assert_same(few_token_linear_triton(x, weight, None), want)
    assert (home[t:] == 7).all()


def test_nothing_to_do():
    x, weight, _ = case(3, 41, 96, torch.float16)
    assert few_token_linear_triton(x[:0], weight, None).shape == (0, 41)
    assert few_token_linear_triton(x, weight[:0], None).shape == (3, 0)


def test_more_tokens_and_other_dtypes_are_torchs():
    x, weight = torch.randn(MAX_TOKENS + 1, 8, dtype=torch.float64), torch.randn(3, 8, dtype=torch.float64)
    assert_same(few_token_linear(x.to(DEVICE), weight.to(DEVICE)), (x @ weight.T).to(DEVICE))
    with pytest.raises(ValueError, match="one dtype"):
        few_token_linear(x, weight.float())


def test_every_shape_has_a_cut_that_fits_into_shared_memory():
    for t in (1, 16):
        for n in (1, 4097, 20000):
            for k in (1, 1024, 1025, 2048, 2049, 8192):
                cut = choose_cut(t, n, k)
                assert 2 * cut.num_stages * cut.block_k * (cut.block_n + 16) <= 200 * 1024
