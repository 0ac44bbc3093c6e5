"""What a drafter has to propose, from full forwards of a copy of it: no cache, no slots, no batch."""

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.tiny_models import oracle_of

Path = tuple[int, ...]


class StandaloneOracle:
    """An independent LM: it sees the sequence as it is."""

    def __init__(self, target: Any, draft: Any) -> None:
        self._lm = oracle_of(draft)

    def next_logits(self, text: Sequence[int], path: Path) -> torch.Tensor:
        """Logits of what follows `text` and then the drafts on `path`."""
        return self._lm.logits([*text, *path])

    def kv(self, text: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(keys, values) `[tokens, heads, dim]` per layer; one entry per token of `text`."""
        return model_kv(self._lm.model, text)


class EagleOracle:
    """An EAGLE head: token `p + 1` with the target's hidden state of `p`; for drafts, with its own."""

    def __init__(self, target: Any, head: Any) -> None:
        self._target = oracle_of(target).model
        self._head = copy.deepcopy(head)
        self._head.decoder.set_attn_implementation("sdpa")
        self._hidden: dict[tuple[int, ...], torch.Tensor] = {}

    def next_logits(self, text: Sequence[int], path: Path) -> torch.Tensor:
        hidden, tokens = self._target_hidden(text), list(text[1:])
        for token in path:
            own = self._run(tokens, hidden).last_hidden_state[0, -1:]
            hidden, tokens = torch.cat([hidden, own]), [*tokens, token]
        return self._head.lm_head(self._run(tokens, hidden).last_hidden_state[0, -1])

    def kv(self, text: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """One entry per token of `text` but the first."""
        fused = self._fuse(list(text[1:]), self._target_hidden(text))
        return with_cache(self._head.decoder, inputs_embeds=fused)

    @torch.no_grad()
    def _target_hidden(self, text: Sequence[int]) -> torch.Tensor:
        """Of every token but the last, whose target KV and hidden state are not known yet."""
        key = tuple(text[:-1])
        if key not in self._hidden:
            ids = torch.tensor([key], device=self._target.device)
            self._hidden[key] = self._target.model(input_ids=ids, use_cache=False).last_hidden_state[0]
        return self._hidden[key]

    @torch.no_grad()
    def _run(self, tokens: list[int], hidden: torch.Tensor) -> Any:
        return self._head.decoder(inputs_embeds=self._fuse(tokens, hidden), use_cache=False)

    @torch.no_grad()
    def _fuse(self, tokens: list[int], hidden: torch.Tensor) -> torch.Tensor:
        embedded = self._head.decoder.embed_tokens(torch.tensor([tokens], device=hidden.device))
        return self._head.fc(torch.cat([embedded, hidden[None]], -1))


class MultiLayerOracle:
    """MTP modules: module `i` over (token `p + 1 + i`, what module `i - 1` said at `p`), drafts behind the text."""

    def __init__(self, target: Any, head: Any) -> None:
        self._target = oracle_of(target).model
        self._head = copy.deepcopy(head)
        for i, module in enumerate(self._head.decoder.mtp):
            module.body.set_attn_implementation("sdpa")
            module.body.layers[0].self_attn.layer_idx = 0
            assert i < self._head.num_modules

    @torch.no_grad()
    def next_logits(self, text: Sequence[int], path: Path) -> torch.Tensor:
        count = len(text) - 1
        tokens, said = [*text[1:], *path], hidden_of(self._target, text[:-1])
        for module in range(len(path) + 1):
            out = self._head(*self._inputs(tokens[module : module + count]), said[None], module=module)
            said = out.hidden_states[0]
        return out.logits[0, -1]

    @torch.no_grad()
    def kv(self, text: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Of module `i` one entry per token of `text` but the first `1 + i`: those that are made of known tokens."""
        said, kept = hidden_of(self._target, text[:-1]), []
        for i, module in enumerate(self._head.decoder.mtp):
            ids, positions = self._inputs(text[1 + i :])
            said = said[None, : ids.shape[1]]
            embedded = self._head.decoder.embed_tokens(ids)
            joined = module.eh_proj(torch.cat([module.enorm(embedded), module.hnorm(said)], -1))
            kept += with_cache(module.body, inputs_embeds=joined, position_ids=positions)
            said = self._head(ids, positions, said, module=i).hidden_states[0]
        return kept

    def _inputs(self, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.tensor([list(tokens)], device=self._target.device)
        return ids, torch.arange(len(tokens), device=ids.device)[None]


class FrozenKvOracle:
    """A frozen-KV head: its own state goes on, the target's KV of the text but its last token stays."""

    def __init__(self, target: Any, head: Any) -> None:
        self._target = oracle_of(target).model
        self._head = copy.deepcopy(head)
        self._head.config._attn_implementation = "sdpa"
        for layer in self._head.decoder.layers:
            layer.self_attn.config._attn_implementation = "sdpa"

    @torch.no_grad()
    def next_logits(self, text: Sequence[int], path: Path) -> torch.Tensor:
        known = text[:-1]
        kv = {
            i: tuple(x.transpose(0, 1)[None] for x in pair)
            for i, pair in enumerate(model_kv(self._target, known))
        }
        place = torch.tensor([[len(known) - 1]], device=self._target.device)
        state = hidden_of(self._target, known)[None, -1:]
        for token in (text[-1], *path):
            out = self._head(torch.full_like(place, token), place, state, target_kv=kv)
            state = out.hidden_states
        return out.logits[0, -1]


@torch.no_grad()
def hidden_of(model: Any, text: Sequence[int]) -> torch.Tensor:
    """The hidden states behind the last norm, `[tokens, h]`."""
    ids = torch.tensor([list(text)], device=model.device)
    return model.model(input_ids=ids, use_cache=False).last_hidden_state[0]


def with_cache(model: Any, **inputs: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """transformers' own KV after a forward, (keys, values) `[tokens, heads, dim]` per layer.

    A cache made without a config forgets nothing, whatever the model's sliding window.
    """
    from transformers import DynamicCache

    # its older name is deprecated from transformers 5.24 on
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    cache = DynamicCache()
    with torch.no_grad():
        model(**inputs, use_cache=True, **{name: cache})
    return [(layer.keys[0].transpose(0, 1), layer.values[0].transpose(0, 1)) for layer in cache.layers]


def model_kv(model: Any, text: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The KV of every token of `text`."""
    return with_cache(model, input_ids=torch.tensor([list(text)], device=model.device))


def grow(next_logits: Callable[[Path], torch.Tensor], shape: tuple[int, int, int]) -> dict[Path, float]:
    """EAGLE-2's tree by the book: the score of each chosen node, by its path from the root."""
    steps, topk, nodes = shape

    def children(path: Path, score: float) -> dict[Path, float]:
        best = next_logits(path).float().softmax(-1).topk(topk)
        pairs = zip(best.values.tolist(), best.indices.tolist(), strict=True)
        return {(*path, token): score * p for p, token in pairs}

    def best(scored: dict[Path, float], count: int) -> dict[Path, float]:
        return dict(sorted(scored.items(), key=lambda item: -item[1])[:count])

    frontier = children((), 1.0)
    everything = dict(frontier)
    for _ in range(steps - 1):
        level: dict[Path, float] = {}
        for path, score in frontier.items():
            level |= children(path, score)
        everything |= level
        frontier = best(level, topk)
    return best(everything, nodes - 1)
