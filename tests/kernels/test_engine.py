"""A whole engine on its kernels: the tokens, and every tree and path, of the engine on its references."""

import copy
from dataclasses import replace

import pytest
import torch

from spec_v2 import SamplingParams
from spec_v2.kernels import dispatch
from tests import hybrid_models as hybrids
from tests import tiny_models as tiny
from tests.harness import CHAIN, TREE_2, Recorder, make_engine
from tests.kernels.support import DEVICE
from tests.scheduling_helpers import scene, scene_prompts

SAMPLED = {"temperature": 0.9, "seed": 5}
CASES = {
    "plain": (None, CHAIN, {}, {}),
    "ngram": ("NGRAM", (3, 3, 6), {}, {}),
    "standalone tree": ("STANDALONE", TREE_2, {}, {}),
    "eagle tree": ("EAGLE", TREE_2, {}, {}),
    "eagle chain": ("EAGLE", CHAIN, {}, {}),
    "eagle sampled": ("EAGLE", TREE_2, {}, SAMPLED),
    "rejection": ("STANDALONE", CHAIN, {"speculative_use_rejection_sampling": True}, SAMPLED),
}


def run(case):
    """Tokens, what each step drafted and accepted, and the scores of all nodes."""
    algorithm, shape, options, params = CASES[case]
    target, draft = scene(algorithm, DEVICE)
    with make_engine(target, algorithm, draft, shape, schedule="sync", **options) as engine:
        recorder = Recorder(engine)
        prompts = scene_prompts(algorithm, target, 2)
        done = engine.generate(prompts, SamplingParams(max_new_tokens=6, **params))
    drafted = [score for record in recorder.records for score in record.scores]
    return [d.output_ids for d in done], [replace(record, scores=[]) for record in recorder.records], drafted


@pytest.mark.parametrize("case", CASES)
def test_an_engine_on_kernels_does_what_its_references_do(case, monkeypatch):
    monkeypatch.setattr(dispatch, "runs_triton", lambda tensor: False)
    tokens, steps, scores = run(case)
    asked = []
    monkeypatch.setattr(dispatch, "runs_triton", lambda tensor: asked.append(tensor) is None)
    own_tokens, own_steps, own_scores = run(case)
    assert (own_tokens, own_steps) == (tokens, steps)
    assert own_scores == pytest.approx(scores, rel=1e-5)  # a softmax sums in another order
    assert len(asked) > 20


@pytest.mark.parametrize("family", ["qwen3_5_text", "bamba", "lfm2"])
def test_recurrent_layers_on_kernels_do_what_their_references_do(family, monkeypatch):
    """In fp32, since in float64 recurrences have no kernel; target and drafter are recurrent."""
    target = copy.deepcopy(hybrids.hybrid(family, DEVICE)).float()
    draft = tiny.noisy_copy(target, sigma=0.15)
    prompts, runs = hybrids.prompts(hybrids.hybrid(family, DEVICE), (3, 2), 4), []
    for on_kernels in (False, True):
        monkeypatch.setattr(dispatch, "runs_triton", lambda tensor, answer=on_kernels: answer)
        with make_engine(target, "STANDALONE", draft, TREE_2, schedule="sync") as engine:
            recorder = Recorder(engine)
            done = engine.generate(prompts, SamplingParams(max_new_tokens=4))
            states = [buffer[1:3].clone() for buffer in engine.scheduler.cache.target_states.buffers()]
        steps = [(r.tokens, r.parents, r.accepted_nodes) for r in recorder.records]
        runs.append(([d.output_ids for d in done], steps, states))
    assert runs[0][:2] == runs[1][:2]
    for mine, theirs in zip(runs[1][2], runs[0][2], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4 * float(theirs.abs().max()))
