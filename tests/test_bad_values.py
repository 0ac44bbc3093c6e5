"""Every value that cannot be honoured is refused by name before anything runs, and nothing is left behind."""

import dataclasses
import threading

import jaxtyping
import pytest

from spec_v2 import Engine, SamplingParams
from spec_v2.server_args import ServerArgs
from tests import tiny_models as tiny
from tests.harness import TREE_2
from tests.surface import assert_at_rest
from tests.tiny_models import VOCAB

NAN, INF = float("nan"), float("inf")
BAD_PARAMS = {
    "max_new_tokens": [0, -1, True, 1.9, "5", None],
    "temperature": [-0.1, NAN, INF, True, "0", None, 1e-9],
    "top_p": [0, -0.5, 1.0001, NAN, True, "1"],
    "top_k": [0, -2, True, 4.5, "4", None],
    "seed": [-1, 2**63, True, 1.0, "1"],
    "stop_token_ids": ["12", 5, None, [-1], [True], [1.0]],
    "ignore_eos": [0, 1, None, "true"],
    "stop": [5, None, "", ("a", ""), (1,), {"a"}],
    "min_new_tokens": [-1, True, 1.5, None, 129],
    "min_p": [-0.1, 1.1, NAN, True, "0", None],
    "repetition_penalty": [0, -1.0, 2.5, NAN, INF, True, None],
    "presence_penalty": [-2.1, 2.1, NAN, True, "1"],
    "frequency_penalty": [-2.1, 2.1, INF, True, None],
    "json_schema": ["{}", {}, 5],
    "regex": ["a*", 5],
    "ebnf": ["root ::= x", 5],
    "logit_bias": [5, None, [(1, 2.0)], {-1: 1.0}, {"1": 1.0}, {1: NAN}, {1: None}, {True: 1.0}, {1.0: 1.0}],
    "logprobs": [0, 1, None, 5],
    "top_logprobs": [-1, 21, True, 1.0, None],
}
BAD_ARGS = {
    "model_path": ["", 5],
    "tokenizer_path": ["", 5],
    "dtype": ["int8", 5, None],
    "device": ["tpu", "cuda:x", 5],
    "context_length": [0, -1, True, 1.5, 10_000],
    "page_size": [0, -1, True, 1.9, "16", None],
    "max_running_requests": [0, -1, True, 1.0],
    "max_total_tokens": [0, -5, True, 1.5],
    "max_prefill_tokens": [0, -1, True, 2.0, None],
    "mem_fraction_static": [0.0, 1.0, -0.5, NAN, True, "0.5"],
    "chunked_prefill_size": [0, -1, True, 2.0],
    "disable_radix_cache": [0, 1, None, "yes"],
    "random_seed": [-1, 2**63, True, 1.0, None],
    "disable_overlap_schedule": [0, 1, None, "yes"],
    "num_threads": [0, -1, True, 2.0],
    "disable_cuda_graph": [0, 1, None, "yes"],
    "cuda_graph_max_bs": [0, -1, True, 2.0],
    "speculative_algorithm": ["", "EAGEL", 5],
    "speculative_draft_model_path": ["", 5],
    "speculative_num_steps": [0, -1, True, 1.9],
    "speculative_eagle_topk": [0, -1, True, 1.9],
    "speculative_num_draft_tokens": [0, 1, True, 1.9],
    "speculative_token_map": ["", 5],
    "speculative_use_rejection_sampling": [0, 1, None],
    "speculative_adaptive": [0, 1, "no"],
    "speculative_adaptive_config": ["", 5],
    "speculative_simulated_accept_length": [0, -1, True, 1.9],
    "enable_multi_layer_eagle": [0, 1, None],
    "speculative_ngram_min_bfs_breadth": [0, -1, True, 1.5, None],
    "speculative_ngram_max_bfs_breadth": [0, -1, True, 1.5, None],
    "speculative_ngram_max_trie_depth": [1, 0, True, 2.5, None],
    "speculative_ngram_match_type": ["bfs", "", 5, None],
    "speculative_ngram_external_corpus_path": ["", 5],
    "speculative_ngram_external_corpus_max_tokens": [0, -1, True, 1.5, None],
}


@pytest.fixture(autouse=True)
def _bad_types_reach_the_validation(monkeypatch):
    # The suite type-checks every call; here, refusing wrong types is what is tested.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def pairs(table):
    return [pytest.param(n, v, id=f"{n}-{v!r}") for n, values in table.items() for v in values]


