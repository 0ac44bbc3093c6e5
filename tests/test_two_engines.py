"""SC-14: an engine changes nothing that another one, or its own target, can see."""

import copy

import pytest
import torch

from tests.eagle3_models import deep_llama, eagle3_head
from tests.scheduling_helpers import expected, free, greedy, outputs, scene_engine, scene_prompts
from tests.tiny_models import llama, noisy_copy, random_llama


def check(engine):
    prompts, params = scene_prompts(None, engine.model, 3), [greedy(n) for n in (4, 9, 6)]
    assert outputs(engine, prompts, params) == expected(engine, prompts, params)


def test_sc_14_a_draft_leaves_the_targets_settings_alone(open_engine, device):
    target, draft = llama(device), random_llama(99, hidden_size=16).to(device)
    before, draft_before = target.config.to_dict(), draft.config.to_dict()
    plain = open_engine(target)
    settings, geometry = plain.model.config.to_dict(), plain._runners[0].geometry
    plain.close()
    engine = open_engine(target, "STANDALONE", draft)
    assert engine.model.config.to_dict() == settings
    assert engine._runners[0].geometry == geometry
    assert engine._runners[1].geometry != geometry
    check(engine)
    engine.close()
    assert target.config.to_dict() == before
    assert draft.config.to_dict() == draft_before


def test_sc_14_two_engines_have_their_own_settings_and_memory(open_engine, device):
    target = llama(device)
    plain = open_engine(target, page_size=16, schedule="sync")
    tree = open_engine(copy.deepcopy(target), "STANDALONE", noisy_copy(target), (3, 2, 6))
    assert (plain.server_args.num_draft_tokens, tree.server_args.num_draft_tokens) == (1, 6)
    before = free(plain), free(tree)
    for engine in (plain, tree, plain, tree):
        check(engine)
    assert (free(plain), free(tree)) == before


@pytest.mark.parametrize("closed_first", ["older", "newer"])
def test_two_engines_may_share_a_model(closed_first, open_engine, device):
    """The one that is left keeps working, and the last one to close gives the model its own attention back."""
    target = copy.deepcopy(llama(device))
    own = target.config._attn_implementation
    older, newer = open_engine(target), open_engine(target, "NGRAM")
    check(older)
    check(newer)
    first, left = (older, newer) if closed_first == "older" else (newer, older)
    first.close()
    check(left)
    left.close()
    assert target.config._attn_implementation == own
    assert not target.get_decoder()._forward_hooks
    with torch.no_grad():
        target(input_ids=torch.tensor([[1, 2]], device=device))  # nothing of ours is left in it


def test_an_engine_may_draft_with_its_own_target(open_engine, device):
    target = copy.deepcopy(llama(device))
    own = target.config._attn_implementation
    engine = open_engine(target, "STANDALONE", target)
    check(engine)
    engine.close()
    assert target.config._attn_implementation == own


def test_the_same_engine_gives_the_same_answers_again(schedule, device):
    with scene_engine("STANDALONE", device, schedule=schedule) as engine:
        prompts = scene_prompts("STANDALONE", engine.model, 3)
        options = [greedy(n, temperature=0.7, seed=n) for n in (5, 8, 3)]
        assert engine.generate(prompts, options) == engine.generate(prompts, options)


def test_a_shared_model_gathers_hidden_states_only_for_the_engine_that_runs(open_engine, device):
    target = deep_llama(device)
    reading = open_engine(target, "EAGLE3", eagle3_head(target))
    plain = open_engine(target)
    (runner, _), (other,) = reading._runners, plain._runners
    check(plain)
    assert (runner._aux, runner._last_hidden) == ({}, None)
    check(reading)
    assert other._last_hidden is None
    check(plain)
