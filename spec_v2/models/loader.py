"""A name, a folder or a hub id becomes a frozen causal language model, in the dtype and place asked for.

Only safetensors weights are read, code from a checkpoint is never run, and nothing is downloaded unless the
user names a hub id. Every refusal names the setting it came from, its value and what to do instead.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from spec_v2.models.folder_check import BAD_SETTINGS, problem_of
from spec_v2.models.gguf_cache import (
    PACKAGED_MODELS,
    PackagedModel,
    build_cached_folder,
    cache_root,
    packaged_folder,
    quiet_transformers,
)

if TYPE_CHECKING:
    import transformers

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)
_LANGUAGE_MODEL = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_PICKLE = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model ready to run: in eval mode, no parameter requires a gradient, attention is transformers' eager.

    `name`: as the user gave it, or the built-in name. `tokenizer`: None if the source has none.
    `source_folder`: where `config.json` lies; for a hub id, a folder of the hub's own cache.
    """

    name: str
    model: "transformers.PreTrainedModel"
    tokenizer: "transformers.PreTrainedTokenizerBase | None"
    config: "transformers.PretrainedConfig"
    source_folder: Path

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every token id that ends a text, ascending: the generation settings', the config's, the tokenizer's."""
        found: set[int] = set()
        for holder in (self.model.generation_config, self.config, self.tokenizer):
            ids = getattr(holder, "eos_token_id", None)
            found.update([ids] if isinstance(ids, int) else ids or ())
        return tuple(sorted(found))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """What the user named, found: `location` is what transformers is to read, a folder or a hub id."""

    role: str
    name: str
    location: str
    folder: Path

    @property
    def is_local(self) -> bool:
        return Path(self.location).is_dir()

    def refusal(self, problem: str, remedy: str) -> ValueError:
        return ValueError(f"{self.role}={self.name!r}: {problem}; {remedy}")


def list_known_models() -> dict[str, str]:
    """What each built-in model is, by its name. None of them needs a network."""
    return {known.name: known.summary for known in PACKAGED_MODELS}


def load_model(
    name_or_path: str, *, dtype: torch.dtype, device: torch.device, role: str = "model_path"
) -> LoadedModel:
    """Load a causal language model and its tokenizer.

    `name_or_path`: a built-in name (`list_known_models`), a folder with `config.json` and safetensors weights,
    or a hub id such as "org/name", which alone may download. Weights go straight to `dtype` and `device`.
    `role`: the setting that errors name. Raises ValueError for unknown names, missing or pickled weights,
    weights that leave part of the model unset, models that need code of their own, and models that aren't
    causal language models.
    """
    source = _find(name_or_path, role)
    config = _causal_config(source)
    model = _read_weights(source, config, dtype, device)
    return LoadedModel(
        name=source.name,
        model=model.eval().requires_grad_(False),
        tokenizer=_read_tokenizer(source),
        config=model.config,
        source_folder=source.folder,
    )


def load_tokenizer(
    name_or_path: str, *, role: str = "tokenizer_path"
) -> "transformers.PreTrainedTokenizerBase":
    """Load a tokenizer alone, from the same kinds of names as `load_model`; a folder needs no weights.

    Raises ValueError, naming `role`, if nothing is found or what is found has no tokenizer.
    """
    source = _find(name_or_path, role, weights=False)
    tokenizer = _read_tokenizer(source)
    if tokenizer is None:
        raise source.refusal("there is no tokenizer", "name a folder that holds a tokenizer.json")
    return tokenizer


def first_layers(name_or_path: str, num_layers: int, *, role: str = "model_path") -> Path:
    """A folder with a smaller model: the first `num_layers` decoder layers of the one named, the rest as it is.

    Embeddings, final norm, output head and tokenizer are the same, so it can draft for the larger one. It is
    written into the cache once, in the dtype of the checkpoint. Raises ValueError as `load_model` does, or if
    the model hasn't that many layers.
    """
    source = _find(name_or_path, role)
    total = _causal_config(source).get_text_config().num_hidden_layers
    if not 1 <= num_layers <= total:
        raise ValueError(
            f"num_layers={num_layers}: {source.name} has {total} layers; choose from 1 to {total}"
        )
    place = hashlib.sha256(str(source.folder.resolve()).encode()).hexdigest()[:8]
    target = cache_root() / f"{Path(source.name).name}-first{num_layers}-{place}"
    stamp = {"format": "1", "source": _fingerprint(source)}
    return build_cached_folder(target, lambda folder: _write_first_layers(source, num_layers, folder), stamp)


def _find(name_or_path: str, role: str, *, weights: bool = True) -> _Source:
    known = _known(name_or_path)
    if known is not None:
        folder = packaged_folder(known, role=role)
        return _Source(role=role, name=known.name, location=str(folder), folder=folder)
    folder = Path(name_or_path).expanduser()
    source = _Source(role=role, name=name_or_path, location=str(folder), folder=folder)
    if name_or_path and folder.is_dir():
        if weights:
            _check_files(source)
        return source
    if _HUB_ID.fullmatch(name_or_path):
        return _find_on_hub(name_or_path, role, weights)
    names = ", ".join(list_known_models())
    if folder.is_file():
        raise source.refusal("this is a file", "give the folder that holds it and its config.json")
    raise source.refusal(
        "no built-in model and no folder has this name",
        f"use {names}, an existing folder, or a hub id org/name",
    )


def _known(name: str) -> PackagedModel | None:
    for known in PACKAGED_MODELS:
        if name.casefold() in (other.casefold() for other in known.names):
            return known
    return None


