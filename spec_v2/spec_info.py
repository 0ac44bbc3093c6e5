"""The speculative algorithms: their names, what each can do, and the worker class that runs each.

Other modules ask the predicates here ("does the draft keep KV of its own?") instead of comparing names, so
a new algorithm is described in one place.
"""

from __future__ import annotations

import difflib
import enum
import importlib
import importlib.util
from typing import TYPE_CHECKING

from spec_v2.spec_registry import CustomAlgorithm, add, registered

if TYPE_CHECKING:
    from spec_v2.server_args import ServerArgs


class SpeculativeAlgorithm(enum.Enum):
    """How tokens are proposed before the target model verifies them. NONE decodes one token a step."""

    NONE = "NONE"
    EAGLE = "EAGLE"
    EAGLE3 = "EAGLE3"
    STANDALONE = "STANDALONE"
    NGRAM = "NGRAM"
    FROZEN_KV_MTP = "FROZEN_KV_MTP"

    @classmethod
    def from_string(cls, name: str | None) -> SpeculativeAlgorithm | CustomAlgorithm:
        """The algorithm called `name`, in any case; None is NONE and NEXTN is another name of EAGLE; names
        registered with `spec_v2.register_algorithm` are found too.

        Raises ValueError, listing the known names, for anything else.
        """
        if name is None:
            return cls.NONE
        known: dict[str, SpeculativeAlgorithm | CustomAlgorithm] = {
            **cls.__members__,
            **ALIASES,
            **registered(),
        }
        found = known.get(str(name).upper())
        if found is not None:
            return found
        near = difflib.get_close_matches(str(name).upper(), known, n=1)
        guess = f" Did you mean {near[0]}?" if near else ""
        raise ValueError(
            f"speculative_algorithm (--speculative-algorithm) is {name!r}, which is not known.{guess}"
            f" Use one of {', '.join(known)}."
        )

    def is_none(self) -> bool:
        """True when nothing is drafted."""
        return self is SpeculativeAlgorithm.NONE

    def is_ngram(self) -> bool:
        """True when drafts come from a trie of earlier tokens and no draft model exists."""
        return self is SpeculativeAlgorithm.NGRAM

    def is_eagle(self) -> bool:
        """True for the EAGLE family: the draft reads the target's hidden states."""
        return self in _EAGLE_FAMILY

    def needs_draft_model(self) -> bool:
        """True when a draft checkpoint (or a draft model object) has to be given."""
        return self.is_eagle() or self is SpeculativeAlgorithm.STANDALONE

    def keeps_history(self) -> bool:
        """True when the worker reads the known tokens of each request from its FutureMap row."""
        return self.is_ngram()

    def has_draft_kv(self) -> bool:
        """True when the draft writes KV of its own; FROZEN_KV_MTP only reads the target's."""
        return self.needs_draft_model() and self is not SpeculativeAlgorithm.FROZEN_KV_MTP

    def carries_draft_hidden_states(self) -> bool:
        """True when hidden states travel from one step to the next together with the draft."""
        return self.is_eagle()

    def draft_is_shifted(self) -> bool:
        """True when draft slot p holds (token p+1, hidden p), so that prefix keys are token pairs."""
        return self.is_eagle() and self.has_draft_kv()

    def draft_runs_ahead(self) -> bool:
        """True when the draft's KV reaches one position past the target's, which costs one more slot."""
        return self is SpeculativeAlgorithm.STANDALONE

    def uses_tree_path(self, topk: int) -> bool:
        """True when verification walks a tree: always for NGRAM, otherwise when `topk` exceeds 1.

        The widths can't tell: a tree of 5 steps and 6 tokens is as wide as a chain of 5 steps.
        """
        return self.is_ngram() or topk > 1

    def create_worker(self, server_args: ServerArgs) -> type:
        """The class that runs this algorithm; its module is imported here, on first need.

        Raises ValueError when the algorithm has no such worker or the worker is not in this release; errors
        from inside an existing worker module pass through unchanged.
        """
        multi_layer = server_args.enable_multi_layer_eagle
        path = WORKERS.get((self, multi_layer))
        if path is None:
            raise ValueError(
                f"enable_multi_layer_eagle (--enable-multi-layer-eagle) is {multi_layer}, but {self.name} has"
                " no multi-layer worker. Leave the flag out, or use --speculative-algorithm EAGLE."
            )
        module_name, class_name = path.rsplit(".", 1)
        if not _module_exists(module_name):
            raise ValueError(
                f"{class_name}, which runs {_label(self, multi_layer)}, is not in this release."
                f" Choose --speculative-algorithm from: {', '.join(available()) or 'nothing yet'}."
            )
        worker: type = getattr(importlib.import_module(module_name), class_name)
        return worker


