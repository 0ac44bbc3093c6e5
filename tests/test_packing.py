"""Packed projections give what the single ones give, and keep nothing twice."""

import copy

import pytest
import torch
from torch import nn

from spec_v2 import Engine, SamplingParams
from spec_v2.model_executor.packing import _can_reorder, pack_projections, reorder_weights, speed_up_linears
from tests import tiny_models as tiny


def logits_of(model, ids):
    with torch.no_grad():
        return model(input_ids=ids).logits


def test_packed_projections_change_nothing(device):
    model = copy.deepcopy(tiny.llama(device))
    ids = torch.tensor([tiny.random_prompt(1, 20)], device=device)
    before, size = logits_of(model, ids), sum(p.numel() for p in model.parameters())
    layers = model.config.num_hidden_layers
    assert pack_projections(model) == 2 * layers
    assert torch.allclose(logits_of(model, ids), before, rtol=1e-12, atol=1e-12)
    assert sum(p.numel() for p in model.parameters()) == size
    linears = [m for m in model.modules() if type(m) is nn.Linear]
    # the two products, o_proj and down_proj of each layer, and the head
    assert len(linears) == 4 * layers + 1
    assert pack_projections(model) == 0


def test_biases_are_packed_too(device):
    model = copy.deepcopy(tiny.llama(device))
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(layer.self_attn, name)
            new = nn.Linear(old.in_features, old.out_features, dtype=old.weight.dtype, device=device)
            setattr(layer.self_attn, name, new)
    ids = torch.tensor([tiny.random_prompt(2, 9)], device=device)
    before = logits_of(model, ids)
    assert pack_projections(model) == 2 * model.config.num_hidden_layers
    assert torch.allclose(logits_of(model, ids), before, rtol=1e-12, atol=1e-12)


def test_projections_that_differ_in_kind_stay_apart(device):
    model = copy.deepcopy(tiny.llama(device))
    attention = model.model.layers[0].self_attn
    old = attention.q_proj
    attention.q_proj = nn.Linear(old.in_features, old.out_features, dtype=old.weight.dtype, device=device)
    assert pack_projections(model) == 2 * model.config.num_hidden_layers - 1


def test_a_packed_model_decodes_as_before(schedule, device):
    model = copy.deepcopy(tiny.llama(device))
    prompt = tiny.random_prompt(3, 7)
    right = tiny.oracle_of(tiny.llama(device)).tokens(prompt, 20)
    pack_projections(model)
    sync = schedule == "sync"
    with Engine(model, disable_overlap_schedule=sync, speculative_algorithm="NGRAM") as engine:
        (done,) = engine.generate(prompt, SamplingParams(max_new_tokens=20))
    assert list(done.output_ids) == list(right)


needs_onednn = pytest.mark.skipif(
    not _can_reorder(), reason="this processor or torch has no bf16 oneDNN product"
)


@needs_onednn
def test_weights_in_onednns_order_give_the_same_bits_and_are_kept_once():
    model = copy.deepcopy(tiny.llama(torch.device("cpu"))).bfloat16()
    ids = torch.tensor([tiny.random_prompt(1, 20)])
    pack_projections(model)
    before, q_rows = logits_of(model, ids), model.model.layers[0].self_attn.q_proj.product.weight[3].clone()
    linears = sum(type(m) is nn.Linear for m in model.modules())
    assert reorder_weights(model) == linears > 0
    assert torch.equal(logits_of(model, ids), before)
    assert not any(type(m) is nn.Linear for m in model.modules())
    assert torch.equal(model.model.layers[0].self_attn.q_proj.product.weight[3], q_rows)
    kept = sum(p.numel() for p in model.parameters())
    assert kept == model.model.embed_tokens.weight.numel() + sum(
        m.weight.numel() for m in model.modules() if type(m).__name__.endswith("RMSNorm")
    )


@needs_onednn
def test_what_is_shared_is_not_reordered():
    tied = copy.deepcopy(tiny.llama(torch.device("cpu"))).bfloat16()
    tied.lm_head.weight = tied.model.embed_tokens.weight
    speed_up_linears(tied)
    assert type(tied.lm_head) is nn.Linear

    target = copy.deepcopy(tiny.llama(torch.device("cpu"))).bfloat16()
    head = nn.Sequential(nn.Linear(8, 8, dtype=torch.bfloat16), target.lm_head)
    speed_up_linears(head, shared_with=target)
    assert head[1] is target.lm_head
    assert type(head[1]) is nn.Linear
    assert type(head[0]) is not nn.Linear


def test_other_dtypes_keep_their_weights():
    model = copy.deepcopy(tiny.llama(torch.device("cpu")))
    assert reorder_weights(model) == 0
