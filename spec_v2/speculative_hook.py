"""Fills in the speculative settings that were left out, and rejects those that don't fit together.

This runs before any weight is loaded. Each rejection names the flags, their values and what to do instead.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import fields, replace

from spec_v2.server_args import ServerArgs, flag_of
from spec_v2.spec_info import SpeculativeAlgorithm
from spec_v2.spec_registry import CustomAlgorithm

DEFAULT_TRIO: dict[SpeculativeAlgorithm | CustomAlgorithm, tuple[int, int, int]] = {
    SpeculativeAlgorithm.EAGLE: (5, 4, 8),
    SpeculativeAlgorithm.EAGLE3: (5, 4, 8),
    SpeculativeAlgorithm.STANDALONE: (3, 1, 4),
    SpeculativeAlgorithm.FROZEN_KV_MTP: (3, 1, 4),
}
"""(num_steps, topk, num_draft_tokens) when none of the three is given."""

DEFAULT_MULTI_LAYER_TRIO = (3, 1, 4)
"""The same with `enable_multi_layer_eagle`, which drafts chains only."""

DEFAULT_NGRAM_DRAFT_TOKENS = 12
"""NGRAM's num_draft_tokens when it isn't given."""

DEFAULT_CUSTOM_TRIO = (3, 1, 4)
"""(steps, topk, draft tokens) of a registered algorithm."""

REMOVED_ENVIRONMENT_VARIABLE = "SGLANG_ENABLE_SPEC_V2"
"""Used to choose between two implementations of speculation; only one is left, so it isn't read."""

_STEPS = "speculative_num_steps"
_TOPK = "speculative_eagle_topk"
_TOKENS = "speculative_num_draft_tokens"
_DRAFT_PATH = "speculative_draft_model_path"
_SIMULATED = "speculative_simulated_accept_length"
_TRIO_FLAGS = f"{flag_of(_STEPS)}, {flag_of(_TOPK)} and {flag_of(_TOKENS)}"


def resolve_speculative(args: ServerArgs, *, draft_model_given: bool = False) -> ServerArgs:
    """A copy of `args` with a normal algorithm name and every speculative number filled in.

    `draft_model_given` says that the caller has a draft model object, so that no path is needed. Settings
    that contradict each other, or that nothing would use, raise ValueError. A chain whose token count isn't
    its steps + 1 is corrected with a UserWarning. Resolving twice changes nothing.
    """
    _warn_removed_environment_variable()
    algorithm = args.algorithm
    _check_draft_model(args, algorithm, draft_model_given)
    _check_multi_layer(args, algorithm)
    _check_unused(args, algorithm)
    if algorithm.is_none():
        return replace(args, speculative_algorithm=None)
    resolved = _resolve_ngram(args) if algorithm.is_ngram() else _resolve_trio(args, algorithm)
    _check_simulated(resolved)
    return resolved


def _resolve_ngram(args: ServerArgs) -> ServerArgs:
    low, high = args.speculative_ngram_min_bfs_breadth, args.speculative_ngram_max_bfs_breadth
    if low > high:
        raise ValueError(
            f"{_shown(args, 'speculative_ngram_min_bfs_breadth')} is more than"
            f" {_shown(args, 'speculative_ngram_max_bfs_breadth')}: lower the first or raise the second."
        )
    tokens = args.speculative_num_draft_tokens or DEFAULT_NGRAM_DRAFT_TOKENS
    # forced acceptance says nothing about whether drafts pay, so by default it lets them be
    is_forced = args.speculative_simulated_accept_length is not None
    adaptive = not is_forced if args.speculative_adaptive is None else args.speculative_adaptive
    return replace(
        args,
        speculative_algorithm="NGRAM",
        speculative_num_draft_tokens=tokens,
        speculative_adaptive=adaptive,
    )