ALIASES = {"NEXTN": SpeculativeAlgorithm.EAGLE}
"""Other names that `SpeculativeAlgorithm.from_string` accepts."""

_EAGLE_FAMILY = frozenset(
    {SpeculativeAlgorithm.EAGLE, SpeculativeAlgorithm.EAGLE3, SpeculativeAlgorithm.FROZEN_KV_MTP}
)

_WORKER_PACKAGE = "spec_v2.speculative"

WORKERS: dict[tuple[SpeculativeAlgorithm, bool], str] = {
    (SpeculativeAlgorithm.NONE, False): f"{_WORKER_PACKAGE}.plain_worker.PlainWorker",
    (SpeculativeAlgorithm.EAGLE, False): f"{_WORKER_PACKAGE}.eagle_worker_v2.EAGLEWorkerV2",
    (SpeculativeAlgorithm.EAGLE3, False): f"{_WORKER_PACKAGE}.eagle_worker_v2.EAGLEWorkerV2",
    (SpeculativeAlgorithm.STANDALONE, False): f"{_WORKER_PACKAGE}.standalone_worker_v2.StandaloneWorkerV2",
    (SpeculativeAlgorithm.NGRAM, False): f"{_WORKER_PACKAGE}.ngram_worker.NGRAMWorker",
    (SpeculativeAlgorithm.FROZEN_KV_MTP, False): (
        f"{_WORKER_PACKAGE}.frozen_kv_mtp_worker_v2.FrozenKVMTPWorkerV2"
    ),
    (
        SpeculativeAlgorithm.EAGLE,
        True,
    ): f"{_WORKER_PACKAGE}.multi_layer_eagle_worker_v2.MultiLayerEagleWorkerV2",
}
"""(algorithm, enable_multi_layer_eagle) -> dotted path of the worker class."""


def available() -> list[str]:
    """What this release can run, by looking for the worker modules without importing them."""
    return [
        _label(algorithm, multi_layer)
        for (algorithm, multi_layer), path in WORKERS.items()
        if _module_exists(path.rsplit(".", 1)[0])
    ]


def _label(algorithm: SpeculativeAlgorithm, multi_layer: bool) -> str:
    return f"{algorithm.name} with --enable-multi-layer-eagle" if multi_layer else algorithm.name


def _module_exists(name: str) -> bool:
    # Outermost package first: find_spec raises, rather than returning None, when a parent is absent.
    parts = name.split(".")
    prefixes = (".".join(parts[: end + 1]) for end in range(len(parts)))
    return all(importlib.util.find_spec(prefix) is not None for prefix in prefixes)


def register_algorithm(
    name: str,
    worker: type,
    *,
    draft_model: bool = False,
    shifted: bool = False,
    reads_history: bool = False,
) -> CustomAlgorithm:
    """Make `speculative_algorithm=name` run `worker`. Registering a name again replaces it.

    Raises ValueError for a name that is built in, and for a class that is no worker.
    """
    key = name.upper()
    if key in SpeculativeAlgorithm.__members__ or key in ALIASES:
        raise ValueError(f"name={name!r} is a built-in algorithm; choose another name")
    if not callable(getattr(worker, "forward_batch_generation", None)):
        raise ValueError(
            f"worker={worker!r} has no forward_batch_generation; derive it from "
            "spec_v2.speculative.base_spec_worker.BaseSpecWorker"
        )
    algorithm = CustomAlgorithm(
        name=key, worker=worker, draft_model=draft_model, shifted=shifted, reads_history=reads_history
    )
    add(algorithm)
    return algorithm
