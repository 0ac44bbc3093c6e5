"""Everybody who takes part in a `bench`, loaded: our engines, and transformers' model in the same process."""

import contextlib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import torch

from spec_v2.admission import eos_token_ids
from spec_v2.bench.contenders import Contender, EngineContender, TransformersContender
from spec_v2.bench.oracle import OracleContender
from spec_v2.bench.settings import ORACLE, BenchSettings, draft_path_of, server_args_of
from spec_v2.engine import Engine


def open_engines(settings: BenchSettings, closing: ExitStack) -> list[EngineContender]:
    """An engine for each algorithm and schedule, closed by `closing`."""
    opened: dict[tuple[str, str], EngineContender] = {}
    for algorithm in sorted(settings.algorithms, key=lambda name: name == ORACLE):  # it records the others
        for schedule in settings.schedules:
            args = asdict(server_args_of(settings, algorithm, schedule))
            engine = closing.enter_context(Engine(args.pop("model_path"), **args))
            name = f"{algorithm} {schedule}"
            opened[algorithm, schedule] = (
                OracleContender(name, engine, opened["none", schedule])
                if algorithm == ORACLE
                else EngineContender(name, engine)
            )
    return [
        opened[algorithm, schedule] for algorithm in settings.algorithms for schedule in settings.schedules
    ]


def open_transformers(settings: BenchSettings, engines: Sequence[EngineContender]) -> list[Contender]:
    """Plain generation; assisted generation for STANDALONE and prompt lookup for NGRAM, where they take part."""
    ours = engines[0].engine
    model = load_for_transformers(settings.server_args.model_path, ours.dtype, ours.device)
    threads = settings.server_args.num_threads
    ends = eos_token_ids(ours.model, ours.tokenizer)
    opened: list[Contender] = [TransformersContender("generate", model, threads, eos_token_ids=ends)]
    for algorithm in settings.algorithms:
        args = next(e.engine.server_args for e in engines if e.algorithm == algorithm)
        if algorithm == "NGRAM":
            options: dict[str, Any] = {
                "prompt_lookup_num_tokens": args.num_draft_tokens - 1,
                "eos_token_ids": ends,
            }
            opened.append(TransformersContender("lookup", model, threads, speculates=True, **options))
        if algorithm == "STANDALONE":
            path = draft_path_of(settings, algorithm)
            assert path is not None
            assistant = load_for_transformers(path, ours.dtype, ours.device)
            options = {"assistant_model": assistant, "eos_token_ids": ends}
            opened.append(TransformersContender("assisted", model, threads, speculates=True, **options))
    return opened


def load_for_transformers(path: str, dtype: torch.dtype, device: torch.device) -> Any:
    """A model of its own, that uses torch's attention and never stops early."""
    from spec_v2.models.loader import load_model

    return for_transformers(load_model(path, dtype=dtype, device=device).model)


def for_transformers(model: Any) -> Any:
    """The model, as fast as transformers runs it, and without an end of its own."""
    with contextlib.suppress(ValueError):  # a model that cannot keeps its own
        model.set_attn_implementation("sdpa")
    model.generation_config.eos_token_id = None
    return model
