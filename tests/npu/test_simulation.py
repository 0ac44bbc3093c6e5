"""The simulated NPU refuses what hardware refuses; a simulation that lets everything pass would prove nothing."""

import pytest
import torch

pytestmark = pytest.mark.skipif(
    not getattr(torch.npu, "is_simulated", False), reason="real hardware: nothing is simulated"
)


@pytest.fixture
def graph():
    return torch.npu.NPUGraph()


def attend(query, keys, lengths, page=128):
    """One call of the operator over the first pages of a pool, nothing hidden."""
    b, q, heads, _ = query.shape
    blocks = torch.arange(b, dtype=torch.int32, device="npu")[:, None]
    out, _ = torch.ops.npu.npu_fused_infer_attention_score(
        query, keys, keys,
        atten_mask=torch.zeros(b, 1, q, page, dtype=torch.bool, device="npu"),
        actual_seq_lengths_kv=lengths, block_table=blocks, block_size=page,
        num_heads=heads, num_key_value_heads=heads, input_layout="BSND", sparse_mode=1,
    )  # fmt: skip
    return out


@pytest.fixture
def query():
    return torch.randn(2, 3, 1, 16, dtype=torch.float64).to("npu")


@pytest.fixture
def keys():
    return torch.randn(2, 128, 16, dtype=torch.float64).to("npu")


# -- the device ----------------------------------------------------------------------------------------------


def test_host_and_device_do_not_mix():
    x = torch.ones(3, device="npu")
    assert (x + 1).device.type == "npu"
    assert (x * torch.tensor(2.0)).tolist() == [2, 2, 2]  # a number may lie on the host
    for mix in (
        lambda: x + torch.ones(3),
        lambda: torch.cat([x, torch.ones(3)]),
        lambda: torch.ones(3).add_(x),
    ):
        with pytest.raises(RuntimeError, match="same device"):
            mix()
    with pytest.raises(TypeError, match="copy it to the host first"):
        x.numpy()


def test_only_host_memory_is_pinned():
    with pytest.raises(RuntimeError, match="pinned"):
        torch.empty(3, device="npu", pin_memory=True)


def test_views_and_changes_in_place_reach_the_same_memory():
    x = torch.zeros(2, 3, device="npu")
    x[1].fill_(5)
    x.view(6)[0] = 1
    assert x.cpu().tolist() == [[1, 0, 0], [5, 5, 5]]
    assert x.add_(1) is x


# -- graphs --------------------------------------------------------------------------------------------------


WAITS = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "bool": lambda x: bool(x[0] > 0),
    "mask": lambda x: x[x > 1],
    "nonzero": lambda x: torch.nonzero(x),
    "upload": lambda x: x + torch.ones(4).to("npu"),
    "equal": lambda x: torch.equal(x, x),
    "copy": lambda x: torch.zeros(4).copy_(x),
}


@pytest.mark.parametrize("wait", WAITS)
def test_what_the_host_would_wait_for_cannot_be_captured(graph, wait):
    x = torch.arange(4.0, device="npu")
    with pytest.raises(RuntimeError, match="not permitted"), torch.npu.graph(graph):
        WAITS[wait](x)
    with pytest.raises(RuntimeError, match="not captured"):
        graph.replay()


def test_a_capture_changes_nothing_and_a_replay_reads_what_is_there_then(graph):
    x, total = torch.ones(4, device="npu"), torch.zeros(1, device="npu")
    with torch.npu.graph(graph):
        y = x * 2
        total += y.sum()
        y[0] = 7
    assert total.item() == 0
    for _ in range(2):
        graph.replay()
    assert total.item() == 16
    x.fill_(10)
    graph.replay()
    assert total.item() == 96
    assert y.tolist() == [7, 20, 20, 20]