def _resolve_trio(args: ServerArgs, algorithm: SpeculativeAlgorithm | CustomAlgorithm) -> ServerArgs:
    steps, topk, tokens = _complete_trio(args, algorithm)
    _check_rejection_sampling(args, topk)
    if args.enable_multi_layer_eagle and (topk != 1 or tokens != steps + 1):
        raise ValueError(
            f"--enable-multi-layer-eagle drafts chains, but {_shown(args, _TOPK)} and {_shown(args, _TOKENS)}"
            f" with {_shown(args, _STEPS)}: use {flag_of(_TOPK)} 1 and {flag_of(_TOKENS)} {steps + 1}."
        )
    if topk == 1 and tokens != steps + 1:
        warnings.warn(
            f"{_shown(args, _TOKENS)} does not fit a chain ({_shown(args, _TOPK)}) of {_shown(args, _STEPS)};"
            f" using {steps + 1}. Give {flag_of(_TOKENS)} {steps + 1} to silence this.",
            UserWarning,
            stacklevel=3,
        )
        tokens = steps + 1
    capacity = 1 + topk + (steps - 1) * topk**2
    if tokens > capacity:
        raise ValueError(
            f"{_shown(args, _TOKENS)} is more than the {capacity} nodes of a tree with {_shown(args, _STEPS)}"
            f" and {_shown(args, _TOPK)}: use at most {capacity}, or raise one of the other two."
        )
    return replace(
        args,
        speculative_algorithm=algorithm.name,
        speculative_num_steps=steps,
        speculative_eagle_topk=topk,
        speculative_num_draft_tokens=tokens,
        speculative_adaptive=False,
    )


def _check_rejection_sampling(args: ServerArgs, topk: int) -> None:
    if not args.speculative_use_rejection_sampling:
        return
    flag = flag_of("speculative_use_rejection_sampling")
    if topk != 1:
        raise ValueError(f"{flag} works on chains, but {flag_of(_TOPK)} is {topk}: use {flag_of(_TOPK)} 1.")
    if args.speculative_token_map is not None:
        raise ValueError(
            f"{flag} needs a draft over the whole vocabulary, but {_shown(args, 'speculative_token_map')} is"
            " given: leave one of them out."
        )


def _check_simulated(args: ServerArgs) -> None:
    """Forced acceptance must fit the tree, and nothing that decides by acceptance may go with it."""
    asked = args.speculative_simulated_accept_length
    if asked is None:
        return
    if asked > args.accept_width:
        raise ValueError(
            f"{_shown(args, _SIMULATED)} is more than the {args.accept_width} tokens that a step of these drafts"
            f" can accept, the bonus token included: use at most {args.accept_width}, or draft more."
        )
    for name in ("speculative_use_rejection_sampling", "speculative_adaptive"):
        if getattr(args, name):
            raise ValueError(
                f"{flag_of(name)} decides by what the target accepts, which {_shown(args, _SIMULATED)} overrides:"
                " leave one of them out."
            )


def _complete_trio(
    args: ServerArgs, algorithm: SpeculativeAlgorithm | CustomAlgorithm
) -> tuple[int, int, int]:
    steps, topk, tokens = (
        args.speculative_num_steps,
        args.speculative_eagle_topk,
        args.speculative_num_draft_tokens,
    )
    default = (
        DEFAULT_MULTI_LAYER_TRIO
        if args.enable_multi_layer_eagle
        else DEFAULT_TRIO.get(algorithm, DEFAULT_CUSTOM_TRIO)
    )
    if steps is None and topk is None and tokens is None:
        return default
    if steps is None or topk is None or tokens is None:
        trio = (_STEPS, _TOPK, _TOKENS)
        given = ", ".join(_shown(args, name) for name in trio if getattr(args, name) is not None)
        raise ValueError(
            f"only part of {_TRIO_FLAGS} is given ({given}): give all three, or none for"
            f" {algorithm.name}'s default of {default[0]}, {default[1]} and {default[2]}."
        )
    return steps, topk, tokens


