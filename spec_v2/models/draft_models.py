"""Draft models by path: an independent small LM for STANDALONE, a head for EAGLE."""

import json
from pathlib import Path
from typing import Any

from spec_v2.models.eagle import EagleHead
from spec_v2.server_args import ServerArgs
from spec_v2.spec_info import SpeculativeAlgorithm

FIELD = "speculative_draft_model_path"


def load_draft_model(args: ServerArgs, target: Any, tokenizer: Any) -> Any:
    """The draft model that `speculative_draft_model_path` names, in the target's dtype and on its device.

    Raises ValueError where it does not fit the target or the algorithm.
    """
    from spec_v2.models.loader import load_model

    path = args.speculative_draft_model_path
    assert path is not None  # the hook has refused this already
    if args.algorithm is SpeculativeAlgorithm.EAGLE:
        return load_eagle_head(Path(path), target)
    if args.algorithm is not SpeculativeAlgorithm.STANDALONE:
        raise ValueError(
            f"speculative_algorithm={args.algorithm.name}: loading its draft head is not in this release; use "
            "EAGLE, STANDALONE or NGRAM"
        )
    loaded = load_model(path, dtype=target.dtype, device=target.device, role=FIELD)
    ours, theirs = (t.get_vocab() if t is not None else None for t in (tokenizer, loaded.tokenizer))
    if ours is not None and theirs is not None and ours != theirs:
        raise ValueError(
            f"{FIELD}={path}: its tokenizer maps text to other ids than the target's, so its drafts would be "
            "other words; use a draft model with the target's tokenizer"
        )
    return loaded.model


def check_same_vocabulary(args: ServerArgs, target: Any, draft: Any) -> None:
    """Raise ValueError where target and draft do not have the same number of token ids."""
    ours, theirs = int(target.config.vocab_size), int(draft.config.vocab_size)
    if ours != theirs:
        raise ValueError(
            f"{FIELD}: the draft model has vocab_size={theirs}, the target {ours}; use a draft model with the "
            "target's vocabulary"
        )


def load_eagle_head(folder: Path, target: Any) -> EagleHead:
    """An EAGLE head from `config.json` and `model.safetensors` with the published key names.

    Keys: `fc.weight` (and `fc.bias`), `layers.N.*`; `embed_tokens.weight` is not read, the target's is shared;
    `lm_head.weight` is used where present. Raises ValueError naming each missing or unknown tensor.
    """
    from safetensors.torch import load_file
    from transformers import AutoConfig

    weights = folder / "model.safetensors"
    if not (folder / "config.json").is_file() or not weights.is_file():
        raise ValueError(
            f"{FIELD}={folder}: an EAGLE head is a folder with config.json and model.safetensors; name such a folder"
        )
    config = AutoConfig.from_pretrained(folder)
    extra = json.loads((folder / "config.json").read_text())
    tensors = {k.removeprefix("model."): v for k, v in load_file(weights).items()}
    tensors.pop("embed_tokens.weight", None)
    head = EagleHead(
        config,
        target,
        norm_input=bool(extra.get("norm_input", False)),
        norm_output=bool(extra.get("norm_output", False)),
        own_lm_head="lm_head.weight" in tensors,
    )
    if "fc.bias" not in tensors:
        head.fc.bias = None  # type: ignore[assignment]
    own = {k: v for k, v in tensors.items() if k.startswith(("fc.", "lm_head."))}
    own |= {f"decoder.{k}": v for k, v in tensors.items() if k not in own}
    result = head.load_state_dict(own, strict=False)
    shared = {"decoder.embed_tokens.weight"} | (set() if "lm_head.weight" in tensors else {"lm_head.weight"})
    missing = sorted(set(result.missing_keys) - shared)
    if missing or result.unexpected_keys:
        raise ValueError(
            f"{FIELD}={folder}: missing tensors {missing}, unknown tensors {sorted(result.unexpected_keys)}; use a "
            "head whose config.json describes its weights"
        )
    return head.eval()
