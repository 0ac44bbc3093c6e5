"""Fused layers give what transformers' own give; what cannot be fused keeps its own forward and the report says why."""

import copy
import re

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from spec_v2 import SamplingParams
from spec_v2.bench.fused import Shape, bench_kernels, bench_layers, model_step
from spec_v2.mem_cache.kv_pool import KvPool, RowTable
from spec_v2.model_executor import fused as fused_module
from spec_v2.model_executor.forward_batch import extend_forward_batch
from spec_v2.model_executor.fuse import FusedReport, fuse_layers, fuse_linears
from spec_v2.model_executor.fused import FusedAttention, FusedMlp, FusedNorm
from spec_v2.model_executor.model_runner import ModelRunner
from spec_v2.models.eagle import EagleHead
from tests import tiny_models as tiny
from tests.cells import models
from tests.eagle3_models import deep_llama, eagle3_head
from tests.harness import CHAIN, TREE_2

LENGTHS = (5, 3)
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
# what is fused of two layers, a last norm and a rotary module
FAMILIES = {
    "llama": ({"attention_bias": True, "mlp_bias": True}, 4),
    "mistral": ({"sliding_window": 4}, 4),
    "qwen2": ({}, 4),
    "qwen3": ({"head_dim": 16}, 4),
    "smollm3": ({"no_rope_layers": [1, 0]}, 4),
    "qwen3_moe": ({"head_dim": 8} | MOE, 4),
}
# what tells a family apart, and the reason that the report gives for its layers
KEPT = {
    "granite": ({"residual_multiplier": 0.7}, "residual sum"),
    "gemma": ({"head_dim": 8}, "GemmaRMSNorm gives other numbers"),
    "glm": ({"head_dim": 8}, "GlmMLP|GlmAttention|keys gives"),
    "olmo": ({}, "LayerNorm is no RMS norm"),
}
UNSEEN = {"gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8}, "phi3": {}, "gpt_neox": {}}


def build(family, dtype=torch.float32, seed=0, **changes):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **tiny.config_kwargs(initializer_range=0.2, **changes))
    model = tiny.seeded(lambda: AutoModelForCausalLM.from_config(config), seed)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():  # norms' weights and biases start at one and zero, which hides them
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.to(dtype).eval().requires_grad_(False)


def run(model, device, aux_layers=(), dtype=None):
    """Two prefills in one forward. Returns the output, and the KV of all layers."""
    runner = ModelRunner(model, tiny.CONTEXT, aux_layers=aux_layers)
    try:
        pool = KvPool(runner.geometry, 1 + sum(LENGTHS), runner.dtype, device)
        table = RowTable(3, max(LENGTHS), device)
        table.slots[1, : LENGTHS[0]] = torch.arange(1, 1 + LENGTHS[0])
        table.slots[2, : LENGTHS[1]] = torch.arange(1 + LENGTHS[0], 1 + sum(LENGTHS))
        rows = torch.tensor([1, 2], device=device)
        batch = extend_forward_batch(
            kv_pool=pool, row_table=table, rows=rows, prefix_lens=(0, 0), extend_lens=LENGTHS
        )
        ids = torch.tensor(tiny.random_prompt(0, sum(LENGTHS)), device=device)
        positions = torch.cat([torch.arange(n) for n in LENGTHS]).to(device)
        with torch.no_grad():
            return runner.forward(ids, positions, batch), [*pool.keys, *pool.values]
    finally:
        runner.detach()


def rounding(device):
    """What two layers in float32 may differ by: a GPU's packed products sum in another order."""
    return 2e-6 if device.type == "cpu" else 2e-5


