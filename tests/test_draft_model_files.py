"""Draft models from folders: published key names load, and what does not fit is named before anything runs."""

import json

import pytest
import torch
from safetensors.torch import save_file

from spec_v2 import SamplingParams
from tests import tiny_models as tiny
from tests.eagle3_models import deep_llama, eagle3_head
from tests.harness import CHAIN, TREE_2, Recorder, make_engine
from tests.tiny_folder import save_tiny_model
from tests.tiny_tokenizers import letter_tokenizer

EVEN = range(0, 64, 2)
PROMPT = tiny.random_prompt(5, 9)


def head_tensors(head, keep=()):
    """The tensors of a head under published names. What it shares with the target is left out, but for `keep`."""
    shared = {"embed_tokens.weight", "lm_head.weight"} - set(keep)
    named = {name.removeprefix("decoder."): value for name, value in head.state_dict().items()}
    return {name: value.contiguous().clone() for name, value in named.items() if name not in shared}


def write(folder, head, tensors, **settings):
    folder.mkdir(exist_ok=True)
    config = head.config.to_dict() | settings
    (folder / "config.json").write_text(json.dumps(config, default=str))
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def open_path(open_engine, target, algorithm, path, shape=TREE_2, **changes):
    return open_engine(target, algorithm, None, shape, speculative_draft_model_path=path, **changes)


def trees(engine):
    """What an engine drafts after one prompt."""
    recorder = Recorder(engine)
    engine.generate(PROMPT, SamplingParams(max_new_tokens=12))
    return [(r.tokens, r.parents) for r in recorder.records]


# -- what loads ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("extra", ["nothing", "embed_tokens", "lm_head", "no bias"])
def test_ck08_ck05_eagle_heads(open_engine, tmp_path, prefix, extra, device):
    target = tiny.mistral(device)
    head = tiny.hidden_head(target)
    head.fc.bias.data.zero_()
    if extra == "lm_head":
        head.lm_head = tiny.with_noise(target.lm_head, 0.3, 1)
    tensors = head_tensors(head, keep=("lm_head.weight",) if extra == "lm_head" else ())
    if extra == "embed_tokens":
        tensors["embed_tokens.weight"] = torch.randn(8, 4)  # stale: EAGLE always shares the target's
    if extra == "no bias":
        del tensors["fc.bias"]
    path = write(tmp_path / "head", head, {prefix + name: value for name, value in tensors.items()})
    wanted = trees(open_engine(target, "EAGLE", head, TREE_2))
    assert trees(open_path(open_engine, target, "EAGLE", path)) == wanted


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("layer", ["midlayer.", "layers.0."])
@pytest.mark.parametrize("embedding", ["shared", "its own"])
def test_ck08_ck05_eagle3_heads(open_engine, tmp_path, prefix, layer, embedding, device):
    target = deep_llama(device)
    head = eagle3_head(target, EVEN, own_embedding=embedding == "its own")
    keep = ("lm_head.weight", "embed_tokens.weight") if embedding == "its own" else ("lm_head.weight",)
    tensors = head_tensors(head, keep)
    tensors["d2t"] = tensors["d2t"].int()
    tensors["t2d"] = torch.zeros(tiny.VOCAB, dtype=torch.bool)
    renamed = {prefix + name.replace("midlayer.", layer): value for name, value in tensors.items()}
    path = write(tmp_path / "head", head, renamed)
    wanted = trees(open_engine(target, "EAGLE3", head, TREE_2))
    assert trees(open_path(open_engine, target, "EAGLE3", path)) == wanted


def test_ck02_a_whole_vocabulary_needs_no_map(open_engine, tmp_path, device):
    target = deep_llama(device)
    head = eagle3_head(target)
    tensors = head_tensors(head, ("lm_head.weight",))
    del tensors["d2t"]
    path = write(tmp_path / "head", head, tensors)
    wanted = trees(open_engine(target, "EAGLE3", head, TREE_2))
    assert trees(open_path(open_engine, target, "EAGLE3", path)) == wanted


