"""list_replacements gives the table, finds rows in it and draws them."""

import dataclasses
import json
import re
from html.parser import HTMLParser

import pytest

from legacy_compat import list_replacements, registry
from legacy_compat.table_view import TOPICS, Replacements


def test_it_is_the_table():
    everything = list_replacements()
    assert tuple(everything) == registry.load()
    assert everything[0].code == "SV101"
    assert everything[-1] is registry.load()[-1]
    assert isinstance(everything[2:5], Replacements)
    assert len(everything[2:5]) == 3
    assert everything[:2] == everything[0:2] != everything[:3]
    assert registry.by_code("SV301") in everything


@pytest.mark.parametrize(
    ("search", "codes"),
    [
        ("isolation", {"SV301"}),
        ("SV101", {"SV101"}),
        ("eagleworker.DRAFT_forward", {"SV133"}),
        ("SGLANG_ENABLE_SPEC_V2", {"SV601", "SV602"}),
        ("standalone_worker.StandaloneWorker.verify", {"SV134"}),  # an alias
    ],
)
def test_search(search, codes):
    assert codes <= {row.code for row in list_replacements(search)}
    assert len(list_replacements(search)) < 12


def test_search_that_finds_nothing():
    nothing = list_replacements("no such word")
    assert len(nothing) == 0
    assert repr(nothing) == "no removal matches"
    assert nothing._repr_html_() == "<p>No removal matches.</p>"
    assert nothing.to_dicts() == []


def test_by_release():
    early = {row.code for row in list_replacements(sglang_version="0.5.13")}
    assert "SV101" in early
    assert "SV306" not in early  # is_spec_v2 went in 0.5.14
    assert "SV306" in {row.code for row in list_replacements(sglang_version="0.5.14")}
    assert tuple(list_replacements(sglang_version="0.6.0")) == registry.load()
    assert not list_replacements(sglang_version="0.5.9")
    with pytest.raises(ValueError, match="version is 'latest'"):
        list_replacements(sglang_version="latest")


def test_text():
    text = repr(list_replacements())
    assert text.startswith("SV101  sglang.srt.speculative.eagle_worker.EAGLEWorker\n       → sglang.srt.")
    assert text.endswith(
        f"... and {len(registry.load()) - 20} more: list_replacements('a word') searches, [n] takes one"
    )
    assert len(text.splitlines()) == 41
    assert "more" not in repr(list_replacements()[:20])
    assert "→ nothing" in repr(list_replacements("get_last_loc_large_page_size_top_k_1"))


def test_json():
    rows = json.loads(list_replacements().to_json())
    assert [row["code"] for row in rows] == [row.code for row in registry.load()]
    assert rows[0]["sglang_replacement"].endswith("EAGLEWorkerV2")


class Reader(HTMLParser):
    """Collects the cells of a table by row, and checks that tags close in order."""

    def __init__(self):
        super().__init__()
        self.open, self.rows = [], []

    def handle_starttag(self, tag, attrs):
        if tag in ("br", "wbr"):
            return
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data


def read(html):
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == []
    return reader.rows


def test_html_says_the_same_without_styles():
    html = list_replacements()._repr_html_()
    bare = re.sub(r' style="[^"]*"', "", html)
    header, *rows = read(bare)
    assert header == ["Code", "Gone, and since which SGLang", "Instead", "Fix", "What changes"]
    assert [row[0] for row in rows if len(row) == 1] == list(TOPICS.values())
    cells = {row[0]: row[1:] for row in rows if len(row) == 5}
    assert list(cells) == [row.code for row in registry.load()]
    for row in registry.load():
        gone, instead, fix, changes = cells[row.code]
        assert gone == f"{row.old_path}{row.kind}, {row.removed_in}"
        assert instead == f"SGLang: {row.sglang_replacement or '–'}spec_v2: {row.spec_v2_replacement or '–'}"
        assert (fix, changes) == (row.safety, row.changes)


def test_html_shows_what_looks_like_html():
    row = dataclasses.replace(
        registry.by_code("SV101"), changes="a < b & <b>c</b>", sglang_replacement="x.<y>"
    )
    _, _, (_, _, instead, _, changes) = read(Replacements([row])._repr_html_())
    assert changes == "a < b & <b>c</b>"
    assert instead.startswith("SGLang: x.<y>")


def test_html_takes_its_colours_from_the_page():
    html = list_replacements()._repr_html_()
    styles = {
        part.split(":")[0].strip()
        for text in re.findall(r'style="([^"]*)"', html)
        for part in text.split(";")
    }
    assert styles == {"max-height", "overflow", "width", "table-layout", "text-align", "vertical-align"}
    assert "<script" not in html


def test_html_of_a_search_has_only_its_topics():
    rows = read(list_replacements("_overlap_forward_isolation")._repr_html_())
    assert [row[0] for row in rows if len(row) == 1] == [TOPICS["3"]]


def test_every_code_has_a_topic():
    assert {row.code[2] for row in registry.load()} == set(TOPICS)
