"""From what a user gives to requests: every prompt and parameter is checked before anything runs."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from spec_v2.sampling_params import SamplingParams
from spec_v2.scheduler.schedule_batch import Request
from spec_v2.scheduler.stop_strings import StopStrings

Messages = Sequence[Mapping[str, str]]
Prompt = str | Sequence[int] | Messages


class RequestFactory:
    """Makes requests for one engine. `tokenizer` may be None: then prompts are token ids."""

    def __init__(self, model: Any, tokenizer: Any, context_length: int, random_seed: int) -> None:
        self.tokenizer = tokenizer
        self.context_length = context_length
        self.vocab_size = int(model.config.vocab_size)
        self._model = model
        self._random_seed = random_seed
        self.num_requests = 0

    def make(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[Request]:
        """A request per prompt. Raises ValueError naming the prompt or parameter that cannot work."""
        many = as_list(prompts)
        params = as_params(sampling_params, len(many))
        return [self._request(i, p, s) for i, (p, s) in enumerate(zip(many, params, strict=True))]

    def _request(self, i: int, prompt: Prompt, params: SamplingParams) -> Request:
        ids = self._token_ids(i, prompt)
        room = self.context_length - len(ids)
        if room < 1:
            raise ValueError(
                f"prompts[{i}] has {len(ids)} tokens and the context holds {self.context_length}, one of them for "
                "an answer; shorten the prompt or raise context_length"
            )
        self._check_token_ids(i, params)
        request_id = self.num_requests
        self.num_requests += 1
        seed = params.seed
        if seed is None:
            seed = (self._random_seed * 1_000_003 + request_id) % (1 << 63)
        eos = () if params.ignore_eos else eos_token_ids(self._model, self.tokenizer)
        return Request(
            request_id=request_id,
            prompt_ids=ids,
            params=params,
            seed=seed,
            max_new_tokens=min(params.max_new_tokens, room),
            stop_token_ids=frozenset(params.stop_token_ids) | frozenset(eos),
            stop_strings=self._stop_strings(i, params),
        )

    def _token_ids(self, i: int, prompt: Prompt) -> tuple[int, ...]:
        ids: Sequence[Any]
        if isinstance(prompt, str):
            ids = self._needs_tokenizer(f"prompts[{i}] is text", "give token ids")(prompt)["input_ids"]
        elif isinstance(prompt, Iterable):
            ids = list(prompt)
        else:
            raise ValueError(f"prompts[{i}]={prompt!r}: give text, token ids, or chat messages")
        if ids and isinstance(ids[0], Mapping):
            ids = self._chat_ids(i, ids)
        if not ids:
            raise ValueError(f"prompts[{i}] is empty; give at least one token")
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < self.vocab_size:
                raise ValueError(
                    f"prompts[{i}] holds {token!r}; token ids are integers from 0 to {self.vocab_size - 1}"
                )
        return tuple(ids)

    def _chat_ids(self, i: int, messages: Sequence[Any]) -> list[int]:
        tokenizer = self._needs_tokenizer(f"prompts[{i}] is chat messages", "give token ids")
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"prompts[{i}] is chat messages, but the tokenizer has no chat template; give text"
            )
        for message in messages:
            fine = isinstance(message, Mapping) and isinstance(message.get("content"), str)
            if not fine or not isinstance(message.get("role"), str):
                raise ValueError(
                    f"prompts[{i}] holds {message!r}; a message is a dict with 'role' and 'content', both text"
                )
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    def _stop_strings(self, i: int, params: SamplingParams) -> StopStrings | None:
        if not params.stop:
            return None
        tokenizer = self._needs_tokenizer(f"stop={params.stop!r} for prompts[{i}]", "use stop_token_ids")
        return StopStrings(tokenizer, params.stop)

    def _needs_tokenizer(self, what: str, remedy: str) -> Any:
        if self.tokenizer is None:
            raise ValueError(f"{what}, but this engine has no tokenizer; {remedy} or pass tokenizer=")
        return self.tokenizer

    def _check_token_ids(self, i: int, params: SamplingParams) -> None:
        for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
            for token in ids:
                if token >= self.vocab_size:
                    raise ValueError(
                        f"{name} for prompts[{i}] holds {token}; token ids are integers from 0 to {self.vocab_size - 1}"
                    )


def eos_token_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """All end-of-sequence ids that the generation config, the config and the tokenizer know."""
    ids: set[int] = set()
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        eos = getattr(source, "eos_token_id", None)
        ids |= {eos} if isinstance(eos, int) else set(eos or ())
    return frozenset(ids)


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts; a single one becomes a list of one."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise ValueError(f"prompts={prompts!r}: give text, token ids, chat messages, or a list of these")
    many: list[Any] = list(prompts)
    if not many:
        raise ValueError("prompts is empty; give at least one prompt")
    return [many] if isinstance(many[0], (int, Mapping)) else many


def as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """One SamplingParams per prompt."""
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    many: list[Any] = [*params]
    if len(many) != count or any(not isinstance(p, SamplingParams) for p in many):
        raise ValueError(
            f"sampling_params={params!r} for {count} prompts; give one SamplingParams for all, or a list with one "
            "for each prompt"
        )
    return many
