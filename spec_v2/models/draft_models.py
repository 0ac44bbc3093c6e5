"""Draft models by path: an independent small LM for STANDALONE, a head for the others.

Heads are folders with `config.json` and `model.safetensors` under the key names of the published ones, with or without
a `model.` prefix:

- EAGLE-1 and -2: `fc`, `layers.N`;
- EAGLE-3: `fc`, `midlayer` or `layers.0`, `norm`, `lm_head`, `d2t`;
- MTP modules as in DeepSeek-V3: `layers.N.enorm`, `.hnorm`, `.eh_proj`, `.shared_head.norm`, and the parts of a decoder
  layer; `N` counts on from the target's layers or from 0;
- frozen-KV heads as Gemma 4's assistants: `pre_projection`, `layers.N` without keys and values, `norm`,
  `post_projection`, `lm_head`.
"""

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from spec_v2.models.eagle import EagleHead
from spec_v2.models.eagle3 import Eagle3Head
from spec_v2.models.folder_check import BAD_SETTINGS, problem_of, read_object
from spec_v2.models.frozen_kv_mtp import FrozenKvHead
from spec_v2.models.mtp import MtpHead
from spec_v2.server_args import ServerArgs
from spec_v2.spec_info import SpeculativeAlgorithm

P = ParamSpec("P")
T = TypeVar("T")
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
        if args.enable_multi_layer_eagle:
            return load_mtp_head(Path(path), target, args.num_steps, token_map)
        return load_eagle_head(Path(path), target, token_map)
    if args.algorithm is SpeculativeAlgorithm.EAGLE3:
        return load_eagle3_head(Path(path), target)
    if args.algorithm is SpeculativeAlgorithm.FROZEN_KV_MTP:
        return load_frozen_kv_head(Path(path), target)
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
    _check_kind(args, draft)
    if isinstance(draft, MtpHead) and draft.num_modules < args.num_steps:
        raise _too_few_modules(FIELD, draft.num_modules, args.num_steps)


_FITS = {
    EagleHead: "--speculative-algorithm EAGLE",
    MtpHead: "--speculative-algorithm EAGLE --enable-multi-layer-eagle",
    Eagle3Head: "--speculative-algorithm EAGLE3",
    FrozenKvHead: "--speculative-algorithm FROZEN_KV_MTP",
}
"""What runs a head of each kind."""


def _check_kind(args: ServerArgs, draft: Any) -> None:
    wanted = {
        SpeculativeAlgorithm.EAGLE: MtpHead if args.enable_multi_layer_eagle else EagleHead,
        SpeculativeAlgorithm.EAGLE3: Eagle3Head,
        SpeculativeAlgorithm.FROZEN_KV_MTP: FrozenKvHead,
    }.get(args.algorithm)  # type: ignore[arg-type]
    kind = type(draft)
    if kind is wanted or (kind not in _FITS and wanted in (None, EagleHead)):
        return
    flag = ", enable_multi_layer_eagle=True" if args.enable_multi_layer_eagle else ""
    remedy = _FITS.get(kind, "--speculative-algorithm STANDALONE")
    if isinstance(args.algorithm, SpeculativeAlgorithm):
        raise ValueError(
            f"speculative_algorithm={args.algorithm.name}{flag}: the draft model is of another kind "
            f"({kind.__name__}); use {remedy}"
        )


def _too_few_modules(where: str, num_modules: int, num_steps: int) -> ValueError:
    return ValueError(
        f"{where}: {num_modules} MTP modules draft at most {num_modules} steps, but speculative_num_steps={num_steps}; "
        f"use --speculative-num-steps {num_modules} --speculative-num-draft-tokens {num_modules + 1}, or more modules"
    )


def _explained(load: Callable[Concatenate[Path, P], T]) -> Callable[Concatenate[Path, P], T]:
    """Say whose settings they were, whatever comes of building a head from them."""

    @functools.wraps(load)
    def loading(folder: Path, /, *args: P.args, **options: P.kwargs) -> T:
        try:
            return load(folder, *args, **options)
        except (ValueError, *BAD_SETTINGS) as error:
            if str(error).startswith(FIELD):
                raise
            raise ValueError(
                f"{FIELD}={folder}: its config.json describes no head that can be built ({error!r}); use a complete copy"
            ) from error

    return loading


@_explained
def load_eagle_head(folder: Path, target: Any, token_map: Tensor | None = None) -> EagleHead:
    """An EAGLE head. The target's embedding is shared; its LM head too, unless the folder has `lm_head.weight`.

    Raises ValueError naming each missing or unknown tensor.
    """
    config, settings, tensors = _read_head(folder)
    if any(name.startswith(("midlayer.", "d2t")) for name in tensors):
        raise ValueError(f"{FIELD}={folder} holds an EAGLE-3 head; use {_FITS[Eagle3Head]}")
    if any(".eh_proj." in name for name in tensors):
        raise ValueError(f"{FIELD}={folder} holds MTP modules; use {_FITS[MtpHead]}")
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
    shared = {"embed_tokens.weight"} | (set() if own_lm_head else {"lm_head.weight"})
    _fill(head, tensors, _without_decoder, shared, folder)
    if token_map is not None:
        head.keep_hot_tokens(token_map)
    return head.eval()


@_explained
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
    shared = set() if own_embedding else {"embed_tokens.weight"}
    _fill(head, tensors, _without_decoder, shared | ({"d2t"} if "d2t" not in tensors else set()), folder)
    return head.eval()


