"""The front door: `Engine(model=..., **server_args).generate(prompts, SamplingParams(...))`."""

import sys
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

import torch

from spec_v2.completion import Completion, completion_of
from spec_v2.mem_cache.kv_cache_builder import build_kv_cache
from spec_v2.model_executor.model_runner import ModelRunner
from spec_v2.models.draft_models import check_same_vocabulary, load_draft_model
from spec_v2.observability.trace import Trace
from spec_v2.sampling_params import SamplingParams
from spec_v2.scheduler.future_map import FutureMap
from spec_v2.scheduler.schedule_batch import Request
from spec_v2.scheduler.scheduler import Scheduler
from spec_v2.scheduler.stop_strings import StopStrings
from spec_v2.scheduler.streams import make_stream
from spec_v2.server_args import ServerArgs
from spec_v2.speculative_hook import resolve_speculative

Prompt = str | Sequence[int]


class Engine:
    """A model with its scheduler, caches and streams. A context manager: leaving it frees everything.

    `model`: the default model's name, a local folder, a hub id, or a loaded transformers causal LM (then
    `dtype` and `device` are the model's). `draft_model`: a loaded draft model, in place of
    `speculative_draft_model_path`. `debug`: check every hand-over between steps (slow). Other keywords are
    `ServerArgs` fields. Raises ValueError naming the field for anything that cannot work.
    """

    def __init__(
        self,
        model: Any = "smollm2-135m",
        *,
        tokenizer: Any = None,
        draft_model: Any = None,
        debug: bool = False,
        **server_args: Any,
    ) -> None:
        given = isinstance(model, torch.nn.Module)
        name = getattr(model.config, "name_or_path", "") or type(model).__name__ if given else model
        args = ServerArgs.from_kwargs(model_path=name, **server_args)
        self.server_args = resolve_speculative(args, draft_model_given=draft_model is not None)
        worker_class = self.server_args.algorithm.create_worker(self.server_args)
        self._closed = False
        self.device = model.device if given else _device(self.server_args.device)
        self.model, self.tokenizer, self.dtype = self._load(model, tokenizer)
        self.context_length = self._context_length()
        self.trace = Trace()
        self._runners: list[ModelRunner] = []
        target = self._runner(self.model, "model_path")
        draft = self._draft_runner(draft_model)
        self._build(target, draft, worker_class, debug)

    # -- use -----------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[Completion]:
        """One completion per prompt, in order. A single prompt gives a list of one.

        A prompt is text or token ids. `sampling_params`: one for all, or one for each. `progress`: a bar on
        stderr; None shows it to a terminal or notebook only. Raises ValueError, before anything runs, for a
        prompt or parameter that cannot work. An interrupt or error frees all and leaves the engine usable.
        """
        requests = self._requests(prompts, sampling_params)
        try:
            for req in requests:
                self.scheduler.add_request(req)
            with _progress_bar(sum(r.max_new_tokens for r in requests), progress) as bar:
                for _ in self.scheduler.event_loop():
                    bar.update(sum(len(r.output_ids) for r in requests) - bar.n)
        except BaseException:
            self.scheduler.abort_all()
            raise
        return [completion_of(req, self.tokenizer) for req in requests]

    def close(self) -> None:
        """Stop the streams and give the model its own attention back. The engine cannot be used afterwards."""
        if self._closed:
            return
        self._closed = True
        self.scheduler.abort_all()
        self._forward_stream.close()
        self._copy_stream.close()
        for runner in self._runners:
            runner.detach()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Engine({self.server_args!r}, device={str(self.device)!r}, dtype={str(self.dtype)!r})"

    # -- building ------------------------------------------------------------------------------------------

    def _load(self, model: Any, tokenizer: Any) -> tuple[Any, Any, torch.dtype]:
        from spec_v2.models.loader import load_model, load_tokenizer

        args = self.server_args
        if isinstance(model, torch.nn.Module):
            return model.eval(), tokenizer, model.dtype  # type: ignore[return-value]
        dtype = getattr(torch, "bfloat16" if args.dtype == "auto" else args.dtype)
        loaded = load_model(args.model_path, dtype=dtype, device=self.device)
        if args.tokenizer_path is not None:
            tokenizer = load_tokenizer(args.tokenizer_path)
        return loaded.model, tokenizer or loaded.tokenizer, dtype

    def _context_length(self) -> int:
        longest = int(self.model.config.max_position_embeddings)
        wanted = self.server_args.context_length or longest
        if wanted > longest:
            raise ValueError(
                f"context_length={wanted} is more than the {longest} positions that {self.server_args.model_path} "
                f"was made for; use --context-length {longest} or less"
            )
        return wanted

    def _runner(self, model: Any, field: str) -> ModelRunner:
        runner = ModelRunner(model, self.context_length, field)
        self._runners.append(runner)
        return runner

    def _draft_runner(self, draft_model: Any) -> ModelRunner | None:
        algorithm = self.server_args.algorithm
        if not algorithm.needs_draft_model():
            return None
        if draft_model is None:
            draft_model = load_draft_model(self.server_args, self.model, self.tokenizer)
        check_same_vocabulary(self.server_args, self.model, draft_model)
        positions = int(draft_model.config.max_position_embeddings)
        if positions < self.context_length:
            raise ValueError(
                f"speculative_draft_model_path: the draft model has {positions} positions, the context is "
                f"{self.context_length} long; use --context-length {positions} or another draft model"
            )
        return self._runner(draft_model, "speculative_draft_model_path")

    def _build(self, target: ModelRunner, draft: ModelRunner | None, worker_class: Any, debug: bool) -> None:
        args, algorithm = self.server_args, self.server_args.algorithm
        cache = build_kv_cache(
            target_geometry=target.geometry,
            draft_geometry=draft.geometry if draft is not None and algorithm.has_draft_kv() else (),
            dtype=self.dtype,
            device=self.device,
            page_size=args.page_size,
            max_running_requests=args.max_running_requests,
            context_length=self.context_length,
            slots_per_step=args.slots_per_step,
            max_total_tokens=args.max_total_tokens,
            mem_fraction=args.mem_fraction_static,
            pair_keys=algorithm.draft_is_shifted(),
            prefix_cache=not args.disable_radix_cache,
        )
        carries_hidden = draft is not None and algorithm.carries_draft_hidden_states()
        future_map = FutureMap(
            num_rows=cache.rows.num_rows,
            topk=args.topk if draft is not None else 0,
            hidden_size=draft.hidden_size if draft is not None and carries_hidden else 0,
            history_width=cache.row_table.width if algorithm.is_ngram() else 0,
            vocab_size=target.vocab_size,
            dtype=self.dtype,
            device=self.device,
            debug=debug,
        )
        num_threads = args.num_threads or torch.get_num_threads()
        self._forward_stream = make_stream("forward", self.device, self.trace, num_threads)
        self._copy_stream = make_stream("copy", self.device, self.trace, 1)
        cache.row_table.on_stream = self._forward_stream.owns_current_thread
        worker = worker_class(
            stream=self._forward_stream,
            target=target,
            draft=draft,
            cache=cache,
            future_map=future_map,
            server_args=args,
        )
        self.scheduler = Scheduler(
            server_args=args,
            worker=worker,
            cache=cache,
            future_map=future_map,
            forward_stream=self._forward_stream,
            copy_stream=self._copy_stream,
            device=self.device,
            trace=self.trace,
        )
        self._num_requests = 0

    # -- requests ------------------------------------------------------------------------------------------

    def _requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[Request]:
        if self._closed:
            raise RuntimeError("this engine is closed; make a new Engine")
        many = _as_list(prompts)
        params = _as_params(sampling_params, len(many))
        requests = []
        for i, (prompt, param) in enumerate(zip(many, params, strict=True)):
            requests.append(self._request(i, prompt, param))
        for req in requests:
            self.scheduler.planner.check_fits(req)
        return requests

    def _request(self, i: int, prompt: Prompt, params: SamplingParams) -> Request:
        ids = self._token_ids(i, prompt)
        self._check_token_ids(i, params)
        room = self.context_length - len(ids)
        if room < 1:
            raise ValueError(
                f"prompts[{i}] has {len(ids)} tokens and the context holds {self.context_length}, one of them for "
                "an answer; shorten the prompt or raise context_length"
            )
        request_id = self._num_requests
        self._num_requests += 1
        seed = params.seed
        if seed is None:
            seed = (self.server_args.random_seed * 1_000_003 + request_id) % (1 << 63)
        return Request(
            request_id=request_id,
            prompt_ids=ids,
            params=params,
            seed=seed,
            max_new_tokens=min(params.max_new_tokens, room),
            stop_token_ids=self._stop_token_ids(params),
            stop_strings=self._stop_strings(i, params),
        )

    def _token_ids(self, i: int, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError(
                    f"prompts[{i}] is text, but this engine has no tokenizer; give token ids or tokenizer="
                )
            ids = tuple(self.tokenizer(prompt)["input_ids"])
        else:
            ids = tuple(prompt)
        if not ids:
            raise ValueError(f"prompts[{i}] is empty; give at least one token")
        vocab_size = int(self.model.config.vocab_size)
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
                raise ValueError(
                    f"prompts[{i}] holds {token!r}; token ids are integers from 0 to {vocab_size - 1}"
                )
        return ids

    def _stop_strings(self, i: int, params: SamplingParams) -> StopStrings | None:
        if not params.stop:
            return None
        if self.tokenizer is None:
            raise ValueError(
                f"stop={params.stop!r} for prompts[{i}], but this engine has no tokenizer; use stop_token_ids or give tokenizer="
            )
        return StopStrings(self.tokenizer, params.stop)

    def _check_token_ids(self, i: int, params: SamplingParams) -> None:
        vocab_size = int(self.model.config.vocab_size)
        for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
            for token in ids:
                if token >= vocab_size:
                    raise ValueError(
                        f"{name} for prompts[{i}] holds {token}; token ids are below vocab_size={vocab_size}"
                    )

    def _stop_token_ids(self, params: SamplingParams) -> frozenset[int]:
        ids = set(params.stop_token_ids)
        if not params.ignore_eos:
            eos = self.model.generation_config.eos_token_id if self.model.can_generate() else None
            eos = self.model.config.eos_token_id if eos is None else eos
            ids |= {eos} if isinstance(eos, int) else set(eos or ())
            if self.tokenizer is not None and self.tokenizer.eos_token_id is not None:
                ids.add(self.tokenizer.eos_token_id)
        return frozenset(ids)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={name!r}: this machine has no usable CUDA device; use --device cpu")
    return device


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise ValueError(f"prompts={prompts!r}: give text, token ids, or a list of either")
    many = list(prompts)
    if not many:
        raise ValueError("prompts is empty; give at least one prompt")
    return [many] if isinstance(many[0], int) else many  # type: ignore[list-item, return-value]


def _as_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    many = list(params)
    if len(many) != count or not all(isinstance(p, SamplingParams) for p in many):
        raise ValueError(
            f"sampling_params holds {len(many)} entries for {count} prompts; give one SamplingParams for all, or "
            "one for each prompt"
        )
    return many


def _progress_bar(total: int, progress: bool | None) -> Any:
    if progress is None:
        progress = sys.stderr.isatty() or "ipykernel" in sys.modules
    if not progress:
        import contextlib

        return contextlib.nullcontext(_NoBar())
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tqdm.auto warns where ipywidgets is missing
        from tqdm.auto import tqdm
    return tqdm(total=total, unit="tok", leave=False, desc="generate")


class _NoBar:
    n = 0

    def update(self, count: int) -> None:
        """Nothing to show."""
