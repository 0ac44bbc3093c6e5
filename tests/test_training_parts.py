"""The parts of the training loop: loss, optimizer, schedule, kept features, shares of time."""

import argparse
import copy

import numpy as np
import pytest
import torch
from torch import nn

from spec_v2.training.capture import Captured, FeatureMemory, Target
from spec_v2.training.command import _time_shares, add_train_args
from spec_v2.training.fit import Run
from spec_v2.training.kinds import KINDS, one_layer_config, trainable
from spec_v2.training.objective import expected_accept_length, run_batch, soft_cross_entropy
from spec_v2.training.optimizer import MasterAdamW, lr_at
from spec_v2.training.settings import KIND_NAMES, Settings
from spec_v2.training.shards import Texts, make_batch
from tests import tiny_models as tiny
from tests.training_models import tiny_instruct

VOCAB = tiny.VOCAB
TEXTS = Texts.from_lists(
    [tiny.random_prompt(i, 4 + i) for i in range(12)], [tiny.random_prompt(50 + i, 12 + i) for i in range(12)]
)


def test_soft_cross_entropy_is_the_mean_over_rows():
    logits = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    probs = torch.rand(5, 7, dtype=torch.float64).softmax(-1)
    wanted = -(probs * logits.log_softmax(-1)).sum(-1).mean()
    torch.testing.assert_close(soft_cross_entropy(logits, probs), wanted)


def test_the_expected_accept_length_is_a_sum_of_products():
    assert expected_accept_length(torch.tensor([0.5, 0.5, 1.0])) == pytest.approx(1 + 0.5 + 0.25 + 0.25)
    assert expected_accept_length(torch.tensor([0.0, 1.0])) == 1.0


@pytest.mark.parametrize("name", KIND_NAMES)
def test_steps_one_by_one_have_the_gradient_of_the_whole(name):
    """Each step's logits are freed before the next step's are made; the gradient is that of the weighted mean of losses."""
    kind, model = KINDS[name], tiny_instruct().double()
    vocabulary = torch.arange(0, VOCAB, 2) if kind.reduces_vocabulary else None
    head = kind.build(model, vocabulary, 3)
    own = list(trainable(head, model).values())
    for parameter in own:
        parameter.requires_grad_()
    draftable = None if vocabulary is None else np.isin(np.arange(VOCAB), vocabulary)
    num_steps = min(3, kind.num_steps)
    batch = make_batch(TEXTS, np.arange(6), num_steps, kind.first_lead, draftable)
    target = Target(model, kind.aux_layers(model), kind.kv_layers(model))
    said = target(batch.tokens)
    found = run_batch(kind, head, target, batch, vocabulary, said, step_decay=0.5, backward=True)
    mine = [p.grad.clone() for p in own]

    probs = model.get_output_embeddings()(said.hidden).softmax(-1)
    probs = (
        probs if vocabulary is None else probs[..., vocabulary] / probs[..., vocabulary].sum(-1, keepdim=True)
    )
    losses = []
    for step, states in enumerate(kind.states(head, batch, said, num_steps)):
        losses_of_step = []
        for text in range(6):
            begin, length = int(TEXTS.prompt_lens[text]), int(TEXTS.lengths[text])
            for start in range(begin - 1 if kind.first_lead else begin, length - 1 - kind.first_lead - step):
                row = start + kind.first_lead + step
                wanted = batch.tokens[text, row - step + 1 : row + 2]
                if vocabulary is not None and not torch.isin(wanted, vocabulary).all():
                    continue
                logits = kind.readout(head, states[text, start][None], step)[0]
                losses_of_step.append(-(probs[text, row] * logits.log_softmax(-1)).sum())
        losses.append(torch.stack(losses_of_step).mean())
    torch.testing.assert_close(found.loss, torch.stack(losses).detach())
    weights = torch.tensor([0.5**i for i in range(num_steps)], dtype=torch.float64)
    whole = torch.autograd.grad((weights * torch.stack(losses)).sum() / weights.sum(), own, allow_unused=True)
    for a, b in zip(mine, whole, strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-7)


def test_only_own_parameters_are_trained():
    model = tiny_instruct()
    for kind in KINDS.values():
        head = kind.build(model, None, 2)
        names = set(trainable(head, model))
        assert not any("embed_tokens" in name for name in names) or kind.name == "standalone"
        assert ("lm_head.weight" in names) == (kind.name == "eagle3")
        assert not {id(p) for p in model.parameters()} & {id(p) for p in trainable(head, model).values()}


def test_a_layer_is_of_the_target_s_shape():
    model = tiny_instruct(rope_parameters={"rope_type": "default", "rope_theta": 5000.0})
    config = one_layer_config(model)
    assert config.num_hidden_layers == 1
    assert config.rope_parameters["rope_theta"] == 5000.0
    for name in ("hidden_size", "intermediate_size", "num_key_value_heads", "max_position_embeddings"):
        assert getattr(config, name) == getattr(model.config, name)


# -- optimizer -----------------------------------------------------------------------------------------------


def test_bfloat16_weights_follow_their_masters():
    """Steps too small for bfloat16 add up in the masters."""
    weight = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    optimizer = MasterAdamW({"w": weight}, weight_decay=0.0, clip=1e9)
    for _ in range(8):
        weight.grad = torch.ones_like(weight)
        optimizer.step(1e-3)  # AdamW steps by lr where gradients are constant
    assert optimizer.masters[0].dtype == torch.float32
    torch.testing.assert_close(optimizer.masters[0].detach(), torch.full((4, 4), 0.992), atol=1e-5, rtol=0)
    assert torch.equal(weight.detach(), torch.full((4, 4), 0.992).bfloat16())
    assert weight.grad is None


