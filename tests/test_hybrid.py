"""Models with recurrent layers say what transformers makes them say, whatever drafts for them and in whatever trees."""

import copy

import pytest
import torch
from transformers import LlamaConfig

from spec_v2 import Engine, SamplingParams
from spec_v2.facts import facts_of
from spec_v2.models.eagle import EagleHead
from spec_v2.models.eagle3 import Eagle3Head
from spec_v2.models.hybrid import MIXERS
from tests import hybrid_models as hybrids
from tests import tiny_models as tiny
from tests.draft_oracles import StandaloneOracle, grow
from tests.harness import CHAIN, NARROW_TREE, TREE_2, TREE_4, Coverage, Recorder, check_identity, sampled
from tests.surface import assert_at_rest

FAMILIES = list(hybrids.FAMILIES)
KINDS = ["qwen3_5_text", "bamba", "lfm2"]  # one of each recurrence, for what need not be said of each class
LENGTHS = (9, 1, 16, 4)
N = 30


def greedy(count=N):
    return SamplingParams(max_new_tokens=count)


@pytest.fixture
def open_hybrid(open_engine, schedule, device):
    """An engine on a hybrid target, by (family, algorithm, shape)."""

    def open_one(family, algorithm=None, shape=CHAIN, draft="noisy", **changes):
        target = hybrids.hybrid(family, device)
        kinds = {None: None, "NGRAM": None, "STANDALONE": draft, "EAGLE": "head"}
        kind = kinds[algorithm]
        drafter = hybrids.drafter(kind, family, device) if kind else None
        return open_engine(target, algorithm, drafter, shape, schedule=schedule, **changes)

    return open_one


# -- against transformers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_decoding_is_transformers_own_generate(open_hybrid, family, device):
    """Its own cache, its own chunked prefill and one-token updates."""
    model = hybrids.hybrid(family, device)
    prompts = hybrids.prompts(model, LENGTHS, N)
    with torch.no_grad():
        wanted = [
            tuple(
                model.generate(
                    torch.tensor([p], device=device), max_new_tokens=N, do_sample=False, use_cache=True
                )[0, len(p) :].tolist()
            )
            for p in prompts
        ]
    engine = open_hybrid(family)
    assert [done.output_ids for done in engine.generate(prompts, greedy())] == wanted
    assert_at_rest(engine)


@pytest.mark.parametrize("family", KINDS)
def test_a_model_is_transformers_own_again_after_the_engine_and_meanwhile(open_hybrid, family, device):
    model = hybrids.hybrid(family, device)
    ids = torch.tensor([[1, 2, 3]], device=device)
    before = model(input_ids=ids, use_cache=False).logits
    engine, other = open_hybrid(family), open_hybrid(family, "STANDALONE", draft="self")
    for name in ("eager", "spec_v2"):
        model.set_attn_implementation(name)
        if name == "eager":
            assert torch.equal(model(input_ids=ids, use_cache=False).logits, before)
    engine.close()
    assert other.generate([(1, 2, 3)], greedy(4))[0].output_ids == tuple(
        tiny.oracle_of(model).tokens((1, 2, 3), 4)
    )
    other.close()
    assert not any("forward" in vars(m) for m in model.modules() if type(m).__name__ in MIXERS)
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, before)


@pytest.mark.parametrize("family", KINDS)
def test_a_folder_is_loaded_and_said_what_it_is_made_of(family, schedule, device, tmp_path):
    """In float32, through the loader, with projections packed; and in bfloat16, where nothing is certain but the length."""
    model = copy.deepcopy(hybrids.hybrid(family, device)).float()
    for module in model.modules():
        vars(module).pop("forward", None)  # transformers' own norms
    model.save_pretrained(tmp_path)
    oracle = tiny.Oracle(model, attention="eager", min_margin=0)
    options = {"context_length": 60, "disable_overlap_schedule": schedule == "sync", "device": device.type}
    with Engine(str(tmp_path), dtype="float32", speculative_algorithm="NGRAM", **options) as engine:
        facts = facts_of(engine)
        assert facts["model"]["recurrent_layers"] == 1
        assert facts["model"]["kv_heads"] == model.config.num_key_value_heads
        rows = facts["state_pool"]["requests"] + facts["state_pool"]["snapshots"] + 1
        buffers = engine.scheduler.cache.target_states.buffers()
        assert facts["state_pool"]["bytes"] == sum(buffer.nbytes for buffer in buffers)
        assert facts["state_pool"]["bytes"] == rows * facts["model"]["state_bytes_per_request"]
        (done,) = engine.generate([(1, 2, 3, 4, 5)], greedy(12))
        assert type(engine.model).__name__ == type(model).__name__
    wanted = oracle.tokens((1, 2, 3, 4, 5), 12)
    first = next((i for i, (a, b) in enumerate(zip(done.output_ids, wanted, strict=True)) if a != b), None)
    if first is not None:  # only where two tokens are as good as equal
        best = oracle.logits([1, 2, 3, 4, 5, *wanted[:first]]).topk(2).values
        assert float(best[0] - best[1]) < 1e-3
    with Engine(str(tmp_path), dtype="bfloat16", **options) as engine:
        (done,) = engine.generate([(1, 2, 3, 4, 5)], greedy(12))
        assert len(done.output_ids) == 12
        states = engine.scheduler.cache.target_states.states.values()
        assert {buffer.dtype for buffer in states} <= {torch.float32}