# -- what is refused -----------------------------------------------------------------------------------------


def changed(tensors, name, value):
    return {k: v for k, v in tensors.items() if k != name} | ({name: value} if value is not None else {})


EAGLE_CHANGES = {
    "fc.weight": (None, torch.zeros(3, 3)),
    "layers.0.self_attn.q_proj.weight": (None, torch.zeros(1, 32)),
    "layers.1.mlp.up_proj.weight": (torch.zeros(2, 2),),
    "what.is.this": (torch.zeros(1),),
}


@pytest.mark.parametrize("name", EAGLE_CHANGES)
def test_ck08_a_bad_eagle_file_is_refused_and_its_tensor_named(open_engine, tmp_path, name, device):
    target = tiny.mistral(device)
    head = tiny.hidden_head(target)
    for value in EAGLE_CHANGES[name]:
        path = write(tmp_path / "head", head, changed(head_tensors(head), name, value))
        with pytest.raises(ValueError, match=rf"speculative_draft_model_path(.|\n)*{name}"):
            open_path(open_engine, target, "EAGLE", path)


D2T = {
    "missing": None,
    "float": torch.zeros(32),
    "bool": torch.zeros(32, dtype=torch.bool),
    "short": torch.zeros(31, dtype=torch.long),
    "too high": torch.tensor([0] * 31 + [33]),
    "negative": torch.tensor([0, -2] + [0] * 30),
}


@pytest.mark.parametrize("what", D2T)
def test_ck02_ck03_a_bad_map_is_refused(open_engine, tmp_path, what, device):
    target = deep_llama(device)
    head = eagle3_head(target, EVEN)
    tensors = changed(head_tensors(head, ("lm_head.weight",)), "d2t", D2T[what])
    path = write(tmp_path / "head", head, tensors)
    named = {"too high": r"d2t\[31\]", "negative": r"d2t\[1\]"}.get(what, "d2t")
    with pytest.raises(ValueError, match=named):
        open_path(open_engine, target, "EAGLE3", path)


@pytest.mark.parametrize(
    "what",
    ["no folder", "no weights", "damaged config", "damaged weights", "not a dict", "impossible config"],
)
def test_a_folder_that_is_no_head(open_engine, tmp_path, what, device):
    target = tiny.mistral(device)
    head = tiny.hidden_head(target)
    path = write(tmp_path / "head", head, head_tensors(head))
    folder = tmp_path / "head"
    if what == "no folder":
        path = str(tmp_path / "nowhere")
    elif what == "no weights":
        (folder / "model.safetensors").unlink()
    elif what == "damaged weights":
        (folder / "model.safetensors").write_bytes(b"no tensors")
    elif what == "impossible config":  # transformers refuses it with an error of its own
        write(folder, head, head_tensors(head), model_type="llama", num_attention_heads=5)
    else:
        (folder / "config.json").write_text("{" if what == "damaged config" else "[1]")
    with pytest.raises(ValueError, match="speculative_draft_model_path"):
        open_path(open_engine, target, "EAGLE", path)


def test_cf04_heads_under_the_wrong_name(open_engine, tmp_path, device):
    target = deep_llama(device)
    eagle, eagle3 = tiny.hidden_head(target), eagle3_head(target)
    for algorithm, head, right in (
        ("EAGLE", eagle3, "EAGLE3"),
        ("NEXTN", eagle3, "EAGLE3"),
        ("EAGLE3", eagle, "EAGLE"),
    ):
        with pytest.raises(ValueError, match=f"--speculative-algorithm {right}"):
            open_engine(target, algorithm, head, TREE_2)
    path = write(tmp_path / "three", eagle3, head_tensors(eagle3, ("lm_head.weight",)))
    with pytest.raises(ValueError, match="--speculative-algorithm EAGLE3"):
        open_path(open_engine, target, "EAGLE", path)
    path = write(tmp_path / "one", eagle, head_tensors(eagle))
    with pytest.raises(ValueError, match="midlayer"):
        open_path(open_engine, target, "EAGLE3", path)


