"""SamplingParams: defaults and the refusal of values that can't be honoured."""

import dataclasses
import pickle

import jaxtyping
import pytest

from spec_v2.sampling_params import MAX_SEED, SamplingParams

NAN, INF = float("nan"), float("inf")
BAD = {
    "max_new_tokens": [0, -1, True, 1.0, 1.9, "5", None, NAN],
    "temperature": [-0.1, -1, NAN, INF, -INF, True, "0", None, 1e-9, 5e-324, 10**400],
    "top_p": [0, 0.0, -0.5, 1.0001, 2, NAN, INF, True, "1", None, 10**400],
    "top_k": [0, -2, True, 1.0, 4.5, "4", None, INF],
    "seed": [-1, MAX_SEED + 1, True, 1.0, "1", NAN],
    "stop_token_ids": ["12", 5, None, {1, 2}, [-1], [True], [1.0], ["a"], (1, None)],
    "ignore_eos": [0, 1, None, "true"],
    "stop": ["", [""], 5, None, ["a", 1], [["a"]]],
    "min_new_tokens": [-1, 129, True, 1.0, "1", None],
    "min_p": [-0.1, 1.1, True, "0", None, NAN, INF],
    "repetition_penalty": [0, 0.0, -1, 2.1, True, "1", None, NAN],
    "presence_penalty": [-2.1, 2.1, True, "0", None, NAN],
    "frequency_penalty": [-2.1, 2.1, True, "0", None, NAN],
    "logit_bias": [None, 5, [1], {-1: 0.0}, {True: 0.0}, {1: NAN}, {1: 1e300}, {1: "x"}, {"1": 1.0}],
    "logprobs": [0, 1, None, "true"],
    "json_schema": ["{}", {}, 5],
    "regex": ["a*", "", 5],
    "ebnf": ["root ::= x", "", 5],
    "top_logprobs": [-1, 21, 5, True, 1.0, None],
}


@pytest.fixture(autouse=True)
def _bad_types_reach_the_validation(monkeypatch):
    # The suite type-checks every call; here, refusing wrong types is what is tested.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def test_the_bad_value_table_covers_every_field():
    assert set(BAD) == {spec.name for spec in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD.items() for value in values]
)
def test_a_bad_value_names_the_field_and_the_remedy(name, value):
    with pytest.raises(ValueError, match=f"^{name} is ") as caught:
        SamplingParams(**{name: value})
    assert any(remedy in str(caught.value) for remedy in (": give ", "logprobs=True", "give None"))
    shown = value[-1] if isinstance(value, (list, tuple)) else value
    assert repr(shown) in str(caught.value)


def test_defaults():
    params = SamplingParams()
    assert (params.max_new_tokens, params.temperature, params.top_p, params.top_k) == (128, 0.0, 1.0, -1)
    assert (params.seed, params.stop_token_ids, params.ignore_eos) == (None, (), False)
    assert params.is_greedy


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 1),
        ("temperature", 0),
        ("temperature", 1e-6),
        ("temperature", 2.5),
        ("top_p", 1),
        ("top_p", 1e-9),
        ("top_k", 1),
        ("top_k", -1),
        ("seed", 0),
        ("seed", MAX_SEED),
        ("stop_token_ids", (0, 2)),
        ("ignore_eos", True),
    ],
)
def test_good_values_at_the_edges(name, value):
    assert getattr(SamplingParams(**{name: value}), name) == value


def test_values_are_stored_in_one_type():
    params = SamplingParams(8, 1, 1, stop_token_ids=[3, 4])
    assert params == SamplingParams(max_new_tokens=8, temperature=1.0, top_p=1.0, stop_token_ids=(3, 4))
    assert type(params.temperature) is float
    assert type(params.top_p) is float
    assert params.stop_token_ids == (3, 4)
    assert not params.is_greedy


def test_frozen_hashable_and_picklable():
    params = SamplingParams(stop_token_ids=[3])
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 3
    assert hash(params) == hash(SamplingParams(stop_token_ids=(3,)))
    assert pickle.loads(pickle.dumps(params)) == params
