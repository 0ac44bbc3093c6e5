"""The short convolution: bit for bit the reference where sums are exact, within roundings elsewhere; windows exactly."""

import pytest
import torch
import torch.nn.functional as F

from spec_v2.kernels.causal_conv import causal_conv, save_windows
from spec_v2.kernels.causal_conv.reference import causal_conv_reference, save_windows_reference
from spec_v2.kernels.causal_conv.triton_kernel import causal_conv_triton, save_windows_triton
from spec_v2.model_executor.recurrence import _taps_behind, _taps_of_paths
from tests.kernels.accuracy import (
    DTYPES,
    assert_within_an_ulp,
    bf16_rounds_as_on_a_gpu,  # noqa: F401 - an autouse fixture
    randn,
)
from tests.kernels.support import DEVICE, assert_same, poison, seeded, spread


def launches():
    """What compiles for sm_90: 4 taps over the channels of Qwen3-Next, 3 over those of LFM2."""
    calls = {}
    for name, dtype, c, k in (("bf16", torch.bfloat16, 8192, 4), ("fp32", torch.float32, 2048, 3)):
        x, windows, weight = (torch.zeros(*s, dtype=dtype) for s in ((6, c), (5, k - 1, c), (c, k)))
        rows, taps = torch.zeros(6, dtype=torch.long), torch.zeros(6, k, dtype=torch.long)
        saves = torch.zeros(2, 3, dtype=torch.long)
        args = (x, windows, rows, taps, weight)
        calls[f"{name} silu"] = lambda args=args: causal_conv_triton(*args, None, True)
        calls[f"{name} bias"] = lambda args=args, bias=weight[:, 0]: causal_conv_triton(*args, bias, False)
        calls[f"{name} save"] = lambda args=args, s=saves: save_windows_triton(
            *args[:2], s[:, 0], args[3], s, s
        )
    return calls


def numbers(gen, *shape, dtype=torch.float32):
    """Small integers, whose products and sums are exact."""
    return torch.randint(-4, 5, shape, generator=gen).to(DEVICE, dtype)


