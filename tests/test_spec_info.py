"""SpeculativeAlgorithm: names, predicates and the worker that each one gets."""

import importlib.util
import inspect
import sys

import jaxtyping
import pytest

from spec_v2 import spec_info
from spec_v2.server_args import ServerArgs
from spec_v2.spec_info import SpeculativeAlgorithm

A = SpeculativeAlgorithm
EAGLE_FAMILY = {A.EAGLE, A.EAGLE3, A.FROZEN_KV_MTP}


@pytest.fixture(autouse=True)
def _bad_types_reach_the_validation(monkeypatch):
    # The suite type-checks every call; here, refusing wrong types is what is tested.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.mark.parametrize("member", A)
def test_from_string_in_any_case(member):
    for name in (member.name, member.name.lower(), member.name.title()):
        assert A.from_string(name) is member


def test_none_and_alias():
    assert A.from_string(None) is A.NONE
    assert A.from_string("nextn") is A.EAGLE


@pytest.mark.parametrize("name", ["EAGEL", "", "DFLASH", " EAGLE", 3, True])
def test_an_unknown_name_lists_the_known_ones(name):
    with pytest.raises(ValueError, match="--speculative-algorithm") as caught:
        A.from_string(name)
    assert repr(name) in str(caught.value)
    for known in (*A.__members__, "NEXTN"):
        assert known in str(caught.value)


def test_a_near_miss_gets_a_suggestion():
    with pytest.raises(ValueError, match="Did you mean STANDALONE"):
        A.from_string("standalon")


@pytest.mark.parametrize("member", A)
def test_predicates(member):
    assert member.is_none() is (member is A.NONE)
    assert member.is_ngram() is (member is A.NGRAM)
    assert member.is_eagle() is (member in EAGLE_FAMILY)
    assert member.carries_draft_hidden_states() is (member in EAGLE_FAMILY)
    assert member.draft_is_shifted() is (member in {A.EAGLE, A.EAGLE3})
    assert member.needs_draft_model() is (member in EAGLE_FAMILY | {A.STANDALONE})
    assert member.has_draft_kv() is (member in {A.EAGLE, A.EAGLE3, A.STANDALONE})
    assert member.draft_runs_ahead() is (member is A.STANDALONE)
    assert member.uses_tree_path(1) is (member is A.NGRAM)
    assert member.uses_tree_path(2) is True


# --- create_worker


def worker_args(multi_layer=False, sync=False):
    return ServerArgs(enable_multi_layer_eagle=multi_layer, disable_overlap_schedule=sync)


def exists(module):
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize(
    ("key", "class_name"),
    [
        ((A.NONE, False), "PlainWorker"),
        ((A.EAGLE, False), "EAGLEWorkerV2"),
        ((A.EAGLE3, False), "EAGLEWorkerV2"),
        ((A.STANDALONE, False), "StandaloneWorkerV2"),
        ((A.NGRAM, False), "NGRAMWorker"),
        ((A.FROZEN_KV_MTP, False), "FrozenKVMTPWorkerV2"),
        ((A.EAGLE, True), "MultiLayerEagleWorkerV2"),
    ],
)
def test_the_table(key, class_name):
    assert spec_info.WORKERS[key].startswith("spec_v2.speculative.")
    assert spec_info.WORKERS[key].rpartition(".")[2] == class_name


def test_the_table_covers_every_algorithm():
    assert {algorithm for algorithm, _ in spec_info.WORKERS} == set(A)


@pytest.mark.parametrize(("algorithm", "multi_layer"), spec_info.WORKERS)
def test_absent_workers_are_named_as_absent(algorithm, multi_layer):
    module, _, class_name = spec_info.WORKERS[algorithm, multi_layer].rpartition(".")
    if exists(module):
        pytest.skip("present; the test of present workers below loads a light one")
    with pytest.raises(ValueError, match=f"{class_name}.*{algorithm.name}.*not in this release"):
        algorithm.create_worker(worker_args(multi_layer))


def test_available_is_what_can_be_found():
    expected = [
        algorithm.name + (" with --enable-multi-layer-eagle" if multi_layer else "")
        for (algorithm, multi_layer), path in spec_info.WORKERS.items()
        if exists(path.rpartition(".")[0])
    ]
    assert spec_info.available() == expected


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package with one good and one broken worker module, and a table that points into it."""
    folder = tmp_path / "some_workers"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "good.py").write_text("class Plain: pass\nclass Eagle: pass\nclass Multi: pass\n")
    (folder / "broken.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    table = {
        (A.NONE, False): "some_workers.good.Plain",
        (A.EAGLE, False): "some_workers.good.Eagle",
        (A.EAGLE, True): "some_workers.good.Multi",
        (A.STANDALONE, False): "some_workers.broken.Standalone",
        (A.NGRAM, False): "some_workers.absent.Ngram",
        (A.FROZEN_KV_MTP, False): "no_such_package.inner.worker.Frozen",
        (A.EAGLE3, True): "some_workers.absent.Multi3",
    }
    monkeypatch.setattr(spec_info, "WORKERS", table)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "some_workers"]:
        del sys.modules[name]


@pytest.mark.usefixtures("package")
def test_present_workers_are_the_same_class_in_both_schedules():
    cases = [(A.NONE, False, "Plain"), (A.EAGLE, False, "Eagle"), (A.EAGLE, True, "Multi")]
    for algorithm, multi_layer, name in cases:
        worker = algorithm.create_worker(worker_args(multi_layer, sync=True))
        assert worker is algorithm.create_worker(worker_args(multi_layer, sync=False))
        assert worker.__name__ == name


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("algorithm", "multi_layer", "label"),
    [
        (A.NGRAM, False, "Ngram, which runs NGRAM,"),
        (A.FROZEN_KV_MTP, False, "Frozen, which runs FROZEN_KV_MTP,"),
        (A.EAGLE3, True, "Multi3, which runs EAGLE3 with --enable-multi-layer-eagle,"),
    ],
)
def test_an_absent_worker_lists_those_that_are_there(algorithm, multi_layer, label):
    with pytest.raises(ValueError, match="not in this release") as caught:
        algorithm.create_worker(worker_args(multi_layer))
    assert label in str(caught.value)
    assert "NONE, EAGLE, EAGLE with --enable-multi-layer-eagle, STANDALONE." in str(caught.value)


@pytest.mark.usefixtures("package")
def test_a_broken_worker_shows_its_own_error():
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        A.STANDALONE.create_worker(worker_args())


@pytest.mark.parametrize("algorithm", [A.NGRAM, A.STANDALONE, A.NONE, A.FROZEN_KV_MTP, A.EAGLE3])
def test_multi_layer_is_for_eagle_only(algorithm):
    with pytest.raises(ValueError, match=f"--enable-multi-layer-eagle.*{algorithm.name}"):
        algorithm.create_worker(worker_args(multi_layer=True))


def test_the_choice_of_worker_never_looks_at_the_schedule():
    source = inspect.getsource(A.create_worker).lower()
    assert "overlap" not in source
    assert "schedule" not in source
