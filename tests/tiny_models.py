"""Tiny random models in which a wrong slot, position or mask gives another token; plain decoding as the oracle.

Default-initialised tied models repeat one token, and then every error gives the right answer. So weights are
wide (`initializer_range` 0.5) and untied, arithmetic is float64, and a seed is taken only where the greedy
continuation is lively and never near a tie.
"""

import copy
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

VOCAB = 64
CONTEXT = 160
WINDOW = 8
MIN_MARGIN = 1e-6


# -- building ----------------------------------------------------------------------------------------------


def config_kwargs(**changes: Any) -> dict[str, Any]:
    """What most families' configs understand, for a model that runs in a millisecond."""
    return {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.5,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    } | changes


def in_float64(model: Any) -> Any:
    """The model in float64 all through: most families take their RMS norm in fp32 whatever the dtype."""
    model = model.to(torch.float64).eval().requires_grad_(False)
    for parent in list(model.modules()):
        for name, norm in list(parent.named_children()):
            if type(norm).__name__.endswith("RMSNorm") and type(norm) is not nn.RMSNorm:
                wide = nn.RMSNorm(norm.weight.shape, norm.variance_epsilon, dtype=torch.float64)
                wide.load_state_dict(norm.state_dict())
                setattr(parent, name, wide.requires_grad_(False))
    return model


def seeded(make: Callable[[], Any], seed: int) -> Any:
    """What `make` builds when torch's generator starts at `seed`; the generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def random_llama(seed: int, **changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**config_kwargs(**changes))
    return seeded(lambda: in_float64(LlamaForCausalLM(config)), seed)


def sliding_mistral(seed: int, window: int = WINDOW) -> Any:
    """One layer that sees `window` tokens: its next token is a function of them alone, wherever they are."""
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(**config_kwargs(num_hidden_layers=1, sliding_window=window))
    return seeded(lambda: in_float64(MistralForCausalLM(config)), seed)


def lively(make: Callable[[int], Any], first_seed: int = 0, min_margin: float = MIN_MARGIN) -> Any:
    """The model of the first seed whose greedy continuation has 30 distinct tokens in 100 and no near tie."""
    for seed in range(first_seed, first_seed + 50):
        model = make(seed)
        try:
            tokens = Oracle(model, min_margin=min_margin).tokens((1, 2, 3), 100)
        except NearTie:
            continue
        if len(set(tokens)) >= 30:
            return model
    raise AssertionError("no seed gives a lively model")


@cache
def llama(device: torch.device) -> Any:
    return lively(random_llama).to(device)


@cache
def mistral(device: torch.device) -> Any:
    """The target of the constructed EAGLE head, and of NGRAM: what it said once, it says again."""
    return lively(sliding_mistral).to(device)


@cache
def markov(device: torch.device) -> Any:
    """A window of 3, so that three copied tokens suffice for it to go on as before."""
    return lively(lambda seed: sliding_mistral(seed, window=3)).to(device)


# -- drafters ----------------------------------------------------------------------------------------------


def with_noise(linear: nn.Linear, sigma: float, seed: int) -> nn.Linear:
    """A copy of a linear layer with seeded Gaussian noise on its weights."""
    noisy = copy.deepcopy(linear)
    noise = seeded(lambda: torch.randn(linear.weight.shape, dtype=torch.float64), seed)
    noisy.weight.data += sigma * noise.to(linear.weight.device)
    return noisy


def noisy_copy(model: Any, sigma: float = 0.25, seed: int = 7) -> Any:
    """A draft model with the target's own KV and noise on its logits."""
    copied = copy.deepcopy(model)
    copied.lm_head = with_noise(model.lm_head, sigma, seed)
    return copied


