"""What resolve_speculative fills in, corrects and rejects, and the sizes that follow."""

import dataclasses
import warnings

import pytest

from spec_v2.server_args import ServerArgs, flag_of
from spec_v2.speculative_hook import DEFAULT_TRIO, resolve_speculative


@pytest.fixture(autouse=True)
def _no_old_variable(monkeypatch):
    monkeypatch.delenv("SGLANG_ENABLE_SPEC_V2", raising=False)


def eagle(**kwargs):
    kwargs = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": "draft", **kwargs}
    return resolve_speculative(ServerArgs(**kwargs))


def trio(steps, topk, tokens):
    return {
        "speculative_num_steps": steps,
        "speculative_eagle_topk": topk,
        "speculative_num_draft_tokens": tokens,
    }


def trio_of(args):
    return args.speculative_num_steps, args.speculative_eagle_topk, args.speculative_num_draft_tokens


# --- filling in


@pytest.mark.parametrize(
    ("algorithm", "name", "expected"),
    [
        ("EAGLE", "EAGLE", (5, 4, 8)),
        ("eagle", "EAGLE", (5, 4, 8)),
        ("NextN", "EAGLE", (5, 4, 8)),
        ("eagle3", "EAGLE3", (5, 4, 8)),
        ("Standalone", "STANDALONE", (3, 1, 4)),
        ("frozen_kv_mtp", "FROZEN_KV_MTP", (3, 1, 4)),
    ],
)
def test_default_trio(algorithm, name, expected):
    args = eagle(speculative_algorithm=algorithm)
    assert args.speculative_algorithm == name
    assert trio_of(args) == expected == DEFAULT_TRIO[args.algorithm]
    assert resolve_speculative(args) == args


def test_default_ngram():
    args = resolve_speculative(ServerArgs(speculative_algorithm="ngram"))
    assert trio_of(args) == (None, None, 12)
    assert resolve_speculative(args) == args
    given = resolve_speculative(ServerArgs(speculative_algorithm="NGRAM", speculative_num_draft_tokens=6))
    assert given.speculative_num_draft_tokens == 6


def test_default_multi_layer_is_a_chain():
    assert trio_of(eagle(enable_multi_layer_eagle=True)) == (3, 1, 4)


@pytest.mark.parametrize("name", [None, "none", "NONE"])
def test_no_algorithm_changes_nothing(name):
    assert resolve_speculative(ServerArgs(speculative_algorithm=name)) == ServerArgs()


def test_resolving_leaves_its_input_alone():
    args = ServerArgs(speculative_algorithm="nextn", speculative_draft_model_path="draft")
    before = dataclasses.asdict(args)
    resolve_speculative(args)
    assert dataclasses.asdict(args) == before


@pytest.mark.parametrize("schedule_off", [True, False])
def test_a_draft_object_stands_in_for_a_path(schedule_off):
    args = ServerArgs(speculative_algorithm="EAGLE", disable_overlap_schedule=schedule_off)
    resolved = resolve_speculative(args, draft_model_given=True)
    assert trio_of(resolved) == (5, 4, 8)
    assert resolved.disable_overlap_schedule is schedule_off


@pytest.mark.parametrize("tokens", [2, 5, 9])
def test_a_chain_forces_its_token_count(tokens):
    pattern = (
        f"--speculative-num-draft-tokens {tokens}.*--speculative-eagle-topk 1.*--speculative-num-steps 3"
    )
    with pytest.warns(UserWarning, match=pattern) as caught:
        args = eagle(**trio(3, 1, tokens))
    assert trio_of(args) == (3, 1, 4)
    assert len(caught) == 1
    assert "using 4" in str(caught[0].message)


def test_a_consistent_chain_is_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert trio_of(eagle(**trio(5, 1, 6))) == (5, 1, 6)


