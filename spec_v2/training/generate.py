"""Self-generated data: the target writes prompts and answers them, so that nothing has to be downloaded.

Given the beginning of a user's turn in its chat template and nothing else, an instruct model goes on with a user's
prompt (Magpie, Xu et al. 2024, arXiv 2406.08464). A draft model has to learn what its target says, and this is it.
"""

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

    Shards that are there already are kept and counted; each is made from its number and the seed alone. The answers to
    the held-out prompts are written first. Returns what is there now. Raises ValueError for shards of another recipe.
    """
    frame = ChatFrame.of(tokenizer)
    end = time.monotonic() + time_limit if time_limit is not None else float("inf")
    kept = list(_shards_there(folder, recipe))
    seen = {prompt for texts in kept for prompt in _prompts_of(texts, frame)}
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
            prompts = _write_prompts(engine, frame, recipe, number, seen)
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
    engine: Engine, frame: ChatFrame, recipe: Recipe, number: int, seen: set[tuple[int, ...]]
) -> list[tuple[int, ...]]:
    """The prompts of one wave: those that came to an end, that are no stubs, and that nobody wrote before."""
    params = [
        SamplingParams(
            max_new_tokens=recipe.max_prompt_tokens + 1,
            temperature=recipe.prompt_temperature,
            stop_token_ids=frame.stops,
            seed=_seed(recipe, number, i),
        )
        for i in range(recipe.wave)
    ]
    written = engine.generate([frame.before] * recipe.wave, params, progress=False)
    ended = [c.output_ids[:-1] for c in written if c.finish_reason == "stop"]
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


def _shards_there(folder: Path, recipe: Recipe) -> Iterator[Texts]:
    number = 0
    while (path := _path(folder, number)).exists():
        texts, metadata = read_shard(path)
        if metadata != _metadata(recipe, number):
            raise ValueError(
                f"{path} was made by another recipe ({metadata}); use the same settings, or another folder"
            )
        yield texts
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