def constructed_head(target: Any, sigma: float = 0.0, seed: int = 7) -> Any:
    """An EAGLE head that repeats its one-layer, sliding-window target and ignores hidden states.

    It sees token `p + 1` at position `p`; rotary positions are relative, so once the first token has left the
    window it says what the target will say. `sigma`: noise on an LM head of its own.
    """
    head = _eagle_head(target, seed, own_lm_head=sigma > 0, norm_input=True, norm_output=True)
    hidden_size = target.config.hidden_size
    head.decoder.layers.load_state_dict(target.model.layers.state_dict())
    head.decoder.norm.load_state_dict(target.model.norm.state_dict())
    head.fc.weight.data.zero_()
    head.fc.weight.data[:, :hidden_size] = torch.eye(hidden_size)
    head.fc.bias.data.zero_()
    if sigma:
        head.lm_head = with_noise(target.lm_head, sigma, seed)
    return head


def hidden_head(target: Any, seed: int = 3) -> Any:
    """An EAGLE head whose drafts depend on the target's hidden states, and on its own at deeper nodes."""
    return _eagle_head(target, seed)


def _eagle_head(target: Any, seed: int, **options: Any) -> Any:
    from spec_v2.models.eagle import EagleHead

    config = copy.deepcopy(target.config)
    config.num_hidden_layers = 1
    device = target.device
    return in_float64(seeded(lambda: EagleHead(config, target, **options), seed)).to(device)


def hidden_modules(target: Any, num_modules: int = 5, seed: int = 3) -> Any:
    """MTP modules whose drafts depend on the target's hidden states, and on each other's output."""
    from spec_v2.models.mtp import MtpHead

    return in_float64(seeded(lambda: MtpHead(target.config, target, num_modules=num_modules), seed)).to(
        target.device
    )


def constructed_modules(target: Any, sigma: float = 0.0, num_modules: int = 5, seed: int = 7) -> Any:
    """MTP modules that repeat their one-layer, sliding-window target and ignore hidden states.

    Module `i` sees tokens `1 + i ..`; once those that it does not see have left the window it says what the target will
    say. The target's embedding has rows of one length (`even_mistral`), so that a norm leaves them as they are. `sigma`:
    noise on the LM head.
    """
    head = hidden_modules(target, num_modules)
    width, eps = target.config.hidden_size, target.config.rms_norm_eps
    for module in head.decoder.mtp:
        module.enorm.weight.data.fill_((1 + eps) ** 0.5)
        module.eh_proj.weight.data.zero_()
        module.eh_proj.weight.data[:, :width] = torch.eye(width)
        module.body.layers.load_state_dict(target.model.layers.state_dict())
        module.shared_head.norm.load_state_dict(target.model.norm.state_dict())
    if sigma:
        head.lm_head = with_noise(target.lm_head, sigma, seed)
    return head


@cache
def even_mistral(device: torch.device) -> Any:
    """The target of the constructed MTP modules: embeddings with a root mean square of 1."""

    def make(seed: int) -> Any:
        model = sliding_mistral(seed)
        weight = model.model.embed_tokens.weight.data
        weight /= weight.square().mean(1, keepdim=True).sqrt()
        return model

    return lively(make).to(device)


def hidden_reader(target: Any, layers: Sequence[int] = (1, 0), seed: int = 3) -> Any:
    """A frozen-KV head, narrower than the target, whose drafts depend on hidden states and on the KV that it reads."""
    from spec_v2.models.frozen_kv_mtp import FrozenKvHead

    config = copy.deepcopy(target.config)
    config.num_hidden_layers, config.target_layer_ids = len(layers), list(layers)
    config.head_dim, config.hidden_size, config.num_attention_heads = 8, 24, 6

    def make() -> Any:
        head = FrozenKvHead(config, target, own_lm_head=True)
        for name, parameter in head.named_parameters():
            if parameter.dim() > 1 and "embed_tokens" not in name:
                parameter.data.normal_(std=0.5)  # else it would hardly look at the KV
        return head

    return in_float64(seeded(make, seed)).to(target.device)


