"""What recurrent layers don't do is refused when the engine opens, by the name of the setting."""

import pytest

from spec_v2 import SamplingParams
from tests import hybrid_models as hybrids
from tests import tiny_models as tiny
from tests.harness import CHAIN


def test_an_adaptive_drafter_with_recurrent_layers_is_refused(open_engine, device):
    target, draft = hybrids.hybrid("lfm2", device), hybrids.drafter("noisy", "lfm2", device)
    with pytest.raises(ValueError, match=r"speculative_adaptive=True.*recurrent layers.*leave it out"):
        open_engine(target, "STANDALONE", draft, CHAIN, speculative_adaptive=True)


def test_an_adaptive_drafter_for_a_recurrent_target_gives_its_tokens(open_engine, schedule, device):
    target = hybrids.hybrid("lfm2", device)
    draft = tiny.noisy_copy(tiny.llama(device))
    prompts = hybrids.prompts(target, (9, 4), 20)
    engine = open_engine(target, "STANDALONE", draft, CHAIN, schedule=schedule, speculative_adaptive=True)
    done = engine.generate(prompts, SamplingParams(max_new_tokens=20))
    assert [d.output_ids for d in done] == [tuple(tiny.oracle_of(target).tokens(p, 20)) for p in prompts]
