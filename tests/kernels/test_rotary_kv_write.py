"""Rotary positions and the KV write: bit for bit the reference, nothing else in the pool touched."""

import pytest
import torch

from spec_v2.kernels.rotary_kv_write import HeadNorms, rotary_kv_write
from spec_v2.kernels.rotary_kv_write.reference import rotary_kv_write_reference
from spec_v2.kernels.rotary_kv_write.triton_kernel import rotary_kv_write_triton
from tests.kernels.accuracy import DTYPES, assert_within_an_ulp, bf16_rounds_as_on_a_gpu, randn  # noqa: F401
from tests.kernels.support import DEVICE, assert_same, seeded, spread

SLOTS = 50
# heads, kv_heads, dim, value_dim, rotary_dim (0: none)
SHAPES = [
    (1, 1, 2, 2, 2),
    (9, 3, 16, 16, 16),  # groups that are not full
    (5, 5, 12, 20, 12),  # no powers of two, values of another width
    (4, 2, 32, 32, 8),  # partial
    (3, 1, 24, 24, 0),  # no positions
    (40, 2, 128, 128, 128),
]


def launches():
    """What compiles for sm_90: SmolLM2 and Llama-8B straight from one product, Qwen3, partial and no positions."""
    found = {}
    for heads, kv_heads, dim, rotary_dim, normed in (
        (9, 3, 64, 64, False),
        (32, 8, 128, 128, False),
        (32, 8, 128, 128, True),
        (8, 2, 128, 32, False),
        (16, 4, 128, 0, False),
    ):
        for dtype in (torch.bfloat16, torch.float32):
            qkv = torch.zeros(8, heads + 2 * kv_heads, dim, dtype=dtype)
            angles = (torch.zeros(8, rotary_dim, dtype=dtype),) * 2 if rotary_dim else None
            pool = torch.zeros(64, kv_heads, dim, dtype=dtype), torch.zeros(64, kv_heads, dim, dtype=dtype)
            norms = HeadNorms(qkv[0, 0], qkv[0, 1], 1e-6) if normed else None
            slots = torch.zeros(8, dtype=torch.long)
            args = (*qkv.split([heads, kv_heads, kv_heads], 1), angles, slots, *pool, norms)
            found[f"{heads} x {dim}, {rotary_dim} turn, {normed}, {dtype}"] = lambda args=args: (
                rotary_kv_write_triton(*args)
            )
    return found


def inputs(t, shape, dtype, *, normed=False):
    """Arguments with a poisoned pool, and two copies of the pool."""
    heads, kv_heads, dim, value_dim, rotary_dim = shape
    query, key = randn(t, heads, dim, dtype=dtype, seed=1), randn(t, kv_heads, dim, dtype=dtype, seed=2)
    value = randn(t, kv_heads, value_dim, dtype=dtype, seed=3)
    angles = None
    if rotary_dim:  # the halves differ, so that one in the other's place shows
        angles = randn(t, rotary_dim, dtype=dtype, seed=4), randn(t, rotary_dim, dtype=dtype, seed=5)
    slots = torch.randperm(SLOTS, generator=seeded(6))[:t].to(DEVICE)
    norms = None
    if normed:
        norms = HeadNorms(randn(dim, dtype=dtype, seed=7), randn(dim, dtype=dtype, seed=8), 1e-6)
    pools = [
        [
            torch.full((SLOTS, kv_heads, width), torch.nan, dtype=dtype, device=DEVICE)
            for width in (dim, value_dim)
        ]
        for _ in range(2)
    ]
    return (query, key, value, angles, slots), norms, pools


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bit_for_bit(shape, dtype):
    (query, key, value, angles, slots), _, (got_pool, want_pool) = inputs(7, shape, dtype)
    want = rotary_kv_write_reference(query, key, value, angles, slots, *want_pool)
    spread_angles = None if angles is None else tuple(map(spread, angles))
    got = rotary_kv_write_triton(
        spread(query), spread(key), spread(value), spread_angles, spread(slots), *got_pool
    )
    assert got.is_contiguous()
    assert_same(got, want)
    assert_same(got_pool, want_pool)  # NaN where nothing was written


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norms_of_the_heads(shape, dtype):
    args, norms, (got_pool, want_pool) = inputs(5, shape, dtype, normed=True)
    wide_pool = [x.double() for x in want_pool]
    want = rotary_kv_write_reference(*args, *want_pool, norms)
    got = rotary_kv_write_triton(*args, *got_pool, norms)
    double = [x if x is None or not isinstance(x, torch.Tensor) else x.double() for x in args[:3]]
    angles = None if args[3] is None else tuple(x.double() for x in args[3])
    wide_norms = HeadNorms(norms.query_weight.double(), norms.key_weight.double(), norms.eps)
    truth = rotary_kv_write_reference(*double, angles, args[4], *wide_pool, wide_norms)
    slots = args[4]
    for one, other, right in (
        (got, want, truth),
        (got_pool[0][slots], want_pool[0][slots], wide_pool[0][slots]),
    ):
        # where two products cancel, what is left is their rounding
        size = right.abs().amax(-1, keepdim=True)
        worst, torchs = ((x.double() - right).abs() / size for x in (one, other))
        assert worst.max() <= 1.05 * torchs.max() + 5e-7
        assert_within_an_ulp(one, other, atol=float(size.max()) * 4 * torch.finfo(dtype).eps)
    assert_same(got_pool[1], want_pool[1])