@pytest.mark.parametrize(("table", "settings"), [(BAD_PARAMS, SamplingParams), (BAD_ARGS, ServerArgs)])
def test_the_tables_cover_every_field(table, settings):
    assert set(table) == {spec.name for spec in dataclasses.fields(settings)}


@pytest.mark.parametrize(("name", "value"), pairs(BAD_PARAMS))
def test_a_bad_request_option_is_named(name, value):
    with pytest.raises(ValueError, match=f"^{name} is .*: (give|set) "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(("name", "value"), pairs(BAD_ARGS))
def test_cf10_a_bad_setting_is_named_and_leaves_nothing(name, value, device):
    target = tiny.llama(device)
    before = threading.active_count(), target.config._attn_implementation
    with pytest.raises(ValueError, match=name):
        Engine(target, **({"context_length": 64} | {name: value})) if name != "model_path" else Engine(value)
    assert (threading.active_count(), target.config._attn_implementation) == before


def test_an_unknown_setting_is_named_with_a_guess(device):
    with pytest.raises(ValueError, match=r"page_sise.*did you mean page_size"):
        Engine(tiny.llama(device), page_sise=4)
    with pytest.raises(ValueError, match="schedule"):
        ServerArgs.from_kwargs(schedule="sync")


# -- what only an engine can know ----------------------------------------------------------------------------

FITTING = SamplingParams(max_new_tokens=4)
IN_ENGINE = {
    "a stop token outside": ([[1]], SamplingParams(stop_token_ids=(VOCAB,)), "stop_token_ids"),
    "a bias outside": ([[1]], SamplingParams(logit_bias={VOCAB: 1.0}), "logit_bias"),
    "a string without a tokenizer": ([[1]], SamplingParams(stop="x"), "stop="),
    "too few params": ([[1], [2]], [FITTING], "sampling_params"),
    "no params": ([[1]], [None], "sampling_params"),
    "a long prompt": ([[1] * 160], FITTING, r"prompts\[0\]"),
    "the second prompt": ([[1], [2, "x"]], FITTING, r"prompts\[1\]"),
    "no prompts": ([], FITTING, "prompts"),
    "a number": (5, FITTING, "prompts"),
    "a float token": ([[1.0]], FITTING, r"prompts\[0\]"),
    "a true token": ([[True]], FITTING, r"prompts\[0\]"),
    "more than the pool": ([[1] * 20], SamplingParams(max_new_tokens=120), "max_total_tokens"),
}


@pytest.mark.parametrize("algorithm", [None, "STANDALONE"])
def test_the_engine_refuses_by_name_and_stays_usable(open_engine, algorithm, schedule, device):
    target = tiny.llama(device)
    draft = tiny.noisy_copy(target) if algorithm else None
    engine = open_engine(target, algorithm, draft, TREE_2, schedule=schedule, max_total_tokens=100)
    for prompts, params, named in IN_ENGINE.values():
        with pytest.raises(ValueError, match=named):
            engine.generate(prompts, params)
        assert_at_rest(engine)
    assert engine.scheduler.num_steps_launched == 0
    (done,) = engine.generate([1, 2, 3], SamplingParams(max_new_tokens=6))
    assert list(done.output_ids) == tiny.oracle_of(target).tokens([1, 2, 3], 6)
    assert_at_rest(engine)


def test_good_options_at_their_edges(open_engine, schedule, device):
    engine = open_engine(tiny.llama(device), schedule=schedule)
    edges = [
        {"min_p": 1.0, "temperature": 1.0, "seed": 1},
        {"repetition_penalty": 2.0, "presence_penalty": -2, "frequency_penalty": 2},
        {"repetition_penalty": 0.01},
        {"min_new_tokens": 5, "stop_token_ids": tuple(range(VOCAB - 1))},
        {"logprobs": True, "top_logprobs": 20},
        {"logit_bias": {5: 1e30}},
        {"logit_bias": dict.fromkeys(range(VOCAB), -1e30)},
    ]
    many = [SamplingParams(**({"max_new_tokens": 5} | edge)) for edge in edges]
    done = engine.generate([[1, 2, 3]] * len(many), many)
    assert all(0 <= token < VOCAB for d in done for token in d.output_ids)
    assert done[5].output_ids == (5,) * 5
    assert all(d.completion_tokens == 5 for d in done)
    assert_at_rest(engine)


def test_params_can_be_hashed_and_keep_their_own_bias():
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = 5.0
    assert params.logit_bias == {1: 2.0}
    assert hash(params) == hash(SamplingParams(logit_bias={1: 2.0}))
