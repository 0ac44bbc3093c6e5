"""Training runs what inference runs: features, positions, shifts and recurrent states are the engine's."""

import copy
from functools import partial

import pytest
import torch

from spec_v2 import SamplingParams
from spec_v2.models.eagle3 import default_aux_layers
from spec_v2.training.capture import Target, with_fused_norms
from spec_v2.training.kinds import KINDS
from spec_v2.training.settings import KIND_NAMES
from spec_v2.training.shards import Batch
from spec_v2.training.unroll import unroll
from tests import tiny_models as tiny
from tests.draft_oracles import EagleOracle
from tests.eagle3_models import LAYERS, Eagle3Oracle, aux_features, deep_llama, eagle3_head
from tests.harness import CHAIN, make_engine

EVEN = range(0, 64, 2)
TEXT = tiny.random_prompt(3, 24)


def setting(name, device):
    """(target, draft model)."""
    if name == "eagle3":
        return deep_llama(device), eagle3_head(deep_llama(device), EVEN)
    target = tiny.llama(device)
    make = {
        "eagle": tiny.hidden_head,
        "mtp": partial(tiny.hidden_modules, num_modules=CHAIN[0]),
        "frozen_kv_mtp": tiny.hidden_reader,
        "standalone": tiny.noisy_copy,
    }
    return target, make[name](target)


def captured_of(kind, target, head, text):
    """What training captures of a text."""
    layers = getattr(head, "target_layers", ())
    dense = Target(copy.deepcopy(target), kind.aux_layers(target), layers)
    return dense(torch.tensor([list(text)], device=target.device))


def drafting(kind, target, head, prompt, schedule="sync"):
    """(hidden states given, positions, logits of its last row) of all the drafter's forwards while an engine answers."""
    engine = make_engine(
        target, kind.algorithm, head, CHAIN, schedule=schedule, enable_multi_layer_eagle=kind.multi_layer
    )
    runner = engine.scheduler.worker.draft_runner
    forwards, forward = [], runner.forward

    def watched(input_ids, positions, forward_batch, logits_at=None, target_hidden=None, **rest):
        out = forward(input_ids, positions, forward_batch, logits_at, target_hidden, **rest)
        hidden = None if target_hidden is None else target_hidden.clone()
        forwards.append((hidden, positions.tolist(), out.logits[-1].clone()))
        return out

    runner.forward = watched
    try:
        (done,) = engine.generate([prompt], SamplingParams(max_new_tokens=12))
    finally:
        engine.close()
    return forwards, done


def known_by_step(prompt, done):
    """What was known when the drafts of each step were made: the prompt, then what each step has emitted."""
    text, known = [*prompt, *done.output_ids], len(prompt) + 1
    for accepted in done.spec.accept_lens:
        yield text[:known]
        known += accepted


@pytest.mark.parametrize("name", KIND_NAMES)
def test_each_draft_step_has_the_logits_of_inference(name, device):
    """What the engine drafted is laid out as a text; training must say of it what the engine said, in every step."""
    kind, num_steps = KINDS[name], CHAIN[0]
    target, head = setting(name, device)
    forwards, done = drafting(kind, target, copy.deepcopy(head), TEXT)
    ids = head.target_ids if getattr(head, "target_ids", None) is not None else torch.arange(tiny.VOCAB)
    rounds = [
        [seen for _, _, seen in forwards[i : i + num_steps]] for i in range(0, len(forwards), num_steps)
    ]
    num_checked = 0
    for known, said in zip(known_by_step(TEXT, done), rounds, strict=False):
        text = [*known, *(int(ids[logits.argmax()]) for logits in said), 0]
        batch = Batch(torch.tensor([text], device=device), ids[:0], (), len(text))
        states = kind.states(copy.deepcopy(head), batch, captured_of(kind, target, head, text), num_steps)
        for step, logits in enumerate(said):
            # a head's chain starts at the newest position with features; a small LM reads on
            row = len(known) - 2 if kind.first_lead else len(known) - 1 + step
            state = states[step if kind.first_lead else 0][0, row]
            torch.testing.assert_close(kind.readout(head, state[None], step)[0], logits, atol=1e-9, rtol=1e-9)
            num_checked += 1
    assert num_checked >= 3 * num_steps


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_features_are_what_the_engine_gives_the_head(name, schedule, device):
    """Those of the prompt, and after every step the newest accepted token's."""
    kind = KINDS[name]
    target, head = setting(name, device)
    forwards, done = drafting(kind, target, head, TEXT, schedule)
    captured = captured_of(kind, target, head, [*TEXT, *done.output_ids])
    features = (captured.aux if name == "eagle3" else captured.hidden)[0]
    (prompt_hidden, prompt_positions, _), *later = forwards
    torch.testing.assert_close(prompt_hidden, features[prompt_positions], atol=1e-9, rtol=1e-9)
    extends = later[CHAIN[0] - 1 :: CHAIN[0]]
    for accepted, (hidden, positions, _) in zip(done.spec.accept_lens, extends, strict=False):
        real = [p for p in positions[:accepted] if p < len(features)]
        torch.testing.assert_close(hidden[: len(real)], features[real], atol=1e-9, rtol=1e-9)
    assert len(extends) >= 3


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_every_position_starts_a_chain(name, device):
    """Against full forwards without any of our attention; rows of a batch do not see each other."""
    kind = KINDS[name]
    target, head = setting(name, device)
    oracle = EagleOracle(target, head) if name == "eagle" else Eagle3Oracle(target, head, EVEN)
    other = tiny.random_prompt(4, len(TEXT))
    tokens = torch.tensor([TEXT, other], device=device)
    captured = Target(copy.deepcopy(target), kind.aux_layers(target))(tokens)
    states = kind.states(copy.deepcopy(head), Batch(tokens, tokens[0], (), 0), captured, 4)
    for row, text in enumerate((TEXT, other)):
        for step in range(4):
            for start in (0, 1, 7, 13, len(text) - 3 - step):
                wanted = oracle.next_logits(text[: start + 2], text[start + 2 : start + 2 + step])
                mine = head.readout(states[step][row, start])
                wanted = wanted[list(EVEN)] if name == "eagle3" else wanted
                torch.testing.assert_close(mine, wanted, atol=1e-8, rtol=1e-8)


def test_aux_features_are_the_inputs_of_the_layers(device):
    target = deep_llama(device)
    found = Target(copy.deepcopy(target), default_aux_layers(LAYERS))(
        torch.tensor([TEXT], device=device)
    ).aux[0]
    torch.testing.assert_close(found, aux_features(target, TEXT), atol=1e-9, rtol=1e-9)


def test_gradients_are_those_of_separate_chains(device):
    """The unrolled pass and one full forward per chain and step give the same gradient."""
    target, head = setting("eagle3", device)
    text, num_steps = TEXT[:9], 3
    tokens = torch.tensor([text], device=device)
    features = captured_of(KINDS["eagle3"], target, head, text).aux

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
    target, head = setting("eagle3", device)
    tokens = torch.tensor([TEXT, (*TEXT[:16], *[0] * 8)], device=device)
    dense = Target(copy.deepcopy(target), default_aux_layers(LAYERS))
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
