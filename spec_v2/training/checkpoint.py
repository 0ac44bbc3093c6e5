"""A draft model as a folder: weights under published names, config.json, and a card that the code writes.

Files stay under 15 MiB: larger weights are cut into shards with an index, as transformers does it.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spec_v2.training.kinds import Kind

MAX_FILE_BYTES = 15 << 20
WEIGHTS, INDEX, RECORD = "model.safetensors", "model.safetensors.index.json", "training.json"


def write_checkpoint(folder: Path, kind: Kind, head: Any) -> None:
    """Write weights in bfloat16 and `config.json`. Older weights there are replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: _to_save(value) for name, value in kind.tensors(head).items()}
    write_weights(folder, tensors)
    settings = json.dumps(dict(kind.settings(head)), indent=2, sort_keys=True, default=str)
    (folder / "config.json").write_text(settings + "\n")


def write_weights(folder: Path, tensors: Mapping[str, Tensor], max_bytes: int = MAX_FILE_BYTES) -> None:
    """One file, or shards and an index. A single tensor larger than `max_bytes` gets a file of its own."""
    from safetensors.torch import save_file

    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > max_bytes - (64 << 10):  # room for the header
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    for old in folder.glob("model*.safetensors*"):
        old.unlink()
    metadata = {"format": "pt"}
    if len(shards) == 1:
        save_file(shards[0], folder / WEIGHTS, metadata)
        return
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / name, metadata)
        where |= dict.fromkeys(shard, name)
    total = sum(t.nbytes for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _to_save(value: Tensor) -> Tensor:
    value = value.detach().cpu()
    return (value.to(torch.bfloat16) if value.is_floating_point() else value).contiguous()


# -- the card ------------------------------------------------------------------------------------------------


def update_record(folder: Path, **values: Any) -> None:
    """Note what is known of a draft model's making in `training.json`, and write its card anew."""
    path = folder / RECORD
    record = json.loads(path.read_text()) if path.exists() else {}
    record |= values
    path.write_text(json.dumps(record, indent=2, sort_keys=True, default=str) + "\n")
    (folder / "README.md").write_text(card(record, read_curve(folder / "curve.jsonl")))


def read_curve(path: Path) -> list[dict[str, Any]]:
    """The lines of a training curve; none where there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def card(record: Mapping[str, Any], curve: Sequence[Mapping[str, Any]]) -> str:
    """The model card, in Markdown."""
    data, settings = record.get("data", {}), record.get("settings", {})
    parts = [
        f"# {record['title']} for {record['target']}",
        f"A draft model for `--speculative-algorithm {record['algorithm']}`"
        + (" with `--enable-multi-layer-eagle`" if record.get("multi_layer") else "")
        + f". It has {record['parameters']:,} parameters of its own"
        + (
            f" and drafts from {record['draft_vocab_size']:,} token ids"
            if record.get("draft_vocab_size")
            else ""
        )
        + ". Drafts never change the text: the target verifies every token.",
        "## Data",
        f"{data.get('answer_tokens', 0):,} answer tokens in {data.get('texts', 0):,} texts that the target wrote "
        "itself: prompts after the chat template's user prefix (Magpie, Xu et al. 2024, arXiv 2406.08464), answers "
        f"greedy and sampled. Held-out prompts: `spec_v2/training/heldout.jsonl`, sha256 `{data.get('heldout_sha256')}`,"
        " fixed before training; no training prompt is one of them.",
        "## Recipe",
        _table(("setting", "value"), sorted(settings.items())),
        "```console\n$ " + record.get("command", "") + "\n```",
        f"Trained {record.get('date')} on {record.get('machine')} ({record.get('versions')}).",
    ]
    if measured := [line for line in curve if "heldout" in line]:
        rows = [
            (
                f"{line['tokens']:,}",
                f"{line['heldout']['loss'][0]:.3f}",
                " ".join(f"{a:.2f}" for a in line["heldout"]["agreement"]),
                f"{line['heldout']['accept_length']:.2f}",
            )
            for line in measured
        ]
        head = (
            "tokens seen",
            "loss of the first draft",
            "agreement by draft step",
            "accept length, from these",
        )
        parts += ["## Curve", "On the held-out answers, teacher-forced:", _table(head, rows)]
    if evaluation := record.get("evaluation"):
        rows = [
            (
                row["shape"],
                f"{row['temperature']:g}",
                f"{row['accept_length']:.2f}",
                " ".join(f"{a:.2f}" for a in row["acceptance_rate_per_position"]),
            )
            for row in evaluation["rows"]
        ]
        head = ("steps, topk, tokens", "temperature", "accept length", "acceptance by position")
        about = (
            f"{evaluation['prompts']} held-out prompts, at most {evaluation['max_new_tokens']} tokens each, through the "
            f"engine in {evaluation['dtype']} on {evaluation['device']}; the bonus token is included."
        )
        parts += ["## Evaluation", about, _table(head, rows)]
    return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)
