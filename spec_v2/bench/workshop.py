"""Where a suite's models and contenders are opened, and closed again when the next ones need the room."""

import gc
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from spec_v2.bench.contenders import Contender, EngineContender, TransformersContender
from spec_v2.bench.opening import for_transformers, load_for_transformers
from spec_v2.bench.oracle import OracleContender, register_oracle
from spec_v2.bench.prediction import StepCost
from spec_v2.bench.settings import ORACLE, STAND_IN_LAYERS
from spec_v2.bench.suite_models import ModelPlan, SuiteModel, load_suite_model, random_target, weight_bytes
from spec_v2.bench.suite_rows import ENTRIES, Entry
from spec_v2.engine import Engine

ACTIVATION_BYTES = 6 << 30  # of a prefill of many prompts, and of logits
SPARE_POSITIONS = 64  # of the context, behind prompt and text: drafts that cannot be emitted any more


class Missing(ValueError):
    """A contender that cannot take part here, and why."""


class Workshop:
    """One model at a time. All engines of a case share its weights; transformers has a copy of its own."""

    def __init__(
        self, plans: Mapping[str, ModelPlan], device: torch.device, engine: Mapping[str, Any]
    ) -> None:
        register_oracle()
        self._plans, self.device, self._engine_settings = plans, device, engine
        self._num_threads: int | None = engine.get("num_threads")
        self._loaded: dict[str, SuiteModel] = {}
        self._theirs: dict[str, Any] = {}

    def plan(self, name: str) -> ModelPlan:
        return self._plans[name]

    def model(self, name: str) -> SuiteModel:
        """The model of this name; the one before it is let go."""
        if name not in self._loaded:
            self.clear()
            self._loaded[name] = load_suite_model(self._plans[name], self.device)
        return self._loaded[name]

    def clear(self) -> None:
        """Let go of everything that is loaded."""
        self._loaded.clear()
        self._theirs.clear()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def check_room(self, name: str, batch_size: int, entries: Sequence[str]) -> None:
        """Raise Missing where a GPU has less free memory than the case is bound to need."""
        if self.device.type != "cuda":
            return
        if name not in self._loaded:
            self.clear()
        plan, c = self._plans[name], self._plans[name].config
        copies = 1 + any(ENTRIES[entry].theirs for entry in entries) - len(self._loaded)
        width = 2 * c["hidden_size"] // c["num_attention_heads"] * c["num_key_value_heads"]
        per_token = width * c["num_hidden_layers"] * getattr(torch, plan.dtype).itemsize
        tokens = batch_size * (plan.prompt_tokens + plan.new_tokens + SPARE_POSITIONS)
        needed = weight_bytes(plan) * copies + per_token * tokens * len(set(entries)) + ACTIVATION_BYTES
        free, _ = torch.cuda.mem_get_info(self.device)
        if needed > free:
            raise Missing(
                f"needs about {needed / 2**30:.0f} GiB of GPU memory, and {free / 2**30:.0f} are free"
            )

    def open(self, name: str, model_name: str, batch_size: int, opened: Mapping[str, Contender],
             closing: ExitStack) -> Contender:  # fmt: skip
        """The contender `name`. `opened`: those before it, among them plain decoding where it is to be replayed.

        Raises Missing where it cannot take part.
        """
        entry, model = ENTRIES[name], self.model(model_name)
        if entry.theirs is not None:
            return self._transformers(name, entry.theirs, model, batch_size)
        if entry.algorithm == ORACLE and "plain" not in opened:
            raise Missing(f"{name} replays plain decoding, which does not run here")
        engine = closing.enter_context(self._engine(entry, model, batch_size))
        if self.device.type == "cuda":
            torch.cuda.synchronize(
                self.device
            )  # weights were made on another stream than the one that reads them
        if entry.algorithm == ORACLE:
            plain = opened["plain"]
            assert isinstance(plain, EngineContender)
            return OracleContender(name, engine, plain)
        return EngineContender(name, engine)

    def _engine(self, entry: Entry, model: SuiteModel, batch_size: int) -> Engine:
        plan, draft = model.plan, None
        if entry.algorithm == "EAGLE3":
            draft, _ = model.head()
        if entry.algorithm == "STANDALONE":
            draft = self._stand_in(model)
        return Engine(
            model.model,
            draft_model=draft,
            context_length=plan.prompt_tokens + plan.new_tokens + SPARE_POSITIONS,
            max_running_requests=batch_size,
            disable_radix_cache=True,
            **self._engine_settings,
            **entry.settings,
        )

    def step_cost(self, name: str, model_name: str) -> StepCost | None:
        """What a step of the contender must cost; None for those that are not ours."""
        entry, model = ENTRIES[name], self.model(model_name)
        given = entry.settings.get
        if entry.theirs is not None or entry.algorithm == "STANDALONE":
            return None
        nodes, steps = given("speculative_num_draft_tokens", 1), given("speculative_num_steps", 1)
        return StepCost(
            target=model.cost,
            draft=model.head()[1] if entry.algorithm == "EAGLE3" else None,
            num_nodes=nodes,
            num_steps=steps,
            topk=given("speculative_eagle_topk", 1),
            accept_width=min(nodes, steps + 1),
        )

    # -- transformers, and the real model's stand-in ------------------------------------------------------

    def _transformers(self, name: str, kind: str, model: SuiteModel, batch_size: int) -> Contender:
        if kind != "generate" and batch_size > 1:
            raise Missing(f"{name} takes one prompt at a time")
        options: dict[str, Any] = {}
        if kind == "lookup":
            options["prompt_lookup_num_tokens"] = (
                ENTRIES["NGRAM"].settings["speculative_num_draft_tokens"] - 1
            )
        if kind == "assisted":
            options["assistant_model"] = self._copy(model, "assistant")
        theirs = self._copy(model, "target")
        speculates = kind != "generate"
        return TransformersContender(
            name.removeprefix("transformers "), theirs, self._num_threads, speculates=speculates, **options
        )

    def _copy(self, model: SuiteModel, role: str) -> Any:
        if role not in self._theirs:
            self._theirs[role] = self._load_copy(model, role)
        return self._theirs[role]

    def _load_copy(self, model: SuiteModel, role: str) -> Any:
        if role != "target":
            return load_for_transformers(self._first_layers(model), model.model.dtype, self.device)
        if model.is_real:
            assert model.plan.packaged is not None
            return load_for_transformers(model.plan.packaged, model.model.dtype, self.device)
        return for_transformers(random_target(model.plan, self.device))

    def _stand_in(self, model: SuiteModel) -> Any:
        from spec_v2.model_executor.fuse import speed_up
        from spec_v2.models.loader import load_model

        path = self._first_layers(model)
        if "stand-in" not in self._theirs:
            loaded = load_model(path, dtype=model.model.dtype, device=self.device).model
            speed_up(loaded)
            self._theirs["stand-in"] = loaded
        return self._theirs["stand-in"]

    def _first_layers(self, model: SuiteModel) -> str:
        from spec_v2.models.loader import first_layers

        if not model.is_real or model.plan.packaged is None:
            raise Missing(f"its draft model is the first layers of the real one, and here are {model.note}")
        return str(first_layers(model.plan.packaged, STAND_IN_LAYERS))
