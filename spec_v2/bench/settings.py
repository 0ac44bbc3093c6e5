"""What `bench` can be told, and the engine settings of each algorithm that follow from it. Nothing here needs torch."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from spec_v2.bench.prompts import KINDS
from spec_v2.bench.suite_settings import add_suite_args
from spec_v2.models.gguf_cache import PACKAGED_MODELS
from spec_v2.models.shipped import shipped_draft
from spec_v2.server_args import ServerArgs, add_cli_args, flag_of, from_cli_args
from spec_v2.spec_info import SpeculativeAlgorithm
from spec_v2.spec_registry import CustomAlgorithm

T = TypeVar("T")

SCHEDULES = ("sync", "overlap")
OTHERS = ("transformers",)
ORACLE = "ORACLE"
MULTI_LAYER = "MULTI_LAYER_EAGLE"
"""EAGLE with `enable_multi_layer_eagle`, which is one of the settings and no algorithm, under a name of its own."""
STAND_IN_LAYERS = 6
"""Layers of the target that draft for it where STANDALONE is given no draft model."""

_CHOSEN_HERE = {
    "speculative_algorithm": "--algorithms",
    "disable_overlap_schedule": "--schedules",
    "enable_multi_layer_eagle": f"--algorithms {MULTI_LAYER}",
    "disable_radix_cache": "nothing: each repetition computes its prompts anew",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings:
    """`batch_sizes` x `prompts` are the cases, `algorithms` x `schedules` and `against` the contenders."""

    algorithms: tuple[str, ...]
    schedules: tuple[str, ...]
    batch_sizes: tuple[int, ...]
    prompts: tuple[str, ...]
    max_new_tokens: int
    repetitions: int
    against: tuple[str, ...]
    draft_models: Mapping[str, str]
    server_args: ServerArgs


def add_bench_args(parser: argparse.ArgumentParser) -> None:
    """The flags of `bench`, the engine's among them."""
    group = parser.add_argument_group("what is measured")

    def add(flag: str, kind: Callable[[str], Any], default: object, text: str, metavar: str) -> None:
        note = "" if default is None or not str(default) else f" (default: {default})"
        group.add_argument(flag, type=kind, default=default, metavar=metavar, help=text + note)

    add(
        "--algorithms",
        _list_of(_algorithm),
        "none,NGRAM",
        "algorithms; none is plain decoding, ORACLE replays it",
        "A,B",
    )
    add("--schedules", _list_of(_one_of(SCHEDULES)), "overlap", "of sync, overlap", "A,B")
    add("--batch-sizes", _list_of(_count), "1", "prompts that run at a time", "N,M")
    add(
        "--prompts",
        _list_of(_one_of(tuple(KINDS))),
        "copy,free",
        f"kinds of prompts: {', '.join(KINDS)}",
        "A,B",
    )
    add("--max-new-tokens", _count, 64, "tokens that each prompt is given", "N")
    add("--repetitions", _count, 3, "timed runs of each contender in each case", "N")
    add("--against", _list_of(_one_of(OTHERS), may_be_empty=True), "", "in turn with ours: transformers", "A")
    group.add_argument(
        "--draft-model",
        type=_draft_model,
        action="append",
        default=[],
        metavar="ALGORITHM=PATH",
        help="an algorithm's own draft model, instead of --speculative-draft-model-path; may be repeated",
    )
    add_suite_args(parser)
    add_cli_args(parser)


def bench_defaults() -> argparse.Namespace:
    """What an empty command line gives."""
    parser = argparse.ArgumentParser()
    add_bench_args(parser)
    return parser.parse_args([])


def settings_from(options: argparse.Namespace) -> BenchSettings:
    """The settings of a parsed command line. Raises ValueError naming the flag for those that don't fit together."""
    args = from_cli_args(options)
    for name, chooser in _CHOSEN_HERE.items():
        if getattr(args, name) not in (None, False):
            raise ValueError(f"{flag_of(name)}: in a benchmark this is chosen by {chooser}; leave it out")
    settings = BenchSettings(
        algorithms=options.algorithms,
        schedules=options.schedules,
        batch_sizes=options.batch_sizes,
        prompts=options.prompts,
        max_new_tokens=options.max_new_tokens,
        repetitions=options.repetitions,
        against=options.against,
        draft_models=dict(options.draft_model),
        server_args=args,
    )
    _check(settings)
    return settings


