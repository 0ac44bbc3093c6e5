"""What draws itself in a notebook: plain elements, everything escaped, and the same meaning without styles."""

import re
from html.parser import HTMLParser

import pytest
import torch

from legacy_compat import list_replacements
from spec_v2 import Completion, DraftTree, ServerArgs, SpecMetrics, Trace
from spec_v2.observability.markup import table, tree_list, visible
from tests.test_plots import TREE

HOSTILE = "</td><script>alert(1)</script><b onclick=x>&amp;\n"
TAGS = {
    "p",
    "b",
    "i",
    "ul",
    "li",
    "span",
    "table",
    "caption",
    "thead",
    "tbody",
    "tr",
    "th",
    "td",
    "br",
    "code",
    "div",
    "wbr",
}
ATTRIBUTES = {"style", "scope", "colspan"}
VOID = {"br", "wbr"}


class Reader(HTMLParser):
    """Checks the nesting, and collects tags, attributes and text."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.open, self.text = set(), set(), [], ""
        self.feed(html)
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def trace_with(name):
    trace = Trace()
    for step in range(3):
        with trace.span("forward", name, step):
            pass
    return trace


def tree(b):
    return DraftTree(
        tokens=torch.tensor([[7, 10, 11, 0]] * b),
        parents=torch.tensor([[-1, 0, 1, -1]] * b),
        scores=torch.tensor([[1.0, 0.6, 0.3, 0.0]] * b),
        match_lens=torch.zeros(b, dtype=torch.long),
        draft_probs=torch.empty(b, 0, 0),
    )


def completion(step_lens, accept_lens, pieces):
    return Completion(
        text="".join(pieces),
        output_ids=tuple(range(len(pieces))),
        finish_reason="length",
        prompt_tokens=3,
        spec=SpecMetrics(accept_lens, (3,) * len(accept_lens)),
        pieces=pieces,
        step_lens=step_lens,
    )


DONE = completion((1, 3, 1, 2), (3, 1, 2), ("a", "b", "c", "d", "e", HOSTILE, "g"))
OBJECTS = {
    "Completion": DONE,
    "DraftTree": tree(6),
    "DecodeStep": TREE,
    "Trace": trace_with(HOSTILE),
    "ServerArgs": ServerArgs(model_path=HOSTILE),
    "the legacy table": list_replacements("EAGLEWorker"),
}


@pytest.fixture(params=OBJECTS)
def shown(request):
    return OBJECTS[request.param]


def test_elements_are_plain_and_well_nested(shown):
    html = shown._repr_html_()
    read = Reader(html)
    assert read.tags <= TAGS
    assert read.attributes <= ATTRIBUTES
    assert "url(" not in html
    assert "http" not in html


def test_the_meaning_survives_without_styles(shown):
    html = shown._repr_html_()
    bare = re.sub(r' style="[^"]*"', "", html)
    assert "style" not in bare
    assert Reader(bare).text == Reader(html).text
    assert Reader(bare).tags == Reader(html).tags


def test_a_repr_is_short(shown):
    most_lines = 41 if shown is OBJECTS["the legacy table"] else 1
    assert len(repr(shown).splitlines()) <= most_lines
    assert "tensor(" not in repr(shown)


def bold_of(done):
    return re.findall(r"<b[^>]*>(.*?)</b>", done._repr_html_().split("<table>")[0])


def test_accepted_drafts_are_bold_and_the_targets_own_are_not():
    assert bold_of(DONE) == [
        "bc",
        "&lt;/td&gt;&lt;script&gt;alert(1)&lt;/script&gt;&lt;b onclick=x&gt;&amp;amp;&#8629;<br>",
    ]


def test_a_step_that_was_cut_has_no_bonus():
    """Four tokens were accepted in the last step, two of them kept: both are drafts."""
    assert bold_of(completion((1, 2), (4,), ("a", "b", "c"))) == ["bc"]
    assert bold_of(completion((1, 2), (2,), ("a", "b", "c"))) == ["b"]
    assert bold_of(completion((1,), (), ("a",))) == []


def test_a_step_says_in_words_what_became_of_its_drafts():
    said = Reader(TREE._repr_html_()).text
    for words in (
        "✓ ␣dog 0.40 accepted",
        "✗ ␣cat 0.50 rejected",
        "· $x$ 0.50 not reached",
        "␣the, known before",
    ):
        assert words in said
    assert "2 of 7 drafts accepted, then ␣barks, the target's own token" in said


def test_a_tree_shows_its_first_requests_and_no_padding():
    html = tree(6)._repr_html_()
    assert html.count("<b>10</b> 0.600") == 4
    assert "and 2 more" in html
    assert "<b>0</b>" not in html
    assert "more" not in tree(4)._repr_html_()
    assert repr(tree(6)) == "DraftTree(6 requests, 4 nodes each, on cpu)"


def test_a_trace_tells_how_long_things_took():
    said = Reader(trace_with("verify")._repr_html_()).text
    assert "what ran on each lane" in said
    assert "forwardverify3" in said


def test_white_space_is_shown():
    assert [visible(t) for t in (" a\n", "", "\x00", "統")] == ["␣a↵", "∅", "\\x00", "統"]


def test_the_helpers_escape():
    assert "<i>" not in table("<i>", ["<i>"], [["<i>", "<i>"]])
    assert tree_list([-1, 0, -1], str) == "<ul><li>0<ul><li>1</li></ul></li></ul>"
