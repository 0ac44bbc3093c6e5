"""Whatever a kernel's wrapper allocates holds poison first: an element that the kernel forgets shows."""

import warnings

import numpy as np
import pytest
import torch

from tests.kernels.support import INTERPRETED, poison


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch):
    def poisoned(original):
        return lambda *args, **kwargs: poison(original(*args, **kwargs))

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


@pytest.fixture(autouse=True)
def quiet_numpy():
    """The interpreter computes with numpy, which would warn of the NaN and infinities that a GPU passes on."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "All-NaN slice", RuntimeWarning)
        yield


@pytest.fixture
def checked_kernels(monkeypatch):
    """Kernels check what they are given. In the interpreter alone: a failed check ends a CUDA context for good."""
    if not INTERPRETED:
        pytest.skip("a failed device assert ends the process's CUDA context")
    from triton.runtime import interpreter

    monkeypatch.setenv("SPEC_V2_DEBUG_KERNELS", "1")
    options = interpreter.InterpreterOptions(debug=True)  # what debug=True at a launch is to the compiler
    monkeypatch.setattr(interpreter.interpreter_builder, "options", options)
