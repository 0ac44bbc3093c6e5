"""Self-generated data: the target writes prompts and answers them, so that nothing has to be downloaded.

Given the beginning of a user's turn in its chat template and nothing else, an instruct model goes on with a user's
prompt (Magpie, Xu et al. 2024, arXiv 2406.08464). A draft model has to learn what its target says, and this is it. Small
models think of few topics by themselves, so part of the prompts is begun for them.
"""

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spec_v2.engine import Engine
from spec_v2.observability.progress import progress_bar
from spec_v2.sampling_params import SamplingParams
from spec_v2.training.heldout import SHA256, heldout_prompts, normalised
from spec_v2.training.settings import Recipe
from spec_v2.training.shards import Texts, read_shard, write_shard

HELDOUT_FILE = "heldout.safetensors"
_MARK = "THE-PROMPT-STANDS-HERE"
_WORD = re.compile(" [a-z]{4,}")

OPENINGS = (
    "What is", "What are", "What does", "What happens when", "Who was", "Where can I find", "When did", "Why do", "Why is",
    "How do", "How does", "How can I", "How is", "Can you", "Could you tell me", "Is it true that", "Explain", "Describe",
    "Compare", "Tell me about", "Give me", "Name", "List", "Make a list of", "Write", "Write a story about", "Write a poem",
    "Write a letter", "Write a function that", "Write a program", "Create", "Design", "Plan", "Suggest", "Recommend",
    "Summarize", "Rewrite", "Translate", "Correct", "Calculate", "Solve", "Find", "If", "I want to", "I need", "I have",
    "My", "Help me", "Imagine", "Pretend", "Act as", "Let's talk about", "In the year", "The", "A", "Please", "Hello",
)  # fmt: skip
"""How people begin what they ask of an assistant."""


