"""Folders with the key names, dtypes and relative shapes of published draft heads load, every tensor in its place.

The names are written out here, not derived from our modules. Sizes are small, so that nothing has to be downloaded.
"""

import json

import pytest
import torch
from safetensors.torch import save_file

from spec_v2 import SamplingParams
from spec_v2.mem_cache.kv_pool import LayerGeometry
from spec_v2.models.draft_models import load_eagle3_head, load_eagle_head, load_frozen_kv_head, load_mtp_head
from tests import tiny_models as tiny
from tests.eagle3_models import deep_llama
from tests.harness import CHAIN, SHORT_CHAIN, TREE_2, check_identity, make_engine

H, MLP, V, DRAFT_V, HEADS, KV_HEADS, DIM = 32, 64, tiny.VOCAB, 24, 4, 2, 8
Q, KV = HEADS * DIM, KV_HEADS * DIM
LLAMA = {
    "model_type": "llama", "hidden_act": "silu", "hidden_size": H, "intermediate_size": MLP, "vocab_size": V,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6, "initializer_range": 0.02, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
    "transformers_version": "4.31.0", "use_cache": True,
}  # fmt: skip


def attention_and_mlp(prefix, read=H):
    return {
        f"{prefix}self_attn.q_proj.weight": (Q, read),
        f"{prefix}self_attn.k_proj.weight": (KV, read),
        f"{prefix}self_attn.v_proj.weight": (KV, read),
        f"{prefix}self_attn.o_proj.weight": (H, Q),
        f"{prefix}mlp.gate_proj.weight": (MLP, H),
        f"{prefix}mlp.up_proj.weight": (MLP, H),
        f"{prefix}mlp.down_proj.weight": (H, MLP),
        f"{prefix}post_attention_layernorm.weight": (H,),
    }


# SafeAILab's first heads: no norm before the layer nor after it. The embedding is a copy of the target's.
EAGLE_1 = attention_and_mlp("layers.0.") | {
    "embed_tokens.weight": (V, H),
    "fc.weight": (H, 2 * H),
    "fc.bias": (H,),
}
EAGLE_2 = {name: shape for name, shape in EAGLE_1.items() if name != "fc.bias"}  # for Llama 3: no bias
EAGLE_3 = attention_and_mlp("midlayer.", read=2 * H) | {
    "midlayer.hidden_norm.weight": (H,),
    "midlayer.input_layernorm.weight": (H,),
    "fc.weight": (H, 3 * H),
    "norm.weight": (H,),
    "lm_head.weight": (DRAFT_V, H),
    "d2t": (DRAFT_V,),
    "t2d": (V,),
}
DTYPES = {"d2t": torch.int64, "t2d": torch.bool}
EAGLE_3_CONFIG = LLAMA | {"num_hidden_layers": 1, "draft_vocab_size": DRAFT_V, "torch_dtype": "bfloat16"}
HEADS_OF = {
    "SafeAILab EAGLE": (
        "EAGLE",
        torch.float16,
        EAGLE_1,
        LLAMA
        | {
            "num_hidden_layers": 1,
            "architectures": ["LlamaForCausalLM"],
            "bias": True,
            "torch_dtype": "float16",
        },
    ),
    "SafeAILab EAGLE, Llama 3": (
        "EAGLE",
        torch.float16,
        EAGLE_2,
        LLAMA
        | {
            "num_hidden_layers": 1,
            "architectures": ["LlamaForCausalLM"],
            "bias": False,
            "torch_dtype": "float16",
        },
    ),
    "SafeAILab EAGLE-3": (
        "EAGLE3",
        torch.float16,
        EAGLE_3,
        EAGLE_3_CONFIG | {"architectures": ["LlamaForCausalLM"], "torch_dtype": "float16"},
    ),
    "SpecForge EAGLE-3": (
        "EAGLE3",
        torch.bfloat16,
        EAGLE_3,
        EAGLE_3_CONFIG
        | {"architectures": ["LlamaForCausalLMEagle3"], "pretraining_tp": 1, "attention_bias": False},
    ),
    "SpecForge EAGLE-3, its own embedding": (
        "EAGLE3",
        torch.bfloat16,
        EAGLE_3 | {"embed_tokens.weight": (V, H)},
        EAGLE_3_CONFIG | {"architectures": ["LlamaForCausalLMEagle3"]},
    ),
}