def test_cf01_a_draft_with_another_vocabulary(open_engine, device):
    with pytest.raises(ValueError, match=r"speculative_draft_model_path.*vocab_size=32"):
        open_engine(tiny.llama(device), "STANDALONE", tiny.random_llama(1, vocab_size=32), CHAIN)


def test_cf01_a_draft_with_another_tokenizer(open_engine, tmp_path, device):
    """The same ids, but they mean other words."""
    from transformers import AutoTokenizer

    target, path = tiny.llama(device), str(save_tiny_model(tmp_path / "draft", layers=1))
    with pytest.raises(ValueError, match=r"speculative_draft_model_path.*tokenizer"):
        open_path(open_engine, target, "STANDALONE", path, CHAIN, tokenizer=letter_tokenizer())
    own = AutoTokenizer.from_pretrained(path)
    engine = open_path(open_engine, target, "STANDALONE", path, CHAIN, tokenizer=own)
    (done,) = engine.generate("w1 w2 w3", SamplingParams(max_new_tokens=8))
    assert list(done.output_ids) == tiny.oracle_of(target).tokens([1, 2, 3], 8)


def test_cf06_a_draft_with_too_few_positions(open_engine, device):
    target, draft = tiny.llama(device), tiny.random_llama(1, max_position_embeddings=64).to(device)
    with pytest.raises(ValueError, match=r"64 positions.*160 long"):
        open_engine(target, "STANDALONE", draft, CHAIN)
    engine = open_engine(target, "STANDALONE", draft, CHAIN, context_length=64)
    prompt = tiny.random_prompt(1, 58)
    (done,) = engine.generate(prompt, SamplingParams(max_new_tokens=50))
    assert list(done.output_ids) == tiny.oracle_of(target).tokens(prompt, 6)


# -- token maps ----------------------------------------------------------------------------------------------


def test_ck11_a_token_map_drafts_its_ids_only_in_its_own_order(open_engine, tmp_path, schedule, device):
    target = tiny.mistral(device)
    head = tiny.hidden_head(target)
    path = write(tmp_path / "head", head, head_tensors(head))
    hot = [60, 5, 3, 22, 17, 9, 1, 40, 41]
    (tmp_path / "map.json").write_text(json.dumps(hot))
    changes = {"speculative_token_map": str(tmp_path / "map.json"), "schedule": schedule}
    engine = open_path(open_engine, target, "EAGLE", path, **changes)
    drafted = {token for tokens, _ in trees(engine) for token in tokens[1:]}
    assert drafted <= set(hot)
    assert len(drafted) > 3
    draft = engine._runners[1].model
    torch.testing.assert_close(draft.lm_head.weight, target.lm_head.weight[torch.tensor(hot)])


BAD_MAPS = [
    "[1, 1, 2]",
    "[1]",
    "[]",
    "[1, 64]",
    "[-1, 2]",
    "[1.0, 2]",
    "[true, 2]",
    '{"1": 2}',
    "[1, 2",
    "null",
]


@pytest.mark.parametrize("text", [*BAD_MAPS, None])
def test_ck11_a_bad_token_map_is_refused(open_engine, tmp_path, text, device):
    target = tiny.mistral(device)
    head = tiny.hidden_head(target)
    path = write(tmp_path / "head", head, head_tensors(head))
    if text is not None:
        (tmp_path / "map.json").write_text(text)
    with pytest.raises(ValueError, match="speculative_token_map"):
        open_path(open_engine, target, "EAGLE", path, speculative_token_map=str(tmp_path / "map.json"))


def test_a_refused_draft_leaves_the_target_as_it_was(device):
    target = tiny.llama(device)
    own = target.config._attn_implementation
    with pytest.raises(ValueError, match="speculative_draft_model_path"):
        make_engine(target, "STANDALONE", tiny.random_llama(1, vocab_size=32), CHAIN)
    assert target.config._attn_implementation == own