@pytest.mark.parametrize(("steps", "topk", "most"), [(1, 2, 3), (2, 2, 7), (3, 4, 37), (1, 8, 9)])
def test_tree_capacity(steps, topk, most):
    assert trio_of(eagle(**trio(steps, topk, most))) == (steps, topk, most)
    with pytest.raises(
        ValueError, match=f"--speculative-num-draft-tokens {most + 1} .* at most {most}"
    ) as caught:
        eagle(**trio(steps, topk, most + 1))
    assert f"--speculative-num-steps {steps}" in str(caught.value)
    assert f"--speculative-eagle-topk {topk}" in str(caught.value)


# --- derived sizes


@pytest.mark.parametrize(
    ("settings", "longest_path", "slots", "is_tree"),
    [
        (trio(5, 1, 6), 5, 6, False),
        (trio(5, 3, 6), 5, 15, True),  # as wide as the chain above, and a tree
        (trio(5, 4, 3), 2, 20, True),  # fewer nodes than steps + 1
        (trio(2, 2, 7), 2, 7, True),
        ({"speculative_algorithm": "STANDALONE", **trio(3, 1, 4)}, 3, 5, False),
        ({"speculative_algorithm": "STANDALONE", **trio(3, 2, 4)}, 3, 7, True),
    ],
)
def test_derived_sizes(settings, longest_path, slots, is_tree):
    args = eagle(**settings)
    assert trio_of(args) == (args.num_steps, args.topk, args.num_draft_tokens)
    assert (args.longest_path, args.accept_width) == (longest_path, longest_path + 1)
    assert args.slots_per_step == slots
    assert args.is_tree is is_tree


@pytest.mark.parametrize("breadth", [1, 10])
def test_derived_sizes_of_ngram(breadth):
    raw = ServerArgs(speculative_algorithm="NGRAM", speculative_ngram_max_bfs_breadth=breadth)
    args = resolve_speculative(raw)
    assert (args.num_steps, args.topk, args.num_draft_tokens) == (0, breadth, 12)
    assert (args.longest_path, args.accept_width, args.slots_per_step) == (11, 12, 12)
    assert args.is_tree is True


def test_derived_sizes_without_speculation():
    args = resolve_speculative(ServerArgs())
    assert (args.num_steps, args.topk, args.num_draft_tokens) == (0, 1, 1)
    assert (args.longest_path, args.accept_width, args.slots_per_step) == (0, 1, 1)
    assert args.is_tree is False


@pytest.mark.parametrize("name", ["num_steps", "topk", "num_draft_tokens", "longest_path", "is_tree"])
def test_derived_sizes_ask_for_resolution(name):
    with pytest.raises(ValueError, match="resolve_speculative"):
        getattr(ServerArgs(speculative_algorithm="EAGLE"), name)


# --- rejections


