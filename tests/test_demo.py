"""The demo: its verdicts, its tables, and all of it once on a tiny model."""

import re
from types import SimpleNamespace

import pytest
import torch

from spec_v2 import demo, demo_report
from spec_v2.completion import Completion, SpecMetrics
from spec_v2.models.shipped import shipped_draft
from spec_v2.server_args import ServerArgs
from tests.tiny_folder import save_tiny_model


def run_of(ids, algorithm="NGRAM", prompt="repeat"):
    done = Completion(
        text="some text",
        output_ids=tuple(ids),
        finish_reason="length",
        prompt_tokens=2,
        spec=SpecMetrics(accept_lens=(2, 1), draft_depths=(3, 0)),
    )
    return demo_report.Run(prompt, (1, 2), algorithm, "sync", done, 0.5)


class FixedLogits:
    """A target that says the same after every text, and remembers what it was asked."""

    device, dtype = torch.device("cpu"), torch.bfloat16

    def __init__(self, logits):
        self._logits = torch.tensor(logits, dtype=torch.bfloat16)

    def __call__(self, input_ids, use_cache):
        self.asked = input_ids.tolist()
        return SimpleNamespace(logits=self._logits.expand(*input_ids.shape, -1))


# --- verdicts ---


def test_an_equal_text_is_the_same():
    plain = run_of([5, 6, 7], "plain")
    assert demo_report.tie_note(plain, plain, None) == ("(compared with)", False)
    assert demo_report.tie_note(run_of([5, 6, 7]), plain, None) == ("same", False)


@pytest.mark.parametrize(
    ("logits", "said", "wrong"),
    [
        # bfloat16's neighbours of 20 are 0.125 apart, so four of them are 0.5
        ([20.0, 20.0, 1.0], "margin 0: a bf16 tie", False),
        ([19.5, 20.0, 1.0], "margin 0.5: a bf16 tie", False),
        ([19.375, 20.0, 1.0], "margin 0.625: NOT a tie, the limit is 0.5", True),
        # the unit is that of the largest logit by magnitude, whatever its sign: it tells how large the hidden state is
        ([6.0, 6.5, -20.0], "margin 0.5: a bf16 tie", False),
        ([6.0, 6.5, -4.0], "margin 0.5: NOT a tie, the limit is 0.125", True),
        # the two tokens tie with each other, but a third is far above both: neither was to be chosen
        ([5.0, 5.0, 20.0], "margin 15: NOT a tie, the limit is 0.5", True),
    ],
)
def test_texts_may_part_only_at_a_tie(logits, said, wrong):
    target = FixedLogits(logits)
    note = demo_report.tie_note(run_of([2, 1, 2]), run_of([2, 0, 2], "plain"), target)
    assert note == (f"parts at token 1, {said}", wrong)
    assert target.asked == [[1, 2, 2]]  # the prompt and what both have in common


def test_a_text_that_is_cut_short_is_wrong():
    note, wrong = demo_report.tie_note(run_of([5]), run_of([5, 6], "plain"), None)
    assert note.startswith("NOT the same")
    assert wrong


@pytest.mark.parametrize(
    ("left", "right", "place"),
    [((1, 2), (1, 2), None), ((1, 2), (1, 3), 1), ((1,), (1, 2), 1), ((), (), None)],
)
def test_first_difference(left, right, place):
    assert demo_report.first_difference(left, right) == place


@pytest.mark.parametrize(("value", "step"), [(1.0, 2**-7), (-20.0, 0.125), (32.0, 0.25), (31.9, 0.125)])
def test_ulp_of_bfloat16(value, step):
    assert demo_report.ulp(value, torch.finfo(torch.bfloat16).eps) == step


def test_exact_comparison_names_what_differs():
    plain, other = run_of([5, 6], "plain"), run_of([5, 7])
    assert demo_report.compare_exactly([plain, plain]) == ("2 of 2 runs give the same 2 tokens", 0)
    assert demo_report.compare_exactly([plain, other]) == ("NOT equal: NGRAM, sync parts at token 1", 1)