def _check_files(source: _Source) -> None:
    names = sorted(path.name for path in source.folder.iterdir())
    if "adapter_config.json" in names:  # transformers would fetch the base model that it points to
        raise source.refusal("this is an adapter, not a model", "merge it into its base model and save that")
    if "config.json" not in names:
        raise source.refusal("the folder has no config.json", "give a folder that save_pretrained wrote")
    if any(name.endswith(".safetensors") for name in names):
        if (problem := problem_of(source.folder)) is not None:
            raise source.refusal(f"it could not be read ({problem})", "use a complete copy")
        return
    pickled = [name for name in names if name.endswith(_PICKLE)]
    found = f"its weights are pickled ({pickled[0]}) and" if pickled else "the folder has no weights;"
    raise source.refusal(
        f"{found} only *.safetensors is read",
        "convert with model.save_pretrained(folder), which writes model.safetensors",
    )


def _find_on_hub(hub_id: str, role: str, weights: bool) -> _Source:
    from transformers.utils.hub import cached_file

    source = _Source(role=role, name=hub_id, location=hub_id, folder=Path())
    with _explained(source):
        found = cached_file(hub_id, "config.json" if weights else "tokenizer_config.json")
    return _Source(role=role, name=hub_id, location=hub_id, folder=Path(found).parent)


@contextlib.contextmanager
def _explained(source: _Source) -> Iterator[None]:
    """Turn what is said about a missing, damaged or unreachable file into a refusal."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ImportError, ValueError, SafetensorError, StrictDataclassError, *BAD_SETTINGS) as error:
        reason = " ".join(str(error).split())
        if source.is_local:
            raise source.refusal(
                f"it could not be read ({reason})", "check its files or use another"
            ) from error
        raise source.refusal(
            f"no folder has this name, and the hub could not provide it ({reason})",
            "check the name and the network, or give a local folder with the downloaded files",
        ) from error


def _causal_config(source: _Source) -> "transformers.PretrainedConfig":
    """The config, if a language model that transformers knows and that attends to the past only."""
    from transformers import CONFIG_MAPPING, AutoConfig
    from transformers.models.auto import modeling_auto

    with _explained(source):
        raw = json.loads((source.folder / "config.json").read_text(encoding="utf-8"))
    if not isinstance(raw, dict):
        raise source.refusal("its config.json could not be read (not an object)", "use another model")
    kind = raw.get("model_type")
    if "auto_map" in raw and kind not in CONFIG_MAPPING:
        raise source.refusal(
            f"model_type {kind!r} needs code that the checkpoint brings (auto_map), which is never run",
            "use a model whose architecture is part of transformers",
        )
    with _explained(source):
        config = AutoConfig.from_pretrained(source.location, trust_remote_code=False)
    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    named = raw.get("architectures") or [causal]
    is_encoder = kind in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES and not raw.get("is_decoder")
    if config.is_encoder_decoder or is_encoder or not causal or not named[0].endswith(_LANGUAGE_MODEL):
        raise source.refusal(
            f"{named[0] or kind} is not a decoder-only causal language model",
            "use one, e.g. a ...ForCausalLM",
        )
    return config


def _read_weights(
    source: _Source, config: "transformers.PretrainedConfig", dtype: torch.dtype | str, device: torch.device
) -> Any:
    from transformers import AutoModelForCausalLM

    with _quiet_if_local(source), _explained(source):
        model, report = AutoModelForCausalLM.from_pretrained(
            source.location,
            config=config,
            dtype=dtype,
            device_map=device,
            use_safetensors=True,
            trust_remote_code=False,
            attn_implementation="eager",
            output_loading_info=True,
        )
    if missing := sorted(report["missing_keys"]):
        raise source.refusal(
            f"the weights lack {len(missing)} tensors, {missing[0]} for one", "give a complete checkpoint"
        )
    return model


def _read_tokenizer(source: _Source) -> Any:
    from transformers import AutoTokenizer

    if source.is_local and not any((source.folder / name).is_file() for name in _TOKENIZER_FILES):
        return None
    with _quiet_if_local(source), _explained(source):
        return AutoTokenizer.from_pretrained(source.location, trust_remote_code=False)


def _quiet_if_local(source: _Source) -> contextlib.AbstractContextManager[None]:
    """A download shows its progress; a file that is already here need not."""
    return quiet_transformers() if source.is_local else contextlib.nullcontext()


def _fingerprint(source: _Source) -> str:
    """Changes when the weights or the config do. On the hub, a folder is named after its commit."""
    if not source.is_local:
        return source.folder.name
    files = [source.folder / "config.json", *sorted(source.folder.glob("*.safetensors"))]
    return " ".join(f"{path.name}:{path.stat().st_size}:{path.stat().st_mtime_ns}" for path in files)


def _write_first_layers(source: _Source, num_layers: int, folder: Path) -> None:
    from transformers import GenerationConfig

    config = _causal_config(source)
    text = config.get_text_config()
    for key, value in list(vars(text).items()):
        if "layer" in key and isinstance(value, list) and len(value) == text.num_hidden_layers:
            setattr(text, key, value[:num_layers])
    text.num_hidden_layers = num_layers
    model = _read_weights(source, config, "auto", torch.device("cpu"))
    # Only the token ids: the sampling settings of some checkpoints can be read but not saved again.
    ids = {
        key: getattr(model.generation_config, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    model.generation_config = GenerationConfig(**ids)
    with quiet_transformers():
        model.save_pretrained(folder)
    if (tokenizer := _read_tokenizer(source)) is not None:
        tokenizer.save_pretrained(folder)
