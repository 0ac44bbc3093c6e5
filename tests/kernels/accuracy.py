"""How far results are from the truth, and from each other."""

import numpy as np
import pytest
import torch

from tests.kernels.support import DEVICE, INTERPRETED, seeded

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def randn(*shape, dtype, seed=0):
    """Normal numbers, rounded to the dtype; the same on every device."""
    return torch.randn(*shape, generator=seeded(seed)).to(DEVICE, dtype)


def error_of(got, truth):
    """The largest relative error."""
    return float(((got.double() - truth).abs() / truth.abs().clamp(min=1e-30)).max())


def assert_within_an_ulp(got, want, atol=0.0):
    """Equal, but for roundings that went the other way: two of them, in fp32 a few as its functions differ."""
    ulps = 8 if want.dtype == torch.float32 else 2
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    eps = torch.finfo(want.dtype).eps
    torch.testing.assert_close(got.double(), want.double(), rtol=ulps * eps, atol=atol)
    if want.dtype != torch.float32:
        assert (got != want).sum() <= max(4, 0.02 * got.numel())


@pytest.fixture(autouse=True)
def bf16_rounds_as_on_a_gpu(monkeypatch):
    """To the nearest, ties to even; the interpreter cuts off. For test modules that import it."""
    if not INTERPRETED:
        return
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast = InterpreterBuilder.cast_impl

    def rounding_cast(self, src, dst_type):
        if not (src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16):
            return cast(self, src, dst_type)
        bits = np.ascontiguousarray(src.data, dtype=np.float32).view(np.uint32).astype(np.uint64)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = np.where(np.isnan(src.data), (bits >> 16) | 0x40, rounded)
        return TensorHandle(rounded.astype(np.uint16).reshape(np.shape(src.data)), tl.bfloat16)

    monkeypatch.setattr(InterpreterBuilder, "cast_impl", rounding_cast)
    monkeypatch.setattr(InterpreterBuilder, "create_fp_trunc", rounding_cast)