@_explained
def load_mtp_head(folder: Path, target: Any, num_steps: int, token_map: Tensor | None = None) -> MtpHead:
    """The first `num_steps` MTP modules of a folder. Embedding and LM head are the target's.

    Published files hold copies of both for each module. An LM head that differs from the target's is kept. Raises
    ValueError naming each missing or unknown tensor, and where there are fewer modules than steps.
    """
    config, _, tensors = _read_head(folder)
    layers = sorted({int(name.split(".")[1]) for name in tensors if ".eh_proj." in name})
    if len(layers) < num_steps:
        raise _too_few_modules(f"{FIELD}={folder}", len(layers), num_steps)
    first, unused = layers[0], tuple(f"layers.{layer}." for layer in layers[num_steps:])
    tensors = {
        name: value
        for name, value in tensors.items()
        if not name.endswith("embed_tokens.weight") and not name.startswith(unused)
    }
    lm_head = tensors.pop("lm_head.weight", None)  # the target's own, where a file is part of its checkpoint
    own_heads = set()
    for module in range(num_steps):
        name = f"layers.{first + module}.shared_head.head.weight"
        if name in tensors and _same(tensors[name], lm_head, target):
            del tensors[name]
        elif name in tensors:
            own_heads.add(module)
    head = MtpHead(config, target, num_modules=num_steps, own_heads=frozenset(own_heads))

    def published(name: str) -> str:
        """`decoder.mtp.0.body.layers.0.mlp.up_proj.weight` is `layers.61.mlp.up_proj.weight`."""
        name = re.sub(r"^decoder\.mtp\.(\d+)\.", lambda m: f"layers.{first + int(m[1])}.", name)
        return _without_decoder(name.replace(".body.layers.0.", ".", 1))

    _fill(head, _stack_experts(tensors), published, {"embed_tokens.weight", "lm_head.weight"}, folder)
    if token_map is not None:
        head.keep_hot_tokens(token_map)
    return head.eval()


@_explained
def load_frozen_kv_head(folder: Path, target: Any) -> FrozenKvHead:
    """A frozen-KV head. The embedding is the target's; so is the LM head, unless the folder has `lm_head.weight`.

    Raises ValueError naming each missing or unknown tensor, and each setting that does not fit the target.
    """
    config, settings, tensors = _read_head(folder)
    own_lm_head = "lm_head.weight" in tensors
    for name in ("target_layer_ids", "sliding_window"):  # settings that a Llama config may drop
        setattr(config, name, settings.get(name))
    head = FrozenKvHead(config, target, own_lm_head=own_lm_head)
    tensors.pop("embed_tokens.weight", None)
    shared = {"embed_tokens.weight"} | (set() if own_lm_head else {"lm_head.weight"})
    _fill(head, tensors, _without_decoder, shared, folder)
    return head.eval()


def _without_decoder(name: str) -> str:
    return name.removeprefix("decoder.")


def _same(tensor: Tensor, lm_head: Tensor | None, target: Any) -> bool:
    """Whether a module's LM head is the target's: the copy that lies beside it, or the one that the target runs."""
    weight = target.get_output_embeddings().weight
    if lm_head is not None and torch.equal(tensor, lm_head):
        return True
    return tensor.shape == weight.shape and torch.equal(tensor.to(weight), weight)


def _stack_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Published files have a tensor for each expert; transformers' module has one for all, gates above ups."""
    pattern = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
    found: dict[tuple[str, str], dict[int, Tensor]] = {}
    rest = {}
    for name, value in tensors.items():
        match = pattern.fullmatch(name)
        if match is None:
            rest[name] = value
        else:
            found.setdefault((match[1], match[3]), {})[int(match[2])] = value
    stacked = {key: torch.stack([each[i] for i in sorted(each)]) for key, each in found.items()}
    for experts in {experts for experts, _ in stacked}:
        parts = [stacked[experts, part] for part in ("gate", "up") if (experts, part) in stacked]
        rest[f"{experts}.gate_up_proj"] = torch.cat(parts, 1)
        if (experts, "down") in stacked:
            rest[f"{experts}.down_proj"] = stacked[experts, "down"]
    return rest


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
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError
    from transformers import AutoConfig

    if not (folder / "config.json").is_file() or not any((folder / name).is_file() for name in _WEIGHTS):
        raise ValueError(
            f"{FIELD}={folder}: a draft head is a folder with config.json and model.safetensors; name such a folder"
        )
    if (problem := problem_of(folder)) is not None:
        raise ValueError(f"{FIELD}={folder}: cannot be read ({problem}); use a complete copy of the head")
    try:
        settings = read_object(folder / "config.json")
        tensors = {name.removeprefix("model."): value for name, value in _read_weights(folder).items()}
        return AutoConfig.from_pretrained(folder), settings, tensors
    except (OSError, KeyError, ValueError, SafetensorError, StrictDataclassError) as error:
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


def _fill(
    head: torch.nn.Module,
    tensors: dict[str, Tensor],
    published: Callable[[str], str],
    shared: set[str],
    folder: Path,
) -> None:
    """Copy the tensors in. `published`: a tensor's name in files, by its name in the head. `shared` need not be there."""
    own_tensors = {published(name): (name, own) for name, own in head.state_dict().items()}
    wrong = [
        f"{name} {tuple(tensors[name].shape)} instead of {tuple(own.shape)}"
        for name, (_, own) in own_tensors.items()
        if name in tensors and own.shape != tensors[name].shape
    ]
    missing = sorted(set(own_tensors) - set(tensors) - shared)
    unknown = sorted(set(tensors) - set(own_tensors))
    if wrong or missing or unknown:
        raise ValueError(
            f"{FIELD}={folder}: missing tensors {missing}, unknown tensors {unknown}, wrong shapes {wrong}; use a "
            "head whose config.json describes its weights and that was made for this target"
        )
    head.load_state_dict({own_tensors[name][0]: value for name, value in tensors.items()}, strict=False)