# --- tables ---


def test_columns_are_aligned():
    lines = demo_report.align([("", "tokens/s", "text"), ("plain", "1.5", "same")], right=(1,))
    assert lines == ["        tokens/s   text", "plain        1.5   same"]


def test_a_block_shows_the_runs_of_a_prompt():
    text = demo_report.block("repeat", "Say\nthis.", [(run_of([5, 6, 7]), "same")])
    assert text.startswith('repeat: "Say this."\n  answer: "some text" (3 tokens)\n')
    assert re.search(r"NGRAM +sync +6\.0 +1\.50 +0\.33 +same", text)


def test_the_summary_adds_up_prompts():
    runs = [run_of([5, 6, 7], prompt=p) for p in ("repeat", "story")]
    assert re.search(r"NGRAM +sync +6\.0 +1\.50$", demo_report.summary(runs))


# --- the whole ---


def test_prompts_use_the_chat_template_where_there_is_one():
    class Tokenizer:
        chat_template = None

        def __call__(self, text, **options):
            return {"input_ids": [len(text), *options.values()]}

        def apply_chat_template(self, chat, **options):
            return "<user>" + chat[0]["content"] if options["add_generation_prompt"] else "?"

    tokenizer = Tokenizer()
    assert demo.token_ids(tokenizer, "abc") == (3,)
    tokenizer.chat_template = "a template"
    assert demo.token_ids(tokenizer, "abc") == (9, False)


def test_the_demo_runs_on_another_model(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SPEC_V2_CACHE", str(tmp_path / "cache"))
    folder = save_tiny_model(tmp_path / "tiny")
    code = demo.main(["--quick", "--model", str(folder)])
    out, err = capsys.readouterr()
    assert code == ("NOT" in out)
    assert out.count("6 of 6 runs give the same 24 tokens") == len(demo.EXACT_PROMPTS)
    assert "first 1 of 3 layers" in " ".join(out.split())
    assert "not a speed-up on a CPU" in out
    for prompt in demo.PROMPTS:
        assert f"\n{prompt}: " in out
    assert max(map(len, out.splitlines())) <= 120
    assert len(re.findall(r"^\.\.\. .* \[[0-9.]+ s\]$", err, re.MULTILINE)) == 2 + 2 * 6


@pytest.mark.parametrize(("exact_ids", "num_wrong"), [((5, 6), 4), ((5, 9), 6)])
def test_wrong_outputs_fail_the_demo(monkeypatch, capsys, exact_ids, num_wrong):
    def measure(models, prompts, num_tokens):
        ids = (5, 7) if len(prompts) == len(demo.PROMPTS) else exact_ids
        for algorithm in ("plain", "NGRAM"):
            yield from (run_of((5, 6) if algorithm == "plain" else ids, algorithm, p) for p in prompts)

    target = FixedLogits([0.0] * 6 + [20.0, 10.0])  # 6 was right and 7 is no tie
    monkeypatch.setattr(demo, "load_models", lambda model, dtype: demo.Models(target, None, 3))
    monkeypatch.setattr(demo, "measure", measure)
    assert demo.main(["--quick"]) == 1
    assert f"FAILED: {num_wrong} outputs differ" in capsys.readouterr().out


def test_the_default_model_drafts_with_its_head():
    assert list(demo.Models(None, None, 30, head_path="a folder").settings) == ["plain", "NGRAM", "EAGLE3"]
    assert list(demo.Models(None, None, 3, draft_layers=1).settings) == ["plain", "NGRAM", "STANDALONE"]
    head_path = shipped_draft(ServerArgs(speculative_algorithm="EAGLE3"))
    assert head_path is not None  # what load_models looks for


def test_a_model_that_cannot_be_used_is_named(capsys):
    assert demo.main(["--model", "/no/such/model"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "model_path='/no/such/model'" in err


def test_ctrl_c_exits_130(monkeypatch, capsys):
    def interrupted(model, num_tokens):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "demo", interrupted)
    assert demo.main([]) == 130
    assert capsys.readouterr().err == "demo: interrupted\n"
