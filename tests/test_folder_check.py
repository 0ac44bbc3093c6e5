"""Model folders from strangers: each lie is found by its file and field, and nothing else is ever raised."""

import contextlib
import copy
import json
import shutil
import struct

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from spec_v2.models.draft_models import load_eagle3_head
from spec_v2.models.folder_check import problem_of, tensor_shapes
from spec_v2.models.loader import load_model
from spec_v2.training.checkpoint import write_checkpoint
from spec_v2.training.kinds import KINDS
from tests.eagle3_models import deep_llama, eagle3_head
from tests.tiny_folder import save_tiny_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target():
    return copy.deepcopy(deep_llama(CPU)).float()  # that one is shared by all tests


@pytest.fixture(scope="module")
def whole(tmp_path_factory, target):
    """A folder with a draft head, and one with a model. Both load."""
    top = tmp_path_factory.mktemp("folders")
    write_checkpoint(top / "head", KINDS["eagle3"], copy.deepcopy(eagle3_head(deep_llama(CPU))).float())
    save_tiny_model(top / "model")
    assert problem_of(top / "head") is None
    assert problem_of(top / "model") is None
    return top


@pytest.fixture
def head(whole, tmp_path):
    return shutil.copytree(whole / "head", tmp_path / "head")


def edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def weights(folder):
    return next(iter(sorted(folder.glob("*.safetensors"))))


def with_header(path, change):
    """Rewrite a safetensors file's header; the data behind it stays."""
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.dumps(change(json.loads(raw[8 : 8 + length]))).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + raw[8 + length :])


def first_tensor(header):
    return next(name for name in header if name != "__metadata__")


# --- one lie each


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_size", 2**40), ("hidden_size", 12345), ("num_hidden_layers", 10**9), ("num_hidden_layers", -1),
        ("vocab_size", "many"), ("num_attention_heads", True), ("intermediate_size", 2**30), ("head_dim", 2.5),
        ("max_position_embeddings", 2**62), ("hidden_size", 0),
    ],
)  # fmt: skip
def test_sizes_that_no_weights_bear_out(head, target, name, value):
    edit(head, **{name: value})
    with pytest.raises(ValueError, match=rf"config\.json has {name}={value!r}"):
        load_eagle3_head(head, target)


@pytest.mark.parametrize(
    "text",
    ['{"hidden_size": NaN}', '{"a": 1, "a": 2}', "[" * 100_000, "[]", "{", '{"a": ' + "9" * 5000 + "}"],
)
def test_a_config_that_is_no_plain_object(head, target, text):
    (head / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json"):
        load_eagle3_head(head, target)


@pytest.mark.parametrize("name", ["../stolen.safetensors", "/etc/passwd", "a\\b.safetensors", "model.bin", 3])
def test_an_index_that_leads_elsewhere(head, target, name):
    shutil.copy(weights(head), head.parent / "stolen.safetensors")
    (head / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"fc.weight": name}}))
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json"):
        load_eagle3_head(head, target)


def test_a_link_that_leaves_the_folder(head, target):
    outside = shutil.move(weights(head), head.parent / "outside.safetensors")
    (head / "model.safetensors").symlink_to(outside)
    with pytest.raises(ValueError, match=r"model\.safetensors is a link that leaves the folder"):
        load_eagle3_head(head, target)


def test_the_hubs_cache_links_to_its_blobs(whole, target, tmp_path):
    """models--org--name/snapshots/<commit>/file leads to models--org--name/blobs/<hash>."""
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "0123", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, path in enumerate(sorted((whole / "head").iterdir())):
        shutil.copy(path, blobs / str(i))
        (snapshot / path.name).symlink_to(f"../../blobs/{i}")
    load_eagle3_head(snapshot, target)


LIES = {
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-5]),
    "empty": lambda path: path.write_bytes(b""),
    "a long header": lambda path: path.write_bytes(struct.pack("<Q", 2**60) + path.read_bytes()[8:]),
    "a pickle": lambda path: torch.save({"fc.weight": torch.zeros(3)}, path),
    "bytes of another": lambda path: with_header(
        path, lambda h: h | {"again": h[first_tensor(h)]}
    ),
    "a shape that does not fit": lambda path: with_header(
        path, lambda h: h | {first_tensor(h): h[first_tensor(h)] | {"shape": [2**40, 2**40]}}
    ),
    "an unknown dtype": lambda path: with_header(
        path, lambda h: h | {first_tensor(h): h[first_tensor(h)] | {"dtype": "F4"}}
    ),
    "a negative shape": lambda path: with_header(
        path, lambda h: h | {first_tensor(h): h[first_tensor(h)] | {"shape": [-1]}}
    ),
    "an entry that is no object": lambda path: with_header(path, lambda h: h | {first_tensor(h): 7}),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_file_whose_header_lies(head, target, lie):
    LIES[lie](weights(head))
    with pytest.raises(ValueError, match=r"\.safetensors"):
        load_eagle3_head(head, target)


def test_shapes_are_those_of_the_tensors(tmp_path):
    tensors = {"a": torch.zeros(2, 3), "b": torch.zeros(()), "c": torch.zeros(0, 4, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    assert tensor_shapes(tmp_path / "x.safetensors") == {name: tuple(t.shape) for name, t in tensors.items()}


def test_the_models_own_folders_are_checked_too(whole, tmp_path):
    folder = shutil.copytree(whole / "model", tmp_path / "model")
    edit(folder, hidden_size=2**40)
    with pytest.raises(ValueError, match=r"hidden_size=1099511627776.*; use a complete copy"):
        load_model(str(folder), dtype=torch.float32, device=CPU)


# --- any lie

VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=3), st.just([]), st.just({}),
    st.sampled_from((1, 2, 3, 7, 31, 33, 10**6)),
)  # fmt: skip
FUZZ = settings(
    max_examples=60, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


class Refused(ValueError):
    """Ours, which names the setting."""


def named(load):
    def loading():
        try:
            load()
        except ValueError as error:
            raise (
                Refused if str(error).startswith("speculative_draft_model_path") else AssertionError
            ) from error

    return loading


def loads_or_refuses(load):
    """The only two ways out."""
    with contextlib.suppress(Refused):
        load()


@FUZZ
@given(st.data())
def test_a_config_with_any_value_anywhere(whole, target, tmp_path, data):
    folder = shutil.copytree(whole / "head", tmp_path / "head", dirs_exist_ok=True)
    keys = sorted(json.loads((folder / "config.json").read_text()))
    edit(folder, **{data.draw(st.sampled_from(keys)): data.draw(VALUES)})
    loads_or_refuses(named(lambda: load_eagle3_head(folder, target)))


@FUZZ
@given(st.data())
def test_weights_with_any_byte_changed(whole, target, tmp_path, data):
    folder = shutil.copytree(whole / "head", tmp_path / "head", dirs_exist_ok=True)
    path = weights(folder)
    raw = bytearray(path.read_bytes())
    length = struct.unpack("<Q", raw[:8])[0]
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, 7 + length))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw[: data.draw(st.sampled_from((len(raw), len(raw) - 1, 9, 3)))])
    loads_or_refuses(named(lambda: load_eagle3_head(folder, target)))
