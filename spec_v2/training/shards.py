"""Token data: shards on disk, and the batches that training reads.

A text is a prompt in the chat template and the target's answer to it, up to and with the token that ended it. Loss is
asked of answers only: nothing is ever drafted inside a prompt.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Int, Integer
from torch import Tensor

LENGTH_STEP = 64  # batches are as long as their longest text, rounded up to this: few shapes occur
POOL_BATCHES = 64  # texts are sorted by length within this many batches, so that little is padding

Ints = Integer[np.ndarray, " n"]


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts one behind the other: `tokens` `[sum of lengths]`, `lengths` and `prompt_lens` `[texts]`, in tokens."""

    tokens: Integer[np.ndarray, " tokens"]
    lengths: Integer[np.ndarray, " texts"]
    prompt_lens: Integer[np.ndarray, " texts"]

    @classmethod
    def from_lists(cls, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> "Texts":
        """One text per pair of a prompt and its answer."""
        both = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
        return cls(
            np.array([token for text in both for token in text], np.int64),
            np.array([len(text) for text in both], np.int32),
            np.array([len(prompt) for prompt in prompts], np.int32),
        )

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_answer_tokens(self) -> int:
        return int(self.lengths.sum() - self.prompt_lens.sum())

    def answer_mask(self) -> Bool[np.ndarray, " tokens"]:
        """Which of `tokens` belong to an answer."""
        starts = np.repeat(self.starts(), self.lengths)
        return np.arange(len(self.tokens)) - starts >= np.repeat(self.prompt_lens, self.lengths)  # type: ignore[no-any-return]

    def starts(self) -> Integer[np.ndarray, " texts"]:
        """Where each text begins in `tokens`."""
        return np.cumsum(self.lengths) - self.lengths  # type: ignore[no-any-return]


def write_shard(path: Path, texts: Texts, vocab_size: int, metadata: Mapping[str, object]) -> None:
    """Write a shard whole or not at all. Tokens take two bytes where the vocabulary allows it."""
    from safetensors.numpy import save_file

    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    tensors = {
        "tokens": texts.tokens.astype(np.uint16 if vocab_size <= 1 << 16 else np.int32),
        "lengths": texts.lengths.astype(np.int32),
        "prompt_lens": texts.prompt_lens.astype(np.int32),
    }
    save_file(tensors, unfinished, {name: json.dumps(value) for name, value in metadata.items()})
    unfinished.replace(path)


def read_shard(path: Path) -> tuple[Texts, dict[str, object]]:
    """A shard and its metadata. Raises ValueError for a file that is no shard."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np") as file:
            texts = Texts(*(file.get_tensor(name) for name in ("tokens", "lengths", "prompt_lens")))
            metadata = {name: json.loads(value) for name, value in (file.metadata() or {}).items()}
    except (OSError, SafetensorError, ValueError) as error:
        raise ValueError(
            f"{path} is no shard of training texts ({error}); delete it and generate it again"
        ) from error
    if texts.lengths.sum() != len(texts.tokens) or (texts.prompt_lens > texts.lengths).any():
        raise ValueError(f"{path}: its lengths do not fit its tokens; delete it and generate it again")
    return texts, metadata


def read_texts(folder: Path) -> Texts:
    """All shards of a folder, in the order of their names. Raises ValueError where there is none."""
    parts = [read_shard(path)[0] for path in sorted(folder.glob("shard-*.safetensors"))]
    if not parts:
        raise ValueError(f"{folder} holds no shard-*.safetensors; run `spec-v2 train generate` first")
    return Texts(
        *(np.concatenate([getattr(p, name) for p in parts]) for name in ("tokens", "lengths", "prompt_lens"))
    )


def most_frequent(
    texts: Texts, vocab_size: int, count: int, always: Sequence[int] = ()
) -> Int[Tensor, " count"]:
    """The `count` token ids that answers hold most often, ascending; `always` are among them."""
    counts = np.bincount(texts.tokens[texts.answer_mask()].astype(np.int64), minlength=vocab_size)
    counts[list(always)] = counts.max() + 1
    best = np.argsort(-counts, kind="stable")[:count]  # ties to the lowest id
    return torch.from_numpy(np.sort(best))


# -- batches -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Batch:
    """Texts of similar length, padded on the right, and where the loss looks. Positions are of the flat `b * t` tokens.

    `label_rows`: positions whose next token is to be predicted; the target's distribution is needed there only.
    `chains[i]`: for draft step `i`, where its chains start, and which of `label_rows` says what is right.
    """

    tokens: Int[Tensor, "b t"]
    label_rows: Int[Tensor, " r"]
    chains: tuple[tuple[Tensor, Tensor], ...]  # int64, as many of each as the step has chains
    num_tokens: int  # padding excluded

    def to(self, device: torch.device) -> "Batch":
        """Uploaded without waiting."""

        def up(x: Tensor) -> Tensor:
            return (x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True)

        chains = tuple((up(starts), up(labels)) for starts, labels in self.chains)
        return Batch(up(self.tokens), up(self.label_rows), chains, self.num_tokens)


def plan_batches(texts: Texts, tokens_per_batch: int, generator: np.random.Generator) -> list[Ints]:
    """One epoch: numbers of the texts of each batch, in random order. A batch never has more tokens, padding included,
    unless a single text is longer."""
    order = generator.permutation(len(texts))
    mean = max(1.0, float(texts.lengths.mean()))
    pool = max(1, int(POOL_BATCHES * tokens_per_batch / mean))
    batches: list[Ints] = []
    for begin in range(0, len(order), pool):
        numbers = order[begin : begin + pool]
        numbers = numbers[np.argsort(texts.lengths[numbers], kind="stable")]
        while len(numbers):
            widths = -(-texts.lengths[numbers] // LENGTH_STEP) * LENGTH_STEP
            fits = max(1, int((np.arange(1, len(numbers) + 1) * widths <= tokens_per_batch).sum()))
            batches.append(numbers[:fits])
            numbers = numbers[fits:]
    return [batches[i] for i in generator.permutation(len(batches))]


def make_batch(
    texts: Texts,
    numbers: Ints,
    num_steps: int,
    first_lead: int = 1,
    draftable: Bool[np.ndarray, " vocab"] | None = None,
) -> Batch:
    """The batch of the texts `numbers`.

    Step `i` of a chain that starts at `p` says what follows token `p + first_lead + i`. `draftable` `[vocabulary]`: which
    ids can be drafted, None for all. A chain ends before the first token that cannot be: inference never gets beyond it.
    """
    lengths, prompt_lens = (
        texts.lengths[numbers].astype(np.int64),
        texts.prompt_lens[numbers].astype(np.int64),
    )
    t = -(-int(lengths.max()) // LENGTH_STEP) * LENGTH_STEP
    tokens = np.zeros((len(numbers), t), np.int64)
    begins = texts.starts()[numbers]
    spans = [texts.tokens[s : s + n] for s, n in zip(begins, lengths, strict=True)]
    tokens[np.arange(t) < lengths[:, None]] = np.concatenate(spans)

    # Row r asks for token r + 1. An answer's first token is never drafted: the target's prefill gives it.
    rows = np.arange(t)
    asked = (rows >= prompt_lens[:, None]) & (rows <= lengths[:, None] - 2)
    if draftable is not None:
        asked[:, :-1] &= draftable[tokens[:, 1:]]
    label_of = asked.ravel().cumsum() - 1  # a row's place among the label rows
    chains, alive = [], asked
    for step in range(num_steps):
        if step:  # the draft before this one was asked for as well
            alive = np.pad(alive[:, :-1], ((0, 0), (1, 0))) & asked
        where = np.flatnonzero(alive)
        chains.append((torch.from_numpy(where - first_lead - step), torch.from_numpy(label_of[where])))
    label_rows = torch.from_numpy(np.flatnonzero(asked))
    return Batch(torch.from_numpy(tokens), label_rows, tuple(chains), int(lengths.sum()))
