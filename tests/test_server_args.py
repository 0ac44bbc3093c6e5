"""ServerArgs: the validation of each value, its representations and its command line."""

import argparse
import dataclasses
import pickle
import subprocess
import sys
from pathlib import Path

import jaxtyping
import pytest

from spec_v2.server_args import REFUSED, ServerArgs, add_cli_args, flag_of, from_cli_args

ROOT = Path(__file__).parents[1]
NOT_A_COUNT = [True, 1.9, 1.0, "4", 0, -1, float("nan"), [4]]
COUNTS = [
    "context_length",
    "page_size",
    "max_running_requests",
    "max_total_tokens",
    "max_prefill_tokens",
    "num_threads",
    "cuda_graph_max_bs",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "speculative_ngram_min_bfs_breadth",
    "speculative_ngram_max_bfs_breadth",
    "speculative_ngram_max_trie_depth",
    "speculative_ngram_external_corpus_max_tokens",
    "chunked_prefill_size",
    "speculative_simulated_accept_length",
]
TEXTS = [
    "model_path",
    "tokenizer_path",
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_token_map",
    "speculative_adaptive_config",
    "speculative_ngram_external_corpus_path",
]
CHOICES = ["dtype", "device", "speculative_ngram_match_type"]
SWITCHES = [
    "disable_cuda_graph",
    "disable_overlap_schedule",
    "disable_radix_cache",
    "enable_multi_layer_eagle",
    "speculative_adaptive",
    "speculative_use_rejection_sampling",
]
OPTIONAL = {spec.name for spec in dataclasses.fields(ServerArgs) if spec.default is None}


@pytest.fixture(autouse=True)
def _bad_types_reach_the_validation(monkeypatch):
    # The suite type-checks every call; here, refusing wrong types is what is tested.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


# --- one value at a time


def test_the_bad_value_tables_cover_every_field():
    names = {spec.name for spec in dataclasses.fields(ServerArgs)}
    assert names == {*COUNTS, *TEXTS, *CHOICES, *SWITCHES, "random_seed", "mem_fraction_static"}


BAD_VALUES = [
    *[(name, value) for name in COUNTS for value in NOT_A_COUNT],
    *[(name, value) for name in TEXTS for value in (7, True, "", "  ", ["a"])],
    *[(name, value) for name in CHOICES for value in (7, True, "", "bf16", "AUTO")],
    *[(name, value) for name in SWITCHES for value in (0, 1, "true", "")],
    *[("random_seed", value) for value in (-1, 2**63, True, 1.0, "0")],
    *[("mem_fraction_static", value) for value in (0.0, 1.0, -0.5, 2, True, "0.5", float("nan"))],
    *[("device", value) for value in ("cuda:", "cuda:x", "cuda:-1", "cuda:0 ", "cpu\n", "gpu", "cpu:0")],
    ("speculative_num_draft_tokens", 1),
    ("speculative_ngram_max_trie_depth", 1),
]


@pytest.mark.parametrize(("name", "value"), BAD_VALUES)
def test_a_bad_value_names_field_flag_and_value(name, value):
    with pytest.raises(ValueError, match=name) as caught:
        ServerArgs(**{name: value})
    assert flag_of(name) in str(caught.value)
    assert repr(value) in str(caught.value)
    assert "give " in str(caught.value)


@pytest.mark.parametrize("spec", dataclasses.fields(ServerArgs), ids=lambda spec: spec.name)
def test_none_is_taken_only_where_it_is_the_default(spec):
    if spec.name in OPTIONAL:
        assert getattr(ServerArgs(**{spec.name: None}), spec.name) is None
    else:
        with pytest.raises(ValueError, match=spec.name):
            ServerArgs(**{spec.name: None})


def test_defaults():
    args = ServerArgs()
    assert (args.model_path, args.dtype, args.device) == ("smollm2-135m", "auto", "auto")
    assert (args.page_size, args.max_running_requests, args.max_prefill_tokens) == (1, 48, 16384)
    assert (args.max_total_tokens, args.context_length, args.num_threads) == (None, None, None)
    assert args.random_seed == 0
    assert args.speculative_algorithm is None
    assert args.schedule == "overlap"
    assert ServerArgs(disable_overlap_schedule=True).schedule == "sync"


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:12", "npu"])
def test_devices(device):
    assert ServerArgs(device=device).device == device


