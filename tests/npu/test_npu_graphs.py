"""Steps recorded as NPU graphs give plain decoding's tokens, and only because each replay gets its lengths anew.

On the simulated device (the head of the report says so) a replay without new lengths raises `NotUpdated` where hardware
would hang, and attention reads no key beyond the length that it was given.
"""

import pytest
import torch

from spec_v2 import SamplingParams
from spec_v2.kernels.paged_attention.host_lens import HostLens
from spec_v2.model_executor.graph_runner import GraphRunner
from spec_v2.model_executor.npu_graph_runner import (
    EAGLEDraftExtendNpuGraphRunner,
    EAGLEDraftNpuGraphRunner,
    MultiLayerEagleDraftExtendNpuGraphRunner,
    Replay,
)
from tests.adaptive_policies import RandomPolicy
from tests.harness import TREE_4, make_engine, sampled
from tests.npu.fused_models import PAGE, SHAPES, fused_engine, models, pools_of, prompts_for
from tests.recorded_runs import CalledAsTheyAre
from tests.scheduling_helpers import expected, free, outputs
from tests.tiny_models import WINDOW, random_prompt

pytestmark = pytest.mark.usefixtures("takes_float64")


@pytest.fixture
def open_fused(schedule, device):
    engines = []

    def open_one(name, **changes):
        engines.append(fused_engine(name, schedule, device, **changes))
        return engines[-1]

    yield open_one
    for engine in engines:
        engine.close()


def lengths(count):
    return [SamplingParams(max_new_tokens=8 + 4 * i) for i in range(count)]


# -- tokens --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
def test_replayed_steps_give_the_plain_tokens(open_fused, name, sampling):
    """Batches of 5 (too large to be recorded) down to 1, over a page's end, with NaN in all memory that nobody wrote."""
    engine = open_fused(name)
    assert all(pool.host_lens is not None for pool in pools_of(engine))
    for pool in pools_of(engine):
        pool.fill_unused(float("nan"), engine.server_args.page_size)
    before = free(engine)
    for count in (5, 3):
        prompts = prompts_for(name, count)
        params = lengths(count)
        if sampling == "sampled":
            params = [sampled(i, max_new_tokens=p.max_new_tokens) for i, p in enumerate(params)]
        assert outputs(engine, prompts, params) == expected(engine, prompts, params)
    assert engine._forward_stream.graphs.num_captures >= 3
    assert free(engine) == before


@pytest.mark.parametrize("name", ["plain", "eagle-tree"])
def test_steps_that_are_not_recorded_get_their_lengths_too(open_fused, name):
    engine = open_fused(name, disable_cuda_graph=True, debug=True)
    prompts = prompts_for(name, 3)
    assert outputs(engine, prompts, lengths(3)) == expected(engine, prompts, lengths(3))
    biased = SamplingParams(max_new_tokens=6, logit_bias={3: 100.0})
    assert outputs(engine, prompts[:1], biased) == [(3,) * 6]


def test_bfloat16_replays_give_the_bits_of_calls(schedule, device):
    """The operator's own dtypes, without the simulation's liberty."""
    target, draft = models("standalone-tree", device, torch.bfloat16)
    prompts, said = prompts_for("standalone-tree", 3), []
    for replays in (True, False):
        with make_engine(
            target, "STANDALONE", draft, TREE_4, schedule=schedule, debug=False, page_size=PAGE, max_running_requests=3
        ) as engine:  # fmt: skip
            assert pools_of(engine)[0].host_lens is not None
            if not replays:
                engine._forward_stream.graphs = CalledAsTheyAre()  # the same padding
            said.append(outputs(engine, prompts, SamplingParams(max_new_tokens=12)))
    assert said[0] == said[1]


@pytest.mark.parametrize("name", ["standalone-tree", "eagle-chain", "multi-layer"])
def test_a_draft_that_knows_the_target_is_accepted_in_full(open_fused, name, device):
    """Plain decoding's tokens would come out whatever a draft model reads; this is what shows that it reads its own KV."""
    _, draft = models(name, device, sigma=0.0)
    steps = 3
    engine = open_fused(name, draft=draft, shape=(steps, 1, steps + 1))
    # longer than the window of EAGLE's targets; short enough for a single key to matter; and over a page's end
    prompts = [random_prompt(i, length) for i, length in enumerate((2 * WINDOW, 2 * WINDOW + 3, 118))]
    for done in engine.generate(prompts, SamplingParams(max_new_tokens=1 + 5 * (steps + 1))):
        assert done.spec.accept_lens == (steps + 1,) * 5