MARKS = (60, 61, 62, 63)
_MARK, _CONSTANT = 30, 31  # dimensions of the embedding


def marked_prompt(seed: int, length: int) -> tuple[int, ...]:
    """A random prompt in which one to three places hold marks."""
    prompt = [token % MARKS[0] for token in random_prompt(seed, length)]
    for i in range(1 + seed % 3):
        prompt[(seed * 7 + 3 * i) % length] = MARKS[(seed + i) % len(MARKS)]
    return tuple(prompt)


@cache
def marked_llama(device: torch.device) -> Any:
    """The target of the constructed frozen-KV head: its one layer attends to the prompt's marks and to nothing else.

    A drafter without KV of its own sees neither the newest token's keys nor those of its drafts, and always asks from
    one place. So it can be certain only of a target to which neither matters: all marks have one key, other tokens
    one that gets a weight below 1e-30, positions turn neither, and a mark is never said. Tokens
    still depend on which marks the prompt has, by way of their values.
    """
    for seed in range(15, 50):  # none below it will do
        model = _marked_llama(seed)
        oracle = Oracle(model)
        try:
            texts = [oracle.tokens(marked_prompt(i, 6), 40) for i in range(8)]
        except NearTie:
            continue
        if min(len(set(text)) for text in texts) >= 5 and len({tuple(text[20:]) for text in texts}) == 8:
            return model.to(device)
    raise AssertionError("no seed gives a lively model")


def _marked_llama(seed: int) -> Any:
    rope = {"rope_type": "default", "rope_theta": 1e30}  # only the first of four frequencies turns
    model = random_llama(seed, num_hidden_layers=1, rope_parameters=rope)
    embedding, layer = model.model.embed_tokens.weight.data, model.model.layers[0]
    embedding[:, _MARK], embedding[:, _CONSTANT] = 0.0, 2.0
    embedding[list(MARKS), _MARK] = 2.0
    rest = embedding[:, :_MARK]
    left = len(embedding[0]) - embedding[:, _MARK:].square().sum(1, keepdim=True)
    rest *= (
        left / rest.square().sum(1, keepdim=True)
    ).sqrt()  # a root mean square of 1, so that a norm changes nothing
    for projection, read in ((layer.self_attn.q_proj, _CONSTANT), (layer.self_attn.k_proj, _MARK)):
        projection.weight.data.zero_()
        projection.weight.data[3::8, read] = 8.0  # of each head, what the slowest frequency turns
    layer.self_attn.o_proj.weight.data *= 0.1  # else marks would outweigh the newest token
    for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
        projection.weight.data[_CONSTANT] = 0.0
    model.lm_head.weight.data[list(MARKS)] = 0.0
    model.lm_head.weight.data[list(MARKS), _CONSTANT] = -500.0
    return model


def constructed_reader(target: Any, sigma: float = 0.0, seed: int = 7) -> Any:
    """A frozen-KV head that repeats `marked_llama`'s layer on that model's own KV and ignores hidden states."""
    from spec_v2.models.frozen_kv_mtp import FrozenKvHead

    head = in_float64(seeded(lambda: FrozenKvHead(copy.deepcopy(target.config), target), seed))
    width, layer = target.config.hidden_size, head.decoder.layers[0]
    own = {k: v for k, v in target.model.layers[0].state_dict().items() if k in layer.state_dict()}
    layer.load_state_dict(own)
    head.decoder.norm.load_state_dict(target.model.norm.state_dict())
    head.decoder.pre_projection.weight.data.zero_()
    head.decoder.pre_projection.weight.data[:, :width] = torch.eye(width)
    if sigma:
        head.lm_head = with_noise(target.lm_head, sigma, seed)
    return head.to(target.device)


# -- plain decoding ----------------------------------------------------------------------------------------


class NearTie(AssertionError):
    """Two tokens are so close that rounding may choose between them."""


