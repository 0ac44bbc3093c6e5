"""Recorded decode steps give the tokens of steps that run as they are, at every batch size, padded or not.

Without a GPU the recordings are simulated (tests/simulated_graphs.py); on one they are CUDA graphs.
"""

import pytest
import torch

from spec_v2 import SamplingParams
from spec_v2.model_executor.graph_runner import MAX_VARIANTS, capture_sizes, padded_size
from tests.adaptive_policies import RandomPolicy
from tests.cells import SETUPS, open_setup, setup_prompts
from tests.eagle3_models import deep_llama, eagle3_head
from tests.harness import TREE_2, sampled
from tests.scheduling_helpers import expected, free
from tests.simulated_graphs import SimulatedGraphs, attach

SIZES = (1, 2, 4)
POOL = {"debug": False, "max_running_requests": 6, "cuda_graph_max_bs": 4}


def open_recording(open_engine, monkeypatch, name, schedule, device, **changes):
    engine = open_setup(open_engine, name, schedule, device, **POOL | changes)
    if device.type == "cpu":
        return engine, attach(engine, SIZES, monkeypatch)
    return engine, engine._forward_stream.graphs


def run(engine, prompts, params):
    return [done.output_ids for done in engine.generate(prompts, params)]


# -- sizes ---------------------------------------------------------------------------------------------------


def test_sizes_end_with_the_largest_and_rise():
    assert capture_sizes(1) == (1,)
    assert capture_sizes(6) == (1, 2, 4, 6)
    sizes = capture_sizes(256)
    assert sizes[-1] == 256
    assert list(sizes) == sorted(set(sizes))


def test_a_batch_gets_the_smallest_size_that_holds_it():
    assert [padded_size(n, SIZES) for n in range(1, 6)] == [1, 2, 4, 4, None]
    assert padded_size(1, ()) is None


# -- whole steps ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SETUPS)
@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
@pytest.mark.parametrize("separate", [False, True], ids=["joined", "separate"])
def test_recorded_steps_give_the_plain_tokens(
    open_engine, monkeypatch, name, sampling, separate, schedule, device
):
    """Requests of unequal lengths leave one by one, so every size from 5 (too large) down to 1 occurs."""
    engine, graphs = open_recording(open_engine, monkeypatch, name, schedule, device)
    engine.trace.separate_launches = separate
    before = free(engine)
    for count in (5, 4, 3, 4, 1):
        prompts = setup_prompts(name, engine.model, count)
        lengths = [6 + 5 * i for i in range(count)]
        params = [
            SamplingParams(max_new_tokens=n) if sampling == "greedy" else sampled(i, max_new_tokens=n)
            for i, n in enumerate(lengths)
        ]
        assert run(engine, prompts, params) == expected(engine, prompts, params)
    assert graphs.num_captures > (4 if separate else 1) * len(SIZES)
    labels = {span.name for span in engine.trace.spans() if span.lane == "forward"}
    assert any("verify+publish" in label for label in labels) != separate
    assert free(engine) == before


@pytest.mark.parametrize("name", ["eagle-chain", "eagle-tree", "standalone-tree", "multi-layer", "frozen-kv"])
def test_gr11_every_launch_of_changing_settings_is_recorded(open_engine, monkeypatch, name, schedule, device):
    """Catching up after steps without drafts too: one launch that runs as it is takes the joined ones with it."""
    engine, graphs = open_recording(
        open_engine,
        monkeypatch,
        name,
        schedule,
        device,
        adaptive_policy=RandomPolicy(3),
        speculative_adaptive=True,
    )
    prompts = setup_prompts(name, engine.model, 4)
    params = [SamplingParams(max_new_tokens=30)] * 4
    for _ in range(3):
        assert run(engine, prompts, params) == expected(engine, prompts, params)
    assert graphs.num_refused == 0
    assert len(set(engine.trace.settings().values())) > 1
    labels = {span.name for span in engine.trace.spans() if span.lane == "forward"}
    assert name == "frozen-kv" or any("catch_up" in label for label in labels)


@pytest.mark.parametrize("shape", [(1, 1, 2), (1, 4, 5)], ids=["chain", "tree"])
def test_gr08_one_draft_step_is_recorded_too(open_engine, monkeypatch, shape, schedule, device):
    engine, graphs = open_recording(
        open_engine, monkeypatch, "standalone-tree", schedule, device, shape=shape
    )
    prompts, params = (
        setup_prompts("standalone-tree", engine.model, 3),
        [SamplingParams(max_new_tokens=16)] * 3,
    )
    assert run(engine, prompts, params) == expected(engine, prompts, params)
    assert graphs.num_captures > 0
    assert graphs.num_refused == 0