def assert_same_run(one, other, tolerance):
    for got, want in zip(one[1], other[1], strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    for name in ("logits", "hidden_states"):
        got, want = getattr(one[0], name), getattr(other[0], name)
        assert float((got - want).norm()) <= tolerance * float(want.norm())


# -- equal ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, device):
    changes, count = FAMILIES[family]
    model = build(family, **changes).to(device)
    fused = copy.deepcopy(model)
    report = fuse_layers(fused, on_cpu=True)
    assert len(report.fused) == count, report
    has_experts = "moe" in family
    assert set(report.kept) == ({f"model.layers.{i}.mlp" for i in (0, 1)} if has_experts else set())
    assert_same_run(run(fused, device), run(model, device), rounding(device))


def test_float64_to_the_last_digits(device):
    model = copy.deepcopy(tiny.llama(device))
    fused = copy.deepcopy(model)
    assert len(fuse_layers(fused, on_cpu=True).fused) == 4
    assert_same_run(run(fused, device), run(model, device), 1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_on_a_cpu_is_bit_for_bit_torchs(dtype):
    """The references round where transformers rounds, so nothing differs but what a kernel does."""
    device = torch.device("cpu")
    model = build("qwen3", dtype, head_dim=16)
    fused = copy.deepcopy(model)
    assert len(fuse_layers(fused, on_cpu=True).fused) == 4
    packed = copy.deepcopy(fused)
    for module in packed.modules():
        module.__dict__.pop("forward", None)
    got, want = run(fused, device), run(packed, device)
    assert torch.equal(got[0].logits, want[0].logits)
    assert all(map(torch.equal, got[1], want[1]))


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen3", "smollm3"])
def test_on_a_gpu_in_bf16(family):
    device = torch.device("cuda")
    model = build(family, torch.bfloat16, **FAMILIES[family][0]).to(device)
    fused = copy.deepcopy(model)
    report = fuse_layers(fused)
    assert len(report.fused) == 4, report
    got, want = (run(m, device)[0].logits.float() for m in (fused, model))
    assert float((got - want).norm()) <= 0.05 * float(want.norm())


@pytest.mark.gpu
@torch.no_grad()
def test_a_captured_step_is_the_step():
    device = torch.device("cuda")
    shape = Shape("tiny", 64, 96, 4, 2, 16)
    step = model_step(shape, 3, fuse=True, num_layers=2, dtype=torch.bfloat16, device=device)
    step()  # compiles
    right = step().logits.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    captured.logits.zero_()
    graph.replay()
    assert torch.equal(captured.logits, right)


def test_inputs_of_layers_and_the_last_hidden_states_are_still_to_be_seen(device):
    model = deep_llama(device)
    fused = copy.deepcopy(model)
    assert len(fuse_layers(fused, on_cpu=True).fused) == 10
    for aux_layers in ((2, 4, 5), (0, 7), ()):
        assert_same_run(run(fused, device, aux_layers), run(model, device, aux_layers), 1e-11)


def test_whoever_replaces_hidden_states_gets_the_norm_of_the_replacement(device):
    outputs = []
    for fuse in (False, True):
        model = copy.deepcopy(tiny.llama(device))
        if fuse:
            fuse_layers(model, on_cpu=True)
        for layer in model.model.layers:
            layer.register_forward_hook(lambda module, args, output: output * 0.5)
        outputs.append(run(model, device))
    assert_same_run(*outputs, 1e-12)


# -- linear layers -------------------------------------------------------------------------------------------


def test_linear_layers_keep_their_numbers_and_what_is_shared_is_fused_once(device):
    target = copy.deepcopy(tiny.llama(device))
    head = copy.deepcopy(target)
    head.lm_head = target.lm_head
    layers = [m for m in target.modules() if type(m) is nn.Linear]
    want = [
        layer(torch.ones(2, 3, layer.in_features, dtype=layer.weight.dtype, device=device))
        for layer in layers
    ]
    assert fuse_linears(target) == len(layers)
    assert fuse_linears(head) == len(layers) - 1
    for layer, own in zip(layers, want, strict=True):
        got = layer(torch.ones(2, 3, layer.in_features, dtype=layer.weight.dtype, device=device))
        assert torch.equal(got, own)  # float64 takes torch's product
    del layers[0].forward
    assert fuse_linears(target) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 5, 16, 17])