def test_gradients_are_clipped_and_their_norm_told():
    weight = nn.Parameter(torch.zeros(2))
    optimizer = MasterAdamW({"w": weight}, weight_decay=0.0, clip=1.0)
    weight.grad = torch.tensor([3.0, 4.0])
    assert float(optimizer.step(0.1)) == pytest.approx(5.0)


def test_averages_are_swapped_in_and_out():
    weight = nn.Parameter(torch.zeros(3))
    optimizer = MasterAdamW({"w": weight}, weight_decay=0.0, clip=1e9, ema=0.75)
    weight.grad = torch.ones(3)
    optimizer.step(1.0)
    now = weight.detach().clone()
    optimizer.use(averages=True)
    torch.testing.assert_close(weight.detach(), 0.25 * now)
    optimizer.use(averages=False)
    assert torch.equal(weight.detach(), now)


def test_state_comes_back_in_small_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("spec_v2.training.optimizer.PIECE_BYTES", 40)

    def fresh():
        parameters = {"a": nn.Parameter(torch.ones(5, 5)), "b": nn.Parameter(torch.ones(3))}
        return parameters, MasterAdamW(parameters, weight_decay=0.1, clip=1.0, ema=0.9)

    def step(parameters, optimizer, seed):
        for i, p in enumerate(parameters.values()):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed + i))
        optimizer.step(0.1)

    parameters, optimizer = fresh()
    step(parameters, optimizer, 0)
    optimizer.save(tmp_path)
    assert len(list(tmp_path.glob("exp_avg_sq-*"))) == 3
    others, other = fresh()
    other.load(tmp_path, 1)
    for seed in (10, 20):
        step(parameters, optimizer, seed)
        step(others, other, seed)
    assert all(torch.equal(parameters[name], others[name]) for name in parameters)
    assert all(torch.equal(a, b) for a, b in zip(optimizer.averages, other.averages, strict=True))
    parameters["a"] = nn.Parameter(torch.ones(5, 6))
    with pytest.raises(ValueError, match="--resume"):
        MasterAdamW(parameters, weight_decay=0.1, clip=1.0).load(tmp_path, 1)


def test_the_rate_warms_up_and_falls_as_a_cosine():
    assert lr_at(0.0, 0, 1.0, 10) == pytest.approx(0.1)
    assert lr_at(0.0, 9, 1.0, 10) == 1.0
    assert lr_at(0.5, 100, 1.0, 10) == pytest.approx(0.51)
    assert lr_at(1.0, 100, 1.0, 10) == pytest.approx(0.02)
    assert lr_at(1.5, 100, 1.0, 0) == pytest.approx(0.02)


# -- the loop ------------------------------------------------------------------------------------------------


def test_features_are_kept_while_there_is_room():
    def capture():
        calls.append(1)
        return Captured(torch.zeros(1, 2, 4), torch.zeros(1, 2, 0), {})

    calls = []
    memory = FeatureMemory(torch.device("cpu"), 0.5)
    assert memory.room == 0
    memory.room = 40  # one batch of 32 bytes
    for number in (3, 5, 3, 5, 3):
        memory.get(number, capture)
    assert len(calls) == 3


def test_each_epoch_has_the_same_batches_in_another_order(tmp_path):
    settings = Settings(max_steps=1, tokens_per_batch=128, draft_vocab_size=48)
    run = Run(KINDS["eagle3"], tiny_instruct(), TEXTS, None, settings, tmp_path)
    batches, size = run._endless(), len(run.plan)
    epochs = [[next(batches) for _ in range(size)] for _ in range(2)]
    orders = [[number for _, _, number, _ in epoch] for epoch in epochs]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(size))
    assert orders[0] != orders[1]
    tokens = [{number: batch.tokens.tolist() for _, _, number, batch in epoch} for epoch in epochs]
    assert tokens[0] == tokens[1]
    run.close()


def test_kept_features_change_nothing(tmp_path):
    """Over three epochs; and batches are the same texts in each, in another order."""
    results = []
    for room in (0, 1 << 30):
        settings = Settings(max_steps=9, tokens_per_batch=256, draft_vocab_size=48, log_every=1)
        model, asked = tiny_instruct(), []
        run = Run(KINDS["eagle3"], model, TEXTS, None, settings, tmp_path)
        run.features.room = room
        model.get_decoder().register_forward_hook(lambda *_, asked=asked: asked.append(1))
        run.train()
        assert run.progress.epoch == 2
        results.append((len(asked), copy.deepcopy(run.optimizer.masters)))
        run.close()
    assert [calls for calls, _ in results] == [9, 3]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


def test_time_is_shared_out():
    parser = argparse.ArgumentParser()
    add_train_args(parser)

    def shares(*flags):
        return _time_shares(parser.parse_args([*flags, "--out", "x"]))

    assert shares("fit", "--max-steps", "3") == {}
    assert shares("fit", "--time-limit", "2", "--kind", "eagle,mtp")["mtp"] == 120
    parts = shares("all", "--time-limit", "8", "--kind", "eagle3,eagle")
    assert sum(parts.values()) == pytest.approx(7 * 60)
    assert parts["eagle3"] == pytest.approx(3 * parts["eagle"])
