"""An algorithm of one's own: a worker class under a name runs in both schedules, and cannot shadow what is built in."""

from typing import final

import pytest
import torch

import spec_v2
from spec_v2 import SamplingParams, spec_registry
from spec_v2.server_args import ServerArgs
from spec_v2.spec_info import ALIASES, SpeculativeAlgorithm
from spec_v2.speculative.base_spec_worker import BaseSpecWorker
from spec_v2.speculative.model_draft_worker import ModelDraftWorker
from spec_v2.speculative_hook import resolve_speculative
from spec_v2.types import DraftTree
from tests import tiny_models as tiny
from tests.cells import models
from tests.harness import CHAIN, TREE_2, check_identity
from tests.surface import assert_at_rest

PROMPTS = [tiny.random_prompt(30 + i, 6 + i) for i in range(3)]


def count_up(inputs, num_nodes):
    """A chain below the newest token: each draft is the token before it plus one."""
    steps = torch.arange(num_nodes, device=inputs.bonus_tokens.device)
    return DraftTree(
        tokens=(inputs.bonus_tokens[:, None] + steps) % tiny.VOCAB,
        parents=(steps - 1).expand(len(inputs.rows), -1),
        scores=torch.ones(len(inputs.rows), num_nodes, device=steps.device),
        match_lens=torch.zeros_like(inputs.bonus_tokens),
        draft_probs=torch.empty(len(inputs.rows), 0, 0, device=steps.device),
    )


@final
class CountingWorker(BaseSpecWorker):
    def draft(self, batch, inputs):
        return self.stream.launch(count_up, inputs, self.shape.num_draft_tokens, label="draft")


@final
class OwnDraftWorker(ModelDraftWorker):
    @property
    def shifted(self):
        return False


@pytest.fixture(autouse=True)
def _forget_registrations(monkeypatch):
    monkeypatch.setattr(spec_registry, "_registered", {})


def test_a_worker_of_ones_own_runs(open_engine, schedule, device):
    spec_v2.register_algorithm("counting", CountingWorker)
    engine = open_engine(tiny.llama(device), "Counting", None, (4, 1, 5), schedule=schedule)
    assert type(engine.scheduler.worker) is CountingWorker
    records = check_identity(engine, PROMPTS, [SamplingParams(max_new_tokens=20)] * 3)
    for r in records:
        assert r.tokens == [(r.tokens[0] + i) % tiny.VOCAB for i in range(5)]
    assert_at_rest(engine)


@pytest.mark.parametrize("shape", [CHAIN, TREE_2], ids=str)
def test_a_worker_with_a_draft_model_runs(open_engine, shape, schedule, device):
    spec_v2.register_algorithm("MINE", OwnDraftWorker, draft_model=True)
    target, draft = models("STANDALONE", "noisy", device)
    engine = open_engine(target, "MINE", draft, shape, schedule=schedule, disable_radix_cache=False)
    records = check_identity(engine, PROMPTS, [SamplingParams(max_new_tokens=20)] * 3)
    assert max(r.accept_len for r in records) > 2
    assert_at_rest(engine)
    with pytest.raises(ValueError, match="--speculative-draft-model-path"):
        resolve_speculative(ServerArgs(speculative_algorithm="MINE"))


@pytest.mark.parametrize("name", [*SpeculativeAlgorithm.__members__, *ALIASES])
def test_mg06_a_built_in_name_is_refused(name):
    for spelled in (name, name.lower()):
        with pytest.raises(ValueError, match="built-in"):
            spec_v2.register_algorithm(spelled, CountingWorker)
    assert spec_registry.registered() == {}


def test_a_class_that_is_no_worker_is_refused():
    with pytest.raises(ValueError, match="forward_batch_generation"):
        spec_v2.register_algorithm("WORDS", str)
    assert spec_registry.registered() == {}


def test_an_unknown_name_lists_the_registered_ones():
    spec_v2.register_algorithm("counting", CountingWorker)
    with pytest.raises(ValueError, match="Did you mean COUNTING") as caught:
        _ = ServerArgs(speculative_algorithm="COUNTIN").algorithm
    assert "NGRAM" in str(caught.value)


def test_registering_again_replaces():
    spec_v2.register_algorithm("MINE", OwnDraftWorker, draft_model=True)
    spec_v2.register_algorithm("mine", CountingWorker)
    algorithm = SpeculativeAlgorithm.from_string("Mine")
    assert algorithm.create_worker(ServerArgs(speculative_algorithm="MINE")) is CountingWorker
    assert not algorithm.needs_draft_model()