def test_few_tokens_take_the_kernel(tokens, monkeypatch):
    layer = nn.Linear(300, 70, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
    x = torch.randn(1, tokens, 300, device="cuda", dtype=torch.bfloat16)
    want = layer(x)
    fuse_linears(layer)
    torch.testing.assert_close(layer(x), want, rtol=2**-7, atol=2**-7)
    monkeypatch.setattr(torch.nn.functional, "linear", None)
    if tokens <= 16:
        assert layer(x).shape == (1, tokens, 70)
    else:
        with pytest.raises(TypeError):
            layer(x)


# -- engines -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [None, "EAGLE", "STANDALONE"])
def test_an_engine_on_fused_models_decodes_as_before(open_engine, algorithm, schedule, device):
    target, draft = (copy.deepcopy(m) for m in models(algorithm, "noisy" if algorithm else "nothing", device))
    prompts = [tiny.random_prompt(seed, 4 + seed) for seed in range(3)]
    right = [
        tuple(tiny.oracle_of(models(algorithm, "noisy" if algorithm else "nothing", device)[0]).tokens(p, 16))
        for p in prompts
    ]
    assert fuse_layers(target, on_cpu=True).fused
    if draft is not None:
        assert fuse_layers(draft, on_cpu=True).fused
    engine = open_engine(target, algorithm, draft, TREE_2, schedule=schedule)
    done = engine.generate(prompts, SamplingParams(max_new_tokens=16))
    assert [d.output_ids for d in done] == right


@pytest.mark.parametrize("shape", [CHAIN, TREE_2], ids=["chain", "tree"])
def test_eagle3_drafts_the_same_tokens(open_engine, shape, device):
    target = deep_llama(device)
    prompt = tiny.random_prompt(4, 6)
    steps = []
    for fuse in (False, True):
        model, head = copy.deepcopy(target), eagle3_head(target)
        if fuse:
            report = fuse_layers(head, on_cpu=True)
            assert set(report.fused) == {"decoder.midlayer", "decoder.rotary_emb"}, report
            assert len(fuse_layers(model, on_cpu=True).fused) == 10
        engine = open_engine(model, "EAGLE3", head, shape)
        (done,) = engine.generate([prompt], SamplingParams(max_new_tokens=16))
        steps.append((done.output_ids, done.spec.verify_ct, done.spec.num_correct_drafts))
    assert steps[0] == steps[1]


def test_a_published_eagle_head_has_no_norms_around_its_layer(device):
    target = tiny.llama(device)
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = 1
    head = tiny.in_float64(tiny.seeded(lambda: EagleHead(config, target), 0)).to(device)
    report = fuse_layers(head, on_cpu=True)
    assert set(report.fused) == {"decoder.layers.0", "decoder.norm", "decoder.rotary_emb"}, report


# -- refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", KEPT)
def test_a_family_that_computes_something_else_is_kept(family, device):
    changes, reason = KEPT[family]
    model = build(family, **changes).to(device)
    fused = copy.deepcopy(model)
    report = fuse_layers(fused, on_cpu=True)
    assert not [name for name in report.fused if "layers" in name]
    for i in range(2):
        assert re.search(reason, report.kept[f"model.layers.{i}"]), report
    assert_same_run(run(fused, device), run(model, device), rounding(device))


@pytest.mark.parametrize("family", UNSEEN)
def test_layers_of_other_parts_are_not_touched(family, device):
    model = build(family, **UNSEEN[family]).to(device)
    report = fuse_layers(model, on_cpu=True)
    assert not [name for name in report.fused if "layers" in name]


def scaled(name):
    """A module whose output is a little larger than that of its class."""

    def change(layer):
        part = layer.get_submodule(name)
        own = type(part)

        class Larger(own):
            def forward(self, *args, **kwargs):
                output = own.forward(self, *args, **kwargs)
                return (output[0] * 1.001, *output[1:]) if isinstance(output, tuple) else output * 1.001

        part.__class__ = Larger

    return change


def other_activation(layer):
    layer.mlp.act_fn = nn.GELU()


def unpackable(layer):
    old = layer.self_attn.k_proj
    layer.self_attn.k_proj = nn.Linear(old.in_features, old.out_features).requires_grad_(False)


def clipped(layer):
    layer.self_attn.config = copy.copy(layer.self_attn.config)
    layer.self_attn.config.clip_qkv = 30.0


def another_residual(layer):
    own = type(layer)

    class Other(own):
        def forward(self, hidden_states, **kwargs):
            return own.forward(self, hidden_states, **kwargs) + 0.01 * hidden_states

    layer.__class__ = Other


def another_residual_inside(layer):
    own = type(layer)

    class Other(own):
        def forward(self, hidden_states, **kwargs):
            attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
            hidden_states = 1.01 * hidden_states + attended
            return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))

    layer.__class__ = Other