@pytest.mark.parametrize("name", ["standalone-tree", "eagle-chain", "multi-layer"])
def test_settings_that_change_leave_a_draft_knowing_the_target(open_fused, name, device):
    """What a draft model reads late lies within the lengths that the host knows; behind them may be anything."""
    _, draft = models(name, device, sigma=0.0)
    engine = open_fused(
        name, draft=draft, shape=(3, 1, 4), adaptive_policy=RandomPolicy(3), speculative_adaptive=True
    )
    for pool in pools_of(engine):
        pool.fill_unused(float("nan"), engine.server_args.page_size)
    prompts = [random_prompt(i, length) for i, length in enumerate((2 * WINDOW, 2 * WINDOW + 3, 118, 40))]
    params = [SamplingParams(max_new_tokens=20 + 3 * i) for i in range(4)]
    for _ in range(2):
        completions = engine.generate(prompts, params)
        assert [done.output_ids for done in completions] == expected(engine, prompts, params)
        for done in completions:
            assert [n - 1 for n in done.spec.accept_lens] == list(done.spec.draft_depths)
    assert len(set(engine.trace.settings().values())) > 1


# -- lengths -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "standalone-tree", "eagle-chain", "multi-layer"])
def test_the_host_knows_every_length_exactly(open_fused, name):
    """Too long a length would let attention read memory that somebody else has left."""
    engine = open_fused(name)
    known, seen = [], 0
    lens_on_host, process = engine.scheduler.future_map.lens_on_host, engine.scheduler.processor.process

    def noting(rows):
        known.append(lens_on_host(rows))
        return known[-1]

    def checking(batch, result):
        nonlocal seen
        result.copy_done.synchronize()
        if not batch.forward_mode.is_extend():
            committed = [req.kv_committed_len for req in batch.reqs if not req.finished]
            lens = known[seen]
            assert [n for n, req in zip(lens, batch.reqs, strict=False) if not req.finished] == committed
            assert not any(lens[len(batch.reqs) :]), "padding rows have no tokens"
            seen += 1
        return process(batch, result)

    engine.scheduler.future_map.lens_on_host = noting
    engine.scheduler.processor.process = checking
    engine.generate(prompts_for(name, 3), lengths(3))
    assert seen == len(known) > 5


def _give_up(suspects, error):
    """The engine would start the step over; here the error itself is what is looked for."""
    raise error


def test_a_runner_that_skips_the_update_is_noticed(open_fused, monkeypatch):
    from tests.npu.simulated_graph import NotUpdated, NPUGraph

    engine = open_fused("eagle-tree")
    monkeypatch.setattr("spec_v2.scheduler.scheduler.accuse", _give_up)
    monkeypatch.setattr(NPUGraph, "update", lambda self, cpu_update_input: None)
    with pytest.raises(NotUpdated, match="hardware would hang"):
        engine.generate(prompts_for("eagle-tree", 2), lengths(2))


def test_a_runner_that_updates_with_old_lengths_is_noticed(open_fused, monkeypatch):
    engine = open_fused("plain")
    prompts, params = prompts_for("plain", 3), lengths(3)
    first = {}
    newest = HostLens.of
    monkeypatch.setattr(
        HostLens, "of", lambda self, span: first.setdefault((span, len(self.seq_lens)), newest(self, span))
    )
    assert outputs(engine, prompts, params) != expected(engine, prompts, params)


def test_a_runner_that_does_not_wait_for_its_last_replay_is_noticed(device, monkeypatch):
    monkeypatch.setattr("spec_v2.scheduler.scheduler.accuse", _give_up)
    """With overlap: the host gives draft-extend its lengths while the step before may still run."""
    make = Replay.__init__

    class NoFence:
        def record(self):
            """Nothing to wait for."""

        synchronize = record

    monkeypatch.setattr(
        Replay, "__init__", lambda self, graph, spans, lens, fence: make(self, graph, spans, lens, NoFence())
    )
    with (
        fused_engine("eagle-tree", "overlap", device) as engine,
        pytest.raises(RuntimeError, match="may still read the lengths"),
    ):
        engine.generate(prompts_for("eagle-tree", 2), lengths(2))


