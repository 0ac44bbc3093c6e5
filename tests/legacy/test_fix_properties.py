"""Whatever the program: fixing twice is fixing once, what has no finding isn't touched, and the result parses."""

import ast
import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from legacy_compat.fix.run import fix_bytes
from legacy_compat.fix.texts import Allowed, Refused
from legacy_compat.scan.run import Options, scan_bytes
from tests.legacy.scan_tools import S, notebook, rules

EXAMPLES = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
V2 = "SGLANG_ENABLE_SPEC_V2"

expressions = st.sampled_from(
    [
        "batch.is_spec_v2",
        "not batch.is_spec_v2",
        "(batch.is_spec_v2)",
        "EAGLEWorker",
        "ew.EAGLEWorker",
        "ew.fast_topk(1)",
        "algo.supports_spec_v2()",
        "mode.is_draft_extend(include_v2=True)",
        "sched._overlap_forward_isolation(batch)",
        "batch.filter_batch(ids, v1_spec_info_filtered=True)",
        f'"{S}eagle_worker.EAGLEWorker.draft"',
        f'{{"{V2}": "1", "A": 1}}',
        '["--enable-beta-spec", "--mamba-scheduler-strategy"]',
        f'f"{S}{{name}}"',
        "maybe_detect_nan",
        "1",
        "x",
    ]
)
compound = st.recursive(
    expressions,
    lambda inner: st.builds(
        lambda form, a, b: form.format(a, b),
        st.sampled_from(
            [
                "{} and {}",
                "f({}, k={})",
                "[{}, {}]",
                "({} == {})",
                "{} if x else {}",
                "({}, {})",
                "g({})[{}]",
                "(\n  {},  # c\n  {},\n)",
            ]
        ),
        inner,
        inner,
    ),
    max_leaves=4,
)
simple = st.one_of(
    st.builds("x = {}".format, compound),
    st.builds("print({})".format, compound),
    st.sampled_from(
        [
            f"from {S}eagle_worker import EAGLEWorker",
            f"from {S}eagle_worker import (  # a\n    EAGLEWorker,  # b\n    get_last_loc_large_page_size_top_k_1,\n)",
            f"import {S}eagle_worker as ew",
            f"import {S}eagle_worker",
            f"from {S}spec_utils import maybe_detect_nan, fast_topk  # c",
            f'os.environ["{V2}"] = "1"',
            f'os.environ.setdefault("{V2}", "1"); y = 1',
            f"envs.{V2}.set(True)",
            "# a comment",
            "",
            "pass",
        ]
    ),
)


def indented(lines):
    return "\n".join("    " + line for line in "\n".join(lines).split("\n"))


def block(head):
    return lambda lines: f"{head}\n{indented([*lines, 'pass'])}"


statements = st.recursive(
    simple,
    lambda inner: st.one_of(
        *[
            st.lists(inner, min_size=1, max_size=3).map(block(head))
            for head in (
                "if x:",
                "def f(EAGLEWorkerX=1):",
                "class A:",
                f"with envs.{V2}.override(True):  # on",
                f"with a, envs.{V2}.override(True):",
                "with s._overlap_forward_isolation(b):",
            )
        ],
        st.lists(inner, min_size=1, max_size=2).map(
            lambda lines: (
                f"try:\n{indented([*lines, 'pass'])}\nexcept ImportError:\n    from {S}eagle_worker_v2 import EAGLEWorkerV2\n"
            )
        ),
    ),
    max_leaves=6,
)


def parses(program):
    try:
        ast.parse(program)
    except SyntaxError:
        return False
    return True


programs = (
    st.lists(statements, max_size=6)
    .map(lambda parts: "\n".join(["import os", "from sglang.srt.environ import envs", *parts]) + "\n")
    .filter(parses)
)
allowed = st.builds(Allowed, unsafe=st.booleans(), drop_legacy=st.booleans())


def fixed(name, data, how):
    return fix_bytes(name, data, rules(), Options(), how)[0]


@EXAMPLES
@given(programs, allowed, st.sampled_from(["\n", "\r\n"]))
def test_python(program, how, newline):
    data = program.replace("\n", newline).encode()
    once = fixed("a.py", data, how)
    ast.parse(once)
    assert fixed("a.py", once, how) == once
    assert program.count("# c") == 0 or b"\r\n" not in data or b"\r\n" in once
    before, after = (scan_bytes("a.py", text, rules(), Options())[0].kept for text in (data, once))
    assert not any(map(how, after))
    if not any(map(how, before)):
        assert once == data


@EXAMPLES
@given(st.lists(programs.map(lambda text: text[:-1]), min_size=1, max_size=3), allowed)
def test_notebooks(cells, how):
    data = notebook(*[("code", cell) for cell in cells]).encode()
    once = fixed("a.ipynb", data, how)
    new = json.loads(once)
    assert len(new["cells"]) == len(cells)
    for cell in new["cells"]:
        ast.parse("".join(cell["source"]))
    assert fixed("a.ipynb", once, how) == once


words = st.sampled_from(
    [f"{V2}=1", f"{V2}=0", "A=b", "export", "env", "sglang serve", "--enable-beta-spec", "--port 1", "\\\n ", "&&", ";",
     "if x; then\n", "\nfi\n", "\n", "# c", "'", '"', "docker run -e", "--mamba-scheduler-strategy x", "|", "\t"]
)  # fmt: skip


@EXAMPLES
@given(
    st.lists(words, max_size=14).map(" ".join),
    allowed,
    st.sampled_from(["run.sh", "Dockerfile", "a.yaml", ".env", "a.md"]),
)
def test_plain_text(text, how, name):
    data = text.encode()
    try:
        once = fixed(name, data, how)
    except Refused:
        return
    assert fixed(name, once, how) == once
    # only what a finding names is taken away
    for word in ("A=b", "--port", "docker", "if x; then", "# c"):
        assert once.decode().count(word) <= text.count(word)
    before = scan_bytes(name, data, rules(), Options())[0].kept
    if not any(map(how, before)):
        assert once == data


keys = st.dictionaries(
    st.sampled_from([V2, "A", "b", "c d", "SGLANG_ENABLE_OVERLAP_PLAN_STREAM"]),
    st.sampled_from(["1", "true", "x"]),
    max_size=4,
)


@EXAMPLES
@given(keys, st.sampled_from([None, 1, 2, 4]), allowed)
def test_json_stays_json_and_loses_one_key(table, indent, how):
    data = json.dumps({"sglang": 1, "env": table}, indent=indent).encode()
    once = json.loads(fixed("a.json", data, how))
    kept = {key: value for key, value in table.items() if key != V2 or value == "x"}
    assert once == {"sglang": 1, "env": kept}


@EXAMPLES
@given(
    st.binary(max_size=200).map(
        lambda noise: noise + b"\nSGLANG_ENABLE_SPEC_V2=1 sglang.srt.speculative.eagle_worker " + noise
    )
)
def test_no_bytes_upset_the_scanner(data):
    for name in ("a.py", "a.sh", "a.yaml", "a.ipynb", "a.md", "a.json", "a.toml", "a"):
        scan_bytes(name, data, rules(), Options())
