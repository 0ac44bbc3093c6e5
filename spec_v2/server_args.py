"""`ServerArgs`: every setting of an engine, checked once, with the names and flags that SGLang uses.

`ServerArgs` checks each value alone. What depends on several values, and the defaults of an algorithm, are
the work of `spec_v2.speculative_hook.resolve_speculative`; the derived properties describe its result.
"""

from __future__ import annotations

import argparse
import difflib
import re
from dataclasses import Field, dataclass, field, fields
from html import escape
from typing import Any, Literal

from spec_v2.spec_info import SpeculativeAlgorithm
from spec_v2.spec_registry import CustomAlgorithm

_SGLANG = "is not here; leave it out, or use SGLang"
REFUSED = {
    "lora_paths": f"LoRA {_SGLANG}",
    "enable_lora": f"LoRA {_SGLANG}",
    "dp_size": f"data parallelism {_SGLANG}",
    "enable_dp_attention": f"data parallelism {_SGLANG}",
    "tp_size": f"tensor parallelism {_SGLANG}",
    "pp_size": f"pipeline parallelism {_SGLANG}",
    "grammar_backend": f"constrained decoding {_SGLANG}",
    "enable_multimodal": f"image and audio input {_SGLANG}",
    "quantization": f"quantised weights {_SGLANG}",
}
"""SGLang's settings that are refused by name: what asks for them must not run without them."""

_DEVICE = re.compile(r"auto|cpu|cuda(:[0-9]+)?|npu")
_MAX_SEED = 2**63 - 1