def _check_draft_model(
    args: ServerArgs, algorithm: SpeculativeAlgorithm | CustomAlgorithm, object_given: bool
) -> None:
    given = object_given or args.speculative_draft_model_path is not None
    if algorithm.needs_draft_model() and not given:
        raise ValueError(
            f"{_shown(args, 'speculative_algorithm')} needs a draft model, and {flag_of(_DRAFT_PATH)} is not"
            f" given: name one with {flag_of(_DRAFT_PATH)}, or use"
            " --speculative-algorithm NGRAM, which needs none."
        )
    if given and not algorithm.needs_draft_model():
        draft = "a draft model object" if object_given else _shown(args, _DRAFT_PATH)
        raise ValueError(
            f"{draft} is given, but {_user(algorithm)} uses no draft model: leave {flag_of(_DRAFT_PATH)} out,"
            " or choose --speculative-algorithm EAGLE, EAGLE3, STANDALONE or FROZEN_KV_MTP."
        )


def _check_multi_layer(args: ServerArgs, algorithm: SpeculativeAlgorithm | CustomAlgorithm) -> None:
    if not args.enable_multi_layer_eagle:
        return
    shown = _shown(args, "enable_multi_layer_eagle")
    if algorithm is SpeculativeAlgorithm.EAGLE3:
        raise ValueError(
            f"{shown} drafts with MTP modules, which read the target's last hidden state; an EAGLE3 head reads three"
            " layers of it: leave the flag out, or choose --speculative-algorithm EAGLE and give MTP modules with"
            f" {flag_of(_DRAFT_PATH)}."
        )
    if algorithm is not SpeculativeAlgorithm.EAGLE:
        raise ValueError(
            f"{shown} is not used by {_user(algorithm)}: leave it out, or choose --speculative-algorithm EAGLE."
        )


def _check_unused(args: ServerArgs, algorithm: SpeculativeAlgorithm | CustomAlgorithm) -> None:
    """A setting that would be ignored is an error: its user believes that it is in force."""
    for spec in fields(args):
        if not spec.name.startswith("speculative_") or getattr(args, spec.name) == spec.default:
            continue
        if spec.name in ("speculative_algorithm", _DRAFT_PATH):
            continue
        if algorithm.is_none():
            remedy = "leave it out, or choose an algorithm with --speculative-algorithm"
        elif algorithm.is_ngram() and spec.name in (_STEPS, _TOPK):
            remedy = f"leave it out; {flag_of(_TOKENS)} alone sizes NGRAM's drafts"
        elif not algorithm.is_ngram() and _is_for_ngram(args, spec.name):
            remedy = "leave it out, or use --speculative-algorithm NGRAM"
        elif algorithm.is_ngram() and spec.name == "speculative_use_rejection_sampling":
            remedy = "leave it out, or use EAGLE, EAGLE3, STANDALONE or FROZEN_KV_MTP, whose drafts have probabilities"
        elif algorithm is not SpeculativeAlgorithm.EAGLE and spec.name == "speculative_token_map":
            remedy = "leave it out, or use --speculative-algorithm EAGLE (an EAGLE3 head brings its own map)"
        else:
            continue
        raise ValueError(f"{_shown(args, spec.name)} is not used by {_user(algorithm)}: {remedy}.")


def _is_for_ngram(args: ServerArgs, name: str) -> bool:
    return name.startswith("speculative_ngram_") or (
        name == "speculative_adaptive" and args.speculative_adaptive is True
    )


def _warn_removed_environment_variable() -> None:
    value = os.environ.get(REMOVED_ENVIRONMENT_VARIABLE)
    if value is None:
        return
    warnings.warn(
        f"the environment variable {REMOVED_ENVIRONMENT_VARIABLE}={value!r} has no effect: both schedules use"
        " the same workers. Unset it; for the synchronous schedule give --disable-overlap-schedule.",
        UserWarning,
        stacklevel=3,
    )


def _user(algorithm: SpeculativeAlgorithm | CustomAlgorithm) -> str:
    return "plain decoding" if algorithm.is_none() else algorithm.name


def _shown(args: ServerArgs, name: str) -> str:
    """The setting as one would type it: a switch alone, anything else with its value."""
    value = getattr(args, name)
    return flag_of(name) if value is True else f"{flag_of(name)} {value}"