def make_tensors(shapes, dtype):
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name, shape in shapes.items():
        if name == "d2t":
            tensors[name] = torch.arange(DRAFT_V)  # draft id i is token 2i
        elif name == "t2d":
            tensors[name] = torch.arange(V) % 2 == 0
        else:
            tensors[name] = (0.4 * torch.randn(shape, generator=generator)).to(DTYPES.get(name, dtype))
    return tensors


def write(folder, config, tensors):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def generates(open_engine, target, algorithm, folder, shape=TREE_2, **changes):
    """The head drafts, and the tokens are the target's."""
    engine = open_engine(
        target,
        algorithm,
        None,
        shape,
        speculative_draft_model_path=str(folder),
        context_length=128,
        **changes,
    )
    prompts = [tiny.random_prompt(i, 5 + i) for i in range(2)]
    records = check_identity(engine, prompts, [SamplingParams(max_new_tokens=10)] * 2)
    return {token for record in records for token in record.tokens[1:]}


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("layout", HEADS_OF)
def test_ck08_published_heads(open_engine, tmp_path, layout, prefix, device):
    algorithm, dtype, shapes, config = HEADS_OF[layout]
    tensors = make_tensors(shapes, dtype)
    top = ("lm_head", "d2t", "t2d")  # never below the model
    named = {name if name.startswith(top) else prefix + name: value for name, value in tensors.items()}
    folder = write(tmp_path / "head", config, named)
    target = deep_llama(device)
    head = (load_eagle3_head if algorithm == "EAGLE3" else load_eagle_head)(folder, target)
    loaded = {name.removeprefix("decoder."): value for name, value in head.state_dict().items()}
    left_out = {"t2d"} | (set() if "own" in layout else {"embed_tokens.weight"})
    for name in set(tensors) - left_out:
        assert torch.equal(loaded[name].cpu(), tensors[name].to(loaded[name].dtype)), name
    if "own" not in layout:
        assert torch.equal(loaded["embed_tokens.weight"], target.get_input_embeddings().weight)
    drafted = generates(open_engine, target, algorithm, folder)
    assert algorithm == "EAGLE" or all(token % 2 == 0 for token in drafted)


# -- MTP modules ---------------------------------------------------------------------------------------------


def mtp_module(layer, parts):
    prefix = f"model.layers.{layer}."
    own = {
        "enorm.weight": (H,),
        "hnorm.weight": (H,),
        "eh_proj.weight": (H, 2 * H),
        "embed_tokens.weight": (V, H),
        "shared_head.norm.weight": (H,),
        "shared_head.head.weight": (V, H),
        "input_layernorm.weight": (H,),
    }
    return {prefix + name: shape for name, shape in (own | parts).items()}


def mtp_tensors(target, layers, parts, dtype, own_head=()):
    """As published: embedding and LM head of each module are copies of the target's."""
    tensors = {}
    for layer in layers:
        tensors |= make_tensors(mtp_module(layer, parts), dtype)
        tensors[f"model.layers.{layer}.embed_tokens.weight"] = (
            target.get_input_embeddings().weight.to(dtype).clone()
        )
        if layer not in own_head:
            tensors[f"model.layers.{layer}.shared_head.head.weight"] = target.lm_head.weight.to(dtype).clone()
    return tensors


MTP_CONFIG = LLAMA | {"num_hidden_layers": 2, "num_nextn_predict_layers": 3, "torch_dtype": "float64"}


def file_name(own_name, first):
    """Of a tensor in the published layout, by its name in the head; None for what is shared."""
    if "decoder.mtp." not in own_name:
        return None
    _, _, module, rest = own_name.split(".", 3)
    return f"model.layers.{first + int(module)}.{rest.removeprefix('body.layers.0.')}"