CHANGES = {
    "residual inside": (another_residual_inside, "post_attention_layernorm reads something else"),
    "input norm": (scaled("input_layernorm"), "gives other numbers"),
    "attention": (scaled("self_attn"), "self_attn gives other numbers"),
    "norm after it": (scaled("post_attention_layernorm"), "gives other numbers"),
    "mlp": (scaled("mlp"), "mlp gives other numbers"),
    "projections apart": (unpackable, "could not be packed"),
    "clipping": (clipped, "clip_qkv is set"),
    "residual": (another_residual, "the layer returns something else"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_module_is_noticed_and_its_neighbours_are_fused(change, device):
    model = build("llama", num_hidden_layers=3)
    make, reason = CHANGES[change]
    make(model.model.layers[1])
    model = model.to(device)
    fused = copy.deepcopy(model)
    report = fuse_layers(fused, on_cpu=True)
    assert list(report.kept) == ["model.layers.1"], report
    assert reason in report.kept["model.layers.1"]
    assert {"model.layers.0", "model.layers.2", "model.norm"} <= set(report.fused)
    assert_same_run(run(fused, device), run(model, device), rounding(device))


def test_another_activation_stays_in_a_fused_layer(device):
    model = build("llama").to(device)
    other_activation(model.model.layers[1])
    fused = copy.deepcopy(model)
    report = fuse_layers(fused, on_cpu=True)
    assert report.kept == {"model.layers.1.mlp": "its activation is GELU, not SiLU"}
    assert len(report.fused) == 4
    assert_same_run(run(fused, device), run(model, device), rounding(device))


WRONG = {
    "norm": (FusedNorm, "of"),
    "attention": (FusedAttention, "__call__"),
    "mlp": (FusedMlp, "__call__"),
}


@pytest.mark.parametrize("part", WRONG)
def test_a_wrong_kernel_is_noticed(part, monkeypatch, device):
    """A kernel that is wrong on some GPU costs speed, not right answers."""
    owner, name = WRONG[part]
    right = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args: right(*args) * 1.01)
    model = build("llama").to(device)
    want = run(copy.deepcopy(model), device)
    report = fuse_layers(model, on_cpu=True)
    assert {"model.layers.0", "model.layers.1"} <= set(report.kept), report
    assert_same_run(run(model, device), want, rounding(device))


def test_keys_and_values_that_are_not_written_are_noticed(monkeypatch, device):
    """The slots hold the right ones already, from the forward that was recorded."""
    monkeypatch.setattr(fused_module, "rotary_kv_write", lambda query, *args: query.contiguous())
    report = fuse_layers(build("smollm3", no_rope_layers=[0, 0]).to(device), on_cpu=True)
    assert "keys gives other numbers" in report.kept["model.layers.0"], report


def test_a_model_that_is_refused_is_left_alone(device):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = build("llama", rope_parameters=rope).to(device)
    report = fuse_layers(model, on_cpu=True)
    assert not report.fused
    assert "dynamic" in str(report)


# -- around it -----------------------------------------------------------------------------------------------


def test_without_slots_the_model_is_transformers_own(device):
    model = copy.deepcopy(tiny.llama(device))
    ids = torch.tensor([tiny.random_prompt(1, 9), tiny.random_prompt(2, 9)], device=device)
    want = model(input_ids=ids).logits
    fuse_layers(model, on_cpu=True)
    run(model, device)
    torch.testing.assert_close(model(input_ids=ids).logits, want, rtol=1e-12, atol=1e-12)
    assert model.config._attn_implementation != "spec_v2"


def test_rows_of_positions_are_transformers_own_too(device):
    model = copy.deepcopy(tiny.llama(device))
    ids = torch.tensor([tiny.random_prompt(1, 9), tiny.random_prompt(2, 9)], device=device)
    positions = torch.stack([torch.arange(9), 2 * torch.arange(9)]).to(device)
    want = model(input_ids=ids, position_ids=positions).logits
    fuse_layers(model, on_cpu=True)
    got = model(input_ids=ids, position_ids=positions).logits
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_a_debugged_pool_checks_the_slots(monkeypatch, device):
    model = copy.deepcopy(tiny.llama(device))
    fuse_layers(model, on_cpu=True)
    checked = []
    monkeypatch.setattr(KvPool, "check", lambda pool, slots: checked.append(slots))
    run(model, device)
    assert len(checked) == model.config.num_hidden_layers


def test_a_copy_has_weights_of_its_own(device):
    fused = copy.deepcopy(tiny.llama(device))
    fuse_layers(fused, on_cpu=True)
    want = run(fused, device)
    other = copy.deepcopy(fused)
    for parameter in other.model.layers.parameters():
        parameter.data.zero_()
    assert_same_run(run(fused, device), want, 0)
    assert not torch.equal(run(other, device)[0].logits, want[0].logits)


def test_names_stay_and_a_forward_can_be_taken_off(device):
    model = copy.deepcopy(tiny.llama(device))
    names = [name for name, _ in model.named_modules()]
    report = fuse_layers(model, on_cpu=True)
    assert [n for n in names if "proj" not in n] == [n for n, _ in model.named_modules() if "proj" not in n]
    want = run(model, device)
    assert fuse_layers(model, on_cpu=True) == FusedReport()
    del model.model.layers[0].forward
    assert_same_run(run(model, device), want, 1e-12)
    assert str(report) == "4 modules fused"


def test_on_a_cpu_nothing_is_done_unasked():
    model = build("llama")
    report = fuse_layers(model)
    assert str(report) == "0 modules fused; model.layers.0 and 1 more kept: on a CPU"
    assert type(model.model.layers[0].self_attn.q_proj) is nn.Linear
    assert not any("forward" in module.__dict__ for module in model.modules())


# -- launches ------------------------------------------------------------------------------------------------

VIEWS = {
    "view", "_unsafe_view", "unsqueeze", "split", "split_with_sizes", "select", "slice", "transpose", "t", "permute",
    "detach", "alias", "expand", "unbind", "empty", "_reshape_alias", "as_strided", "squeeze",
}  # fmt: skip


class Launches(TorchDispatchMode):
    """Counts operators that compute something; a kernel of ours is one, whatever its reference does."""

    def __init__(self):
        super().__init__()
        self.names, self.inside = [], False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::").split(".")[0]
        if not self.inside and name not in VIEWS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))

    def as_one(self, name, fn):
        def counted(*args, **kwargs):
            self.names.append(name)
            self.inside = True
            try:
                return fn(*args, **kwargs)
            finally:
                self.inside = False

        return counted


