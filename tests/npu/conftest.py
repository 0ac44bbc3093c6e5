"""These tests want the device type `npu`, which a process has for good: they are collected with --backend npu alone."""

import pytest
import torch

from spec_v2.kernels.paged_attention import npu


def pytest_ignore_collect(collection_path, config):
    return True if config.getoption("--backend") != "npu" else None


@pytest.fixture
def takes_float64(monkeypatch):
    """Let the operator attend in float64, in which tests compare tokens exactly; the simulated one can."""
    if not torch.npu.is_simulated:
        pytest.skip("hardware's operator takes no float64")
    monkeypatch.setattr(npu, "DTYPES", (*npu.DTYPES, torch.float64))
