"""Where kernels run in tests, and hostile inputs for them.

With a CUDA device the kernels run compiled, on it; elsewhere they run in Triton's interpreter, on CPU tensors. The
assertions are the same. `tests/conftest.py` chooses before anything imports Triton.
"""

import os

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
POISON = -(2**30) - 7  # no id, no length, no slot


def seeded(seed=0):
    """A generator of the host: the same inputs on every device."""
    return torch.Generator().manual_seed(seed)


def dyadic(generator, *shape, denominator=1024):
    """Distributions whose entries are multiples of 1/1024: their fp32 sums are exact in any order."""
    cuts = (
        torch.randint(0, denominator + 1, (*shape[:-1], shape[-1] - 1), generator=generator).sort(-1).values
    )
    edges = torch.nn.functional.pad(cuts, (1, 0)), torch.nn.functional.pad(cuts, (0, 1), value=denominator)
    return ((edges[1] - edges[0]).float() / denominator).to(DEVICE)


def coins(generator, *shape):
    """Multiples of 1/4096 in [0, 1)."""
    return (torch.randint(0, 4096, shape, generator=generator).float() / 4096).to(DEVICE)


def spread(x):
    """The same numbers on the device in a view without unit strides, between poison; transposed in memory too."""
    padded = [2 * n + 1 for n in x.shape]
    home = torch.empty(padded[::-1], dtype=x.dtype, device=DEVICE)
    poison(home)
    view = home.permute(*range(x.ndim)[::-1])[tuple(slice(1, None, 2) for _ in padded)]
    view.copy_(x)
    return view


def poison(x):
    """Fill with what no result may contain."""
    if x.dtype == torch.bool:
        return x.fill_(True)
    return x.fill_(torch.nan if x.is_floating_point() else max(POISON, torch.iinfo(x.dtype).min))


def assert_same(got, want):
    """Bit for bit, dtype and shape included; tuples one by one."""
    if isinstance(want, tuple | list):
        assert len(got) == len(want)
        for one, other in zip(got, want, strict=True):
            assert_same(one, other)
        return
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    assert got.device.type == DEVICE.type
    torch.testing.assert_close(got.cpu(), want.cpu(), rtol=0, atol=0, equal_nan=True)
