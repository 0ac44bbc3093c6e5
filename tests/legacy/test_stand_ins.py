"""Stand-ins serve annotations and isinstance, and explain themselves as soon as they are put to use."""

import copy
import functools
import inspect
import pickle
import typing
from unittest import mock

import pytest

import legacy_compat
from legacy_compat import RemovedV1AttributeError, RemovedV1UsageError, create_worker, registry, stand_in
from spec_v2 import ServerArgs
from spec_v2.spec_info import SpeculativeAlgorithm

EAGLEWorker = stand_in("EAGLEWorker")


@pytest.mark.parametrize(
    "use",
    [
        lambda: EAGLEWorker(None, 0, 0, 0, 0, 0, 0, 0, None),
        lambda: type("Mine", (EAGLEWorker,), {}),
        lambda: type("Mine", (dict, EAGLEWorker), {}),
        lambda: setattr(EAGLEWorker, "draft", print),
        lambda: delattr(EAGLEWorker, "__doc__"),
        mock.patch.object(EAGLEWorker, "new_attribute", create=True).start,
    ],
    ids=["call", "derive", "derive second", "patch", "delete", "mock"],
)
def test_use_is_an_error(use):
    with pytest.raises(RemovedV1UsageError) as caught:
        use()
    assert caught.value.code == "SV101"
    assert str(caught.value).startswith("SV101: SGLang 0.5.13 removed the class")


def test_members_lead_to_where_they_went():
    with pytest.raises(RemovedV1AttributeError) as caught:
        EAGLEWorker.draft  # noqa: B018
    assert caught.value.replacement == "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.draft"
    with pytest.raises(AttributeError, match="'EAGLEWorker' has no attribute 'no_such_thing'"):
        EAGLEWorker.no_such_thing  # noqa: B018
    assert not hasattr(EAGLEWorker, "draft")


def test_the_usual_patch_says_where_to_patch():
    """A guard, functools.wraps around the old method, an assignment: the first step already explains."""
    with pytest.raises(RemovedV1AttributeError, match=r"eagle_worker_v2\.EagleDraftWorker\.draft"):
        EAGLEWorker.draft = functools.wraps(EAGLEWorker.draft)(print)


def test_nothing_is_an_instance():
    assert not isinstance(3, EAGLEWorker)
    assert not isinstance(EAGLEWorker, EAGLEWorker)
    assert not issubclass(dict, EAGLEWorker)
    assert issubclass(EAGLEWorker, EAGLEWorker)


def test_annotations():
    def patch(worker: EAGLEWorker | None, other: "EAGLEWorker" = None) -> list[EAGLEWorker]:
        return []

    hints = typing.get_type_hints(patch, globals())
    assert hints["worker"] == typing.Union[EAGLEWorker, None] == EAGLEWorker | None  # noqa: UP007
    assert hints["other"] is EAGLEWorker
    assert typing.get_args(hints["return"]) == (EAGLEWorker,)
    assert list(inspect.signature(patch).parameters) == ["worker", "other"]


def test_python_can_handle_it_like_any_class():
    assert copy.copy(EAGLEWorker) is copy.deepcopy(EAGLEWorker) is EAGLEWorker
    assert pickle.loads(pickle.dumps(EAGLEWorker)) is EAGLEWorker
    assert {EAGLEWorker: 1}[EAGLEWorker] == 1
    assert EAGLEWorker.__name__ == "EAGLEWorker"
    assert repr(EAGLEWorker) == (
        "<stand-in for sglang.srt.speculative.eagle_worker.EAGLEWorker, removed in SGLang 0.5.13>"
    )
    inspect.signature(EAGLEWorker)
    mock.create_autospec(EAGLEWorker)
    mock.Mock(spec=EAGLEWorker)


def test_a_class_has_one_stand_in():
    assert stand_in("sglang.srt.speculative.eagle_worker.EAGLEWorker") is EAGLEWorker
    assert stand_in("sglang.srt.speculative.standalone_worker.EAGLEWorker") is EAGLEWorker
    assert stand_in("StandaloneWorker") is not EAGLEWorker
    for row in registry.load():
        if row.kind == "class":
            assert stand_in(row.old_path).__name__ == row.name


@pytest.mark.parametrize("name", ["EAGLEWorkerV2", "eagle_worker", "verify", "SGLANG_ENABLE_SPEC_V2", ""])
def test_only_removed_classes_have_one(name):
    with pytest.raises(
        ValueError, match=f"name='{name}' is no removed class; the removed classes are EAGLEW"
    ):
        stand_in(name)


# --- create_worker as V1 people call it ---


@pytest.mark.parametrize("enable_overlap", [True, False])
@pytest.mark.parametrize("algorithm", ["EAGLE", "STANDALONE", "NGRAM"])
def test_create_worker_with_enable_overlap(algorithm, enable_overlap):
    args = ServerArgs()
    for call in (
        lambda: create_worker(algorithm, args, enable_overlap=enable_overlap),
        lambda: create_worker(algorithm, args, enable_overlap),
    ):
        with pytest.raises(RemovedV1UsageError) as caught:
            call()
        assert caught.value.code == "SV302"
        (note,) = caught.value.__notes__
        assert f"leave out enable_overlap={enable_overlap}" in note
        assert f"ServerArgs(disable_overlap_schedule={not enable_overlap})" in note


def test_the_class_has_another_name():
    assert create_worker("EAGLE", ServerArgs()).__name__ == "EAGLEWorkerV2"


@pytest.mark.parametrize("algorithm", ["EAGLE", "eagle3", "STANDALONE", "NGRAM", None])
def test_create_worker_without_it(algorithm):
    args = ServerArgs()
    assert create_worker(algorithm, args) is SpeculativeAlgorithm.from_string(algorithm).create_worker(args)


def test_the_package_gives_these_names():
    assert legacy_compat.stand_in is stand_in
    assert legacy_compat.create_worker is create_worker