def _setting(
    kind: type,
    default: object,
    text: str,
    *,
    minimum: int = 1,
    choices: tuple[str, ...] | None = None,
    aliases: tuple[str, ...] = (),
) -> Any:
    """A field that `__post_init__` checks and `add_cli_args` turns into a flag, both from this metadata."""
    metadata = {"help": text, "kind": kind, "minimum": minimum, "choices": choices, "aliases": aliases}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ServerArgs:
    """Settings of an engine, immutable. A bad value raises ValueError naming the field, value and remedy.

    The meaning of each field is its `help` text. None means "chosen later": by `resolve_speculative` for
    the speculative fields, by the engine, from the model and the memory at hand, for the others.
    """

    model_path: str = _setting(
        str, "smollm2-135m", "target model: a built-in name, a folder or a hub id", aliases=("--model",)
    )
    tokenizer_path: str | None = _setting(
        str, None, "tokenizer folder or hub id; the model's own if not given"
    )
    dtype: str = _setting(
        str,
        "auto",
        "dtype of weights and KV; auto is bfloat16",
        choices=("auto", "bfloat16", "float16", "float32", "float64"),
    )
    device: str = _setting(str, "auto", "auto, cpu, cuda, cuda:N or npu")
    context_length: int | None = _setting(
        int, None, "longest sequence in tokens; the model's own if not given"
    )
    page_size: int = _setting(int, 1, "tokens in one page, the unit of KV allocation")
    max_running_requests: int = _setting(int, 48, "most requests in one batch")
    max_total_tokens: int | None = _setting(int, None, "size of the KV pool in tokens")
    max_prefill_tokens: int = _setting(int, 16384, "most prompt tokens in one prefill step")
    mem_fraction_static: float | None = _setting(
        float, None, "share of the memory that the KV pool may take, above 0 and below 1", minimum=0
    )
    chunked_prefill_size: int | None = _setting(
        int, None, "most prompt tokens of one request in one prefill step; whole prompts if not given"
    )
    disable_radix_cache: bool = _setting(bool, False, "do not reuse the KV of prefixes seen before")
    random_seed: int = _setting(int, 0, "seed for requests that bring none, 0 to 2**63-1", minimum=0)
    disable_overlap_schedule: bool = _setting(
        bool, False, "process a step's results before launching the next step"
    )
    disable_cuda_graph: bool = _setting(
        bool, False, "launch every kernel of a decode step by itself, instead of replaying recorded graphs"
    )
    cuda_graph_max_bs: int | None = _setting(
        int, None, "most requests of a batch that graphs are recorded for; max_running_requests if not given"
    )
    num_threads: int | None = _setting(int, None, "CPU threads of the forward stream")
    speculative_algorithm: str | None = _setting(
        str, None, "EAGLE, EAGLE3, NEXTN (= EAGLE), STANDALONE, NGRAM or FROZEN_KV_MTP, in any case"
    )
    speculative_draft_model_path: str | None = _setting(
        str, None, "draft model: a folder or a hub id", aliases=("--speculative-draft-model",)
    )
    speculative_num_steps: int | None = _setting(int, None, "draft forward passes in one step")
    speculative_eagle_topk: int | None = _setting(int, None, "branches kept at each draft pass; 1 is a chain")
    speculative_num_draft_tokens: int | None = _setting(
        int, None, "nodes verified in one step, the newest known token included", minimum=2
    )
    speculative_token_map: str | None = _setting(
        str, None, "EAGLE: JSON file with the token ids that the head may draft; all if not given"
    )
    speculative_use_rejection_sampling: bool = _setting(
        bool,
        False,
        "chains: draw drafts and accept more; same distribution, other samples than plain decoding",
    )
    speculative_adaptive: bool | None = _setting(
        bool, None, "NGRAM: leave the drafts out while they do not pay; on for NGRAM if not given"
    )
    speculative_simulated_accept_length: int | None = _setting(
        int, None, "timing only: tokens that every step accepts, bonus included, whatever the target says"
    )
    enable_multi_layer_eagle: bool = _setting(
        bool, False, "EAGLE: the draft model is one MTP module for each draft step; chains only"
    )
    speculative_ngram_min_bfs_breadth: int = _setting(int, 1, "NGRAM: fewest children of a matched node")
    speculative_ngram_max_bfs_breadth: int = _setting(int, 10, "NGRAM: most children of a matched node")
    speculative_ngram_max_trie_depth: int = _setting(
        int, 18, "NGRAM: tokens in the longest remembered run", minimum=2
    )
    speculative_ngram_match_type: str = _setting(
        str, "BFS", "NGRAM: newest (BFS) or most frequent (PROB) continuation first", choices=("BFS", "PROB")
    )
    speculative_ngram_external_corpus_path: str | None = _setting(
        str, None, "NGRAM: text file, one document a line, that all requests may copy from too"
    )
    speculative_ngram_external_corpus_max_tokens: int = _setting(
        int, 100_000, "NGRAM: most tokens read from the corpus; the search time grows with them"
    )

    def __post_init__(self) -> None:
        for spec in fields(self):
            _check(spec, getattr(self, spec.name))
        if not _DEVICE.fullmatch(self.device):
            raise _error("device", self.device, "give auto, cpu, cuda, cuda:N or npu")
        if self.random_seed > _MAX_SEED:
            raise _error("random_seed", self.random_seed, "give a whole number from 0 to 2**63-1")
        if self.max_total_tokens is not None and self.max_total_tokens < self.page_size:
            remedy = f"give at least one page, here {self.page_size} tokens, or lower --page-size"
            raise _error("max_total_tokens", self.max_total_tokens, remedy)

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> ServerArgs:
        """`ServerArgs(**kwargs)`; an unknown keyword raises ValueError that suggests the nearest name."""
        known = [spec.name for spec in fields(cls)]
        for name, value in kwargs.items():
            if name in REFUSED:
                raise ValueError(f"{name}={value!r}: {REFUSED[name]}")
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                guess = f"did you mean {near[0]}?" if near else f"the settings are {', '.join(known)}."
                raise ValueError(f"unknown setting {name}={value!r}: {guess}")
        return cls(**kwargs)

    @property
    def algorithm(self) -> SpeculativeAlgorithm | CustomAlgorithm:
        """`speculative_algorithm` as an enum member or a registered one; ValueError for an unknown name."""
        return SpeculativeAlgorithm.from_string(self.speculative_algorithm)

    @property
    def schedule(self) -> Literal["sync", "overlap"]:
        """Whether a step is launched before the previous one is processed ("overlap") or after ("sync")."""
        return "sync" if self.disable_overlap_schedule else "overlap"

    @property
    def num_steps(self) -> int:
        """Draft forward passes in one step; 0 where no draft model runs: NGRAM and plain decoding."""
        if self.algorithm.is_none() or self.algorithm.is_ngram():
            return 0
        return _resolved("speculative_num_steps", self.speculative_num_steps)

    @property
    def topk(self) -> int:
        """Most children of a node that drafting keeps; 1 without speculation."""
        if self.algorithm.is_none():
            return 1
        if self.algorithm.is_ngram():
            return self.speculative_ngram_max_bfs_breadth
        return _resolved("speculative_eagle_topk", self.speculative_eagle_topk)

    @property
    def num_draft_tokens(self) -> int:
        """Nodes verified for a request in one step, root included; 1 without speculation."""
        if self.algorithm.is_none():
            return 1
        return _resolved("speculative_num_draft_tokens", self.speculative_num_draft_tokens)

    @property
    def longest_path(self) -> int:
        """Most drafts that one step can accept, bonus token excluded."""
        below_root = self.num_draft_tokens - 1
        return below_root if self.algorithm.is_ngram() else min(self.num_steps, below_root)

    @property
    def accept_width(self) -> int:
        """Most tokens that one step can emit for a request, bonus token included."""
        return self.longest_path + 1

    @property
    def slots_per_step(self) -> int:
        """KV slots that one step may write for a request, before rounding up to pages."""
        ahead = 1 if self.algorithm.draft_runs_ahead() else 0
        return max(self.num_steps * self.topk, self.num_draft_tokens) + ahead

    @property
    def prefix_lookahead(self) -> int:
        """Tokens behind a cached page that its draft KV depends on: one for EAGLE, one for each MTP module."""
        if not self.algorithm.draft_is_shifted():
            return 0
        return self.num_steps if self.enable_multi_layer_eagle else 1

    @property
    def is_tree(self) -> bool:
        """Whether drafts form a tree; decided by algorithm and topk, as the widths can coincide."""
        return self.algorithm.uses_tree_path(self.topk)

    def __repr__(self) -> str:
        changed = ", ".join(f"{spec.name}={value!r}" for spec, value in self._changed())
        return f"ServerArgs({changed})"

    def _repr_html_(self) -> str:
        """The changed settings, and the schedule, as a plain table for notebooks."""
        rows = [(spec.name, str(value), str(spec.default)) for spec, value in self._changed()]
        if "model_path" not in {name for name, _, _ in rows}:
            rows.insert(0, ("model_path", self.model_path, self.model_path))
        rows.append(("schedule", self.schedule, "overlap"))
        head = "".join(f'<th scope="col">{title}</th>' for title in ("setting", "value", "default"))
        body = "".join(
            f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td><td>{escape(default)}</td></tr>'
            for name, value, default in rows
        )
        caption = "<caption>ServerArgs: settings that differ from their defaults</caption>"
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def _changed(self) -> list[tuple[Field[Any], Any]]:
        pairs = [(spec, getattr(self, spec.name)) for spec in fields(self)]
        return [(spec, value) for spec, value in pairs if value != spec.default]


