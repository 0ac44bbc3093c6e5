"""The front door: `Engine(model=..., **server_args).generate(prompts, SamplingParams(...))`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch

from spec_v2.adaptive_policy import AdaptivePolicy
from spec_v2.admission import Prompt, RequestFactory
from spec_v2.completion import Completion, completion_of, undecodable
from spec_v2.engine_parts import (
    check_recurrent,
    make_cache,
    make_future_map,
    open_device,
    turned_on_for,
)
from spec_v2.kernels.paged_attention.host_lens import HostLens
from spec_v2.model_executor.cuda_graph_runner import CudaGraphRunner
from spec_v2.model_executor.fuse import speed_up
from spec_v2.model_executor.graph_runner import capture_sizes
from spec_v2.model_executor.model_runner import ModelRunner
from spec_v2.model_executor.npu_backend import can_pin, device_name, use_fused_attention
from spec_v2.model_executor.npu_graph_runner import NpuGraphs
from spec_v2.models.draft_models import check_draft_model, load_draft_model
from spec_v2.models.eagle3 import default_aux_layers
from spec_v2.models.hybrid import MIXERS, lend_mixers, return_mixers
from spec_v2.models.shipped import shipped_draft
from spec_v2.observability.progress import progress_bar
from spec_v2.observability.step_log import StepLog
from spec_v2.observability.trace import Trace
from spec_v2.sampling_params import SamplingParams
from spec_v2.scheduler.future_map import FutureMap
from spec_v2.scheduler.schedule_batch import Request
from spec_v2.scheduler.scheduler import Scheduler
from spec_v2.scheduler.step_shapes import StepShapes
from spec_v2.scheduler.streams import NpuStream, make_stream
from spec_v2.server_args import ServerArgs
from spec_v2.spec_info import SpeculativeAlgorithm
from spec_v2.speculative.adaptive import candidate_shapes, default_policy
from spec_v2.speculative.forced_acceptance import say_if_forced
from spec_v2.speculative_hook import resolve_speculative
from spec_v2.streaming import Chunk, RequestStream


class Engine:
    """A model with its scheduler, caches and streams. A context manager: leaving it frees everything.

    `model`: the default model's name, a local folder, a hub id, or a loaded transformers causal LM (then
    `dtype` and `device` are the model's). `draft_model`: a loaded draft model, in place of
    `speculative_draft_model_path`. `adaptive_policy`: chooses how much each step drafts, in place of the built-in one;
    it turns `speculative_adaptive` on. `debug`: check every hand-over between steps (slow), and raise what a step raises
    instead of going on after it. Other keywords are `ServerArgs` fields. Raises ValueError naming the field for anything that cannot work.
    """

    def __init__(
        self,
        model: Any = "smollm2-135m",
        *,
        tokenizer: Any = None,
        draft_model: Any = None,
        adaptive_policy: AdaptivePolicy | None = None,
        debug: bool = False,
        **server_args: Any,
    ) -> None:
        model = server_args.pop("model_path", model)  # SGLang's name for it
        given = isinstance(model, torch.nn.Module)
        name = getattr(model.config, "name_or_path", "") or type(model).__name__ if given else model
        if adaptive_policy is not None:
            server_args = turned_on_for(adaptive_policy, server_args)
        args = ServerArgs.from_kwargs(model_path=name, **server_args)
        if draft_model is None and args.speculative_draft_model_path is None:
            args = replace(args, speculative_draft_model_path=shipped_draft(args))
        self.server_args = resolve_speculative(args, draft_model_given=draft_model is not None)
        worker_class = self.server_args.algorithm.create_worker(self.server_args)
        self._closed = False
        self._last_requests: list[Request] = []
        say_if_forced(self.server_args)
        self.device = model.device if given else open_device(self.server_args.device)
        self.model, self.tokenizer, self.dtype = self._load(model, tokenizer)
        self.context_length = self._context_length()
        self.trace = Trace()
        self._factory = RequestFactory(
            self.model, self.tokenizer, self.context_length, self.server_args.random_seed
        )
        self._runners: list[ModelRunner] = []
        try:
            target = self._runner(self.model, "model_path", self._aux_layers())
            draft = self._draft_runner(draft_model)
            self._build(target, draft, worker_class, adaptive_policy, debug)
        except BaseException:
            self._detach_runners()
            raise

    # -- use -----------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[Completion]:
        """One completion per prompt, in order. A single prompt gives a list of one.

        A prompt is text, token ids, or chat messages (the model's own template). `sampling_params`: one for all, or one for each. `progress`: a bar on
        stderr; None shows it to a terminal or notebook only. Raises ValueError, before anything runs, for a
        prompt or parameter that cannot work. A request that fails by itself ends with finish_reason "error"; the others go on.
        An interrupt frees all and leaves the engine usable; `last_completions` has what was said until then.
        """
        requests = self._last_requests = self._requests(prompts, sampling_params)
        try:
            self.scheduler.add_requests(requests)
            with progress_bar(sum(r.max_new_tokens for r in requests), "tok", progress) as bar:
                for _ in self._steps(requests):
                    bar.update(sum(len(r.output_ids) for r in requests) - bar.n)
        except BaseException:
            self.scheduler.abort_all()
            raise
        return [completion_of(req, self.tokenizer) for req in requests]

    @property
    def last_completions(self) -> list[Completion]:
        """Of the newest `generate`, whatever ended it: after an interrupt, finished ones and the beginnings of the others."""
        return [completion_of(req, self.tokenizer) for req in self._last_requests]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[Chunk]:
        """Like `generate`, but gives each request's news after every step. Leaving the loop early aborts them.

        Other calls may be made between chunks: their requests join the same batches.
        """
        requests = self._requests(prompts, sampling_params)
        return self._stream([RequestStream(i, r, self.tokenizer) for i, r in enumerate(requests)])

    def abort(self, request_id: int) -> None:
        """End a running request at the next step: finish_reason "abort", its text so far. Any thread may call."""
        self.scheduler.abort_request(request_id)

    @contextmanager
    def record_steps(self, max_steps: int = 10_000) -> Iterator[StepLog]:
        """Keep each decode step's tree and what was accepted, the newest `max_steps`, while the context is open.

        It costs a launch and a host read per step, and nothing outside of the context.
        """
        self.scheduler.processor.step_log = log = StepLog(self._decode_token, max_steps)
        try:
            yield log
        finally:
            self.scheduler.processor.step_log = None

    def _decode_token(self, token: int) -> str:
        return str(token) if self.tokenizer is None else str(self.tokenizer.decode([token]))

    def close(self) -> None:
        """Stop the streams and give the model its own attention back. The engine cannot be used afterwards."""
        if self._closed:
            return
        self._closed = True
        self.scheduler.abort_all()
        self._forward_stream.close()
        self._copy_stream.close()
        self._detach_runners()

    def _detach_runners(self) -> None:
        """A model that was given to us goes back as it came."""
        for runner in self._runners:
            runner.detach()
            return_mixers(runner.model)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[Request]:
        if self._closed:
            raise RuntimeError("this engine is closed; make a new Engine")
        if self.scheduler.is_unclean:
            self.scheduler.abort_all()
        requests = self._factory.make(prompts, sampling_params)
        for req in requests:
            self.scheduler.planner.check_fits(req)
        return requests

    def _steps(self, requests: list[Request]) -> Iterator[None]:
        """Run steps until these requests are done, and to the end where there are no others."""
        for _ in self.scheduler.event_loop():
            yield
            if all(r.finished for r in requests) and self.scheduler.has_requests:
                return

    def _stream(self, streams: list[RequestStream]) -> Iterator[Chunk]:
        requests = [s.req for s in streams]
        try:
            self.scheduler.add_requests(requests)
            for _ in self._steps(requests):
                yield from self._news(streams)
            yield from self._news(streams)  # ended by another caller's steps
        except GeneratorExit:
            self.scheduler.abort_now([r for r in requests if not r.finished])
            raise
        except BaseException:
            self.scheduler.abort_all()
            raise

    def _news(self, streams: list[RequestStream]) -> list[Chunk]:
        chunks = []
        for stream in streams:
            try:
                chunks.append(stream.news())
            except Exception as error:  # noqa: BLE001 - the tokenizer's, on this request's text
                self.scheduler.fail_now(stream.req, undecodable(stream.req, error))
                chunks.append(stream.news())
        return [chunk for chunk in chunks if chunk is not None]

    @property
    def device_name(self) -> str:
        """The device for reports: a simulated one says that it is."""
        return device_name(self.device)

    def __repr__(self) -> str:
        return f"Engine({self.server_args!r}, device={self.device_name!r}, dtype={str(self.dtype)!r})"

    # -- building ------------------------------------------------------------------------------------------

    def _load(self, model: Any, tokenizer: Any) -> tuple[Any, Any, torch.dtype]:
        from spec_v2.models.loader import load_model, load_tokenizer

        args = self.server_args
        if isinstance(model, torch.nn.Module):
            for name in ("device", "dtype"):
                if getattr(args, name) != "auto":
                    raise ValueError(
                        f"{name}={getattr(args, name)!r} is not used by a model that is loaded already; move the "
                        f"model with .to(...) and leave {name} out"
                    )
            return model.eval(), tokenizer, model.dtype  # type: ignore[return-value]
        dtype = getattr(torch, "bfloat16" if args.dtype == "auto" else args.dtype)
        loaded = load_model(args.model_path, dtype=dtype, device=self.device)
        speed_up(loaded.model)
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

    def _aux_layers(self) -> tuple[int, ...]:
        if self.server_args.algorithm is not SpeculativeAlgorithm.EAGLE3:
            return ()
        return default_aux_layers(int(self.model.config.num_hidden_layers))

    def _runner(self, model: Any, field: str, aux_layers: tuple[int, ...] = ()) -> ModelRunner:
        lend_mixers(model)
        try:
            runner = ModelRunner(model, self.context_length, field, aux_layers, known_mixers=MIXERS)
        except BaseException:
            return_mixers(model)
            raise
        self._runners.append(runner)
        return runner

    def _draft_runner(self, draft_model: Any) -> ModelRunner | None:
        algorithm = self.server_args.algorithm
        if not algorithm.needs_draft_model():
            return None
        if draft_model is None:
            draft_model = load_draft_model(self.server_args, self.model, self.tokenizer)
            speed_up(draft_model, shared_with=self.model)
        check_draft_model(self.server_args, self.model, draft_model)
        positions = int(draft_model.config.max_position_embeddings)
        if positions < self.context_length:
            raise ValueError(
                f"speculative_draft_model_path: the draft model has {positions} positions, the context is "
                f"{self.context_length} long; use --context-length {positions} or another draft model"
            )
        return self._runner(draft_model, "speculative_draft_model_path")

    def _build(
        self,
        target: ModelRunner,
        draft: ModelRunner | None,
        worker_class: Any,
        policy: AdaptivePolicy | None,
        debug: bool,
    ) -> None:
        args = self.server_args
        check_recurrent(args, target, draft)
        cache = make_cache(args, target, draft, self.dtype, self.device, self.context_length)
        cache.target_pool.debug = cache.draft_pool.debug = debug
        future_map = make_future_map(args, target, draft, cache, self.dtype, self.device, debug)
        num_threads = args.num_threads or torch.get_num_threads()
        self._forward_stream = make_stream("forward", self.device, self.trace, num_threads)
        self._copy_stream = make_stream("copy", self.device, self.trace, 1)
        cache.row_table.on_stream = self._forward_stream.owns_current_thread
        if isinstance(self._forward_stream, NpuStream):
            lens = self._forward_stream.host_lens = HostLens(args.page_size)
            if use_fused_attention(cache, target, draft, lens):
                future_map.mirror_on_host(can_pin(self.device.type))
        worker = worker_class(
            stream=self._forward_stream,
            target=target,
            draft=draft,
            cache=cache,
            future_map=future_map,
            server_args=args,
        )
        if args.speculative_ngram_external_corpus_path is not None:
            worker.load_corpus(self.tokenizer)
        sizes = self._record_graphs(future_map)
        policy = policy or default_policy(args, self.device.type, records=bool(sizes))
        self.scheduler = Scheduler(
            server_args=args,
            worker=worker,
            cache=cache,
            future_map=future_map,
            forward_stream=self._forward_stream,
            copy_stream=self._copy_stream,
            device=self.device,
            trace=self.trace,
            shapes=StepShapes(candidate_shapes(args), policy),
            survives_errors=not debug,
            capture_sizes=sizes,
        )

    def _record_graphs(self, future_map: FutureMap) -> tuple[int, ...]:
        """Let the forward stream record decode steps, where it can. Returns the batch sizes that it will see."""
        args = self.server_args
        # debug checks read values on the host
        if self.device.type == "cpu" or args.disable_cuda_graph or future_map.debug:
            return ()
        future_map.open_row_0()
        if isinstance(self._forward_stream, NpuStream):
            assert self._forward_stream.host_lens is not None
            self._forward_stream.graphs = NpuGraphs(self.device, self._forward_stream.host_lens)
        else:
            self._forward_stream.graphs = CudaGraphRunner(self.device)
        return capture_sizes(
            min(args.cuda_graph_max_bs or args.max_running_requests, args.max_running_requests)
        )