COUNTS = [
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "speculative_ngram_min_bfs_breadth",
    "speculative_ngram_max_bfs_breadth",
    "speculative_ngram_max_trie_depth",
]
DRAFT = {"speculative_draft_model_path": "draft"}
EAGLE = {"speculative_algorithm": "EAGLE", **DRAFT}
NGRAM = {"speculative_algorithm": "NGRAM"}
REJECTED = [
    ({"speculative_algorithm": "EAGEL"}, ["--speculative-algorithm", "'EAGEL'", "EAGLE", "NGRAM"]),
    *[
        (
            {"speculative_algorithm": name},
            [f"--speculative-algorithm {name}", "--speculative-draft-model-path"],
        )
        for name in ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "FROZEN_KV_MTP")
    ],
    (DRAFT, ["--speculative-draft-model-path draft", "--speculative-algorithm"]),
    ({**NGRAM, **DRAFT}, ["--speculative-draft-model-path draft", "NGRAM"]),
    ({**NGRAM, "speculative_num_steps": 3}, ["--speculative-num-steps 3", "not used by NGRAM"]),
    ({**NGRAM, "speculative_eagle_topk": 3}, ["--speculative-eagle-topk 3", "not used by NGRAM"]),
    (
        {**NGRAM, "speculative_ngram_min_bfs_breadth": 4, "speculative_ngram_max_bfs_breadth": 3},
        ["--speculative-ngram-min-bfs-breadth 4", "--speculative-ngram-max-bfs-breadth 3"],
    ),
    (
        {
            "speculative_algorithm": "STANDALONE",
            "speculative_draft_model_path": "d",
            "speculative_use_rejection_sampling": True,
            "speculative_num_steps": 3,
            "speculative_eagle_topk": 2,
            "speculative_num_draft_tokens": 6,
        },
        ["--speculative-use-rejection-sampling", "--speculative-eagle-topk 1"],
    ),
    (
        {"speculative_algorithm": "NGRAM", "speculative_use_rejection_sampling": True},
        ["--speculative-use-rejection-sampling", "NGRAM"],
    ),
    (
        {
            "speculative_algorithm": "STANDALONE",
            "speculative_draft_model_path": "d",
            "speculative_token_map": "m.json",
        },
        ["--speculative-token-map", "EAGLE"],
    ),
    (
        {
            "speculative_algorithm": "EAGLE",
            "speculative_draft_model_path": "d",
            "speculative_adaptive": True,
        },
        ["--speculative-adaptive", "NGRAM"],
    ),
    ({**NGRAM, "enable_multi_layer_eagle": True}, ["--enable-multi-layer-eagle", "NGRAM"]),
    ({"enable_multi_layer_eagle": True}, ["--enable-multi-layer-eagle", "--speculative-algorithm"]),
    ({**EAGLE, "speculative_algorithm": "STANDALONE", "enable_multi_layer_eagle": True}, ["STANDALONE"]),
    (
        {**EAGLE, "speculative_algorithm": "EAGLE3", "enable_multi_layer_eagle": True},
        ["--enable-multi-layer-eagle", "EAGLE3", "MTP modules", "--speculative-draft-model-path"],
    ),
    (
        {**EAGLE, "enable_multi_layer_eagle": True, **trio(3, 2, 4)},
        ["--enable-multi-layer-eagle", "--speculative-eagle-topk 2", "--speculative-eagle-topk 1"],
    ),
    (
        {**EAGLE, "enable_multi_layer_eagle": True, **trio(3, 1, 6)},
        [
            "--enable-multi-layer-eagle",
            "--speculative-num-draft-tokens 6",
            "--speculative-num-draft-tokens 4",
        ],
    ),
    *[({name: 7}, [f"{flag_of(name)} 7", "--speculative-algorithm"]) for name in COUNTS],
    ({"speculative_ngram_match_type": "PROB"}, ["--speculative-ngram-match-type PROB"]),
    ({**EAGLE, "speculative_ngram_max_trie_depth": 9}, ["--speculative-ngram-max-trie-depth 9", "EAGLE"]),
]


@pytest.mark.parametrize(("settings", "mentioned"), REJECTED)
def test_a_rejection_names_flags_values_and_remedy(settings, mentioned):
    with pytest.raises(ValueError, match="--") as caught:
        resolve_speculative(ServerArgs(**settings))
    for text in mentioned:
        assert text in str(caught.value)


@pytest.mark.parametrize(
    "given", [(3, None, None), (None, 4, None), (None, None, 8), (3, 1, None), (3, None, 8)]
)
@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "STANDALONE", "FROZEN_KV_MTP"])
def test_part_of_the_trio_names_all_three_flags(algorithm, given):
    with pytest.raises(ValueError, match="only part of") as caught:
        eagle(speculative_algorithm=algorithm, **trio(*given))
    for name in ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens"):
        assert flag_of(name) in str(caught.value)


@pytest.mark.parametrize("name", [None, "NGRAM"])
def test_a_draft_object_that_nothing_uses(name):
    with pytest.raises(ValueError, match=r"draft model object .* uses no draft model"):
        resolve_speculative(ServerArgs(speculative_algorithm=name), draft_model_given=True)


@pytest.mark.parametrize("value", ["0", "1", ""])
def test_the_removed_environment_variable_warns_once(monkeypatch, value):
    monkeypatch.setenv("SGLANG_ENABLE_SPEC_V2", value)
    with pytest.warns(UserWarning, match=r"SGLANG_ENABLE_SPEC_V2.*--disable-overlap-schedule") as caught:
        args = resolve_speculative(ServerArgs())
    assert len(caught) == 1
    assert args == ServerArgs()