def flag_of(name: str) -> str:
    """The command-line flag of a `ServerArgs` field, e.g. "--page-size" of "page_size"."""
    return "--" + name.replace("_", "-")


def add_cli_args(parser: argparse.ArgumentParser) -> None:
    """Adds one flag for each `ServerArgs` field to `parser`; read them back with `from_cli_args`."""
    group = parser.add_argument_group("engine settings")
    for spec in fields(ServerArgs):
        text = str(spec.metadata["help"]).replace("%", "%%")
        flags = (*spec.metadata["aliases"], flag_of(spec.name))
        if spec.metadata["kind"] is bool and spec.default is None:
            group.add_argument(*flags, dest=spec.name, action=argparse.BooleanOptionalAction, help=text)
            continue
        if spec.metadata["kind"] is bool:
            group.add_argument(*flags, dest=spec.name, action="store_true", help=text)
            continue
        note = "" if spec.default is None else f" (default: {spec.default})"
        group.add_argument(
            *flags,
            dest=spec.name,
            type=spec.metadata["kind"],
            default=spec.default,
            choices=spec.metadata["choices"],
            metavar=None if spec.metadata["choices"] else "N" if spec.metadata["kind"] is int else "TEXT",
            help=text + note,
        )


def from_cli_args(namespace: argparse.Namespace) -> ServerArgs:
    """The `ServerArgs` of a parsed command line. Other options in `namespace` are left alone; a value that
    parses but can't be used raises ValueError naming its flag."""
    names = [spec.name for spec in fields(ServerArgs) if hasattr(namespace, spec.name)]
    return ServerArgs(**{name: getattr(namespace, name) for name in names})


def _check(spec: Field[Any], value: object) -> None:
    if value is None and spec.default is None:
        return
    kind, choices, minimum = spec.metadata["kind"], spec.metadata["choices"], spec.metadata["minimum"]
    optional = " or leave it out" if spec.default is None else f" (the default is {spec.default!r})"
    # bool is a subclass of int, but True is not a count.
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        what = {
            int: f"a whole number of at least {minimum}",
            float: "a number written with a point, above 0 and below 1",
            str: "a string",
            bool: "True or False",
        }[kind]
        raise _error(spec.name, value, f"give {what}{optional}")
    if kind is int and isinstance(value, int) and value < minimum:
        raise _error(spec.name, value, f"give a whole number of at least {minimum}{optional}")
    if kind is float and isinstance(value, float) and not 0 < value < 1:
        raise _error(spec.name, value, f"give a number above 0 and below 1{optional}")
    if kind is str and isinstance(value, str) and not value.strip():
        raise _error(spec.name, value, f"give a name that is not empty{optional}")
    if choices is not None and value not in choices:
        raise _error(spec.name, value, f"give one of {', '.join(choices)}{optional}")


def _resolved(name: str, value: int | None) -> int:
    if value is None:
        raise ValueError(
            f"{name} ({flag_of(name)}) is not filled in yet: call resolve_speculative(args) first."
        )
    return value


def _error(name: str, value: object, remedy: str) -> ValueError:
    return ValueError(f"{name} ({flag_of(name)}) is {value!r}: {remedy}.")
