"""EAGLE-3: three layers of the target in, a reduced vocabulary out; the tokens are plain decoding's."""

import pytest
import torch

from spec_v2 import SamplingParams
from spec_v2.models.eagle3 import default_aux_layers
from tests import tiny_models as tiny
from tests.draft_oracles import grow
from tests.eagle3_models import Eagle3Oracle, aux_features, deep_llama, eagle3_head
from tests.harness import CHAIN, NARROW_TREE, TREE_2, Recorder, check_identity, sampled

EVEN = range(0, 64, 2)
PROMPTS = [tiny.random_prompt(20 + i, 7 + 3 * i) for i in range(3)]


def open_eagle3(open_engine, schedule, device, token_map=None, shape=TREE_2, **changes):
    target = deep_llama(device)
    head = eagle3_head(target, token_map)
    engine = open_engine(target, "EAGLE3", head, shape, schedule=schedule, **changes)
    return engine, head


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("token_map", [None, EVEN], ids=["whole", "reduced"])
@pytest.mark.parametrize("shape", [CHAIN, TREE_2, NARROW_TREE], ids=str)
def test_identity(open_engine, shape, token_map, page_size, schedule, device):
    changes = {"page_size": page_size, "disable_radix_cache": False, "chunked_prefill_size": 6}
    engine, _ = open_eagle3(open_engine, schedule, device, token_map, shape, **changes)
    check_identity(engine, PROMPTS, [sampled(i, max_new_tokens=16) for i in range(3)])


@pytest.mark.parametrize("shape", [CHAIN, TREE_2], ids=str)
def test_ck04_only_mapped_ids_are_proposed(open_engine, shape, schedule, device):
    engine, _ = open_eagle3(open_engine, schedule, device, EVEN, shape)
    recorder = Recorder(engine)
    done = engine.generate(PROMPTS, SamplingParams(max_new_tokens=16))
    drafted = {token for r in recorder.records for token in r.tokens[1:]}
    assert drafted <= set(EVEN)
    assert len(drafted) > 5
    assert any(token % 2 for d in done for token in d.output_ids), "the target says the others all the same"


@pytest.mark.parametrize("token_map", [None, EVEN, (3, 5, 6, 40, 62, 63)], ids=["whole", "even", "few"])
@pytest.mark.parametrize("shape", [CHAIN, TREE_2], ids=str)
def test_ck04_dr04_the_tree_is_what_full_forwards_of_the_head_give(
    open_engine, shape, token_map, schedule, device
):
    engine, head = open_eagle3(open_engine, schedule, device, token_map, shape)
    oracle = Eagle3Oracle(engine.model, head, token_map)
    recorder = Recorder(engine)
    engine.generate(PROMPTS, SamplingParams(max_new_tokens=8))
    for record in recorder.of_request(0)[:4] + recorder.of_request(1)[:2]:
        wanted = grow(lambda path, text=record.text: oracle.next_logits(text, path), shape)
        nodes = {
            tuple(record.tokens[n] for n in record.path(node)[1:]): record.scores[node]
            for node in range(1, len(record.tokens))
        }
        assert nodes == pytest.approx(wanted, rel=1e-4, abs=1e-30)


@pytest.mark.parametrize("chunk", [None, 4])
def test_ck09_the_head_reads_the_inputs_of_its_layers(open_engine, chunk, schedule, device):
    engine, _ = open_eagle3(open_engine, schedule, device, chunked_prefill_size=chunk)
    draft = engine._runners[1]
    forward, seen = draft.forward, []

    def noted(*args, target_hidden=None, **kwargs):
        seen.append(target_hidden)
        return forward(*args, target_hidden=target_hidden, **kwargs)

    draft.forward = noted
    prompt = PROMPTS[2]
    engine.generate(prompt, SamplingParams(max_new_tokens=1))
    found = torch.cat(seen)
    torch.testing.assert_close(found, aux_features(engine.model, prompt), rtol=1e-10, atol=1e-10)


def test_ck09_low_middle_and_high():
    assert default_aux_layers(32) == (2, 16, 29)
    assert default_aux_layers(6) == (2, 3, 3)
    with pytest.raises(ValueError, match="EAGLE3"):
        default_aux_layers(5)


def test_a_shallow_target_is_refused(device):
    from tests.harness import make_engine

    target = tiny.llama(device)
    own = target.config._attn_implementation
    with pytest.raises(ValueError, match="speculative_algorithm=EAGLE3"):
        make_engine(target, "EAGLE3", eagle3_head(target), TREE_2)
    assert target.config._attn_implementation == own