# -- the runners ---------------------------------------------------------------------------------------------


def replays_of(runner):
    found = [r for recordings in runner._recordings.values() for r in recordings if r.replay is not None]
    return [recording.replay for recording in found]


def test_each_step_function_has_the_runner_of_its_name(open_fused):
    engine = open_fused("eagle-tree")
    engine.generate(prompts_for("eagle-tree", 3), lengths(3))
    graphs = engine._forward_stream.graphs
    draft, extend = graphs.runners["grow_tree"], graphs.runners["draft_extend"]
    assert type(draft) is EAGLEDraftNpuGraphRunner
    assert type(extend) is EAGLEDraftExtendNpuGraphRunner
    assert type(graphs.runners["extend_modules"]) is MultiLayerEagleDraftExtendNpuGraphRunner
    assert all(isinstance(r, GraphRunner) for r in (*graphs.runners.values(), graphs.other))
    assert draft.num_captures > 0 < extend.num_captures
    assert graphs.num_captures == draft.num_captures + extend.num_captures

    _, topk, nodes = SHAPES["eagle-tree"][1]
    for replay in replays_of(draft):  # two draft forwards of one layer each, then the target's over the tree
        assert [span.ahead for span in replay._spans] == [topk, 2 * topk, nodes]
    for replay in replays_of(extend):
        assert len(replay._spans) == 1


def test_windows_of_all_modules_end_together(open_fused):
    """Each begins one token earlier than that of the module before."""
    engine = open_fused("multi-layer")
    engine.generate(prompts_for("multi-layer", 3), lengths(3))
    graphs = engine._forward_stream.graphs
    steps, _, nodes = SHAPES["multi-layer"][1]
    emitted = steps + 1
    assert graphs.runners["extend_modules"].num_captures > 0
    for replay in replays_of(graphs.runners["extend_modules"]):
        assert [span.ahead for span in replay._spans] == [emitted] * steps
    for replay in replays_of(graphs.other):  # draft only lays out what the modules have said
        assert [span.ahead for span in replay._spans] == [nodes]


def test_a_frozen_kv_draft_reads_up_to_the_newest_token(open_fused):
    engine = open_fused("frozen-kv")
    engine.generate(prompts_for("frozen-kv", 3), lengths(3))
    replays = [replay for replay in replays_of(engine._forward_stream.graphs.other) if replay._spans]
    assert replays
    for replay in replays:
        *drafts, _, _ = replay._spans  # the target has two layers
        assert {span.ahead for span in drafts} == {0}


def test_an_unshifted_draft_is_a_token_ahead(open_fused):
    engine = open_fused("standalone-tree")
    engine.generate(prompts_for("standalone-tree", 3), lengths(3))
    graphs = engine._forward_stream.graphs
    (steps, topk, nodes), layers = SHAPES["standalone-tree"][1], 2
    for replay in replays_of(graphs.runners["draft_extend"]):
        assert [span.ahead for span in replay._spans] == [1 + steps + 1] * layers
    levels = [1 + topk * level for level in range(1, steps)]
    for replay in replays_of(graphs.runners["grow_tree"]):
        drafts = [ahead for ahead in levels for _ in range(layers)]
        assert [span.ahead for span in replay._spans] == drafts + [nodes] * layers


def test_slot_ids_are_32_bits_wide(open_fused, monkeypatch):
    from tests.npu import simulated_graph

    engine = open_fused("standalone-tree")
    engine.generate(prompts_for("standalone-tree", 2), lengths(2))
    graphs = engine._forward_stream.graphs
    calls = [
        call for r in graphs.runners.values() for replay in replays_of(r) for call in replay._graph.calls
    ]
    assert isinstance(calls[0], simulated_graph.Call)
    tables = [c.kwargs["block_table"] for c in calls if "fused_infer" in c.func.name()]
    scattered = [c.args[1] for c in calls if "scatter_nd" in c.func.name()]
    assert tables
    assert scattered
    assert {x.dtype for x in (*tables, *scattered)} == {torch.int32}
