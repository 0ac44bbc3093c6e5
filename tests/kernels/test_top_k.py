"""Top-k and arg-max: bit for bit the reference, probabilities as close as fp32 allows."""

import pytest
import torch

from spec_v2.kernels.top_k import top_k, triton_kernel
from spec_v2.kernels.top_k.reference import top_k_probs_reference, top_k_reference
from spec_v2.kernels.top_k.triton_kernel import top_k_probs_triton, top_k_triton
from tests.kernels.support import DEVICE, assert_same, seeded, spread

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
SHAPES = [(1, 1, 1), (3, 17, 1), (2, 65, 3), (2, 300, 5), (1, 7, 7)]


def launches():
    """What compiles for sm_90: the shapes of a draft step, and float64."""
    logits = torch.zeros(8, 32_000, dtype=torch.bfloat16)
    return {
        "arg-max": lambda: top_k_triton(logits, 1),
        "top-k of float64": lambda: top_k_triton(logits.double(), 3),
        "probabilities": lambda: top_k_probs_triton(logits, 4, torch.zeros(32_000, dtype=torch.long)),
    }


def tied(r, v, dtype, seed=0):
    """Few distinct values, both zeros, so that ties cross every boundary."""
    x = torch.randint(-4, 5, (r, v), generator=seeded(seed)) / 4
    return torch.where(torch.rand(r, v, generator=seeded(seed + 1)) < 0.5, x, -x).to(dtype)


@pytest.mark.parametrize("block", [16, 512])
@pytest.mark.parametrize(("r", "v", "k"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_top_k_is_the_reference(r, v, k, block, dtype):
    values = tied(r, v, dtype)
    assert_same(top_k_triton(spread(values), k, block=block), top_k_reference(values, k))


def test_one_wide_row_in_whole_blocks():
    values = torch.randn(2, 152_064, generator=seeded(), dtype=torch.float32).bfloat16()
    assert_same(top_k_triton(values.to(DEVICE), 4), top_k_reference(values, 4))


@pytest.mark.parametrize("k", [1, 4])
def test_special_values_have_the_order_of_argmax(k):
    inf, nan = torch.inf, torch.nan
    least = torch.finfo(torch.float32).min
    values = torch.tensor(
        [
            [0.0, inf, nan, inf, 1.0],
            [-inf] * 5,
            [-0.0, 0.0, -0.0, -inf, least],
            [nan, nan, -nan, 1.0, inf],
            [-1.0, -inf, -inf, -2.0, -inf],
            [least, -inf, least, -inf, -inf],
        ]
    )
    for dtype in (torch.float32, torch.float64):
        got = top_k_triton(values.to(DEVICE, dtype), k, block=16)
        assert_same(got, top_k_reference(values.to(dtype), k))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("r", "v", "k"), SHAPES)
def test_probabilities_are_those_of_a_softmax(r, v, k, dtype):
    logits = tied(r, v, dtype, seed=3) * 8
    got_p, got_ids = top_k_probs_triton(spread(logits), k, block=32)
    _, want_ids = top_k_probs_reference(logits, k)
    assert_same(got_ids, want_ids)
    exact = logits.double().softmax(-1).gather(-1, want_ids)
    torch.testing.assert_close(got_p.cpu().double(), exact, rtol=2e-6, atol=0)


def test_dr19_a_row_without_a_softmax_loses_its_drafts_only():
    inf = torch.inf
    logits = torch.tensor(
        [
            [1.0, 2.0, 3.0] * 20,
            [1.0, torch.nan, 3.0] * 20,
            [1.0, inf, 0.0] * 20,
            [-inf] * 60,
            [-inf] * 59 + [1.0],
        ]
    )
    got = top_k_probs_triton(logits.to(DEVICE), 3, block=16)
    assert_same(got[1], top_k_probs_reference(logits, 3)[1])
    torch.testing.assert_close(got[0].cpu(), top_k_probs_reference(logits, 3)[0], rtol=2e-6, atol=0)
    assert got[1][1:4].tolist() == [[0, 1, 2]] * 3
    assert got[0][1:4].count_nonzero() == 0


def test_ids_are_reported_in_the_target_vocabulary():
    logits = tied(4, 50, torch.float32)
    id_map = torch.randperm(1000, generator=seeded())[:50]
    got = top_k_probs_triton(logits.to(DEVICE), 3, id_map.to(DEVICE), block=16)
    assert_same(got[1], id_map[top_k_reference(logits, 3)[1]])


@pytest.mark.parametrize("programs", [1, 4, 99])
def test_a_row_does_not_depend_on_how_it_is_split(programs, monkeypatch):
    logits = tied(3, 100, torch.bfloat16)
    want = top_k_probs_triton(logits.to(DEVICE), 2, block=16)
    monkeypatch.setattr(triton_kernel, "PROGRAMS", programs)
    assert_same(top_k_probs_triton(logits.to(DEVICE), 2, block=16), want)


def test_no_rows_give_no_rows():
    assert_same(top_k_triton(torch.empty(0, 9, device=DEVICE), 2), top_k_reference(torch.empty(0, 9), 2))


@pytest.mark.parametrize("k", [0, 6])
def test_k_outside_of_the_row_is_refused(k):
    with pytest.raises(ValueError, match=f"k={k}: a row has 5 numbers"):
        top_k(torch.zeros(2, 5), k)


def test_a_vocabulary_beyond_the_index_is_refused():
    row = torch.zeros(1, device=DEVICE).expand(1, 2**30)
    with pytest.raises(ValueError, match=r"vocabulary=1073741824 .*\(1073741823\)"):
        top_k_triton(row, 1)