# -- identity ------------------------------------------------------------------------------------------------


def run_cell(open_hybrid, family, algorithm, topk, *, is_sampled, page_size):
    shape = CHAIN if topk == 1 else TREE_4
    engine = open_hybrid(family, algorithm, shape, page_size=page_size, max_running_requests=3)
    prompts = hybrids.prompts(engine.model, LENGTHS, N)
    if algorithm == "NGRAM":
        engine.scheduler.worker.corpus = hybrids.half_true_corpus(engine.model, prompts, N)
    params = [
        sampled(i, max_new_tokens=N - 4 * i) if is_sampled else greedy(N - 4 * i) for i in range(len(prompts))
    ]
    records = check_identity(engine, prompts, params)
    assert_at_rest(engine)
    return records


@pytest.mark.parametrize("topk", [1, 4])
@pytest.mark.parametrize("algorithm", ["EAGLE", "NGRAM", "STANDALONE"])
@pytest.mark.parametrize("family", FAMILIES)
def test_st10_st11_identity(open_hybrid, family, algorithm, topk):
    coverage = Coverage()
    for is_sampled, page_size in ((False, 1), (True, 16)):
        records = run_cell(open_hybrid, family, algorithm, topk, is_sampled=is_sampled, page_size=page_size)
        coverage.add(records)
    assert 1 in coverage.accepted, "no step accepted nothing"
    assert len(coverage.accepted) >= 3
    assert coverage.full or algorithm == "NGRAM", "no step accepted all that it could"
    assert coverage.rows_differed
    assert topk == 1 or (coverage.moved and coverage.later_child), "the trees were chains"


# -- drafters ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_recurrent_drafter_that_is_the_target_is_always_right(open_hybrid, family):
    """The draft model has states of its own: one position ahead, and behind every node of its tree."""
    engine = open_hybrid(family, "STANDALONE", CHAIN, draft="self")
    prompts = hybrids.prompts(engine.model, LENGTHS, N)
    records = check_identity(engine, prompts, [greedy()] * len(prompts))
    assert {r.accept_len for r in records} == {CHAIN[0] + 1}


@pytest.mark.parametrize("shape", [TREE_2, NARROW_TREE], ids=str)
@pytest.mark.parametrize("family", KINDS)
def test_the_tree_is_what_plain_chains_of_a_recurrent_drafter_give(open_hybrid, family, shape, device):
    target, draft = hybrids.hybrid(family, device), hybrids.drafter("noisy", family, device)
    oracle = StandaloneOracle(target, draft)
    recorder = Recorder(engine := open_hybrid(family, "STANDALONE", shape, chunked_prefill_size=5))
    engine.generate(hybrids.prompts(target, (3, 8, 13), 16), greedy(16))
    for request in range(3):
        for record in recorder.of_request(request)[:4]:
            wanted = grow(lambda path, text=record.text: oracle.next_logits(text, path), shape)
            nodes = {
                tuple(record.tokens[n] for n in record.path(node)[1:]): record.scores[node]
                for node in range(1, len(record.tokens))
            }
            assert nodes == pytest.approx(wanted, rel=1e-3, abs=1e-6), f"{request}, step {record.step}"


def test_a_repeated_convolution_is_accepted_whole_once_the_first_token_is_out_of_its_window(
    open_engine, schedule, device
):
    """An EAGLE head of one short convolution sees what its target sees, but for the first token."""
    target = tiny.lively(hybrids.one_convolution, min_margin=hybrids.MARGIN).to(device)
    head = hybrids.repeating_head(target, sigma=0.0)
    engine = open_engine(target, "EAGLE", head, CHAIN, schedule=schedule)
    records = check_identity(engine, [tiny.random_prompt(i, 5) for i in range(4)], [greedy()] * 4)
    assert {r.accept_len for r in records} == {CHAIN[0] + 1}
    assert not any(engine.scheduler.cache.target_pool.keys[0].shape[1:]), "nothing is kept per token"


def test_an_eagle3_head_reads_hidden_states_of_recurrent_layers(open_engine, schedule, device):
    target = tiny.lively(hybrids.six_layers, min_margin=hybrids.MARGIN).to(device)
    target.min_margin = hybrids.MARGIN
    config = LlamaConfig(**tiny.config_kwargs(num_hidden_layers=1, draft_vocab_size=tiny.VOCAB))
    head = tiny.in_float64(tiny.seeded(lambda: Eagle3Head(config, target), 0)).to(device)
    engine = open_engine(target, "EAGLE3", head, TREE_2, schedule=schedule)
    prompts = hybrids.prompts(target, LENGTHS, 12)
    check_identity(engine, prompts, [greedy(12)] * len(prompts))
    assert not engine.scheduler.cache.draft_states


@pytest.mark.parametrize(("family", "option"), [("lfm2", "norm_input"), ("bamba", "norm_output")])
def test_a_head_whose_norm_has_another_name_is_refused(family, option, device):
    target = hybrids.hybrid(family, device)
    options = {"norm_input": True, "norm_output": True, option: False}
    with pytest.raises(ValueError, match=f"speculative_draft_model_path: .*{option}"):
        EagleHead(copy.deepcopy(target.config), target, **options)