def test_the_pool_holds_at_least_one_page():
    assert ServerArgs(page_size=16, max_total_tokens=16).max_total_tokens == 16
    with pytest.raises(ValueError, match=r"--max-total-tokens.* is 15.*--page-size"):
        ServerArgs(page_size=16, max_total_tokens=15)


def test_frozen_hashable_and_picklable():
    args = ServerArgs(page_size=4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        args.page_size = 8
    assert pickle.loads(pickle.dumps(args)) == args
    assert hash(args) == hash(ServerArgs(page_size=4))
    with pytest.raises(TypeError):
        ServerArgs("some-model")


def test_from_kwargs():
    assert ServerArgs.from_kwargs(page_size=4) == ServerArgs(page_size=4)
    with pytest.raises(ValueError, match=r"speculative_topk=4.*did you mean speculative_eagle_topk"):
        ServerArgs.from_kwargs(speculative_topk=4)
    with pytest.raises(ValueError, match=r"zzz=1.*the settings are model_path"):
        ServerArgs.from_kwargs(zzz=1)


# --- representations


def test_repr_shows_what_was_changed_and_evaluates_back():
    assert repr(ServerArgs()) == "ServerArgs()"
    args = ServerArgs(device="cpu", page_size=16)
    assert repr(args) == "ServerArgs(device='cpu', page_size=16)"
    assert eval(repr(args)) == args


def test_html_is_escaped_and_unstyled():
    html = ServerArgs(model_path="<b>&m", page_size=16)._repr_html_()
    assert "&lt;b&gt;&amp;m" in html
    assert "<b>" not in html
    assert "style" not in html
    assert "class=" not in html
    assert '<th scope="row">page_size</th><td>16</td><td>1</td>' in html
    assert "schedule" in html
    assert "smollm2-135m" in ServerArgs()._repr_html_()


# --- command line


def parse(*argv):
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    return from_cli_args(parser.parse_args(argv))


def test_an_empty_command_line_is_the_defaults():
    assert parse() == ServerArgs()


ROUND_TRIP = {
    **dict.fromkeys(COUNTS, 64),
    **dict.fromkeys(TEXTS, "some/name"),
    **dict.fromkeys(SWITCHES, True),
    "dtype": "float64",
    "device": "cuda:1",
    "speculative_ngram_match_type": "PROB",
    "random_seed": 7,
    "mem_fraction_static": 0.25,
}


@pytest.mark.parametrize("name", [spec.name for spec in dataclasses.fields(ServerArgs)])
def test_command_line_round_trip(name):
    value = ROUND_TRIP[name]
    argv = [flag_of(name)] if value is True else [flag_of(name), str(value)]
    assert parse(*argv) == ServerArgs(**{name: value})


def test_short_flags():
    assert parse("--model", "m").model_path == "m"
    assert parse("--model-path", "m").model_path == "m"
    assert parse("--speculative-draft-model", "d").speculative_draft_model_path == "d"


@pytest.mark.parametrize("argv", [("--page-size", "1.9"), ("--dtype", "bf16"), ("--page-size", "True")])
def test_the_parser_refuses_and_names_the_flag(argv, capsys):
    with pytest.raises(SystemExit):
        parse(*argv)
    assert argv[0] in capsys.readouterr().err


def test_values_that_parse_are_still_validated():
    with pytest.raises(ValueError, match=r"--page-size.* is 0"):
        parse("--page-size", "0")


def test_other_options_in_the_namespace_are_left_alone():
    assert from_cli_args(argparse.Namespace(prompt="hi", page_size=4)) == ServerArgs(page_size=4)


def test_help_covers_every_field():
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    text = parser.format_help()
    for spec in dataclasses.fields(ServerArgs):
        assert flag_of(spec.name) in text
        assert spec.metadata["help"]


def test_configuration_loads_no_heavy_package():
    code = (
        "import sys, spec_v2.server_args, spec_v2.speculative_hook, spec_v2.sampling_params;"
        "print([m for m in ('torch', 'transformers', 'triton', 'numpy', 'matplotlib') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_is_not_here_is_refused_by_name(name):
    with pytest.raises(ValueError, match=f"{name}=1: .* is not here; leave it out, or use SGLang"):
        ServerArgs.from_kwargs(**{name: 1})
