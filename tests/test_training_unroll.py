"""Training runs what inference runs: features, positions, shifts and recurrent states are the engine's."""

import copy
from dataclasses import dataclass
from functools import partial

import pytest
import torch

from spec_v2 import SamplingParams
from spec_v2.models.eagle3 import default_aux_layers
from spec_v2.training.capture import Target, with_fused_norms
from spec_v2.training.unroll import unroll
from tests import tiny_models as tiny
from tests.draft_oracles import EagleOracle
from tests.eagle3_models import LAYERS, Eagle3Oracle, aux_features, deep_llama, eagle3_head
from tests.harness import CHAIN, make_engine

EVEN = range(0, 64, 2)
TEXT = tiny.random_prompt(3, 24)


@dataclass
class DraftForward:
    """One forward of the engine's draft runner for one request. `hidden_in`: what it was given in place of features."""

    tokens: list[int]
    positions: list[int]
    logits: torch.Tensor
    hidden_in: torch.Tensor


def drafting(target, algorithm, head, prompt, schedule="sync"):
    """All forwards of the drafter while an engine answers `prompt`, and what it answers."""
    engine = make_engine(target, algorithm, head, CHAIN, schedule=schedule)
    forwards, forward = [], engine.scheduler.worker.draft_runner.forward

    def watched(input_ids, positions, forward_batch, logits_at=None, target_hidden=None):
        out = forward(input_ids, positions, forward_batch, logits_at, target_hidden)
        forwards.append(
            DraftForward(input_ids.tolist(), positions.tolist(), out.logits.clone(), target_hidden.clone())
        )
        return out

    engine.scheduler.worker.draft_runner.forward = watched
    try:
        (done,) = engine.generate([prompt], SamplingParams(max_new_tokens=12))
    finally:
        engine.close()
    return forwards, [*prompt, *done.output_ids]


def rounds_of(forwards, num_steps):
    """(draft-extend, the draft forwards after it) of each step; the last step's drafts may be missing."""
    rounds = [forwards[i : i + num_steps] for i in range(0, len(forwards), num_steps)]
    return [r for r in rounds if len(r) == num_steps]


def setting(algorithm, device):
    """(target, head, aux layers)."""
    if algorithm == "EAGLE3":
        target = deep_llama(device)
        return target, eagle3_head(target, EVEN), default_aux_layers(LAYERS)
    target = tiny.llama(device)
    return target, tiny.hidden_head(target), ()


def captured_features(target, layers, text):
    dense = Target(copy.deepcopy(target), layers)
    found = dense(torch.tensor([list(text)], device=target.device))
    return found.aux if layers else found.hidden


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3"])
def test_features_are_what_the_engine_gives_the_head(algorithm, schedule, device):
    target, head, layers = setting(algorithm, device)
    forwards, text = drafting(target, algorithm, head, TEXT, schedule)
    features = captured_features(target, layers, text)[0]
    num_checked = 0
    for extend, *_ in rounds_of(forwards, CHAIN[0]):
        real = [
            i for i, p in enumerate(extend.positions) if extend.tokens[i] == (text[p + 1 : p + 2] or [-1])[0]
        ]
        for i in real[: real[-1] + 1]:
            torch.testing.assert_close(
                extend.hidden_in[i], features[extend.positions[i]], atol=1e-9, rtol=1e-9
            )
            num_checked += 1
            break  # rows behind the first wrong one are garbage
    assert num_checked > 3


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3"])
def test_each_draft_step_has_the_logits_of_inference(algorithm, device):
    """What the engine's draft loop drafted is laid out as a text; training must say of it what the engine said."""
    target, head, layers = setting(algorithm, device)
    forwards, text = drafting(target, algorithm, copy.deepcopy(head), TEXT)
    num_steps, checked = CHAIN[0], set()
    for _, *drafted in rounds_of(forwards, num_steps):
        start = drafted[0].positions[0] - 1  # the newest position with features: the chain's start
        drafts = [step.tokens[0] for step in drafted]
        laid_out = [*text[: start + 2], *drafts, 0]
        states = unroll(
            copy.deepcopy(head),
            torch.tensor([laid_out], device=device),
            captured_features(target, layers, laid_out),
            num_steps,
        )
        for step, seen in enumerate(drafted, 1):
            assert seen.positions == [start + step]
            mine = head.readout(states[step][0, start])
            torch.testing.assert_close(mine, seen.logits[0], atol=1e-9, rtol=1e-9)
            checked.add(step)
    assert checked == set(range(1, num_steps))


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3"])
def test_every_position_starts_a_chain(algorithm, device):
    """Against full forwards without any of our attention; rows of a batch do not see each other."""
    target, head, layers = setting(algorithm, device)
    oracle = EagleOracle(target, head) if algorithm == "EAGLE" else Eagle3Oracle(target, head, EVEN)
    other = tiny.random_prompt(4, len(TEXT))
    tokens = torch.tensor([TEXT, other], device=device)
    dense = Target(copy.deepcopy(target), layers)
    captured = dense(tokens)
    states = unroll(copy.deepcopy(head), tokens, captured.aux if layers else captured.hidden, 4)
    for row, text in enumerate((TEXT, other)):
        for step in range(4):
            for start in (0, 1, 7, 13, len(text) - 3 - step):
                wanted = oracle.next_logits(text[: start + 2], text[start + 2 : start + 2 + step])
                mine = head.readout(states[step][row, start])
                wanted = wanted[list(EVEN)] if algorithm == "EAGLE3" else wanted
                torch.testing.assert_close(mine, wanted, atol=1e-8, rtol=1e-8)


