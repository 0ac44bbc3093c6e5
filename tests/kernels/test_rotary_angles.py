"""Cosines and sines are transformers' own."""

import pytest
import torch

from spec_v2.kernels.rotary_angles import rotary_angles
from spec_v2.kernels.rotary_angles.reference import rotary_angles_reference
from spec_v2.kernels.rotary_angles.triton_kernel import rotary_angles_triton
from tests.kernels.accuracy import DTYPES, bf16_rounds_as_on_a_gpu  # noqa: F401
from tests.kernels.support import DEVICE, assert_same, seeded, spread

POSITIONS = torch.tensor([0, 1, 2, 100, 4095, 131_071])


def launches():
    """What compiles for sm_90: heads of 64 and 128."""
    positions = torch.zeros(8, dtype=torch.long)
    return {
        f"{half} {dtype}": lambda half=half, dtype=dtype: rotary_angles_triton(
            positions, torch.zeros(half), 1.0, dtype
        )
        for half in (32, 64)
        for dtype in (torch.bfloat16, torch.float32)
    }


def frequencies(half, base=10_000.0):
    return (1.0 / base ** (torch.arange(0, 2 * half, 2, dtype=torch.float) / (2 * half))).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("half", "scaling"), [(1, 1.0), (12, 1.0), (32, 1.25)])
def test_angles_are_the_references(half, scaling, dtype):
    positions, inv_freq = POSITIONS.to(DEVICE), frequencies(half)
    got = rotary_angles_triton(spread(positions), spread(inv_freq), scaling, dtype)
    want = rotary_angles_reference(positions, inv_freq, scaling, dtype)
    for one, other in zip(got, want, strict=True):
        assert (one.dtype, one.shape) == (dtype, (len(positions), 2 * half))
        torch.testing.assert_close(one.float(), other.float(), rtol=torch.finfo(dtype).eps, atol=1e-6)
        assert (one[:, :half] == one[:, half:]).all()


def test_other_integers_and_no_tokens():
    inv_freq = frequencies(8)
    wide, narrow = (
        rotary_angles_triton(POSITIONS.to(DEVICE, dtype), inv_freq, 1.0, torch.float32)
        for dtype in (torch.int64, torch.int32)
    )
    assert_same(narrow, wide)
    cos, _ = rotary_angles_triton(POSITIONS[:0].to(DEVICE), inv_freq, 1.0, torch.float32)
    assert cos.shape == (0, 16)


@pytest.mark.parametrize("rope_type", ["default", "llama3"])
def test_the_reference_is_transformers(rope_type):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = {"rope_type": rope_type, "rope_theta": 5e5}
    if rope_type == "llama3":
        rope |= {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope |= {"original_max_position_embeddings": 8192}
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=2, max_position_embeddings=200_000, rope_parameters=rope
    )
    rotary = LlamaRotaryEmbedding(config)
    x = torch.randn(1, len(POSITIONS), 64, generator=seeded())
    for dtype in (*DTYPES, torch.float64):
        got = rotary_angles(POSITIONS, rotary.inv_freq, rotary.attention_scaling, dtype)
        wanted = tuple(part[0] for part in rotary(x.to(dtype), POSITIONS[None]))
        # torch's own cosine may differ in the last bit with how a tensor lies in memory
        torch.testing.assert_close(
            got, wanted, rtol=0, atol=torch.finfo(dtype if dtype.itemsize < 4 else torch.float32).eps
        )
