"""A tiny target deep enough for EAGLE-3, random heads for it, and what such a head must propose."""

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from spec_v2.models.eagle3 import Eagle3Head, default_aux_layers
from tests.draft_oracles import Path
from tests.tiny_models import VOCAB, in_float64, lively, oracle_of, random_llama, seeded

LAYERS = 8  # aux layers 2, 4 and 5: all different


@cache
def deep_llama(device: torch.device) -> Any:
    return lively(lambda seed: random_llama(seed, num_hidden_layers=LAYERS)).to(device)


def eagle3_head(target: Any, token_map: Sequence[int] | None = None, seed: int = 0, **options: Any) -> Any:
    """A random head over the target ids in `token_map` (ascending), or over all of them."""
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = 1
    config.draft_vocab_size = VOCAB if token_map is None else len(token_map)
    head = in_float64(seeded(lambda: Eagle3Head(config, target, **options), seed)).to(target.device)
    if token_map is not None:
        ids = torch.tensor(list(token_map), device=target.device)
        head.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
    return head


def aux_features(target: Any, text: Sequence[int]) -> torch.Tensor:
    """Inputs of the three layers, side by side, as transformers itself hands them out."""
    ids = torch.tensor([list(text)], device=target.device)
    with torch.no_grad():
        states = oracle_of(target).model(input_ids=ids, output_hidden_states=True, use_cache=False)
    layers = default_aux_layers(target.config.num_hidden_layers)
    return torch.cat([states.hidden_states[i][0] for i in layers], -1)


class Eagle3Oracle:
    """Full forwards of a copy of the head: no cache, no slots, no batch."""

    def __init__(self, target: Any, head: Any, token_map: Sequence[int] | None = None) -> None:
        self._target = target
        self._ids = torch.tensor(list(token_map if token_map is not None else range(VOCAB)))
        self._head = copy.deepcopy(head)
        self._head.decoder.midlayer.self_attn.config._attn_implementation = "sdpa"

    @torch.no_grad()
    def next_logits(self, text: Sequence[int], path: Path) -> torch.Tensor:
        """Over the target's vocabulary; ids that the head cannot draft are impossible."""
        hidden, tokens = self._head.decoder.fc(aux_features(self._target, text[:-1])), list(text[1:])
        for token in path:
            hidden, tokens = torch.cat([hidden, self._run(tokens, hidden)[-1:]]), [*tokens, token]
        logits = self._head.lm_head(self._head.norm(self._run(tokens, hidden)[-1]))
        return torch.full((VOCAB,), -torch.inf, dtype=logits.dtype).index_copy(0, self._ids, logits.cpu())

    def _run(self, tokens: list[int], hidden: torch.Tensor) -> torch.Tensor:
        places = torch.arange(len(tokens), device=hidden.device)[None]
        return self._head.decoder(
            torch.tensor([tokens], device=hidden.device), places, hidden[None]
        ).last_hidden_state[0]
