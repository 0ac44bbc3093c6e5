"""Models of many families run unchanged; what cannot be right is refused, naming the setting.

Most families compute their norms, softmax or routing in fp32 whatever the model's dtype, so here a token must
win by more than 1e-4.
"""

import copy
from functools import cache

import pytest
import torch

from spec_v2 import SamplingParams
from tests import tiny_models as tiny
from tests.harness import CHAIN, TREE_2, Recorder, make_engine

MARGIN = 1e-4
LENGTH = 24
SLIDING = {"sliding_window": 8}
RECURRENT = {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1}
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "mistral": SLIDING,
    "gemma2": SLIDING | GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 20.0},
    "gemma3_text": SLIDING | GEMMA,
    "gpt_neox": {},
    "gpt_oss": SLIDING | MOE | {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt2": {"n_inner": 64},
    "phi3": {},
    "olmo2": {},
    "cohere2": SLIDING | {"layer_types": ["sliding_attention", "full_attention"], "logit_scale": 1.0},
    "smollm3": {"no_rope_layers": [1, 0]},
    "granite": {"attention_multiplier": 0.3, "logits_scaling": 2.0, "residual_multiplier": 0.7},
    "mixtral": MOE,
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "glm4": {"head_dim": 8},
    "starcoder2": SLIDING,
}


def build(family, seed, **changes):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **tiny.config_kwargs(**FAMILIES.get(family, {}), **changes))
    # torch's grouped products of experts have no float64
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = tiny.seeded(lambda: AutoModelForCausalLM.from_config(config, **options), seed)
    model.generation_config.eos_token_id = None
    return model.to(torch.float64).eval().requires_grad_(False)


@cache
def family_case(family, device):
    """(model, prompts, plain outputs): of the first seeds that are lively and never near a tie."""
    for seed in range(200):
        model = build(family, seed).to(device)
        oracle = tiny.Oracle(model, attention="eager", min_margin=MARGIN)
        prompts = [tiny.random_prompt(seed, 5), tiny.random_prompt(seed + 1, 14)]
        try:
            outputs = [tuple(oracle.tokens(prompt, LENGTH)) for prompt in prompts]
        except tiny.NearTie:
            continue
        if all(len(set(output)) >= 8 for output in outputs):
            return model, prompts, outputs
    raise AssertionError(f"{family}: no seed gives a lively model")


@pytest.mark.parametrize("shape", [None, CHAIN, TREE_2], ids=["plain", "chain", "tree"])
@pytest.mark.parametrize("family", FAMILIES)
def test_family(open_engine, family, shape, schedule, device):
    model, prompts, outputs = family_case(family, device)
    if shape is None:
        engine = open_engine(model, schedule=schedule)
    else:
        engine = open_engine(model, "STANDALONE", copy.deepcopy(model), shape, schedule=schedule)
    recorder = Recorder(engine)
    done = engine.generate(prompts, SamplingParams(max_new_tokens=LENGTH))
    assert [d.output_ids for d in done] == outputs
    lens = {r.accept_len for r in recorder.records if not r.dropped}
    assert lens == ({1} if shape is None else {4}) or (shape == TREE_2 and min(lens) >= 2)


def test_gpt2_drafts_past_its_last_learned_position(open_engine, schedule, device):
    model, prompts, _ = family_case("gpt2", device)
    oracle = tiny.Oracle(model, attention="eager", min_margin=0)
    engine = open_engine(model, "STANDALONE", copy.deepcopy(model), TREE_2, schedule=schedule)
    done = engine.generate(prompts, SamplingParams(max_new_tokens=1000))
    for prompt, d in zip(prompts, done, strict=True):
        assert d.output_ids == tuple(oracle.tokens(prompt, tiny.CONTEXT - len(prompt)))


DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_d_state": 8, "mamba_n_groups": 1}
KDA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
}
REFUSED = {
    "dynamic rope": ("llama", DYNAMIC, "dynamic"),
    "a recurrence beside attention": ("falcon_h1", MAMBA, "2 of 2 layers.*FalconH1Mixer.*Lfm2ShortConv"),
    "a recurrent layer": (
        "olmo_hybrid",
        KDA,
        "1 of 2 layers.*OlmoHybridGatedDeltaNet.*Qwen3NextGatedDeltaNet",
    ),
    "recurrent layers": ("mamba2", RECURRENT, "0 of 2 layers.*Mamba2Mixer.*BambaMixer"),
    "attention that takes no keywords": ("stablelm", {}, "[Ss]table"),
    "positions in attention biases": ("bloom", {"n_head": 4}, "bloom|Bloom"),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("role", ["target", "draft"])
def test_st12_what_cannot_be_right_is_refused(what, role, device):
    family, changes, reason = REFUSED[what]
    refused, good = build(family, 0, **changes).to(device), copy.deepcopy(tiny.llama(device))
    field = "model_path" if role == "target" else "speculative_draft_model_path"
    with pytest.raises(ValueError, match=f"{field}.*(?:{reason})"):
        make_engine(*((refused,) if role == "target" else (good, "STANDALONE", refused)))


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_refusal_leaves_the_models_as_they_were(role, device):
    refused, good = build("llama", 0, **DYNAMIC).to(device), copy.deepcopy(tiny.llama(device))
    own = [m.config._attn_implementation for m in (refused, good)]
    with pytest.raises(ValueError, match="dynamic"):
        make_engine(*((refused,) if role == "target" else (good, "STANDALONE", refused)))
    assert [m.config._attn_implementation for m in (refused, good)] == own
    assert not good.get_decoder()._forward_hooks
