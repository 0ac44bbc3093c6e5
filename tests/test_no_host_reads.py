"""Between launches nothing waits for the device: no value and no shape of a step is read on the host.

Every launch, and the scheduler thread while it launches a step, runs with host reads forbidden: those that Python
asks a tensor for, and those that an operator makes inside. On CUDA torch's own synchronisation check is on as well.
"""

import threading
import warnings
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from spec_v2.scheduler.streams import CpuStream, CudaStream, NpuStream
from tests import hybrid_models as hybrids
from tests.harness import TREE_2
from tests.scheduling_helpers import ALGORITHMS, expected, greedy, outputs, scene_engine, scene_prompts
from tests.tiny_models import llama


class HostRead(Exception):
    pass


READS = (
    "item",
    "tolist",
    "cpu",
    "numpy",
    "nonzero",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__array__",
)
OPERATORS = (
    "_local_scalar_dense", "nonzero", "nonzero_numpy", "masked_select", "equal", "is_nonzero", "allclose",
    "unique_dim", "_unique", "_unique2", "unique_consecutive",
)  # fmt: skip
INDEXING = ("index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_")
_inside = threading.local()


class NoHostReads(TorchDispatchMode):
    """Raises for every operator whose result, or its shape, the host has to know."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::").split(".")[0]
        indices = args[1] if name in INDEXING else ()
        masked = any(isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices)
        no_size = name == "repeat_interleave" and (kwargs or {}).get("output_size") is None
        if name in OPERATORS or masked or no_size:
            raise HostRead(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def host_reads_forbidden(device):
    before = getattr(_inside, "on", False)
    _inside.on = True
    mode = torch.cuda.get_sync_debug_mode() if device.type == "cuda" else 0
    try:
        set_cuda_sync_mode(device, 2)  # an operation that waits for the device is an error
        with NoHostReads():
            yield
    finally:
        _inside.on = before
        set_cuda_sync_mode(device, mode)


def set_cuda_sync_mode(device, mode):
    if device.type == "cuda":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that the mode is a prototype
            torch.cuda.set_sync_debug_mode(mode)


def refusing(name, original):
    def read(self, *args, **kwargs):
        if getattr(_inside, "on", False):
            raise HostRead(name)
        return original(self, *args, **kwargs)

    return read


@pytest.fixture
def forbid(monkeypatch, device):
    """Forbids host reads inside every launch, and on the scheduler thread while it launches a step.

    The engine would start a failed step over, and that one may not read; here it gives up at once.
    """

    def give_up(suspects, error):
        raise error

    monkeypatch.setattr("spec_v2.scheduler.scheduler.accuse", give_up)
    for name in READS:
        monkeypatch.setattr(torch.Tensor, name, refusing(name, getattr(torch.Tensor, name)))

    for stream_class in (CpuStream, CudaStream, NpuStream):

        def launch(self, fn, /, *args, label="", original=stream_class.launch):
            def guarded(*values):
                with host_reads_forbidden(device):
                    return fn(*values)

            return original(self, guarded, *args, label=label)

        monkeypatch.setattr(stream_class, "launch", launch)

    def apply(engine):
        run_batch = engine.scheduler.run_batch

        def guarded(batch, *, overlap):
            with host_reads_forbidden(device):
                return run_batch(batch, overlap=overlap)

        engine.scheduler.run_batch = guarded

    return apply


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_no_step_reads_the_device(algorithm, sampled, schedule, device, forbid):
    drafter = "random" if algorithm == "EAGLE" else None
    with scene_engine(algorithm, device, drafter, schedule=schedule, debug=False) as engine:
        if device.type == "cuda":
            engine.generate([(1, 2)], greedy(2))  # libraries set themselves up once, and wait for it
        forbid(engine)
        options = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 5} if sampled else {}
        prompts = scene_prompts(algorithm, engine.model, 3)
        params = [greedy(n, **options) for n in (8, 5, 6)]
        assert outputs(engine, prompts, params) == expected(engine, prompts, params)


@pytest.mark.parametrize("algorithm", ALGORITHMS[1:])
def test_forced_acceptance_reads_nothing_either(algorithm, schedule, device, forbid):
    with scene_engine(
        algorithm, device, schedule=schedule, debug=False, speculative_simulated_accept_length=2
    ) as engine:
        if device.type == "cuda":
            engine.generate([(1, 2)], greedy(2))
        forbid(engine)
        done = engine.generate(scene_prompts(algorithm, engine.model, 3), greedy(7))
        assert all(one.spec.forced_acceptance for one in done)


@pytest.mark.parametrize("algorithm", ["NGRAM", "STANDALONE"])
@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2"])
def test_recurrent_layers_read_nothing_either(open_engine, algorithm, family, schedule, device, forbid):
    """The drafter is recurrent too."""
    target = hybrids.hybrid(family, device)
    draft = hybrids.drafter("noisy", family, device) if algorithm == "STANDALONE" else None
    engine = open_engine(target, algorithm, draft, TREE_2, schedule=schedule, debug=False)
    prompts = hybrids.prompts(target, (9, 4, 2), 8)
    forbid(engine)
    assert outputs(engine, prompts, greedy(8)) == expected(engine, prompts, [greedy(8)] * 3)


CULPRITS = {
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "bool": lambda x: bool(x.sum() > 0),
    "int": lambda x: int(x[0]),
    "range": lambda x: list(range(x[1])),
    "nonzero": lambda x: torch.nonzero(x),
    "where": lambda x: torch.where(x > 1),
    "mask": lambda x: x[x > 1],
    "mask write": lambda x: x.clone().index_put_((x > 1,), x[:1]),
    "masked_select": lambda x: torch.masked_select(x, x > 1),
    "equal": lambda x: torch.equal(x, x),
    "unique": lambda x: torch.unique(x),
    "repeat_interleave": lambda x: torch.repeat_interleave(x, x),
}


@pytest.mark.parametrize("culprit", CULPRITS)
def test_the_guard_notices(culprit, open_engine, device, forbid):
    engine = open_engine(llama(device), debug=False)
    forbid(engine)
    worker = engine.scheduler.worker

    class Reading:
        def forward_batch_generation(self, batch, on_publish):
            worker.stream.launch(CULPRITS[culprit], torch.arange(4, device=device))
            return worker.forward_batch_generation(batch, on_publish)

    engine.scheduler.worker = Reading()
    with pytest.raises((HostRead, RuntimeError) if device.type == "cuda" else HostRead):
        engine.generate([(1, 2)], greedy(3))
