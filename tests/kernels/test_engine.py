"""A whole engine on its kernels: the tokens, and every tree and path, of the engine on its references."""

from dataclasses import replace

import pytest

from spec_v2 import SamplingParams
from spec_v2.kernels import dispatch
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
