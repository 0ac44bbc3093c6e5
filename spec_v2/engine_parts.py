"""What an engine is made of, from its settings: the device, memory, and what a request's row holds."""

from typing import Any

import torch

from spec_v2.adaptive_policy import AdaptivePolicy
from spec_v2.mem_cache.kv_cache_builder import KvCache, build_kv_cache
from spec_v2.mem_cache.kv_pool import LayerGeometry
from spec_v2.model_executor.model_runner import ModelRunner
from spec_v2.model_executor.npu_backend import NpuKind, load_npu, npu_kind
from spec_v2.scheduler.future_map import MOST_UNREAD, FutureMap
from spec_v2.server_args import ServerArgs
from spec_v2.spec_info import SpeculativeAlgorithm


def make_cache(
    args: ServerArgs,
    target: ModelRunner,
    draft: ModelRunner | None,
    dtype: torch.dtype,
    device: torch.device,
    context_length: int,
) -> KvCache:
    """Pools, row table and allocators. Raises ValueError where the memory is too small."""
    has_draft_kv = draft is not None and args.algorithm.has_draft_kv()
    return build_kv_cache(
        target_geometry=target.geometry,
        draft_geometry=draft_geometry(args, draft),
        dtype=dtype,
        device=device,
        page_size=args.page_size,
        max_running_requests=args.max_running_requests,
        context_length=context_length,
        slots_per_step=args.slots_per_step,
        # logits of every node, and two copies in fp32 where they are sampled
        workspace_bytes=args.max_running_requests
        * args.num_draft_tokens
        * target.vocab_size
        * (dtype.itemsize + 8),
        max_total_tokens=args.max_total_tokens,
        mem_fraction=args.mem_fraction_static,
        lookahead=args.prefix_lookahead,
        prefix_cache=not args.disable_radix_cache,
        target_states=target.state_geometry,
        draft_states=draft.state_geometry if draft is not None and has_draft_kv else {},
    )


def make_future_map(
    args: ServerArgs,
    target: ModelRunner,
    draft: ModelRunner | None,
    cache: KvCache,
    dtype: torch.dtype,
    device: torch.device,
    debug: bool,
) -> FutureMap:
    """Rows that carry a request from step to step."""
    return FutureMap(
        num_rows=cache.rows.num_rows,
        history_width=cache.row_table.width if args.algorithm.keeps_history() else 0,
        **row_widths(args, draft),
        vocab_size=target.vocab_size,
        dtype=dtype,
        device=device,
        debug=debug,
        **unread_widths(args, target),
    )


def turned_on_for(policy: Any, server_args: dict[str, Any]) -> dict[str, Any]:
    """The settings with adaptive speculation on, for the policy's sake."""
    if not isinstance(policy, AdaptivePolicy):
        raise ValueError(
            f"adaptive_policy={policy!r} is no policy: give an object with the methods choose and observe of "
            "spec_v2.AdaptivePolicy"
        )
    if server_args.get("speculative_adaptive") is False:
        raise ValueError(
            f"adaptive_policy={policy!r} is given, and speculative_adaptive is False: leave one of them out"
        )
    return server_args | {"speculative_adaptive": True}


def draft_geometry(args: ServerArgs, draft: ModelRunner | None) -> tuple[LayerGeometry, ...]:
    """The layers of the draft pool; of MTP modules those that run."""
    if draft is None or not args.algorithm.has_draft_kv():
        return ()
    return draft.geometry[: args.num_steps] if args.enable_multi_layer_eagle else draft.geometry


def row_widths(args: ServerArgs, draft: ModelRunner | None) -> dict[str, int]:
    """What a request's row carries of its next draft: the first level; for MTP modules the whole chain; for a drafter
    that runs all its forwards in one step no draft at all, but what it starts from."""
    if draft is None:
        return {"topk": 0, "hidden_size": 0, "draft_probs_width": 0}
    algorithm = args.algorithm
    hidden_size = draft.hidden_size if algorithm.carries_draft_hidden_states() else 0
    probs = draft.vocab_size if args.speculative_use_rejection_sampling else 0
    if args.enable_multi_layer_eagle:
        carried = (args.num_steps - 1) * hidden_size  # by all modules but the last
        return {"topk": args.num_steps, "hidden_size": carried, "draft_probs_width": args.num_steps * probs}
    if not algorithm.has_draft_kv():
        return {"topk": 0, "hidden_size": hidden_size, "draft_probs_width": 0}
    return {"topk": args.topk, "hidden_size": hidden_size, "draft_probs_width": probs}


def check_recurrent(args: ServerArgs, target: ModelRunner, draft: ModelRunner | None) -> None:
    """Raise ValueError for what recurrent layers don't do here."""
    if args.speculative_adaptive and draft is not None and draft.state_geometry:
        raise ValueError(
            "speculative_adaptive=True (--speculative-adaptive): the draft model has recurrent layers, which cannot read later "
            "what steps without drafts emit; leave it out, or use an attention-only draft model"
        )
    if target.state_geometry and args.algorithm is SpeculativeAlgorithm.FROZEN_KV_MTP:
        raise ValueError(
            "speculative_algorithm=FROZEN_KV_MTP: the target has recurrent layers, and a frozen-KV drafter reads keys and "
            "values of attention layers only; use EAGLE, STANDALONE or NGRAM"
        )


def unread_widths(args: ServerArgs, target: ModelRunner) -> dict[str, int]:
    """What a row keeps for a draft model that reads later what steps without drafts emit."""
    if not args.speculative_adaptive or not args.algorithm.has_draft_kv():
        return {}
    hidden_size = target.output_width if args.algorithm.draft_is_shifted() else 0
    return {"unread_width": MOST_UNREAD, "target_hidden_size": hidden_size}


def open_device(name: str) -> torch.device:
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return open_device("npu" if npu_kind() is NpuKind.REAL else "cpu")
    if name == "npu":
        load_npu()
        return torch.device("npu", torch.get_device_module("npu").current_device())
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={name!r}: this machine has no usable CUDA device; use --device cpu")
    return device
