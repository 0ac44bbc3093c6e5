"""The synchronous schedule where it is easily forgotten: with settings that adapt, EAGLE3, MTP modules, on any backend.

Most people run the overlapped one. So these belong to the synchronous cells of the matrix (they ask for no schedule), that of
the NPU included, where tests/npu adds its own attention.
"""

import pytest

from spec_v2 import SamplingParams
from tests.adaptive_policies import RandomPolicy, ScriptedPolicy
from tests.cells import models
from tests.eagle3_models import deep_llama, eagle3_head
from tests.harness import CHAIN, LONG_CHAIN, TREE_2, TREE_4, check_identity, sampled
from tests.scheduling_helpers import expected, free, outputs
from tests.simulated_graphs import attach
from tests.surface import assert_at_rest, count_retractions
from tests.tiny_models import random_prompt

CASES = {
    "eagle3-chain": ("EAGLE3", CHAIN),
    "eagle3-tree": ("EAGLE3", TREE_2),
    "multi-layer": ("MULTI_LAYER_EAGLE", CHAIN),
    "multi-layer-long": ("MULTI_LAYER_EAGLE", LONG_CHAIN),
}
ADAPTIVE = {
    "adaptive-standalone": ("STANDALONE", TREE_4),
    "adaptive-eagle": ("EAGLE", LONG_CHAIN),
    "adaptive-eagle3": ("EAGLE3", TREE_2),
    "adaptive-multi-layer": ("MULTI_LAYER_EAGLE", LONG_CHAIN),
}
PROMPTS = [random_prompt(40 + i, n) for i, n in enumerate((9, 2, 14, 5, 11))]
SIZES = (1, 2, 4)


def open_case(open_engine, name, device, schedule="sync", **changes):
    algorithm, shape = (CASES | ADAPTIVE)[name]
    if algorithm == "EAGLE3":
        target = deep_llama(device)
        draft = eagle3_head(target)
    else:
        target, draft = models(algorithm, "noisy", device)
    if name in ADAPTIVE:
        changes = {"adaptive_policy": RandomPolicy(11), "speculative_adaptive": True} | changes
    return open_engine(target, algorithm, draft, shape, schedule=schedule, **changes)


def params_of(kind):
    lengths = [20 + 7 * i % 19 for i in range(len(PROMPTS))]
    if kind == "sampled":
        return [sampled(i, max_new_tokens=n) for i, n in enumerate(lengths)]
    return [SamplingParams(max_new_tokens=n) for n in lengths]


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
@pytest.mark.parametrize("name", CASES | ADAPTIVE)
def test_tokens_are_those_of_plain_decoding(open_engine, name, kind, device):
    """In debug mode: the lengths that this schedule re-applies are compared with those of the rows in every step."""
    engine = open_case(open_engine, name, device, max_running_requests=3)
    before = free(engine)
    check_identity(engine, PROMPTS, params_of(kind))
    assert free(engine) == before
    assert_at_rest(engine)


@pytest.mark.parametrize("name", CASES | ADAPTIVE)
def test_recorded_steps_too(open_engine, name, device, monkeypatch):
    """Padded batches have no lengths to re-apply: they come from the rows, as with overlap."""
    engine = open_case(
        open_engine, name, device, debug=False, max_running_requests=5, cuda_graph_max_bs=SIZES[-1]
    )
    graphs = engine._forward_stream.graphs
    if device.type == "cpu":
        graphs = attach(engine, SIZES, monkeypatch)
    for _ in range(2):
        params = params_of("greedy")
        assert outputs(engine, PROMPTS, params) == expected(engine, PROMPTS, params)
    assert graphs.num_captures > 2


@pytest.mark.parametrize("name", CASES)
def test_both_schedules_accept_the_same(open_engine, name, device):
    """A draft hangs on its own request's tokens alone, not on when the host looks at them."""
    accepted = []
    for schedule in ("sync", "overlap"):
        engine = open_case(open_engine, name, device, schedule)
        accepted.append([done.spec.accept_lens for done in engine.generate(PROMPTS, params_of("greedy"))])
    assert accepted[0] == accepted[1]
    assert len({n for lens in accepted[0] for n in lens}) > 1


@pytest.mark.parametrize("name", ADAPTIVE)
def test_a_setting_that_changes_in_every_step_changes_what_is_drafted(open_engine, name, device):
    """From no drafts to all and back: what was missed in between is read before the next drafts."""
    engine = open_case(open_engine, name, device, adaptive_policy=ScriptedPolicy([-1, 0, 0, -1, 1]))
    check_identity(engine, PROMPTS, params_of("greedy"))
    settings = engine.trace.settings()
    assert len(set(settings.values())) == 3


@pytest.mark.parametrize(
    "name", ["eagle3-tree", "multi-layer", "adaptive-standalone", "adaptive-multi-layer"]
)
def test_retracted_requests_go_on(open_engine, name, device):
    """Nothing is in flight when a request loses its memory, and nothing of it may be left behind."""
    engine = open_case(open_engine, name, device, max_total_tokens=110)
    retracted = count_retractions(engine)
    params = [SamplingParams(max_new_tokens=24)] * len(PROMPTS)
    assert outputs(engine, PROMPTS, params) == expected(engine, PROMPTS, params)
    assert retracted
    assert_at_rest(engine)


@pytest.mark.parametrize("name", ["eagle3-tree", "multi-layer", "adaptive-eagle"])
def test_an_abort_between_steps_leaves_the_others_alone(open_engine, name, device):
    engine = open_case(open_engine, name, device)
    before, params = free(engine), [SamplingParams(max_new_tokens=24)] * 3
    aborted = None
    for chunk in engine.stream(PROMPTS[:3], params):
        if aborted is None and chunk.index == 1:
            aborted = chunk.request_id
            engine.abort(aborted)
    assert aborted is not None
    assert free(engine) == before
    assert outputs(engine, PROMPTS[:3], params) == expected(engine, PROMPTS[:3], params)
