"""RMS norm: bit for bit the reference where sums are exact, and as close to the truth as torch is."""

import pytest
import torch

from spec_v2.kernels.rms_norm import add_rms_norm, rms_norm
from spec_v2.kernels.rms_norm.reference import add_rms_norm_reference, rms_norm_reference
from spec_v2.kernels.rms_norm.triton_kernel import WIDEST_ROW, add_rms_norm_triton, rms_norm_triton
from tests.kernels.accuracy import DTYPES, assert_within_an_ulp, bf16_rounds_as_on_a_gpu, error_of, randn  # noqa: F401
from tests.kernels.support import DEVICE, assert_same, seeded, spread

SHAPES = [(1, 1), (3, 17), (2, 576), (5, 1000)]
EPS = 1e-5


def launches():
    """What compiles for sm_90: the widths of SmolLM2 and Llama-8B."""
    found = {}
    for h in (576, 4096):
        for dtype in (torch.bfloat16, torch.float32):
            x, weight = torch.zeros(8, h, dtype=dtype), torch.zeros(h, dtype=dtype)
            found[f"{h} {dtype}"] = lambda x=x, w=weight: rms_norm_triton(x, w, EPS)
            found[f"sum {h} {dtype}"] = lambda x=x, w=weight: add_rms_norm_triton(x, x, w, EPS)
    return found


def exact_rows(t, h):
    """Rows of +-2 whose mean square is 4, so that no order of summation matters."""
    signs = torch.randint(0, 2, (t, h), generator=seeded()) * 2 - 1
    return (2.0 * signs).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("t", "h"), [(1, 1), (3, 16), (2, 512)])
def test_exact_sums_give_the_references_bits(t, h, dtype):
    x, weight = exact_rows(t, h).to(dtype), randn(h, dtype=dtype, seed=1)
    residual = (x.roll(1, 0) * 3).to(dtype)
    assert_same(rms_norm_triton(spread(x), spread(weight), 0.0), rms_norm_reference(x, weight, 0.0))
    got = add_rms_norm_triton(spread(x), spread(residual), spread(weight), 0.25)
    assert_same(got[0], residual + x)
    assert_within_an_ulp(got[1], add_rms_norm_reference(x, residual, weight, 0.25)[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("t", "h"), SHAPES)
def test_norms_are_as_close_to_the_truth_as_torchs(t, h, dtype):
    x, residual = randn(t, h, dtype=dtype, seed=2), randn(t, h, dtype=dtype, seed=3) * 5
    weight = randn(h, dtype=dtype, seed=4)
    for total, got, want in (
        (x, rms_norm_triton(spread(x), weight, EPS), rms_norm_reference(x, weight, EPS)),
        (
            residual + x,
            add_rms_norm_triton(x, spread(residual), weight, EPS)[1],
            add_rms_norm_reference(x, residual, weight, EPS)[1],
        ),
    ):
        truth = rms_norm_reference(total.double(), weight.double(), EPS)
        assert error_of(got, truth) <= 1.01 * error_of(want, truth) + 3e-7
        assert_within_an_ulp(got, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sum_is_torchs_and_is_what_is_normed(dtype):
    x, residual = randn(3, 40, dtype=dtype, seed=5), randn(3, 40, dtype=dtype, seed=6) * 1000
    weight = torch.ones(40, dtype=dtype, device=DEVICE)
    total, normed = add_rms_norm_triton(x, residual, weight, EPS)
    assert_same(total, residual + x)
    assert_same(normed, rms_norm_triton(total, weight, EPS))


def test_eps_counts_and_zeros_stay_zeros():
    tiny = torch.full((2, 8), 1e-4, device=DEVICE)
    tiny[1] = 0
    weight = torch.ones(8, device=DEVICE)
    got = rms_norm_triton(tiny, weight, 1e-6)
    torch.testing.assert_close(got[0], torch.full((8,), 1e-4 / (1e-8 + 1e-6) ** 0.5, device=DEVICE))
    assert (got[1] == 0).all()


def test_a_row_with_nan_spoils_no_other():
    x = randn(3, 16, dtype=torch.float32)
    x[1, 3] = torch.nan
    got = rms_norm_triton(x, torch.ones(16, device=DEVICE), EPS)
    assert got[1].isnan().all()
    assert got[[0, 2]].isfinite().all()


def test_no_rows_and_too_wide_rows():
    weight = torch.ones(16, device=DEVICE)
    total, normed = add_rms_norm_triton(weight.new_empty(0, 16), weight.new_empty(0, 16), weight, EPS)
    assert total.shape == normed.shape == (0, 16)
    wide = weight.new_empty(1, 1).expand(1, WIDEST_ROW + 1)
    with pytest.raises(ValueError, match="hidden_size=65537"):
        rms_norm_triton(wide, wide[0], EPS)


def test_dtypes_must_agree():
    x, weight = torch.zeros(2, 8), torch.zeros(8, dtype=torch.float64)
    with pytest.raises(ValueError, match="one dtype"):
        rms_norm(x, weight, EPS)
    with pytest.raises(ValueError, match="one dtype"):
        add_rms_norm(x, x.double(), weight.float(), EPS)


def test_float64_keeps_its_precision():
    x, weight = (torch.randn(4, 33, dtype=torch.float64, generator=seeded(i)) for i in (7, 8))
    want = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight[0]
    torch.testing.assert_close(rms_norm(x, weight[0], EPS), want, rtol=1e-14, atol=0)
    total, normed = add_rms_norm(x - 1, torch.ones_like(x), weight[0], EPS)
    torch.testing.assert_close(total, x, rtol=0, atol=1e-15)
    torch.testing.assert_close(normed, want, rtol=1e-12, atol=1e-14)


def test_the_reference_is_transformers():
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    norm = LlamaRMSNorm(64, EPS).bfloat16().requires_grad_(False)
    norm.weight.copy_(torch.randn(64, generator=seeded(9)))
    x = torch.randn(7, 64, generator=seeded(10)).bfloat16() * 3
    assert torch.equal(rms_norm_reference(x, norm.weight, EPS), norm(x))