class Oracle:
    """Plain decoding without any of our engine: full forwards of a copy of the model, no cache.

    `attention`: transformers' own; its eager one takes the softmax in fp32, its sdpa one in the model's dtype.
    Raises NearTie where a token is not certain: at argmax by logits, when sampling by coins.
    """

    def __init__(self, model: Any, attention: str = "sdpa", min_margin: float = MIN_MARGIN) -> None:
        self.model = copy.deepcopy(model)
        if model.device.type == "npu":  # slow where it is simulated; in float64 it makes no difference
            self.model = self.model.cpu()
        self.model.set_attn_implementation(attention)
        self.min_margin = min_margin
        self._known: dict[Any, list[int]] = {}

    def tokens(self, prompt: Sequence[int], count: int, params: Any = None) -> list[int]:
        """The first `count` tokens after `prompt`; no stop condition cuts them."""
        greedy = params is None or params.is_greedy
        key = None if greedy else (params.temperature, params.top_k, params.top_p, params.seed)
        known = self._known.setdefault((tuple(prompt), key), [])
        while len(known) < count:
            logits = self.logits([*prompt, *known])
            position = len(prompt) + len(known)
            known.append(self._arg_max(logits) if greedy else self._sample(logits, position, params))
        return known[:count]

    @torch.no_grad()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """The next token's logits."""
        ids = torch.tensor([list(tokens)], device=self.model.device)
        return self.model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[0, -1]

    def expected(self, prompt: Sequence[int], params: Any) -> tuple[int, ...]:
        """What a request must give: up to and with the first stop token, at most `max_new_tokens`."""
        tokens = self.tokens(prompt, params.max_new_tokens, params)
        stops = [i for i, token in enumerate(tokens) if token in params.stop_token_ids]
        return tuple(tokens[: stops[0] + 1] if stops else tokens)

    def _arg_max(self, logits: torch.Tensor) -> int:
        best = logits.topk(2).values
        if float(best[0] - best[1]) <= self.min_margin:
            raise NearTie(f"top-2 margin {float(best[0] - best[1])}")
        return int(logits.argmax())

    def _sample(self, logits: torch.Tensor, position: int, params: Any) -> int:
        from spec_v2.kernels.sample_nodes import inverse_cdf, position_coins, processed_probs

        def one(value: float, dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor([value], dtype=dtype, device=logits.device)

        top_k = params.top_k if params.top_k > 0 else VOCAB
        probs = processed_probs(
            logits[None],
            one(params.temperature, torch.float32),
            one(top_k, torch.long),
            one(params.top_p, torch.float32),
            one(params.min_p, torch.float32),
        )
        coin = position_coins(one(params.seed, torch.long), one(position, torch.long)).to(probs.dtype)
        cdf = probs[0].cumsum(0) / probs.sum()
        edge = 1e-10 if self.min_margin <= MIN_MARGIN else 1e-6  # in float64, and where parts are in fp32
        if float((cdf - coin).abs().min()) < edge:
            raise NearTie("a coin on the edge of a token's share")
        return int(inverse_cdf(probs, coin))


@cache
def oracle_of(model: Any) -> Oracle:
    """One oracle per model, so that what it found once stays known."""
    return Oracle(model, min_margin=getattr(model, "min_margin", MIN_MARGIN))


def random_prompt(seed: int, length: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(VOCAB, (length,), generator=generator).tolist())


def copying_prompt(model: Any, seed: int, length: int) -> tuple[int, ...]:
    """A prompt that holds its own continuation: with mistakes (newest), and without.

    For a model with a window of 3. The two occurrences disagree now and then, so trees branch there, and the
    first child is the wrong one.
    """
    start = random_prompt(seed, 3)
    right = oracle_of(model).tokens(start, length)
    wrong = [(token + 1) % VOCAB if i % 5 == seed % 5 else token for i, token in enumerate(right)]
    return (*start, *right, *start, *wrong, *start)
