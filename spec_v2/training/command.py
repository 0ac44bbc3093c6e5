"""`python -m spec_v2 train`: from its flags to draft models on disk."""

import argparse
import json
import shlex
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_v2.training.settings import KIND_NAMES, Recipe, Settings

if TYPE_CHECKING:
    from spec_v2.models.loader import LoadedModel

STAGES = ("generate", "fit", "evaluate", "all")
SHARES = {"generate": 2.5, "eagle3": 6.0}
"""Of the time of `all`: other kinds have 2 each, and an eighth of it is for loading, evaluation and cards."""

EPILOG = """
stages:
  generate   the target writes prompts and answers them; OUT/data fills with shards. Shards that are there are kept.
  fit        train one draft model for each --kind on the shards; OUT/KIND holds it, its curve and its state.
  evaluate   run the held-out prompts through the engine with each --kind; the card in OUT/KIND gets the figures.
  all        the three of them, in this order, within --time-limit.

A run that was cut goes on where it was: give the same command with --resume. Put a finished OUT/KIND anywhere and
name it with --speculative-draft-model-path.
"""


def add_train_args(parser: argparse.ArgumentParser) -> None:
    """The flags of `train`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("stage", choices=STAGES, help="what to do, see below")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where everything goes")
    parser.add_argument(
        "--model", default="smollm2-135m", help="target: a built-in name, a folder or a hub id"
    )
    parser.add_argument(
        "--kind",
        type=_kinds,
        default=("eagle3",),
        metavar="A,B",
        help=f"of {', '.join(KIND_NAMES)}; or all (default: eagle3)",
    )
    parser.add_argument(
        "--time-limit",
        type=float,
        metavar="MIN",
        help="minutes for the stage: of each kind in fit, of the whole in all",
    )
    parser.add_argument(
        "--init-from",
        type=Path,
        metavar="DIR",
        help="begin with the weights in DIR/KIND, with fresh moments and a full schedule",
    )
    parser.add_argument("--resume", action="store_true", help="go on from what is in OUT")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "bfloat16", "float32"),
        help="of the target and the draft model while training; auto is bfloat16 on CUDA, else float32",
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=20_000_000,
        metavar="N",
        help="answer tokens to generate (default: 20000000)",
    )
    parser.add_argument(
        "--prompts", type=int, metavar="N", help="held-out prompts to evaluate; all 64 if not given"
    )
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=256,
        metavar="N",
        help="tokens of each held-out answer (default: 256)",
    )
    for title, of in (("data", Recipe), ("training", Settings)):
        group = parser.add_argument_group(title)
        for spec in fields(of):
            if spec.name in ("time_limit", "temperatures", "seed"):
                continue
            flag, default = "--" + spec.name.replace("_", "-"), spec.default
            if isinstance(default, bool):
                group.add_argument(flag, action=argparse.BooleanOptionalAction, default=default)
                continue
            kind = float if "float" in str(spec.type) else int
            shown = "the kind's own, or no limit" if default is None else default
            group.add_argument(
                flag,
                type=kind,
                default=default,
                metavar="X" if kind is float else "N",
                help=f"(default: {shown})",
            )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of data and training (default: 0)")


def run_train(options: argparse.Namespace) -> str:
    """Run the stages that were asked for. Raises ValueError for settings that cannot work, before anything is written."""
    _check(options)
    command = " ".join(["python -m spec_v2", *map(shlex.quote, getattr(options, "command_line", []))])
    done: dict[str, Any] = {}
    shares = _time_shares(options)
    if options.stage in ("generate", "all"):
        done["data"] = generate_stage(options, shares.get("generate"))
    for name in options.kind:
        if options.stage in ("fit", "all"):
            done[name] = fit_stage(options, name, shares.get(name), command)
        if options.stage in ("evaluate", "all"):
            done.setdefault(name, {})["evaluation"] = evaluate_stage(options, name)
    return json.dumps(done) if options.json else _for_humans(done, options.out)


# -- stages --------------------------------------------------------------------------------------------------


def generate_stage(options: argparse.Namespace, time_limit: float | None) -> dict[str, Any]:
    """Fill OUT/data. `time_limit`: seconds."""
    from spec_v2.model_executor.fuse import speed_up
    from spec_v2.training.generate import generate

    loaded = _load(options, for_engine=True)
    speed_up(loaded.model)
    recipe = Recipe(
        **{spec.name: getattr(options, spec.name) for spec in fields(Recipe) if hasattr(options, spec.name)}
    )
    return generate(
        loaded.model,
        loaded.tokenizer,
        options.out / "data",
        recipe,
        num_tokens=options.tokens,
        time_limit=time_limit,
    )


def fit_stage(
    options: argparse.Namespace, name: str, time_limit: float | None, command: str
) -> dict[str, Any]:
    """Train one kind into OUT/KIND. `time_limit`: seconds of training, earlier parts of a resumed run included."""
    from spec_v2.facts import machine, versions
    from spec_v2.training.checkpoint import update_record
    from spec_v2.training.fit import PROGRESS, Run
    from spec_v2.training.generate import HELDOUT_FILE
    from spec_v2.training.heldout import SHA256
    from spec_v2.training.kinds import KINDS
    from spec_v2.training.shards import read_shard, read_texts

    folder, data = options.out / name, options.out / "data"
    settings = Settings(**{spec.name: getattr(options, spec.name) for spec in fields(Settings)})
    settings = replace(settings, time_limit=time_limit)
    texts = read_texts(data)
    heldout = read_shard(data / HELDOUT_FILE)[0] if (data / HELDOUT_FILE).exists() else None
    folder.mkdir(parents=True, exist_ok=True)
    loaded = _load(options, for_engine=False)
    goes_on = options.resume and (folder / PROGRESS).exists()
    begun = options.init_from / name if options.init_from is not None else None
    run = Run(KINDS[name], loaded.model, texts, heldout, settings, folder, folder if goes_on else begun)
    try:
        if goes_on:
            run.resume()
        run.train()
        update_record(
            folder,
            title=run.kind.title,
            algorithm=run.kind.algorithm,
            multi_layer=run.kind.multi_layer,
            target=loaded.name,
            parameters=sum(p.numel() for p in run.optimizer.parameters.values()),
            draft_vocab_size=len(run.vocabulary) if run.vocabulary is not None else None,
            data={"texts": len(texts), "answer_tokens": texts.num_answer_tokens, "heldout_sha256": SHA256},
            settings=asdict(settings) | {"num_steps": run.num_steps, "lr": settings.lr or run.kind.lr},
            command=command,
            date=f"{datetime.now(UTC):%Y-%m-%d}",
            machine=_device_name(loaded) or machine(),
            versions=", ".join(f"{k} {v}" for k, v in versions().items() if v),
        )
    finally:
        run.close()
    return asdict(run.progress)


def evaluate_stage(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """Evaluate OUT/KIND through the engine, in the engine's dtype."""
    from spec_v2.model_executor.fuse import speed_up
    from spec_v2.training.checkpoint import update_record
    from spec_v2.training.evaluate import evaluate
    from spec_v2.training.kinds import KINDS

    folder = options.out / name
    if not (folder / "training.json").exists():
        raise ValueError(
            f"--out {options.out}: {folder} holds no draft model; run `spec-v2 train fit --kind {name}` first"
        )
    loaded = _load(options, for_engine=True)
    speed_up(loaded.model)
    found = evaluate(
        KINDS[name],
        folder,
        loaded.model,
        loaded.tokenizer,
        num_prompts=options.prompts,
        max_new_tokens=options.max_new_tokens,
    )
    update_record(folder, evaluation=found)
    return found


