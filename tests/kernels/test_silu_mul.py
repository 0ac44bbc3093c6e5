"""silu(gate) * up: where torch rounds, as close to the truth as torch is."""

import pytest
import torch

from spec_v2.kernels.silu_mul import silu_mul
from spec_v2.kernels.silu_mul.reference import silu_mul_reference
from spec_v2.kernels.silu_mul.triton_kernel import silu_mul_triton
from tests.kernels.accuracy import DTYPES, assert_within_an_ulp, bf16_rounds_as_on_a_gpu, error_of, randn  # noqa: F401
from tests.kernels.support import DEVICE, assert_same, seeded, spread


def launches():
    """What compiles for sm_90: the widths of SmolLM2 and Llama-8B, as halves of one tensor."""
    found = {}
    for width in (1536, 14336):
        for dtype in (torch.bfloat16, torch.float32):
            both = torch.zeros(8, 2 * width, dtype=dtype)
            found[f"{width} {dtype}"] = lambda both=both: silu_mul_triton(*both.chunk(2, -1))
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("t", "width"), [(1, 1), (3, 17), (2, 1536), (1, 2049)])
def test_as_close_to_the_truth_as_torch(t, width, dtype):
    gate, up = randn(t, width, dtype=dtype, seed=1) * 4, randn(t, width, dtype=dtype, seed=2)
    wider = torch.cat([up, up], -1)[:, :width]  # rows further apart than the gate's
    assert_same(silu_mul_triton(gate, wider), silu_mul_triton(spread(gate), spread(up)))
    got, want = silu_mul_triton(gate, up), silu_mul_reference(gate, up)
    truth = gate.double().sigmoid() * gate.double() * up.double()
    assert error_of(got, truth) <= 1.01 * error_of(want, truth) + 1e-6
    assert_within_an_ulp(got, want)


def test_halves_of_one_product_are_read_where_they_lie(monkeypatch):
    both = randn(5, 96, dtype=torch.bfloat16)
    gate, up = both.split([48, 48], -1)
    want = silu_mul_triton(gate.contiguous(), up.contiguous())
    monkeypatch.setattr(torch.Tensor, "contiguous", None)
    assert_same(silu_mul_triton(gate, up), want)


def test_the_gate_is_rounded_before_the_product():
    """Where it matters: one rounding at the end gives another number."""
    gate, up = randn(1, 4096, dtype=torch.bfloat16, seed=3), randn(1, 4096, dtype=torch.bfloat16, seed=4)
    once = (torch.nn.functional.silu(gate.float()) * up.float()).bfloat16()
    want = silu_mul_reference(gate, up)
    assert (once != want).float().mean() > 0.1
    assert (silu_mul_triton(gate, up) != want).float().mean() < 0.01


def test_extremes():
    inf, nan = torch.inf, torch.nan
    gate = torch.tensor([[-200.0, 200.0, 0.0, inf, nan, -100.0, 1.0]], device=DEVICE)
    up = torch.tensor([[3.0, 3.0, 3.0, 1.0, 1.0, nan, inf]], device=DEVICE)
    assert_same(
        silu_mul_triton(gate, up)[:, [0, 1, 2, 3, 4, 5]].abs(), silu_mul_reference(gate, up)[:, :6].abs()
    )
    assert silu_mul_triton(gate, up)[0, 6] == inf


def test_no_rows_and_other_dtypes():
    empty = torch.empty(0, 8, device=DEVICE)
    assert silu_mul_triton(empty, empty).shape == (0, 8)
    with pytest.raises(ValueError, match="one dtype"):
        silu_mul(torch.zeros(1, 8), torch.zeros(1, 8, dtype=torch.float64))
    gate, up = (torch.randn(2, 9, dtype=torch.float64, generator=seeded(i)) for i in (5, 6))
    torch.testing.assert_close(silu_mul(gate, up), gate / (1 + (-gate).exp()) * up, rtol=1e-14, atol=0)
