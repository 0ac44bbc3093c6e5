"""The models of a suite: real where there is one, else of the right shape with random weights.

A random target is built to go round in circles: its layers add little to the embedding, and its output layer gives
each token's successor within a block of `CYCLE` ids. So its greedy text is known, repeats itself, and costs what any
text costs; NGRAM finds all of it. A random draft head proposes at random: what it is worth is set by
forced acceptance.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from spec_v2.bench.prediction import ModelCost, cost_of
from spec_v2.bench.prompts import prompt_ids
from spec_v2.model_executor.fuse import speed_up
from spec_v2.models.eagle3 import Eagle3Head
from spec_v2.models.gguf_cache import PACKAGED_MODELS
from spec_v2.models.loader import load_model

CYCLE = 16
LAYER_RANGE = 0.002  # standard deviation of the weights inside a layer: small, so that nothing overflows
HEAD_LOGITS = (
    6.4  # standard deviation of a random head's logits: then its favourite has about half of the share
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """A target, its random head, and what it is asked. `config`: a Llama config's keywords, for random weights.
    `packaged`: the built-in model that is taken instead, where its package is installed."""

    name: str
    config: Mapping[str, Any]
    packaged: str | None = None
    dtype: str = "bfloat16"
    draft_vocab_size: int = 32_000
    prompt_tokens: int = 128
    new_tokens: int = 256
    seed: int = 0


LLAMA_8B = ModelPlan(
    name="Llama-3.1-8B shape",
    config={
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": False,
    },
)
SMOLLM2 = ModelPlan(
    name="SmolLM2-135M",
    packaged="smollm2-135m",
    config={
        "vocab_size": 49_152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100_000.0,
        "tie_word_embeddings": True,
    },
)


@dataclass(slots=True, kw_only=True)
class SuiteModel:
    """A loaded target. `note`: what its weights are. `head` is made when somebody asks for it."""

    plan: ModelPlan
    model: Any
    tokenizer: Any
    cost: ModelCost
    note: str
    _head: list[tuple[Any, ModelCost]] = field(default_factory=list)

    @property
    def is_real(self) -> bool:
        return self.tokenizer is not None

    def head(self) -> tuple[Any, ModelCost]:
        """A random EAGLE-3 head, the same at every call, and its cost."""
        if not self._head:
            head = random_head(self.model, self.plan.draft_vocab_size, self.plan.seed + 1)
            cost = cost_of(head, self.model.get_input_embeddings())
            speed_up(head, shared_with=self.model)
            self._head.append((head, cost))
        return self._head[0]

    def prompts(self, batch_size: int) -> list[tuple[int, ...]]:
        """As many prompts of `plan.prompt_tokens` ids: texts for a real model, else what it would say itself."""
        length = self.plan.prompt_tokens
        if self.is_real:
            texts = prompt_ids(self.tokenizer, "copy", batch_size)
            return [(text * (length // len(text) + 1))[:length] for text in texts]
        generator = torch.Generator().manual_seed(self.plan.seed)
        vocab_size = int(self.plan.config["vocab_size"])
        starts = torch.randint(vocab_size, (batch_size,), generator=generator)
        return [tuple(cycle_from(int(start), length)) for start in starts]


def weight_bytes(plan: ModelPlan) -> int:
    """Of the target, its embedding included."""
    c = plan.config
    heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
    layer = c["hidden_size"] ** 2 * (2 + 2 * kv_heads / heads) + 3 * c["hidden_size"] * c["intermediate_size"]
    tables = 1 if c["tie_word_embeddings"] else 2
    weights = layer * c["num_hidden_layers"] + tables * c["vocab_size"] * c["hidden_size"]
    dtype: torch.dtype = getattr(torch, plan.dtype)
    return int(weights) * dtype.itemsize


def cycle_from(token: int, length: int) -> list[int]:
    """What a random target says from `token` on, that token included."""
    block = token - token % CYCLE
    return [block + (token + i) % CYCLE for i in range(length)]


def load_suite_model(plan: ModelPlan, device: torch.device) -> SuiteModel:
    """The target of a plan, its projections packed as the engine packs those of a model that it loads itself."""
    dtype = getattr(torch, plan.dtype)
    if plan.packaged is not None and _is_installed(plan.packaged):
        loaded = load_model(plan.packaged, dtype=dtype, device=device)
        model, tokenizer, note = loaded.model, loaded.tokenizer, f"{plan.packaged}, its real weights"
    else:
        model, tokenizer = random_target(plan, device), None
        missing = f"; {plan.packaged} is not installed" if plan.packaged else ""
        note = f"{plan.name}, random weights{missing}"
    cost = cost_of(model, model.get_input_embeddings())
    speed_up(model)
    return SuiteModel(plan=plan, model=model, tokenizer=tokenizer, cost=cost, note=note)


def _is_installed(name: str) -> bool:
    import importlib.util

    known = next(known for known in PACKAGED_MODELS if name in known.names)
    return importlib.util.find_spec(known.package) is not None


def random_target(plan: ModelPlan, device: torch.device) -> Any:
    """A Llama of the plan's shape, made on the device; the same weights at every call on the same kind of device."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    no_ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    config = LlamaConfig(**plan.config, **no_ids)
    with torch.random.fork_rng(devices=[]), torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, plan.dtype), attn_implementation="eager"
        )
    generator = torch.Generator(device).manual_seed(plan.seed)
    embedding = model.get_input_embeddings().weight
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.normal_(0, 1.0 if weight is embedding else LAYER_RANGE, generator=generator)
        if model.lm_head.weight is not embedding:  # a tied one says what it just read, again and again
            ids = torch.arange(len(embedding), device=device)
            model.lm_head.weight[ids - ids % CYCLE + (ids + 1) % CYCLE] = embedding
    return model.eval().requires_grad_(False)


def random_head(target: Any, draft_vocab_size: int, seed: int) -> Any:
    """An EAGLE-3 head with random weights over a random choice of the target's tokens."""
    config = copy.deepcopy(target.config)
    config.num_hidden_layers, config.draft_vocab_size = 1, draft_vocab_size
    with torch.random.fork_rng(devices=[]), torch.device(target.device):
        head: Any = Eagle3Head(config, target)
    generator = torch.Generator(target.device).manual_seed(seed)
    embedding = target.get_input_embeddings().weight
    with torch.no_grad():
        for weight in head.parameters():
            if weight.dim() == 2 and weight is not embedding:
                weight.normal_(0, weight.shape[1] ** -0.5, generator=generator)
        head.lm_head.weight.mul_(HEAD_LOGITS)
        order = torch.randperm(len(embedding), generator=generator, device=target.device)
        ids = order[:draft_vocab_size].sort().values
        head.d2t.copy_(ids - torch.arange(draft_vocab_size, device=ids.device))
    return head.eval()