def launches(num_layers, device, monkeypatch):
    model = build("llama", num_hidden_layers=num_layers).to(device)
    fuse_layers(model, on_cpu=True)
    counter = Launches()
    with monkeypatch.context() as patch:
        for name in (
            "rms_norm",
            "add_rms_norm",
            "rotary_kv_write",
            "silu_mul",
            "attend_written",
            "rotary_angles",
        ):
            patch.setattr(fused_module, name, counter.as_one(name, getattr(fused_module, name)))
        with counter:
            run(model, device)
    # the runner's constructor made a forward too, one without slots
    return counter.names[len(counter.names) - counter.names[::-1].index("rotary_angles") :]


def test_a_layer_is_nine_launches(device, monkeypatch):
    two, three = (launches(n, device, monkeypatch) for n in (2, 3))
    more = {name: three.count(name) - two.count(name) for name in three}
    products = {name: n for name, n in more.items() if n and name in ("mm", "addmm", "linear", "matmul")}
    assert sum(products.values()) == 4
    ours = {name: n for name, n in more.items() if n and name not in products}
    assert ours == {"add_rms_norm": 2, "rotary_kv_write": 1, "attend_written": 1, "silu_mul": 1}


def test_the_benchmark_runs_what_it_says(device, capsys):
    shape = Shape("tiny", 32, 64, 4, 2, 8)
    bench_kernels([shape], [3], device)
    bench_layers([shape], [2], device, num_layers=2)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1 + 5 + 1 + 3, said
    assert "4 modules fused" in said[-2]