@pytest.mark.parametrize("bits", [torch.int32, torch.int64])
def test_parts_of_one_product_are_read_where_they_lie(monkeypatch, bits):
    (query, key, value, angles, slots), _, (got_pool, want_pool) = inputs(3, SHAPES[1], torch.bfloat16)
    want = rotary_kv_write_triton(query, key, value, angles, slots, *want_pool)
    parts = torch.cat([query, key, value], 1).split([9, 3, 3], 1)
    monkeypatch.setattr(torch.Tensor, "contiguous", None)
    assert_same(rotary_kv_write_triton(*parts, angles, slots.to(bits), *got_pool), want)
    assert_same(got_pool, want_pool)


def test_padding_tokens_share_slot_0():
    args, _, (pool, _) = inputs(4, SHAPES[1], torch.float32)
    query, key, value, angles, slots = args
    slots = torch.where(torch.arange(4, device=DEVICE) < 2, slots.clamp(min=1), 0)
    rotary_kv_write_triton(query, key, value, angles, slots, *pool)
    assert any(torch.equal(pool[1][0], value[i]) for i in (2, 3))
    assert torch.equal(pool[1][slots[0]], value[0])


def test_no_tokens_touch_nothing():
    args, _, (pool, untouched) = inputs(0, SHAPES[1], torch.float32)
    assert rotary_kv_write_triton(*args, *pool).shape == (0, 9, 16)
    assert_same(pool, untouched)


def test_what_does_not_fit_is_refused():
    (query, key, value, angles, slots), _, (pool, _) = inputs(2, SHAPES[1], torch.float32)
    with pytest.raises(ValueError, match="one dtype"):
        rotary_kv_write(query.double(), key, value, angles, slots, *pool)
    for width in (3, 18):
        wrong = torch.zeros(2, width, device=DEVICE)
        with pytest.raises(ValueError, match=f"rotary_dim={width}"):
            rotary_kv_write(query, key, value, (wrong, wrong), slots, *pool)
    with pytest.raises(ValueError, match="contiguous"):
        rotary_kv_write_triton(query, key, value, angles, slots, spread(pool[0]), pool[1])


@pytest.mark.usefixtures("checked_kernels")
@pytest.mark.parametrize("slot", [SLOTS, -1])
def test_a_slot_outside_of_the_pool_stops_where_it_is_used(slot):
    args, _, (pool, _) = inputs(1, SHAPES[1], torch.float32)
    with pytest.raises(Exception, match="slots: outside of the pool"):
        rotary_kv_write_triton(*args[:4], torch.tensor([slot], device=DEVICE), *pool)


def test_the_reference_is_transformers():
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    (query, key, value, (cos, sin), slots), _, (pool, _) = inputs(6, SHAPES[1], torch.bfloat16)
    args = (x.cpu() for x in (query, key, value))
    cos, sin, slots, pool = cos.cpu(), sin.cpu(), slots.cpu(), [x.cpu() for x in pool]
    got = rotary_kv_write_reference(*args, (cos, sin), slots, *pool)
    q, k = (x.cpu().transpose(0, 1)[None] for x in (query, key))
    q, k = apply_rotary_pos_emb(q, k, cos[None], sin[None])
    assert torch.equal(got, q[0].transpose(0, 1))
    assert torch.equal(pool[0][slots], k[0].transpose(0, 1))
    assert torch.equal(pool[1][slots], value.cpu())
