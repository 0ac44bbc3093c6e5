"""Draft models by path: an independent small LM for STANDALONE, a head for EAGLE and EAGLE-3.

Heads are folders with `config.json` and `model.safetensors` under the key names of the published ones (EAGLE-1
and -2: `fc`, `layers.N`; EAGLE-3: `fc`, `midlayer` or `layers.0`, `norm`, `lm_head`, `d2t`), with or without
a `model.` prefix.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spec_v2.models.eagle import EagleHead
from spec_v2.models.eagle3 import Eagle3Head
from spec_v2.server_args import ServerArgs
from spec_v2.spec_info import SpeculativeAlgorithm

FIELD = "speculative_draft_model_path"
MAP_FIELD = "speculative_token_map"


def load_draft_model(args: ServerArgs, target: Any, tokenizer: Any) -> Any:
    """The draft model that `speculative_draft_model_path` names, in the target's dtype and on its device.

    Raises ValueError where it does not fit the target or the algorithm.
    """
    path = args.speculative_draft_model_path
    assert path is not None  # the hook has refused this already
    if args.algorithm is SpeculativeAlgorithm.EAGLE:
        token_map = read_token_map(args, target) if args.speculative_token_map is not None else None
        return load_eagle_head(Path(path), target, token_map)
    if args.algorithm is SpeculativeAlgorithm.EAGLE3:
        return load_eagle3_head(Path(path), target)
    return _load_standalone(path, target, tokenizer)


def check_draft_model(args: ServerArgs, target: Any, draft: Any) -> None:
    """Raise ValueError where target and draft do not fit each other, or draft and algorithm."""
    ours, theirs = int(target.config.vocab_size), int(draft.config.vocab_size)
    if ours != theirs:
        raise ValueError(
            f"{FIELD}: the draft model has vocab_size={theirs}, the target {ours}; use a draft model with the "
            "target's vocabulary"
        )
    here, there = next(target.parameters()).device, next(draft.parameters()).device
    if here != there:
        raise ValueError(
            f"{FIELD}: the draft model is on {there}, the target on {here}; move it with .to({str(here)!r})"
        )
    is_eagle3 = isinstance(draft, Eagle3Head)
    wants_eagle3 = args.algorithm is SpeculativeAlgorithm.EAGLE3
    if args.algorithm.is_eagle() and is_eagle3 != wants_eagle3:
        fits = "EAGLE3" if is_eagle3 else "EAGLE"
        raise ValueError(
            f"speculative_algorithm={args.algorithm.name}: the draft model is a head for {fits}; use "
            f"--speculative-algorithm {fits}"
        )


def load_eagle_head(folder: Path, target: Any, token_map: Tensor | None = None) -> EagleHead:
    """An EAGLE head. The target's embedding is shared; its LM head too, unless the folder has `lm_head.weight`.

    Raises ValueError naming each missing or unknown tensor.
    """
    config, settings, tensors = _read_head(folder)
    if any(name.startswith(("midlayer.", "d2t")) for name in tensors):
        raise ValueError(f"{FIELD}={folder} holds an EAGLE-3 head; use --speculative-algorithm EAGLE3")
    own_lm_head = "lm_head.weight" in tensors
    head = EagleHead(
        config,
        target,
        norm_input=bool(settings.get("norm_input", False)),
        norm_output=bool(settings.get("norm_output", False)),
        own_lm_head=own_lm_head,
    )
    if "fc.bias" not in tensors:
        head.fc.bias = None  # type: ignore[assignment]
    tensors.pop("embed_tokens.weight", None)
    top = ("fc.", "lm_head.")
    renamed = {k if k.startswith(top) else f"decoder.{k}": v for k, v in tensors.items()}
    shared = {"decoder.embed_tokens.weight"} | (set() if own_lm_head else {"lm_head.weight"})
    _fill(head, renamed, shared, folder)
    if token_map is not None:
        head.keep_hot_tokens(token_map)
    return head.eval()


def load_eagle3_head(folder: Path, target: Any) -> Eagle3Head:
    """An EAGLE-3 head. It has its own LM head, and its own embedding where the folder holds one.

    Raises ValueError naming each missing or unknown tensor, and where a reduced vocabulary has no `d2t`.
    """
    config, _, tensors = _read_head(folder)
    tensors.pop("t2d", None)  # says which target ids have a draft id; d2t says the same and more
    tensors = {k.replace("layers.0.", "midlayer.", 1): v for k, v in tensors.items()}
    own_embedding = "embed_tokens.weight" in tensors
    head = Eagle3Head(config, target, own_embedding=own_embedding)
    if "d2t" in tensors:
        tensors["d2t"] = check_d2t(tensors["d2t"], head.lm_head.out_features, int(config.vocab_size))
    elif head.lm_head.out_features != config.vocab_size:
        raise ValueError(
            f"{FIELD}={folder}: draft_vocab_size={head.lm_head.out_features} is less than vocab_size="
            f"{config.vocab_size}, but there is no tensor d2t that maps one to the other; use a complete head"
        )
    inner = ("embed_tokens.", "fc.", "midlayer.")
    renamed = {f"decoder.{k}" if k.startswith(inner) else k: v for k, v in tensors.items()}
    shared = set() if own_embedding else {"decoder.embed_tokens.weight"}
    _fill(head, renamed, shared | ({"d2t"} if "d2t" not in tensors else set()), folder)
    return head.eval()


def check_d2t(d2t: Tensor, draft_vocab_size: int, vocab_size: int) -> Tensor:
    """`d2t` as int64. Raises ValueError for a wrong dtype, length, or an offset that leaves the vocabulary."""
    if d2t.dtype not in (torch.int32, torch.int64) or d2t.shape != (draft_vocab_size,):
        raise ValueError(
            f"{FIELD}: tensor d2t is {d2t.dtype} of shape {tuple(d2t.shape)}; it must hold {draft_vocab_size} integers"
        )
    ids = d2t.long() + torch.arange(draft_vocab_size)
    for index in ((ids < 0) | (ids >= vocab_size)).nonzero()[:1, 0].tolist():
        raise ValueError(
            f"{FIELD}: d2t[{index}]={int(d2t[index])} gives token {int(ids[index])}, outside vocab_size={vocab_size}"
        )
    return d2t.long()


def read_token_map(args: ServerArgs, target: Any) -> Tensor:
    """The hot tokens of `speculative_token_map`: a JSON list of target ids. ValueError for one that is no such list."""
    path = Path(str(args.speculative_token_map))
    vocab_size = int(target.config.vocab_size)
    if not path.is_file():
        raise ValueError(f"{MAP_FIELD}={path}: no such file; name a JSON file with a list of token ids")
    try:
        ids = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(
            f"{MAP_FIELD}={path}: cannot be read as JSON ({error}); give a list of ids"
        ) from error
    if not isinstance(ids, list) or any(type(t) is not int or not 0 <= t < vocab_size for t in ids):
        raise ValueError(f"{MAP_FIELD}={path}: must be a JSON list of token ids from 0 to {vocab_size - 1}")
    if len(set(ids)) != len(ids) or len(ids) < args.topk:
        raise ValueError(
            f"{MAP_FIELD}={path}: {len(ids)} ids, {len(set(ids))} of them distinct; list each hot token once, and at "
            f"least speculative_eagle_topk={args.topk} of them"
        )
    return torch.tensor(ids)


def _load_standalone(path: str, target: Any, tokenizer: Any) -> Any:
    from spec_v2.models.loader import load_model

    loaded = load_model(path, dtype=target.dtype, device=target.device, role=FIELD)
    ours, theirs = (t.get_vocab() if t is not None else None for t in (tokenizer, loaded.tokenizer))
    if ours is not None and theirs is not None and ours != theirs:
        raise ValueError(
            f"{FIELD}={path}: its tokenizer maps text to other ids than the target's, so its drafts would be "
            "other words; use a draft model with the target's tokenizer"
        )
    return loaded.model


def _read_head(folder: Path) -> tuple[Any, dict[str, Any], dict[str, Tensor]]:
    """(transformers config, config.json as it is, tensors without a `model.` prefix)."""
    from safetensors import SafetensorError
    from transformers import AutoConfig

    if not (folder / "config.json").is_file() or not any((folder / name).is_file() for name in _WEIGHTS):
        raise ValueError(
            f"{FIELD}={folder}: an EAGLE head is a folder with config.json and model.safetensors; name such a folder"
        )
    try:
        settings = json.loads((folder / "config.json").read_text())
        if not isinstance(settings, dict):
            raise ValueError("config.json holds no object")
        tensors = {name.removeprefix("model."): value for name, value in _read_weights(folder).items()}
        return AutoConfig.from_pretrained(folder), settings, tensors
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(
            f"{FIELD}={folder}: cannot be read ({error}); use a complete copy of the head"
        ) from error


_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, from one file or from the shards that the index names."""
    from safetensors.torch import load_file

    whole, index = (folder / name for name in _WEIGHTS)
    if whole.is_file():
        return load_file(whole)
    where = json.loads(index.read_text())["weight_map"]
    tensors = {k: v for name in sorted(set(where.values())) for k, v in load_file(folder / name).items()}
    if lost := sorted(set(where) - set(tensors)):
        raise ValueError(f"{index.name} promises {lost[0]}, and no shard holds it")
    return tensors


def _fill(head: torch.nn.Module, tensors: dict[str, Tensor], shared: set[str], folder: Path) -> None:
    wrong = [
        f"{name} {tuple(tensors[name].shape)} instead of {tuple(own.shape)}"
        for name, own in head.state_dict().items()
        if name in tensors and own.shape != tensors[name].shape
    ]
    own_names = set(head.state_dict())
    missing, unknown = sorted(own_names - set(tensors) - shared), sorted(set(tensors) - own_names)
    if wrong or missing or unknown:
        raise ValueError(
            f"{FIELD}={folder}: missing tensors {missing}, unknown tensors {unknown}, wrong shapes {wrong}; use a "
            "head whose config.json describes its weights and that was made for this target"
        )
    head.load_state_dict(tensors, strict=False)