def test_gr10_padded_rows_of_an_eagle3_head_spoil_nothing(open_engine, monkeypatch, schedule, device):
    """Three requests fill up to four rows; hidden states of three layers travel."""
    target = deep_llama(device)
    engine = open_engine(target, "EAGLE3", eagle3_head(target), TREE_2, schedule=schedule, **POOL)
    graphs = attach(engine, SIZES, monkeypatch) if device.type == "cpu" else engine._forward_stream.graphs
    prompts, params = setup_prompts("eagle-tree", target, 3), [SamplingParams(max_new_tokens=16)] * 3
    for _ in range(2):
        assert run(engine, prompts, params) == expected(engine, prompts, params)
    assert graphs.num_captures > 0


@pytest.mark.parametrize("name", ["plain", "ngram", "eagle-tree", "multi-layer", "frozen-kv"])
def test_nan_in_unused_memory_stays_there(open_engine, monkeypatch, name, schedule, device):
    """Padding rows read slot 0 only, and write nowhere else."""
    engine, _ = open_recording(open_engine, monkeypatch, name, schedule, device)
    cache = engine.scheduler.cache
    for pool in (cache.target_pool, cache.draft_pool):
        pool.fill_unused(float("nan"), engine.server_args.page_size)
    prompts = setup_prompts(name, engine.model, 3)
    params = [SamplingParams(max_new_tokens=20)] * 3
    for _ in range(2):
        assert run(engine, prompts, params) == expected(engine, prompts, params)
    assert not bool(torch.isnan(cache.target_pool.keys[0][0]).any())


def test_options_without_a_fixed_shape_run_as_they_are(open_engine, monkeypatch, schedule, device):
    engine, graphs = open_recording(open_engine, monkeypatch, "plain", schedule, device)
    prompts = setup_prompts("plain", engine.model, 3)
    params = [SamplingParams(max_new_tokens=9, logit_bias={3: 100.0})] * 3
    assert run(engine, prompts, params) == [(3,) * 9] * 3
    (with_logprobs,) = engine.generate(prompts[0], SamplingParams(max_new_tokens=9, logprobs=True))
    assert with_logprobs.output_ids == expected(engine, prompts[:1], [SamplingParams(max_new_tokens=9)])[0]
    assert graphs.num_captures == 0


def test_without_feeding_the_tokens_are_wrong(open_engine, monkeypatch, schedule, device):
    """Negative control: the simulation notices a stale input."""
    if device.type != "cpu":
        pytest.skip("checks the simulation")
    engine, _ = open_recording(open_engine, monkeypatch, "plain", schedule, device)
    prompts = setup_prompts("plain", engine.model, 3)
    params = [SamplingParams(max_new_tokens=n) for n in (5, 20, 20)]
    monkeypatch.setattr(SimulatedGraphs, "_feed", lambda *args: True)
    outputs = [run(engine, prompts, params), run(engine, prompts[::-1], params)]
    assert outputs != [expected(engine, prompts, params), expected(engine, prompts[::-1], params)]


# -- one launch ----------------------------------------------------------------------------------------------


def double(x, n):
    return x * n


def test_a_launch_is_called_twice_then_recorded_and_each_kind_by_itself():
    graphs = SimulatedGraphs()
    one = torch.ones(2)
    for _ in range(4):
        assert graphs.run(double, [one, 2]).tolist() == [2, 2]
    assert (graphs.num_captures, graphs.num_replays) == (1, 2)
    assert graphs.run(double, [one, 3]).tolist() == [3, 3]  # another setting
    assert graphs.run(double, [torch.ones(3), 2]).tolist() == [2, 2, 2]  # another shape
    assert graphs.num_captures == 1


def test_a_tensor_that_changes_is_fed_and_one_that_stays_is_read_where_it_lies():
    graphs, pool = SimulatedGraphs(), torch.zeros(2)
    for value in range(5):
        pool.fill_(10 * value)
        assert graphs.run(torch.add, [pool, torch.full((2,), float(value))]).tolist() == [11 * value] * 2
    assert graphs.num_captures == 1


def test_outputs_are_overwritten_by_the_next_replay():
    graphs, x = SimulatedGraphs(), torch.ones(1)
    for _ in range(3):
        first = graphs.run(double, [x, 2])
    x.fill_(5)
    assert graphs.run(double, [x, 2]) is first
    assert first.tolist() == [10]


def test_too_many_variants_are_called_instead():
    graphs = SimulatedGraphs()
    graphs.run(double, [torch.ones(1), 2])
    owned = [graphs.run(torch.add, [torch.ones(1), i]) for i in range(MAX_VARIANTS + 3) for _ in range(2)][
        1::2
    ]
    for i, tensor in enumerate(owned):
        for _ in range(3):
            assert graphs.run(double, [tensor, 2]).tolist() == [2 * (1 + i)]
    assert graphs.num_captures <= 2 * MAX_VARIANTS + 3


def test_a_launch_that_cannot_be_recorded_runs_as_it_is(caplog):
    class Refusing(SimulatedGraphs):
        def capture(self, fn, args):
            raise RuntimeError("operation not permitted when stream is capturing")

    graphs, x = Refusing(), torch.ones(1)
    for value in range(6):
        x.fill_(value)
        assert graphs.run(double, [x, 2]).tolist() == [2 * value]
    (record,) = caplog.records
    assert "double could not be recorded" in record.message
