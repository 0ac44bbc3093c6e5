"""The rows of the suites: what each measures, what it must reach and should, and what others reached elsewhere.

A row belongs to a case, one model at one batch size, and names the contenders that its figure needs. All rows of a
case share one measurement, in which their contenders take turns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

PEERS = "measured elsewhere on another H200: SGLang 0.5.11, vLLM 0.20.0, same shapes, random weights"
FORCED_LENGTH = 3  # accept length of the rows with a random draft head, bonus included


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A contender of a suite: settings of an engine of ours, or one of transformers' ways to generate (`theirs`)."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    theirs: Literal["generate", "lookup", "assisted"] | None = None

    @property
    def algorithm(self) -> str | None:
        return self.settings.get("speculative_algorithm")


def _drafting(algorithm: str, steps: int, topk: int, tokens: int, forced: int | None) -> Entry:
    settings = {
        "speculative_algorithm": algorithm,
        "speculative_num_steps": steps,
        "speculative_eagle_topk": topk,
        "speculative_num_draft_tokens": tokens,
    }
    return Entry(
        settings=settings | ({} if forced is None else {"speculative_simulated_accept_length": forced})
    )


def _ngram(tokens: int, **settings: Any) -> Entry:
    drafts = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": tokens}
    return Entry(settings=drafts | settings)


_OURS = {
    "plain": Entry(),
    "chain k=3": _drafting("EAGLE3", 3, 1, 4, FORCED_LENGTH),
    "chain k=5": _drafting("EAGLE3", 5, 1, 6, FORCED_LENGTH),
    "tree 5x4x16": _drafting("EAGLE3", 5, 4, 16, FORCED_LENGTH),
    "NGRAM 8": _ngram(8, speculative_adaptive=False),
    "NGRAM": _ngram(12),
    "oracle k=12": _drafting("ORACLE", 12, 1, 13, 13),
    "oracle unforced": _drafting("ORACLE", 12, 1, 13, None),
    "STANDALONE": _drafting("STANDALONE", 3, 1, 4, None),
}
ENTRIES: dict[str, Entry] = {
    **_OURS,
    **{
        f"{name} sync": replace(entry, settings={**entry.settings, "disable_overlap_schedule": True})
        for name, entry in _OURS.items()
    },
    **{f"transformers {kind}": Entry(theirs=kind) for kind in ("generate", "lookup", "assisted")},
}
"""All contenders by name; without "sync" they run the overlapped schedule."""


@dataclass(frozen=True, slots=True)
class Figure:
    """What is computed from the samples of `entries`, of which the first is the one that the row is about.

    speed: tokens per second, decoding only. step: wall milliseconds per decode step. times: the first entry's speed
    over the second's, within each repetition. exposed: milliseconds of a step in which the forward stream waited.
    attention, commit: no contenders, the part by itself.
    """

    kind: Literal["speed", "step", "times", "exposed", "attention", "commit"]
    entries: tuple[str, ...] = ()

    @property
    def unit(self) -> str:
        units = {"speed": "tok/s", "times": "x", "attention": "% of copy speed"}
        return units.get(self.kind, "ms")

    @property
    def higher_is_better(self) -> bool:
        return self.kind in ("speed", "times", "attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """`model` and `batch_size` are the row's case. `must`, `aim`: in the figure's unit, None where nothing was set.
    `peers`: what others reached, as it was told. `beside`: contenders that run along, to compare with."""

    name: str
    text: str
    model: str
    batch_size: int
    figure: Figure
    must: float | None = None
    aim: float | None = None
    peers: str = ""
    beside: tuple[str, ...] = ()

    @property
    def entries(self) -> tuple[str, ...]:
        return (*self.figure.entries, *self.beside)


def _row(
    name: str, text: str, figure: Figure, must: float | None = None, aim: float | None = None, peers: str = "",
    beside: tuple[str, ...] = (),
) -> Row:  # fmt: skip
    """The case is in the name: ...8b..., ...smollm2..., -bN at the end."""
    batch_size = int(name.rpartition("-b")[2])
    model = "8b" if "8b" in name.split("-") else "smollm2"
    return Row(
        name=name, text=text, model=model, batch_size=batch_size, figure=figure, must=must, aim=aim, peers=peers,
        beside=beside,
    )  # fmt: skip


def _speed(*entries: str) -> Figure:
    return Figure("speed", entries)


def _step(*entries: str) -> Figure:
    return Figure("step", entries)


def _times(mine: str, other: str) -> Figure:
    return Figure("times", (mine, other))


def _exposed(entry: str) -> Figure:
    return Figure("exposed", (entry,))


_CHAIN = "EAGLE-3 chain, k = {}, forced accept length 3"
_OVERLAP = "overlap over sync"

H200_ROWS: tuple[Row, ...] = (
    _row("8b-plain-b1", "plain decoding", _speed("plain"), 215.0, 245.0, "SGLang 208, vLLM 211 tok/s"),
    _row("8b-chain3-b1", _CHAIN.format(3), _step("chain k=3"), 5.5, 4.9, "SGLang 6.36, vLLM 5.54 ms", ("plain",)),
    _row("8b-chain5-b1", _CHAIN.format(5), _step("chain k=5"), 6.2, 5.4, "SGLang 7.24, vLLM 6.24 ms", ("plain",)),
    _row("8b-tree-b1", "EAGLE-3 tree, 5 steps, topk 4, 16 tokens, forced accept length 3", _step("tree 5x4x16"),
         7.5, 6.2, "", ("plain",)),
    _row("8b-ngram-b1", "NGRAM, 8 tokens, all accepted by the target itself", _step("NGRAM 8"), 5.5, 4.5,
         "SGLang 7.2 ms", ("plain",)),
    _row("8b-oracle-b1", "forced acceptance of k = 12 replayed drafts (accept length 13), over plain",
         _times("oracle k=12", "plain"), 8.0, 10.5),
    _row("exposed-8b-b1", "exposed host time of a chain step, k = 3, overlap", _exposed("chain k=3"), 0.10, 0.03),
    _row("overlap-8b-plain-b1", _OVERLAP + ", plain", _times("plain", "plain sync"), 0.99, None, "SGLang 1.10-1.15x"),
    _row("overlap-8b-chain3-b1", _OVERLAP + ", chain k = 3", _times("chain k=3", "chain k=3 sync"), 0.99),
    _row("transformers-8b-b1", "plain over transformers' generate", _times("plain", "transformers generate")),
    _row("8b-plain-b32", "plain decoding, total", _speed("plain"), 6_000.0, 6_600.0, "SGLang 5,890, vLLM 6,040 tok/s"),
    _row("8b-chain3-b32", _CHAIN.format(3), _step("chain k=3"), 7.0, 6.3, "SGLang 7.58, vLLM 7.06 ms", ("plain",)),
    _row("8b-chain5-b32", _CHAIN.format(5), _step("chain k=5"), 9.0, 7.5, "SGLang 9.69, vLLM 9.20 ms", ("plain",)),
    _row("exposed-8b-b32", "exposed host time of a chain step, k = 3, overlap", _exposed("chain k=3"), 0.10, 0.03),
    _row("8b-plain-b128", "plain decoding, total", _speed("plain"), 17_000.0, 19_000.0,
         "SGLang 17,100, vLLM 17,370 tok/s"),
    _row("accept-8b-b1", "accept, tree and commit of a tree step (5 steps, topk 4, 16 tokens)", Figure("commit"),
         0.15, 0.08),
    _row("accept-8b-b32", "accept, tree and commit of a tree step (5 steps, topk 4, 16 tokens)", Figure("commit"),
         0.25, 0.12),
    _row("attention-8b-b32", "verify attention of one layer, context 4096, 8 tokens: KV bytes per second",
         Figure("attention"), 75.0, 85.0),
    _row("smollm2-plain-b1", "plain decoding", _speed("plain"), 1_000.0, 2_000.0, "SGLang 816, vLLM 476 tok/s"),
    _row("smollm2-chain3-b1", _CHAIN.format(3), _speed("chain k=3"), 1_500.0, 3_000.0,
         "SGLang 802 (sync 819) tok/s", ("plain",)),
    _row("smollm2-gain-b1", _CHAIN.format(3) + ", over plain", _times("chain k=3", "plain"), 1.0),
    _row("smollm2-oracle-b1", "k = 12 drafts that replay plain decoding, accepted by the target itself, over plain",
         _times("oracle unforced", "plain")),
    _row("exposed-smollm2-b1", "exposed host time of a chain step, k = 3, overlap", _exposed("chain k=3"), 0.10, 0.03),
    _row("overlap-smollm2-plain-b1", _OVERLAP + ", plain", _times("plain", "plain sync"), 0.99, None,
         "SGLang 1.3-1.95x"),
    _row("overlap-smollm2-chain3-b1", _OVERLAP + ", chain k = 3", _times("chain k=3", "chain k=3 sync"), 0.99),
    _row("transformers-smollm2-b1", "plain over transformers' generate", _times("plain", "transformers generate")),
    _row("lookup-smollm2-b1", "NGRAM over transformers' prompt lookup", _times("NGRAM", "transformers lookup")),
    _row("assisted-smollm2-b1", "STANDALONE (the first 6 layers) over transformers' assisted generation",
         _times("STANDALONE", "transformers assisted")),
    _row("exposed-smollm2-b32", "exposed host time of a chain step, k = 3, overlap", _exposed("chain k=3"),
         0.10, 0.03),
    _row("smollm2-plain-b256", "plain decoding, total", _speed("plain"), 90_000.0, 140_000.0,
         "SGLang 110,500, vLLM 35,500 tok/s"),
    _row("smollm2-chain3-b256", _CHAIN.format(3) + ", total", _speed("chain k=3"), 95_000.0, 180_000.0,
         "SGLang 93,500 (sync 90,300) tok/s", ("plain",)),
)  # fmt: skip

CPU_ROWS: tuple[Row, ...] = (
    *(
        row
        for b in (1, 8)
        for row in (
            _row(f"plain-b{b}", "plain decoding, total", _speed("plain")),
            _row(f"ngram-b{b}", "NGRAM over plain, on a text to copy", _times("NGRAM", "plain")),
            _row(
                f"standalone-b{b}",
                "STANDALONE (the first 6 layers) over plain",
                _times("STANDALONE", "plain"),
            ),
            _row(f"overlap-b{b}", _OVERLAP + ", plain", _times("plain", "plain sync")),
            _row(
                f"generate-b{b}",
                "plain over transformers' generate",
                _times("plain", "transformers generate"),
            ),
        )
    ),
    _row("lookup-b1", "NGRAM over transformers' prompt lookup", _times("NGRAM", "transformers lookup")),
    _row(
        "assisted-b1", "STANDALONE over transformers' assisted", _times("STANDALONE", "transformers assisted")
    ),
)


def in_cases(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each case together, cases in the order in which they first occur; a part by itself is a case."""
    cases: dict[tuple[str, int, str], list[Row]] = {}
    for row in rows:
        alone = "" if row.figure.entries else row.name
        cases.setdefault((row.model, row.batch_size, alone), []).append(row)
    return list(cases.values())
