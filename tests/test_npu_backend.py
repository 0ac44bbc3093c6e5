"""What of the NPU backend needs no NPU, not even a simulated one. The rest is in tests/npu, with --backend npu."""

import importlib
import importlib.util
from types import SimpleNamespace

import pytest
import torch

from spec_v2.engine_parts import open_device
from spec_v2.kernels.paged_attention import PagedView, TreeWindow, npu
from spec_v2.kernels.paged_attention.host_lens import HostLens, KvSpan
from spec_v2.kernels.paged_attention.reference import visible_keys
from spec_v2.kernels.tree_structure import ancestor_mask, node_depths
from spec_v2.model_executor import npu_backend
from spec_v2.model_executor.npu_backend import NpuKind, load_npu, npu_kind

CARD = {"is_available": lambda: True, "current_device": lambda: 0}


@pytest.fixture
def torch_with(monkeypatch):
    """Puts a module at `torch.npu`, or takes it away."""
    monkeypatch.delattr(torch, "npu", raising=False)

    def put(**members):
        monkeypatch.setattr(torch, "npu", SimpleNamespace(**members), raising=False)

    return put


# -- is there one --------------------------------------------------------------------------------------------


def test_a_simulated_npu_never_counts_as_real(torch_with):
    assert npu_kind() is NpuKind.ABSENT
    torch_with(is_available=lambda: False)
    assert npu_kind() is NpuKind.ABSENT
    torch_with(**CARD)
    assert npu_kind() is NpuKind.REAL
    torch_with(**CARD, is_simulated=True)
    assert npu_kind() is NpuKind.SIMULATED
    assert open_device("auto").type != "npu", "only somebody who asks for it gets the simulation"


def test_without_torch_npu_the_device_is_refused(torch_with, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"device='npu': torch_npu is not installed; .*--device cpu"):
        open_device("npu")


def test_a_torch_npu_that_does_not_load_says_why(torch_with, monkeypatch):
    def fail(name):
        raise ImportError("libhccl.so: cannot open\nshared object file")

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(
        ValueError, match=r"device='npu'.*libhccl.so: cannot open shared .*set_env.sh"
    ) as caught:
        load_npu()
    assert isinstance(caught.value.__cause__, ImportError)


def test_no_card_is_an_error_too(torch_with):
    torch_with(is_available=lambda: False)
    with pytest.raises(ValueError, match="sees no card"):
        load_npu()


def test_torch_npu_is_imported_nowhere_else():
    """Where Ascend's drivers are missing, importing it breaks `import torch`."""
    import ast
    from pathlib import Path

    import spec_v2

    for path in Path(spec_v2.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.partition(".")[0] == "torch_npu" for name in names), path


def test_only_real_devices_pin():
    assert not npu_backend.can_pin("cpu")
    assert npu_backend.can_pin("cuda")


# -- lengths -------------------------------------------------------------------------------------------------


def test_lengths_of_a_span():
    lens = HostLens(page_size=128)
    lens.seq_lens = (0, 5, 130)
    assert lens.of(KvSpan(3, 256)) == [3, 8, 133]
    assert lens.of(KvSpan(0, 256)) == [
        1,
        5,
        130,
    ]  # a padding row reads one key: a softmax of none is no number
    assert lens.of(KvSpan(3, 128)) == [3, 8, 128]


def test_calls_are_noted_while_somebody_wants_to_know():
    lens = HostLens(page_size=128)
    lens.seq_lens = (4,)
    first, second = KvSpan(2, 128), KvSpan(4, 128)
    lens.take(first)
    with lens.noting() as spans:
        assert lens.take(first) == [6]
        lens.take(second)
    lens.take(first)
    assert spans == [first, second]


# -- what is seen --------------------------------------------------------------------------------------------

PARENTS = torch.tensor([[-1, 0, 0, 1, 1, 2], [-1, 0, 1, 2, 3, 4], [-1, 0, 0, 0, 0, -1]])
PREFIXES = torch.tensor([7, 0, 250])


def view_of(kind):
    """A chain, a tree, or the last level of a tree being drafted (fewer queries than tokens in the window)."""
    width, visible, positions = PARENTS.shape[1], ancestor_mask(PARENTS), node_depths(PARENTS)
    positions = PREFIXES[:, None] + positions
    queries = {"chain": width, "tree": width, "draft": 2}[kind]
    window = None
    if kind != "chain":
        window = TreeWindow(
            visible=visible[:, -queries:], query_positions=positions[:, -queries:], window_positions=positions
        )
    table = torch.zeros(5, 300, dtype=torch.int32)
    return PagedView(
        table=table, rows=torch.tensor([2, 0, 4]), prefix_lens=PREFIXES, max_prefix_len=256, max_queries=queries,
        window=window,
    )  # fmt: skip


@pytest.mark.parametrize("sliding_window", [None, 1, 4])
@pytest.mark.parametrize("kind", ["chain", "tree", "draft"])
def test_the_mask_shows_what_the_reference_sees(kind, sliding_window):
    view, width = view_of(kind), 384
    seen = npu.visible_positions(view, width, sliding_window)
    for i, prefix in enumerate(PREFIXES.tolist()):
        wanted = visible_keys(view, i, view.max_queries, sliding_window)
        keys = prefix + view.window_len
        assert torch.equal(seen[i, :, :keys], wanted)
        assert not seen[i, :, keys:].any()


def test_blocks_are_the_pages_of_the_rows():
    lens = HostLens(page_size=128)
    view = view_of("tree")
    view.table[2, :256] = torch.arange(384, 640)  # pages 3 and 4
    view.table[4, :128], view.table[4, 128:300] = torch.arange(128, 256), torch.arange(896, 1068)
    made = npu.NpuView(view=view, lens=lens, keys_ahead=6)
    assert made.block_table().tolist() == [[3, 4, 0], [0, 0, 0], [1, 7, 8]]
    assert made.block_table().dtype == torch.int32
    assert made.hidden(None).shape == (3, 1, 6, 384)
    assert made.span == (6, 384)
    assert made.hidden(None) is made.hidden(None)


# -- when the operator serves --------------------------------------------------------------------------------


@pytest.fixture
def operator(monkeypatch):
    """As if torch_npu were there."""
    monkeypatch.setattr(torch.ops.npu, "npu_fused_infer_attention_score", print, raising=False)


def fits(*, shape=(1024, 2, 64), dtype=torch.bfloat16, value_dim=64, page_size=128, **options):
    keys = torch.empty(shape, dtype=dtype, device="meta")
    return npu.why_not([keys], [value_dim], [{"scaling": 1.0, **options}], page_size)


def test_the_operator_serves_what_it_is_made_for(operator):
    assert fits() == fits(page_size=512) == fits(dtype=torch.float16) == fits(sliding_window=9) == ""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"page_size": 1}, "page_size=1 "), ({"page_size": 64}, "page_size=64 "), ({"page_size": 640}, "page_size=640 "),
        ({"dtype": torch.float32}, "dtype=float32"), ({"softcap": 30.0}, "softcap"), ({"s_aux": torch.ones(2)}, "sinks"),
        ({"value_dim": 32}, "values: 32"), ({"shape": (1024, 2, 24), "value_dim": 24}, "2 KV heads of 24"),
        ({"shape": (1 << 24, 2, 64)}, "counts to"),
    ],
    ids=str,
)  # fmt: skip
def test_what_it_cannot_serve_is_named(operator, changes, reason):
    assert reason in fits(**changes)


def test_without_the_operator_torch_attends():
    assert "has no npu_fused_infer_attention_score" in fits()