def test_each_replay_needs_new_lengths(graph, query, keys):
    from tests.npu.simulated_graph import NotUpdated

    with torch.npu.graph(graph, auto_dispatch_capture=True):
        out = attend(query, keys, [5, 6])
    with pytest.raises(NotUpdated):
        graph.replay()
    for lengths in ([5, 6], [128, 1], [9, 90]):
        torch.npu.synchronize()
        graph.update(cpu_update_input=[{"actual_seq_lengths_kv": lengths}])
        graph.replay()
        assert torch.equal(out.cpu(), attend(query, keys, lengths).cpu())
        with pytest.raises(NotUpdated):
            graph.replay()


def test_lengths_are_not_changed_under_a_replay_that_may_still_run(graph, query, keys):
    with torch.npu.graph(graph, auto_dispatch_capture=True):
        attend(query, keys, [5, 6])
    new = [{"actual_seq_lengths_kv": [7, 8]}]
    graph.update(cpu_update_input=new)
    too_early, done = torch.npu.Event(), torch.npu.Event()
    too_early.record()
    graph.replay()
    done.record()
    for event in (None, too_early):
        if event is not None:
            event.synchronize()
        with pytest.raises(RuntimeError, match="earlier replay"):
            graph.update(cpu_update_input=new)
    done.synchronize()
    graph.update(cpu_update_input=new)


def test_updates_are_counted(graph, query, keys):
    with torch.npu.graph(graph, auto_dispatch_capture=True):
        for _ in range(3):
            attend(query, keys, [5, 6])
    with pytest.raises(RuntimeError, match="3 operators wait, 2 updates"):
        graph.update(cpu_update_input=[{"actual_seq_lengths_kv": [1, 1]}] * 2)
    graph.update(cpu_update_input=[{"actual_seq_lengths_kv": [1, 1]}])  # one for all
    graph.replay()
    plain = torch.npu.NPUGraph()
    with torch.npu.graph(plain):
        attend(query, keys, [5, 6])
    with pytest.raises(RuntimeError, match="auto_dispatch_capture"):
        plain.update(cpu_update_input=[{}])


# -- operators -----------------------------------------------------------------------------------------------


def test_keys_beyond_the_length_are_not_read(query, keys):
    before = attend(query, keys, [5, 128])
    keys[0, 5:] = torch.nan
    assert torch.equal(attend(query, keys, [5, 128]).cpu(), before.cpu())
    assert attend(query, keys, [6, 128])[0].isnan().all()


REFUSED = {
    "block_table": (torch.int64, "int32"),
    "block_size": (64, "pages|multiple"),
    "actual_seq_lengths_kv": ([5], "length"),
    "sparse_mode": (0, "whole mask"),
    "query": (torch.float32, "dtype"),
    "atten_mask": (torch.float64, "mask is bool"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_operator_takes_what_is_documented_and_no_more(query, keys, name):
    call = {
        "query": query, "key": keys, "value": keys, "block_size": 128, "num_heads": 1, "num_key_value_heads": 1,
        "atten_mask": torch.zeros(2, 1, 3, 128, dtype=torch.bool, device="npu"), "actual_seq_lengths_kv": [5, 6],
        "block_table": torch.tensor([[0], [1]], dtype=torch.int32, device="npu"), "input_layout": "BSND", "sparse_mode": 1,
    }  # fmt: skip
    torch.ops.npu.npu_fused_infer_attention_score(**call)
    change, match = REFUSED[name]
    call[name] = call[name].to(change) if isinstance(change, torch.dtype) else change
    with pytest.raises(RuntimeError, match=match):
        torch.ops.npu.npu_fused_infer_attention_score(**call)


def test_scatter_wants_32_bits():
    pool, rows = torch.zeros(4, 2, device="npu"), torch.ones(2, 2, device="npu")
    torch.ops.npu.npu_scatter_nd_update_(
        pool, torch.tensor([[3], [1]], dtype=torch.int32, device="npu"), rows
    )
    assert pool.sum(1).tolist() == [0, 2, 0, 2]
    with pytest.raises(RuntimeError, match="int32"):
        torch.ops.npu.npu_scatter_nd_update_(pool, torch.tensor([[3], [1]], device="npu"), rows)