def server_args_of(settings: BenchSettings, algorithm: str, schedule: str) -> ServerArgs:
    """The engine of one contender: of the speculative settings, those that its algorithm uses."""
    args = settings.server_args
    kind = kind_of(algorithm)
    changes: dict[str, Any] = {
        spec.name: spec.default
        for spec in fields(args)
        if spec.name.startswith("speculative_") and not _uses(algorithm, spec.name)
    }
    if kind.needs_draft_model():
        changes["speculative_draft_model_path"] = draft_path_of(settings, algorithm)
    return replace(
        args,
        **changes
        | {
            "speculative_algorithm": None if kind.is_none() else kind.name,
            "disable_overlap_schedule": schedule == "sync",
            "disable_radix_cache": True,
            "max_running_requests": max(settings.batch_sizes),
            "enable_multi_layer_eagle": algorithm == MULTI_LAYER,
        },
    )


def kind_of(algorithm: str) -> SpeculativeAlgorithm | CustomAlgorithm:
    """What runs under a contender's name."""
    return SpeculativeAlgorithm.from_string("EAGLE" if algorithm == MULTI_LAYER else algorithm)


def name_of(args: ServerArgs) -> str:
    """The contender's name of an engine's settings."""
    if args.enable_multi_layer_eagle:
        return MULTI_LAYER
    return "none" if args.algorithm.is_none() else args.algorithm.name


def draft_path_of(settings: BenchSettings, algorithm: str) -> str | None:
    """Where an algorithm's draft model lies. STANDALONE on a built-in model has a stand-in."""
    args = settings.server_args
    given = settings.draft_models.get(algorithm) or args.speculative_draft_model_path
    given = given or shipped_draft(replace(args, speculative_algorithm=algorithm))
    built_in = {name.casefold() for known in PACKAGED_MODELS for name in known.names}
    if given is None and algorithm == "STANDALONE" and args.model_path.casefold() in built_in:
        from spec_v2.models.loader import first_layers

        return str(first_layers(args.model_path, STAND_IN_LAYERS))
    return given


def _uses(algorithm: str, name: str) -> bool:
    """Whether an algorithm takes notice of a speculative setting; the engine checks how they fit together."""
    kind = kind_of(algorithm)
    if kind.is_none() or name == "speculative_algorithm":
        return False
    if name.startswith("speculative_ngram_") or name == "speculative_adaptive":
        return kind.is_ngram()
    if name == "speculative_token_map":
        return kind is SpeculativeAlgorithm.EAGLE
    if name in ("speculative_draft_model_path", "speculative_use_rejection_sampling"):
        return kind.needs_draft_model()
    return not kind.is_ngram() or name in (
        "speculative_num_draft_tokens",
        "speculative_simulated_accept_length",
    )


def _check(settings: BenchSettings) -> None:
    args, largest = settings.server_args, max(settings.batch_sizes)
    if settings.max_new_tokens < 2:
        raise ValueError(
            "--max-new-tokens 1: the first token is the prefill's; give at least 2 to see a decode step"
        )
    if largest > args.max_running_requests:
        raise ValueError(
            f"--max-running-requests {args.max_running_requests} is less than the batch of {largest} in --batch-sizes; "
            "raise the first or lower the second"
        )
    if ORACLE in settings.algorithms and "none" not in settings.algorithms:
        raise ValueError("--algorithms ORACLE replays what plain decoding says: add none to --algorithms")
    for name in settings.draft_models:
        if name not in settings.algorithms:
            raise ValueError(
                f"--draft-model {name}=...: {name} is not in --algorithms {','.join(settings.algorithms)}"
            )
    for spec in fields(args):
        given = spec.name.startswith("speculative_") and getattr(args, spec.name) != spec.default
        if given and not any(_uses(algorithm, spec.name) for algorithm in settings.algorithms):
            raise ValueError(
                f"{flag_of(spec.name)} is used by none of --algorithms {','.join(settings.algorithms)}; leave it out"
            )


# -- values of flags: what argparse calls, so that its message names the flag ---------------------------------


def _list_of(item: Callable[[str], T], *, may_be_empty: bool = False) -> Callable[[str], tuple[T, ...]]:
    def parse(text: str) -> tuple[T, ...]:
        values = () if may_be_empty and not text else tuple(item(part.strip()) for part in text.split(","))
        if len(set(values)) != len(values):
            raise argparse.ArgumentTypeError(f"{text!r} names something twice")
        return values

    return parse


def _one_of(choices: tuple[str, ...]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(choices)}")
        return text

    return parse


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def _algorithm(text: str) -> str:
    if text.upper() == ORACLE:
        from spec_v2.bench.oracle import register_oracle  # needs torch

        register_oracle()
    if text.upper() == MULTI_LAYER:
        return MULTI_LAYER
    try:
        algorithm = SpeculativeAlgorithm.from_string(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).partition(") is ")[2]) from error
    return "none" if algorithm.is_none() else algorithm.name


def _draft_model(text: str) -> tuple[str, str]:
    name, equals, path = text.partition("=")
    if not equals or not path:
        raise argparse.ArgumentTypeError(f"{text!r} is not ALGORITHM=PATH")
    return _algorithm(name), path