def random_taps(gen, tokens, t, k):
    """Of tokens that are anywhere; what is missing at the front is in the window."""
    taps = torch.randint(0, tokens, (t, k), generator=gen)
    missing = torch.randint(0, k, (t,), generator=gen)
    back = torch.arange(k)
    return torch.where(back < missing[:, None], back - missing[:, None], taps).to(DEVICE)


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("t", "c", "k"), [(1, 1, 2), (5, 37, 4), (7, 300, 3), (3, 64, 2), (0, 8, 4)])
def test_exact_sums_are_the_reference(t, c, k, bias, silu):
    gen = seeded(t + c)
    x, windows, weight = numbers(gen, 6, c), numbers(gen, 4, k - 1, c), numbers(gen, c, k)
    rows = torch.randint(0, 4, (t,), generator=gen).to(DEVICE)
    args = (rows, random_taps(gen, 6, t, k), weight, numbers(gen, c) if bias else None)
    got = causal_conv_triton(spread(x), windows, *args, silu)
    want = causal_conv_reference(x, windows, *args, silu)
    if silu:
        assert_within_an_ulp(got, want, atol=1e-7)
    else:
        assert_same(got, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounded_as_the_reference(dtype):
    x, windows, weight = (randn(*s, dtype=dtype, seed=s[0]) for s in ((9, 70), (3, 3, 70), (70, 4)))
    rows = torch.tensor([0, 1, 2] * 3, device=DEVICE)
    taps = random_taps(seeded(1), 9, 9, 4)
    got = causal_conv_triton(x, windows, rows, taps, weight, weight[:, 1], True)
    assert_within_an_ulp(
        got, causal_conv_reference(x, windows, rows, taps, weight, weight[:, 1], True), atol=1e-3
    )


@pytest.mark.parametrize("implementation", [save_windows_reference, save_windows_triton])
@pytest.mark.parametrize(("p", "s", "c", "k"), [(1, 1, 1, 2), (3, 1, 37, 4), (3, 3, 300, 4), (2, 2, 64, 3)])
def test_windows_are_saved_as_one_by_one(implementation, p, s, c, k):
    """A request's own row is read and written; snapshots of the same path are taken from what was there before."""
    gen = seeded(p + s)
    x, windows = numbers(gen, 8, c), numbers(gen, 12, k - 1, c)
    taps = random_taps(gen, 8, 8, k)
    start_rows = torch.arange(1, p + 1, device=DEVICE)
    save_rows = (
        torch.arange(p * s, device=DEVICE).view(s, p).T + 1
    )  # column 0: the rows that paths start from
    save_rows[-1, -1] = 0
    save_tokens = torch.randint(0, 8, (p, s), generator=gen).to(DEVICE)
    want = windows.clone()
    for i in range(p):
        for j in range(s):
            if save_rows[i, j] > 0:
                for place, tap in enumerate(taps[save_tokens[i, j], 1:].tolist()):
                    want[save_rows[i, j], place] = x[tap] if tap >= 0 else windows[start_rows[i], k - 1 + tap]
    implementation(spread(x), windows, start_rows, taps, save_tokens, save_rows)
    assert_same(windows, want)


def test_poison_in_other_rows_and_tokens_stays_there():
    x, windows, weight = (randn(*s, dtype=torch.float32) for s in ((4, 20), (5, 3, 20), (20, 4)))
    taps = torch.tensor([[-3, -2, -1, 1], [-2, -1, 1, 2]], device=DEVICE)
    rows = torch.tensor([3, 3], device=DEVICE)
    want = causal_conv_reference(x, windows, rows, taps, weight, None, False)
    for other in (0, 3):
        poison(x[other])
    for other in (1, 2, 4):
        poison(windows[other])
    for run in (causal_conv_triton, causal_conv_reference):
        torch.testing.assert_close(run(x, windows, rows, taps, weight, None, False), want)


def test_a_prompt_is_torchs_convolution_and_a_path_its_own():
    """Two requests, one of 5 tokens behind a window, one of 2; then the same tokens as paths of a tree."""
    gen = seeded(3)
    x, windows, weight = (
        torch.randn(*s, generator=gen, dtype=torch.float64) for s in ((7, 6), (3, 3, 6), (6, 4))
    )
    rows = torch.tensor([2, 2, 2, 2, 2, 1, 1])
    out = causal_conv(
        x, windows, rows, _taps_behind(torch.tensor([0, 1, 2, 3, 4, 0, 1]), 4), weight, None, False
    )
    for row, part in ((2, slice(0, 5)), (1, slice(5, 7))):
        padded = torch.cat([windows[row], x[part]]).T[None]
        torch.testing.assert_close(out[part], F.conv1d(padded, weight[:, None], groups=6)[0].T)
    paths = torch.tensor([[-1, -1, 0], [-1, 0, 3], [0, 3, 4]])
    taps = _taps_of_paths(paths, 4)
    assert taps.tolist() == [[-3, -2, -1, 0], [-2, -1, 0, 3], [-1, 0, 3, 4]]
    out = causal_conv(x, windows, rows[:3], taps, weight, None, False)
    padded = torch.cat([windows[2], x[[0, 3, 4]]]).T[None]
    torch.testing.assert_close(out, F.conv1d(padded, weight[:, None], groups=6)[0].T)
    save_windows(x, windows, torch.tensor([2]), taps, torch.tensor([[1]]), torch.tensor([[1]]))
    torch.testing.assert_close(windows[1], padded[0, :, 2:5].T)


def test_wrong_numbers_are_noticed(checked_kernels):
    x, windows, weight = (torch.zeros(*s) for s in ((4, 8), (3, 3, 8), (8, 4)))
    rows, taps = torch.zeros(1, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long)
    for bad in ({"rows": rows + 3}, {"taps": taps + 4}, {"taps": taps - 4}):
        named = {"rows": rows, "taps": taps} | bad
        with pytest.raises(Exception, match=next(iter(bad))):
            causal_conv_triton(x, windows, named["rows"], named["taps"], weight, None, False)