@dataclass(frozen=True, slots=True)
class ChatFrame:
    """Token ids around a user's prompt, and those that end a turn."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    stops: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Any) -> "ChatFrame":
        """From the tokenizer's chat template. Raises ValueError where it has none."""
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                "model_path: its tokenizer has no chat template, so the model cannot be made to write prompts; use an "
                "instruct model, or write shards of your own texts (spec_v2.training.shards.write_shard)"
            )
        messages = [{"role": "user", "content": _MARK}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        before, mark, after = text.partition(_MARK)
        if not mark:
            raise ValueError(
                "model_path: its chat template changes the user's text; use another instruct model"
            )
        first, last = (tuple(tokenizer(s, add_special_tokens=False)["input_ids"]) for s in (before, after))
        return cls(first, last, stops=last[:1])

    def around(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """A whole prompt, ready to be answered."""
        return (*self.before, *prompt, *self.after)


@dataclass(frozen=True, slots=True)
class Openings:
    """What prompts are begun with: nothing, an opening, or an opening and a word."""

    share: float
    openings: tuple[tuple[int, ...], ...]
    words: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Any, share: float) -> "Openings":
        """`words`: tokens of the vocabulary that are a space and at least four small letters."""
        texts = ((token, tokenizer.decode([token])) for token in sorted(tokenizer.get_vocab().values()))
        words = tuple(token for token, text in texts if _WORD.fullmatch(text))
        return cls(
            share, tuple(tuple(tokenizer(o, add_special_tokens=False)["input_ids"]) for o in OPENINGS), words
        )

    def draw(self, rng: np.random.Generator) -> tuple[int, ...]:
        """Token ids to begin a prompt with."""
        if rng.random() >= self.share:
            return ()
        opening = self.openings[rng.integers(len(self.openings))]
        if not self.words or rng.random() < 0.5:
            return opening
        return (*opening, self.words[rng.integers(len(self.words))])


def generate(
    model: Any,
    tokenizer: Any,
    folder: Path,
    recipe: Recipe,
    *,
    num_tokens: int,
    time_limit: float | None = None,
    progress: bool | None = None,
) -> dict[str, Any]:
    """Fill `folder` with shards until they hold `num_tokens` answer tokens or `time_limit` seconds are over.

    Shards that are there already are kept and counted, those of other recipes too; each is made from its number and its
    recipe alone. The answers to the held-out prompts are written first. Returns what is there now.
    """
    frame = ChatFrame.of(tokenizer)
    end = time.monotonic() + time_limit if time_limit is not None else float("inf")
    kept = list(_shards_there(folder))
    seen = {prompt for texts in kept for prompt in _prompts_of(texts, frame)}
    openings = Openings.of(tokenizer, recipe.opening_share)
    forbidden = {normalised(prompt) for prompt in heldout_prompts()}
    sizes = [texts.num_answer_tokens for texts in kept]
    heldout = [frame.around(tokenizer(p, add_special_tokens=False)["input_ids"]) for p in heldout_prompts()]
    longest = max(recipe.max_prompt_tokens + len(frame.around(())), *map(len, heldout))
    with (
        _engine(model, recipe, longest) as engine,
        progress_bar(num_tokens, "tok", progress) as bar,
    ):
        if not (folder / HELDOUT_FILE).exists():
            _write_heldout(engine, heldout, frame, folder, recipe)
        bar.update(sum(sizes))
        while sum(sizes) < num_tokens and time.monotonic() < end:
            number = len(sizes)
            prompts = _write_prompts(engine, frame, openings, recipe, number, seen)
            prompts = [p for p in prompts if normalised(tokenizer.decode(p)) not in forbidden]
            seen.update(prompts)
            texts = _answer(engine, frame, recipe, number, prompts)
            write_shard(
                _path(folder, number), texts, engine.model.config.vocab_size, _metadata(recipe, number)
            )
            sizes.append(texts.num_answer_tokens)
            bar.update(sizes[-1])
    return {
        "shards": len(sizes),
        "answer_tokens": sum(sizes),
        "recipe": asdict(recipe),
        "heldout_sha256": SHA256,
    }


def _write_prompts(
    engine: Engine,
    frame: ChatFrame,
    openings: Openings,
    recipe: Recipe,
    number: int,
    seen: set[tuple[int, ...]],
) -> list[tuple[int, ...]]:
    """The prompts of one wave: those that came to an end, that are no stubs, and that nobody wrote before."""
    rng = np.random.default_rng((recipe.seed, number, 1))
    begun = [openings.draw(rng)[: recipe.max_prompt_tokens // 2] for _ in range(recipe.wave)]
    params = [
        SamplingParams(
            max_new_tokens=recipe.max_prompt_tokens + 1 - len(opening),
            temperature=recipe.prompt_temperature,
            stop_token_ids=frame.stops,
            seed=_seed(recipe, number, i),
        )
        for i, opening in enumerate(begun)
    ]
    written = engine.generate([(*frame.before, *opening) for opening in begun], params, progress=False)
    ended = [
        (*opening, *c.output_ids[:-1])
        for opening, c in zip(begun, written, strict=True)
        if c.finish_reason == "stop"
    ]
    return [p for p in dict.fromkeys(ended) if len(p) >= recipe.min_prompt_tokens and p not in seen]


def _answer(
    engine: Engine, frame: ChatFrame, recipe: Recipe, number: int, prompts: list[tuple[int, ...]]
) -> Texts:
    rng = np.random.default_rng((recipe.seed, number))
    params = []
    for i in range(len(prompts)):
        temperature = 0.0 if rng.random() < recipe.greedy_share else float(rng.choice(recipe.temperatures))
        params.append(
            SamplingParams(
                max_new_tokens=recipe.max_answer_tokens,
                temperature=temperature,
                stop_token_ids=frame.stops,
                seed=_seed(recipe, number, recipe.wave + i),
            )
        )
    whole = [frame.around(prompt) for prompt in prompts]
    answers = [c.output_ids for c in engine.generate(whole, params, progress=False)] if whole else []
    return Texts.from_lists(whole, answers)


def _write_heldout(
    engine: Engine, prompts: list[tuple[int, ...]], frame: ChatFrame, folder: Path, recipe: Recipe
) -> None:
    params = SamplingParams(max_new_tokens=recipe.heldout_tokens, stop_token_ids=frame.stops)
    answers = [c.output_ids for c in engine.generate(prompts, params, progress=False)]
    texts = Texts.from_lists(prompts, answers)
    write_shard(folder / HELDOUT_FILE, texts, engine.model.config.vocab_size, {"heldout_sha256": SHA256})


def _engine(model: Any, recipe: Recipe, longest_prompt: int) -> Engine:
    """Token ids in, token ids out: decoding a wave's tokens to text would take longer than making them."""
    context = longest_prompt + max(recipe.max_answer_tokens, recipe.heldout_tokens)
    return Engine(
        model,
        max_running_requests=recipe.wave,
        context_length=min(context, int(model.config.max_position_embeddings)),
        max_prefill_tokens=1 << 15,
        disable_radix_cache=True,
    )


def _shards_there(folder: Path) -> Iterator[Texts]:
    number = 0
    while (path := _path(folder, number)).exists():
        yield read_shard(path)[0]
        number += 1


def _prompts_of(texts: Texts, frame: ChatFrame) -> Iterator[tuple[int, ...]]:
    for start, length in zip(texts.starts(), texts.prompt_lens, strict=True):
        prompt = texts.tokens[start : start + length].tolist()
        yield tuple(prompt[len(frame.before) : len(prompt) - len(frame.after)])


def _path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.safetensors"


def _metadata(recipe: Recipe, number: int) -> dict[str, Any]:
    plain = {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(recipe).items()}
    return {"recipe": plain, "shard": number, "heldout_sha256": SHA256}


def _seed(recipe: Recipe, number: int, i: int) -> int:
    """Different for all requests of all waves of a recipe."""
    return (recipe.seed << 44) + (number << 22) + i