def test_aux_features_are_the_inputs_of_the_layers(device):
    target = deep_llama(device)
    found = captured_features(target, default_aux_layers(LAYERS), TEXT)[0]
    torch.testing.assert_close(found, aux_features(target, TEXT), atol=1e-9, rtol=1e-9)


def test_gradients_are_those_of_separate_chains(device):
    """The unrolled pass and one full forward per chain and step give the same gradient."""
    target, head, layers = setting("EAGLE3", device)
    text, num_steps = TEXT[:9], 3
    tokens = torch.tensor([text], device=device)
    features = captured_features(target, layers, text)

    def gradient(states_of):
        mine = copy.deepcopy(head).requires_grad_()
        mine.decoder.embed_tokens.weight.requires_grad_(False)
        total = sum(mine.readout(h).square().sum() for h in states_of(mine))
        return torch.autograd.grad(
            total, [mine.decoder.fc.weight, mine.decoder.midlayer.self_attn.k_proj.weight]
        )

    starts = range(len(text) - 1 - num_steps)

    def unrolled(mine):
        states = unroll(mine, tokens, features, num_steps)
        return [states[step][0, list(starts)] for step in range(num_steps)]

    def one_by_one(mine):
        mine.decoder.midlayer.self_attn.config._attn_implementation = "sdpa"
        for start in starts:
            hidden = mine.decoder.fc(features[0, : start + 1])
            for step in range(num_steps):
                ids = tokens[:, 1 : start + 2 + step]
                places = torch.arange(ids.shape[1], device=device)[None]
                out = mine.hidden_states(ids, places, hidden[None])[0]
                hidden = torch.cat([hidden, out[-1:]])
                yield out[-1:]

    for a, b in zip(gradient(unrolled), gradient(one_by_one), strict=True):
        torch.testing.assert_close(a, b, atol=1e-8, rtol=1e-8)


def test_padding_and_later_tokens_are_not_seen(device):
    target, head, layers = setting("EAGLE3", device)
    tokens = torch.tensor([TEXT, (*TEXT[:16], *[0] * 8)], device=device)
    dense = Target(copy.deepcopy(target), layers)
    states = unroll(copy.deepcopy(head), tokens, dense(tokens).aux, 3)
    for step, state in enumerate(states):
        last = 16 - 2 - step
        torch.testing.assert_close(state[0, :last], state[1, :last], atol=1e-9, rtol=1e-9)
        assert not torch.allclose(state[0, last + 1], state[1, last + 1])


def test_norms_are_replaced_only_where_nothing_changes():
    from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

    ids = torch.tensor([TEXT])
    families = (
        (LlamaForCausalLM, LlamaConfig(**tiny.config_kwargs()), True),
        (Gemma2ForCausalLM, Gemma2Config(**tiny.config_kwargs(head_dim=8)), False),
    )
    for make, config, replaced in families:
        model = tiny.seeded(partial(make, config), 0).eval().requires_grad_(False)
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(torch.linspace(-0.5, 0.5, len(p)))
        before = model(input_ids=ids).logits
        with_fused_norms(model)
        assert replaced == any(type(m) is torch.nn.RMSNorm for m in model.modules())
        torch.testing.assert_close(model(input_ids=ids).logits, before, atol=1e-4, rtol=1e-4)


def test_a_target_that_caps_its_logits_is_refused():
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(**tiny.config_kwargs(head_dim=8, final_logit_softcapping=2.0))
    model = tiny.seeded(lambda: Gemma2ForCausalLM(config), 0).eval()
    with pytest.raises(ValueError, match=r"model_path=Gemma2ForCausalLM: .*soft-capped"):
        Target(model)
    assert model.config._attn_implementation != "spec_v2_unrolled"