# -- flags ---------------------------------------------------------------------------------------------------


def _check(options: argparse.Namespace) -> None:
    if options.stage in ("fit", "all") and options.time_limit is None and options.max_steps is None:
        raise ValueError(
            f"train {options.stage}: give --time-limit MINUTES or --max-steps N, or it would never end"
        )
    for name in (
        "time_limit",
        "max_steps",
        "tokens",
        "wave",
        "tokens_per_batch",
        "num_steps",
        "draft_vocab_size",
    ):
        value = getattr(options, name)
        if value is not None and value <= 0:
            raise ValueError(f"--{name.replace('_', '-')} {value}: give a number above 0")
    if not 0 <= options.greedy_share <= 1:
        raise ValueError(f"--greedy-share {options.greedy_share}: give a share from 0 to 1")
    if options.stage in ("fit", "all") and not options.resume:
        for name in options.kind:
            if (options.out / name / "state").exists():
                raise ValueError(
                    f"--out {options.out}: {name} was trained there already; give --resume to go on, or another folder"
                )


def _time_shares(options: argparse.Namespace) -> dict[str, float]:
    """Seconds of each part."""
    if options.time_limit is None:
        return {}
    seconds = options.time_limit * 60
    parts = ("generate", *options.kind)
    if options.stage != "all":
        return dict.fromkeys(parts, seconds)
    weights = {part: SHARES.get(part, 2.0) for part in parts}
    return {part: seconds * 7 / 8 * weight / sum(weights.values()) for part, weight in weights.items()}


def _kinds(text: str) -> tuple[str, ...]:
    names = KIND_NAMES if text == "all" else tuple(part.strip() for part in text.split(","))
    for name in names:
        if name not in KIND_NAMES:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(KIND_NAMES)}")
    return names


def _load(options: argparse.Namespace, *, for_engine: bool) -> "LoadedModel":
    import torch

    from spec_v2.engine_parts import open_device
    from spec_v2.models.loader import load_model

    device = open_device(options.device)
    dtype = options.dtype
    if dtype == "auto":
        dtype = "bfloat16" if for_engine or device.type == "cuda" else "float32"
    return load_model(options.model, dtype=getattr(torch, dtype), device=device)


def _device_name(loaded: "LoadedModel") -> str:
    import torch

    device = loaded.model.device
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def _for_humans(done: dict[str, Any], out: Path) -> str:
    lines = []
    if "data" in done:
        lines.append(
            f"data: {done['data']['answer_tokens']:,} answer tokens in {done['data']['shards']} shards"
        )
    for name, what in done.items():
        if name == "data":
            continue
        if "step" in what:
            lines.append(
                f"{name}: {what['step']:,} steps, {what['tokens']:,} tokens, {what['seconds']:.0f} s; {out / name}"
            )
        for row in what.get("evaluation", {}).get("rows", ()):
            lines.append(
                f"{name}: ({row['shape']}) at temperature {row['temperature']:g}: accept length {row['accept_length']:.2f}"
            )
    return "\n".join(lines)
