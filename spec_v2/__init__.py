"""Speculative decoding V2, to be read from top to bottom.

Reading order: `types` (the nouns), `speculative/base_spec_worker` (the round), `speculative/draft_tree`,
`verify`, `draft_extend` (its steps), `scheduler/scheduler` (the two schedules), `scheduler/future_map`,
`scheduler/streams` (how they touch memory), `model_executor/attention` (how a model runs on our slots),
`engine` (the front door).
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spec_v2.adaptive_policy import AdaptivePolicy, Outlook, StepObservation
    from spec_v2.completion import Completion
    from spec_v2.engine import Engine
    from spec_v2.observability.metrics import SpecMetrics
    from spec_v2.observability.step_log import DecodeStep, StepLog
    from spec_v2.observability.trace import Trace
    from spec_v2.sampling_params import SamplingParams
    from spec_v2.server_args import ServerArgs
    from spec_v2.spec_info import SpeculativeAlgorithm, register_algorithm
    from spec_v2.streaming import Chunk
    from spec_v2.types import DraftTree, TreeShape, Verdict

__version__ = "0.1.0"

_WHERE = {
    "AdaptivePolicy": "adaptive_policy",
    "Chunk": "streaming",
    "Completion": "completion",
    "DecodeStep": "observability.step_log",
    "DraftTree": "types",
    "Engine": "engine",
    "Outlook": "adaptive_policy",
    "SamplingParams": "sampling_params",
    "ServerArgs": "server_args",
    "SpecMetrics": "observability.metrics",
    "SpeculativeAlgorithm": "spec_info",
    "StepLog": "observability.step_log",
    "StepObservation": "adaptive_policy",
    "Trace": "observability.trace",
    "TreeShape": "types",
    "Verdict": "types",
    "register_algorithm": "spec_info",
}

__all__ = [
    "AdaptivePolicy",
    "Chunk",
    "Completion",
    "DecodeStep",
    "DraftTree",
    "Engine",
    "Outlook",
    "SamplingParams",
    "ServerArgs",
    "SpecMetrics",
    "SpeculativeAlgorithm",
    "StepLog",
    "StepObservation",
    "Trace",
    "TreeShape",
    "Verdict",
    "register_algorithm",
]


def __getattr__(name: str) -> Any:
    # Loaded on first use, so that `import spec_v2` is quick and pulls in no torch.
    if name in _WHERE:
        return getattr(importlib.import_module(f"spec_v2.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'spec_v2' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_WHERE])