@pytest.mark.parametrize("first", [0, 2, 61])
@pytest.mark.parametrize("own_head", [(), (1,)], ids=["shared", "own"])
def test_ck08_mtp_modules_with_llama_layers(open_engine, tmp_path, first, own_head, device):
    target = tiny.llama(device)
    layers = range(first, first + 3)
    tensors = mtp_tensors(target, layers, attention_and_mlp(""), torch.float64, [first + i for i in own_head])
    folder = write(tmp_path / "head", MTP_CONFIG, tensors)
    head = load_mtp_head(folder, target, 3)
    named = {file_name(name, first): value for name, value in head.state_dict().items()}
    named.pop(None)
    heads = {f"model.layers.{first + i}.shared_head.head.weight" for i in own_head}
    skipped = {name for name in tensors if name.endswith(("embed_tokens.weight", "shared_head.head.weight"))}
    assert set(named) == set(tensors) - skipped | heads
    for name, value in named.items():
        assert torch.equal(value.cpu(), tensors[name]), name
    assert head.lm_head is target.get_output_embeddings()
    generates(open_engine, target, "MULTI_LAYER_EAGLE", folder, CHAIN)


def test_ck08_mtp_modules_of_deepseek_v3(tmp_path, device):
    """Latent attention and experts, one tensor for each expert in the file."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    sizes = {
        "q_lora_rank": 6,
        "kv_lora_rank": 5,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 7,
    }
    config = DeepseekV3Config(
        **tiny.config_kwargs(num_hidden_layers=3, num_key_value_heads=4), **sizes, moe_intermediate_size=12,
        n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2, first_k_dense_replace=2,
    )  # fmt: skip
    target = tiny.seeded(lambda: DeepseekV3ForCausalLM(config), 0).eval().requires_grad_(False).to(device)
    qk, rank = 12, sizes["kv_lora_rank"]
    parts = {
        "self_attn.q_a_proj.weight": (6, H),
        "self_attn.q_a_layernorm.weight": (6,),
        "self_attn.q_b_proj.weight": (HEADS * qk, 6),
        "self_attn.kv_a_proj_with_mqa.weight": (rank + 4, H),
        "self_attn.kv_a_layernorm.weight": (rank,),
        "self_attn.kv_b_proj.weight": (HEADS * (8 + 7), rank),
        "self_attn.o_proj.weight": (H, HEADS * 7),
        "post_attention_layernorm.weight": (H,),
        "mlp.gate.weight": (4, H),
        "mlp.gate.e_score_correction_bias": (4,),
    }
    for owner, count in (("mlp.experts.{}.", 4), ("mlp.shared_experts.", 1)):
        for i in range(count):
            prefix = owner.format(i)
            parts[f"{prefix}gate_proj.weight"] = parts[f"{prefix}up_proj.weight"] = (12, H)
            parts[f"{prefix}down_proj.weight"] = (H, 12)
    tensors = mtp_tensors(target, [3], parts, torch.bfloat16)
    tensors["model.layers.3.shared_head.head.weight"] = target.lm_head.weight.clone()
    published = config.to_dict() | {"num_nextn_predict_layers": 1}
    folder = write(tmp_path / "head", published, tensors)
    head = load_mtp_head(folder, target, 1)
    body = head.decoder.mtp[0].body.layers[0]
    experts = body.mlp.experts
    for i in range(4):
        name = f"model.layers.3.mlp.experts.{i}."
        gate_up = torch.cat([tensors[f"{name}gate_proj.weight"], tensors[f"{name}up_proj.weight"]])
        assert torch.equal(experts.gate_up_proj[i].cpu(), gate_up.float())
        assert torch.equal(experts.down_proj[i].cpu(), tensors[f"{name}down_proj.weight"].float())
    assert torch.equal(
        body.self_attn.kv_b_proj.weight.cpu(), tensors["model.layers.3.self_attn.kv_b_proj.weight"].float()
    )
    with make_engine(
        target, "MULTI_LAYER_EAGLE", None, SHORT_CHAIN, speculative_draft_model_path=str(folder)
    ) as engine:
        assert engine.scheduler.cache.draft_pool.geometry == (LayerGeometry(4, qk, 7),)
        (done,) = engine.generate(tiny.random_prompt(3, 6), SamplingParams(max_new_tokens=6))
    with make_engine(target) as engine:  # fp32: what a tie does is not looked at here
        assert engine.generate(tiny.random_prompt(3, 6), SamplingParams(max_new_tokens=6))[0].output_ids == (
            done.output_ids
        )


def changed(tensors, name, value):
    return {k: v for k, v in tensors.items() if k != name} | ({} if value is None else {name: value})


MTP_CHANGES = {
    "layers.2.eh_proj.weight": torch.zeros(H, H),
    "layers.3.enorm.weight": None,
    "layers.4.self_attn.q_proj.weight": torch.zeros(1, H),
    "layers.3.mlp.up_proj.weight_scale_inv": torch.zeros(1, 1),
    "layers.2.shared_head.norm.weight": torch.zeros(H + 1),
}


@pytest.mark.parametrize("name", MTP_CHANGES)
def test_ck08_a_bad_mtp_file_is_refused_and_its_tensor_named(tmp_path, name, device):
    target = tiny.llama(device)
    tensors = mtp_tensors(target, (2, 3, 4), attention_and_mlp(""), torch.float64)
    folder = write(tmp_path / "head", MTP_CONFIG, changed(tensors, f"model.{name}", MTP_CHANGES[name]))
    with pytest.raises(ValueError, match=f"speculative_draft_model_path.*{name}"):
        load_mtp_head(folder, target, 3)


@pytest.mark.parametrize("steps", [1, 2])
def test_modules_beyond_the_steps_are_left_out(open_engine, tmp_path, steps, device):
    target = tiny.llama(device)
    tensors = mtp_tensors(target, (2, 3, 4), attention_and_mlp(""), torch.float64)
    folder = write(tmp_path / "head", MTP_CONFIG, tensors)
    shape = (steps, 1, steps + 1)
    generates(open_engine, target, "MULTI_LAYER_EAGLE", folder, shape)
    engine = open_engine(target, "MULTI_LAYER_EAGLE", tiny.hidden_modules(target), shape)
    assert len(engine.scheduler.cache.draft_pool.geometry) == steps


def test_fewer_modules_than_steps_are_refused(tmp_path, device):
    target = tiny.llama(device)
    tensors = mtp_tensors(target, (2, 3), attention_and_mlp(""), torch.float64)
    folder = write(tmp_path / "head", MTP_CONFIG, tensors)
    remedy = "speculative_num_steps=3.*--speculative-num-steps 2 --speculative-num-draft-tokens 3"
    for draft in ({"speculative_draft_model_path": str(folder)}, {"draft": tiny.hidden_modules(target, 2)}):
        with pytest.raises(ValueError, match=remedy):
            make_engine(target, "MULTI_LAYER_EAGLE", shape=CHAIN, **draft)


def test_a_token_map_cuts_every_modules_lm_head(open_engine, tmp_path, device):
    target, hot = tiny.llama(device), [60, 5, 3, 22, 17, 9, 1, 40, 41]
    tensors = mtp_tensors(target, (2, 3, 4), attention_and_mlp(""), torch.float64, own_head=(3,))
    folder = write(tmp_path / "head", MTP_CONFIG, tensors)
    (tmp_path / "map.json").write_text(json.dumps(hot))
    changes = {"speculative_token_map": str(tmp_path / "map.json")}
    drafted = generates(open_engine, target, "MULTI_LAYER_EAGLE", folder, CHAIN, **changes)
    assert drafted <= set(hot)
    assert len(drafted) > 3


# -- frozen-KV heads -----------------------------------------------------------------------------------------

FROZEN = {
    "pre_projection.weight": (24, 2 * H),
    "post_projection.weight": (H, 24),
    "norm.weight": (24,),
    "lm_head.weight": (V, 24),
} | {
    f"layers.{i}.{name}": shape
    for i in range(2)
    for name, shape in {
        "input_layernorm.weight": (24,),
        "post_attention_layernorm.weight": (24,),
        "self_attn.q_proj.weight": (6 * DIM, 24),
        "self_attn.o_proj.weight": (24, 6 * DIM),
        "mlp.gate_proj.weight": (40, 24),
        "mlp.up_proj.weight": (40, 24),
        "mlp.down_proj.weight": (24, 40),
    }.items()
}


def frozen_config(target, **changes):
    sizes = {"hidden_size": 24, "num_attention_heads": 6, "head_dim": DIM, "intermediate_size": 40}
    rope = {"rope_parameters": target.config.rope_parameters}
    return LLAMA | sizes | rope | {"num_hidden_layers": 2, "target_layer_ids": [0, 1]} | changes


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("window", [None, 5])
def test_frozen_kv_heads(open_engine, tmp_path, prefix, window, device):
    target = tiny.llama(device)
    tensors = make_tensors(FROZEN, torch.bfloat16)
    named = {prefix + name: value for name, value in tensors.items()}
    folder = write(tmp_path / "head", frozen_config(target, sliding_window=window), named)
    head = load_frozen_kv_head(folder, target)
    loaded = {name.removeprefix("decoder."): value for name, value in head.state_dict().items()}
    assert set(loaded) == set(tensors) | {"embed_tokens.weight"}
    for name, value in tensors.items():
        assert torch.equal(loaded[name].cpu(), value.to(loaded[name].dtype)), name
    assert [layer.self_attn.layer_idx for layer in head.decoder.layers] == [0, 1]
    assert {layer.self_attn.sliding_window for layer in head.decoder.layers} == {window}
    assert len(generates(open_engine, target, "FROZEN_KV_MTP", folder)) > 3


FROZEN_CHANGES = {
    "pre_projection.weight": torch.zeros(24, H),
    "layers.1.self_attn.o_proj.weight": None,
    "layers.0.self_attn.k_proj.weight": torch.zeros(KV, 24),
}


@pytest.mark.parametrize("name", FROZEN_CHANGES)
def test_a_bad_frozen_kv_file_is_refused_and_its_tensor_named(tmp_path, name, device):
    target = tiny.llama(device)
    tensors = changed(make_tensors(FROZEN, torch.bfloat16), name, FROZEN_CHANGES[name])
    folder = write(tmp_path / "head", frozen_config(target), tensors)
    with pytest.raises(ValueError, match=f"speculative_draft_model_path.*{name}"):
        load_frozen_kv_head(folder, target)


FROZEN_SETTINGS = {
    "target_layer_ids": ([0, 2], [1], [0, -1]),
    "head_dim": (16,),
    "num_attention_heads": (3,),
    "rope_parameters": ({"rope_type": "default", "rope_theta": 5.0},),
}


@pytest.mark.parametrize("setting", FROZEN_SETTINGS)
def test_a_setting_that_does_not_fit_the_target_is_named(tmp_path, setting, device):
    target = tiny.llama(device)
    for value in FROZEN_SETTINGS[setting]:
        config = frozen_config(target, **{setting: value})
        folder = write(tmp_path / "head", config, make_tensors(FROZEN, torch.bfloat16))
        with pytest.raises(ValueError, match=f"speculative_draft_model_path.*{setting}="):
            load_frozen_kv_head(folder, target)


def test_a_head_without_an_lm_head_must_be_as_wide_as_the_target(tmp_path, device):
    target = tiny.llama(device)
    tensors = changed(make_tensors(FROZEN, torch.bfloat16), "lm_head.weight", None)
    folder = write(tmp_path / "head", frozen_config(target), tensors)
    with pytest.raises(ValueError, match=r"hidden_size=24.*lm_head\.weight"):
        load_frozen_kv_head(folder, target)


# -- under the wrong name ------------------------------------------------------------------------------------


def test_cf04_a_head_of_another_kind_is_named_with_what_runs_it(tmp_path, device):
    target = tiny.llama(device)
    heads = {
        "EAGLE": tiny.hidden_head(target),
        "MULTI_LAYER_EAGLE": tiny.hidden_modules(target),
        "FROZEN_KV_MTP": tiny.hidden_reader(target),
    }
    remedies = {
        "EAGLE": "use --speculative-algorithm EAGLE$",
        "MULTI_LAYER_EAGLE": "use --speculative-algorithm EAGLE --enable-multi-layer-eagle",
        "FROZEN_KV_MTP": "use --speculative-algorithm FROZEN_KV_MTP",
    }
    for algorithm in (*heads, "STANDALONE"):
        for kind, head in heads.items():
            if kind != algorithm:
                with pytest.raises(ValueError, match=remedies[kind]):
                    make_engine(target, algorithm, head, CHAIN)
    with pytest.raises(ValueError, match="use --speculative-algorithm STANDALONE"):
        make_engine(target, "FROZEN_KV_MTP", tiny.random_llama(1), CHAIN)
    tensors = mtp_tensors(target, (2, 3, 4), attention_and_mlp(""), torch.float64)
    folder = write(tmp_path / "head", MTP_CONFIG, tensors)
    with pytest.raises(ValueError, match=remedies["MULTI_LAYER_EAGLE"]):
        make_engine(target, "EAGLE", None, CHAIN, speculative_draft_model_path=str(folder))
