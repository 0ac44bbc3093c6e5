"""What only a GPU can show: that kernels are captured in CUDA graphs, and that offsets beyond 32 bits are right."""

import importlib
from pathlib import Path

import pytest
import torch

from spec_v2.kernels.move_kv.reference import SlotBuffers
from spec_v2.kernels.move_kv.triton_kernel import move_accepted_kv_triton
from spec_v2.kernels.sample_nodes.triton_kernel import sample_probs_triton
from spec_v2.kernels.top_k.triton_kernel import top_k_triton
from spec_v2.kernels.write_kv.triton_kernel import write_kv_triton
from tests.kernels.support import INTERPRETED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(INTERPRETED, reason="the kernels run in Triton's interpreter"),
]
MODULES = sorted(path.stem for path in Path(__file__).parent.glob("test_*.py"))


@pytest.mark.parametrize("module", MODULES)
def test_launches_can_be_captured(module):
    """Twice as they are, which compiles them; then as a graph. A wait for the device would end the capture."""
    with torch.device("cuda"):
        calls = getattr(importlib.import_module(f"tests.kernels.{module}"), "launches", dict)()
        for call in calls.values():
            call()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                call()
            graph.replay()
            torch.cuda.synchronize()


def test_gr16_a_replay_reads_its_inputs_anew():
    logits = torch.zeros(3, 1000, device="cuda")
    top_k_triton(logits, 2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, ids = top_k_triton(logits, 2)
    for best in (7, 999):
        logits.zero_()
        logits[:, best] = 1.0
        graph.replay()
        assert ids.tolist() == [[best, 0]] * 3


def test_kn01_rows_beyond_32_bits():
    """The second row begins behind 2**31 elements."""
    home = torch.zeros(2**31 + 100, dtype=torch.bfloat16, device="cuda")
    rows = home.as_strided((2, 64), (2**31, 1))
    rows[1, 5] = 1.0
    assert top_k_triton(rows, 1)[1].tolist() == [[0], [5]]
    rows[0, 9] = 1.0
    assert sample_probs_triton(rows, torch.zeros(2, device="cuda"), None).tolist() == [9, 5]


def test_kn01_slots_beyond_32_bits():
    num_slots = 2**21 + 3  # of 1024 elements
    pool = [torch.zeros(num_slots, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    token = torch.ones(1, 8, 128, dtype=torch.bfloat16, device="cuda")
    write_kv_triton(*pool, torch.tensor([num_slots - 1], device="cuda"), token, 2 * token)
    slots = torch.tensor([[num_slots - 3, num_slots - 2, num_slots - 1]], device="cuda")
    move_accepted_kv_triton(SlotBuffers.of(tuple(pool)), slots, torch.tensor([[0, 2]], device="cuda"))
    for number, buffer in enumerate(pool, 1):
        assert buffer[-3:, 0, 0].tolist() == [0, number, number]
        assert buffer[:-3].count_nonzero() == 0
