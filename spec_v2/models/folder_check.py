"""A model folder is somebody else's data: what is wrong with it is found before a tensor is made from it.

Names that lead out of the folder, headers that promise what the file does not hold, settings that no tensor bears out.
Headers alone are read: a few kilobytes, whatever the size of the weights.
"""

import json
import struct
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

Shape = tuple[int, ...]

LARGEST_JSON = 64 << 20  # bytes; tokenizers and indexes of large models have a few million
BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
COUNTS = (
    "hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "draft_vocab_size", "num_nextn_predict_layers",
)  # fmt: skip
LARGEST_COUNT = 1 << 31
BAD_SETTINGS = (KeyError, TypeError, AttributeError, IndexError, ArithmeticError, RuntimeError, MemoryError)
"""What building a model from somebody's settings may raise."""


def problem_of(folder: Path) -> str | None:
    """What is wrong with `config.json` and the safetensors files of a folder, or None. It names file and field."""
    try:
        settings = read_object(folder / "config.json")
        _check_counts(settings)
        files = list(_weight_files(folder))
        for path in [folder / "config.json", *files]:
            _check_inside(path, folder)
        shapes = {name: shape for path in files for name, shape in tensor_shapes(path).items()}
        if shapes:
            _check_borne_out(settings, shapes)
    except (OSError, ValueError) as error:
        return str(error)
    return None


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ValueError naming the file for anything else: no NaN, no name twice, no endless nesting."""
    if path.stat().st_size > LARGEST_JSON:
        raise ValueError(f"{path.name} has {path.stat().st_size} bytes, more than any such file needs")
    return _object_of(path.read_bytes(), path.name)


def _object_of(raw: bytes, where: str) -> dict[str, Any]:
    try:
        found = json.loads(
            raw.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_no_name_twice
        )
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is no valid JSON ({error})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{where} holds no object")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _no_name_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} stands there twice")
    return found


def _check_counts(settings: dict[str, Any]) -> None:
    text = settings.get("text_config")
    for part in (settings, text if isinstance(text, dict) else {}):
        for name in COUNTS:
            value = part.get(name)
            if value is None:
                continue
            if type(value) is not int or not 1 <= value <= LARGEST_COUNT:
                raise ValueError(
                    f"config.json has {name}={value!r}, which must be a whole number from 1 to 2**31"
                )


def _weight_files(folder: Path) -> Iterator[Path]:
    """All of the folder, and those that its index names, which must lie in it."""
    yield from sorted(folder.glob("*.safetensors"))
    for index in sorted(folder.glob("*.safetensors.index.json")):
        _check_inside(index, folder)
        where = read_object(index).get("weight_map")
        if not isinstance(where, dict) or not all(isinstance(name, str) for name in where.values()):
            raise ValueError(f"{index.name} has no weight_map from tensors to files")
        for tensor, name in where.items():
            if Path(name).name != name or "\\" in name or not name.endswith(".safetensors"):
                raise ValueError(
                    f"{index.name} puts {tensor} into {name!r}, which is no safetensors file of the folder"
                )
            if not (folder / name).is_file():
                raise ValueError(f"{index.name} puts {tensor} into {name}, and there is no such file")


def _check_inside(path: Path, folder: Path) -> None:
    """A link may lead elsewhere in the folder; in the hub's cache, to the blobs beside its snapshots."""
    homes = [folder.resolve()]
    if folder.resolve().parent.name == "snapshots":
        homes.append(folder.resolve().parent.parent / "blobs")
    if not any(path.resolve().is_relative_to(home) for home in homes):
        raise ValueError(f"{path.name} is a link that leaves the folder; put the file itself there")


def tensor_shapes(path: Path) -> dict[str, Shape]:
    """Shapes by name, from the header of a safetensors file. Raises ValueError naming file and tensor where it lies."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if 8 + length > size or length > LARGEST_JSON:
            raise ValueError(f"{path.name} is cut off: its header should have {length} bytes")
        header = _object_of(file.read(length), f"the header of {path.name}")
    shapes, spans = {}, []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        shape, span = _entry(entry, f"{path.name}, tensor {name}")
        shapes[name] = shape
        spans.append((*span, name))
    end = 0
    for begin, stop, name in sorted(spans):
        if begin < end or stop > size - 8 - length:
            raise ValueError(
                f"{path.name}, tensor {name}: its bytes {begin} to {stop} are not its own, or not there"
            )
        end = stop
    return shapes


def _entry(entry: Any, where: str) -> tuple[Shape, tuple[int, int]]:
    """(shape, where its bytes are)."""
    fields = entry if isinstance(entry, dict) else {}
    kind, shape, span = (fields.get(name) for name in ("dtype", "shape", "data_offsets"))
    if kind not in BYTES:
        raise ValueError(f"{where} has dtype {kind!r}, which is not read here")
    if not _are_sizes(shape) or not _are_sizes(span) or len(span) != 2:
        raise ValueError(f"{where} has shape {shape!r} at {span!r}")
    begin, end = span
    if end - begin != prod(shape) * BYTES[kind]:
        raise ValueError(
            f"{where}: {kind} of shape {shape} does not fill the {end - begin} bytes it is given"
        )
    return tuple(shape), (begin, end)


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _check_borne_out(settings: dict[str, Any], shapes: dict[str, Shape]) -> None:
    """Sizes of the settings are sizes of tensors, so nothing is built that the weights could not fill."""
    text = settings.get("text_config")
    sizes = settings | text if isinstance(text, dict) else settings
    seen = {n for shape in shapes.values() for n in shape}
    hidden, layers = sizes.get("hidden_size"), sizes.get("num_hidden_layers")
    if hidden is not None and hidden not in seen:
        raise ValueError(f"config.json has hidden_size={hidden}, and no tensor has a dimension of that size")
    if layers is not None and layers > len(shapes):
        raise ValueError(
            f"config.json has num_hidden_layers={layers}, and there are {len(shapes)} tensors in all"
        )
    widths = [
        sizes[name] for name in ("intermediate_size", "moe_intermediate_size") if sizes.get(name) is not None
    ]
    if widths and max(seen) < min(widths):
        raise ValueError(
            f"config.json has intermediate_size={widths[0]}, and no tensor has a dimension of that size"
        )
