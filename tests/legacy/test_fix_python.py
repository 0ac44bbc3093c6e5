"""What `fix` does to Python code other than imports, letter by letter."""

import textwrap

import pytest

from tests.legacy.scan_tools import S, fix_text

V1, V2 = S + "eagle_worker", S + "eagle_worker_v2"


def check(before, after, **options):
    before, after = textwrap.dedent(before), textwrap.dedent(after)
    assert fix_text(before, dedent=False, **options) == after


def check_same(text, **options):
    check(text, text, **options)


# --- members and arguments ---


def test_forward_isolation_gains_its_argument():
    check(
        "with sched._overlap_forward_isolation(batch), other():\n    pass\n",
        "with sched._forward_isolation(batch, overlap=True), other():\n    pass\n",
    )
    check("x._overlap_forward_isolation(\n    batch,\n)\n", "x._forward_isolation(batch, overlap=True)\n")
    check_same("f = sched._overlap_forward_isolation\n")
    check_same("class M:\n    def _overlap_forward_isolation(self, batch): ...\n")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("if batch.is_spec_v2 and x: ...", "if not batch.spec_algorithm.is_none() and x: ..."),
        ("if not batch.is_spec_v2: ...", "if batch.spec_algorithm.is_none(): ..."),
        ("x = batch.is_spec_v2 == y", "x = (not batch.spec_algorithm.is_none()) == y"),
        ("x = y == batch.is_spec_v2", "x = y == (not batch.spec_algorithm.is_none())"),
        ("x = (batch.is_spec_v2)", "x = (not batch.spec_algorithm.is_none())"),
        ("x = batch.is_spec_v2 + 1", "x = (not batch.spec_algorithm.is_none()) + 1"),
        ("x = f(batch.is_spec_v2, k=b.c.is_spec_v2)", "x = f(not batch.spec_algorithm.is_none(), k=not b.c.spec_algorithm.is_none())"),
        ("x = batch.is_spec_v2 if batch.is_spec_v2 else 0", "x = not batch.spec_algorithm.is_none() if not batch.spec_algorithm.is_none() else 0"),
        ("x = f(a)[0].is_spec_v2", "x = not f(a)[0].spec_algorithm.is_none()"),
        ("x = batch.is_spec_v2.real", "x = (not batch.spec_algorithm.is_none()).real"),
        ("x = -batch.is_spec_v2", "x = -(not batch.spec_algorithm.is_none())"),
        ("x = [*batch.is_spec_v2]", "x = [*(not batch.spec_algorithm.is_none())]"),
        ("x = batch.is_spec_v2[0]", "x = (not batch.spec_algorithm.is_none())[0]"),
        ("x = batch.is_spec_v2 ** 2", "x = (not batch.spec_algorithm.is_none()) ** 2"),
        ("if algo.supports_spec_v2(): ...", "if not algo.is_none(): ..."),
        ("if not algo.supports_spec_v2(): ...", "if algo.is_none(): ..."),
        ("x = algo.supports_spec_v2() is True", "x = (not algo.is_none()) is True"),
        ('x = f"{batch.is_spec_v2}"', 'x = f"{not batch.spec_algorithm.is_none()}"'),
    ],
)  # fmt: skip
def test_is_spec_v2_with_brackets_where_they_are_needed(before, after):
    assert fix_text(before + "\n") == before + "\n"
    fixed = fix_text(before + "\n", unsafe=True)
    assert fixed == after + "\n"
    # the expression means what the template means in place of the old one
    import ast

    old = ast.dump(ast.parse(before)).count("is_spec_v2") + ast.dump(ast.parse(before)).count(
        "supports_spec_v2"
    )
    assert ast.dump(ast.parse(fixed)).count("is_none") == old


def test_is_draft_extend():
    check(
        "if m.is_draft_extend(include_v2=True): ...\n# sglang\n", "if m.is_draft_extend_v2(): ...\n# sglang\n"
    )
    check_same("import sglang\nif m.is_draft_extend(include_v2=flag): ...\n", unsafe=True)
    check_same("import sglang\nif m.is_draft_extend(): ...\n", unsafe=True)
    check_same("import sglang\nif m.is_draft_extend(x, include_v2=True): ...\n", unsafe=True)


def test_arguments_that_go():
    check("batch.filter_batch(v1_spec_info_filtered=True)\n", "batch.filter_batch()\n")
    check("batch.filter_batch(ids, v1_spec_info_filtered=True)\n", "batch.filter_batch(ids)\n")
    check("batch.filter_batch(v1_spec_info_filtered=True, x=1)\n", "batch.filter_batch(x=1)\n")
    check(
        """\
        batch.filter_batch(
            ids,  # kept
            v1_spec_info_filtered=True,
        )
        """,
        """\
        batch.filter_batch(
            ids,  # kept
        )
        """,
    )
    check(
        "batch.filter_batch(\n    ids,\n    v1_spec_info_filtered=True\n)\n",
        "batch.filter_batch(\n    ids\n)\n",
    )
    check("batch.filter_batch(\n    v1_spec_info_filtered=True\n)\n", "batch.filter_batch()\n")


def test_arguments_that_were_renamed():
    check(
        'import sglang as sgl\nsgl.Engine(\n    mamba_scheduler_strategy="x",  # why\n)\n',
        'import sglang as sgl\nsgl.Engine(\n    mamba_radix_cache_strategy="x",  # why\n)\n',
    )
    check_same('import sglang\nlaunch(mamba_scheduler_strategy="x")\n', unsafe=True)


# --- strings ---


def test_targets_of_patches_keep_their_quotes():
    check(
        f"@patch('{V1}.EAGLEWorker.draft')\n@patch(\"{V1}.EAGLEWorker\")\ndef t(): ...\n",
        f"@patch('{V2}.EagleDraftWorker.draft')\n@patch(\"{V2}.EAGLEWorkerV2\")\ndef t(): ...\n",
        unsafe=True,
    )
    check_same(f'@patch("{S}" "eagle_worker.EAGLEWorker.draft")\ndef t(): ...\n', unsafe=True)


def test_flags_in_lists():
    check(
        'cmd = ["sglang", "serve", "--enable-beta-spec", "--mamba-scheduler-strategy", "x"]\n',
        'cmd = ["sglang", "serve", "--mamba-radix-cache-strategy", "x"]\n',
    )


# --- settings ---

VAR = "SGLANG_ENABLE_SPEC_V2"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (f'import os\nos.environ["{VAR}"] = "1"\nx = 1\n', "import os\nx = 1\n"),
        (f'import os\nos.environ.setdefault("{VAR}", "1"); x = 1\n', "import os\nx = 1\n"),
        (f'x = 1; os.environ["{VAR}"] = "1"\n', "x = 1\n"),
        (f'def f():\n    os.environ["{VAR}"] = "1"\n', "def f():\n    pass\n"),
        (
            f'def f():\n    # keep this\n    os.environ["{VAR}"] = "1"\n',
            "def f():\n    # keep this\n    pass\n",
        ),
        (f'if x: os.environ["{VAR}"] = "1"\n', "if x: pass\n"),
        (f'# keep\nos.environ["{VAR}"] = "1"\n\n\nx = 1\n', "# keep\n\n\nx = 1\n"),
        (f'x = 1\n# a\nos.environ["{VAR}"] = "1"\n# b\ny = 1\n', "x = 1\n# a\n# b\ny = 1\n"),
        (f'x = 1\n# keep\nos.environ["{VAR}"] = "1"\n', "x = 1\n# keep\n"),
        (f'env = {{"{VAR}": "1", "A": "b"}}\n', 'env = {"A": "b"}\n'),
        (f'env = {{"A": "b", "{VAR}": "1"}}\n', 'env = {"A": "b"}\n'),
        (f'env = {{\n    "A": "b",  # a\n    "{VAR}": "1",  # v\n}}\n', 'env = {\n    "A": "b",  # a\n}\n'),
        (f'env = {{"{VAR}": "1"}}\n', "env = {}\n"),
        (f'env = dict(os.environ, {VAR}="1")\n', "env = dict(os.environ)\n"),
        (f'os.environ["{VAR}"] = "0"\n', None),
        (f'os.environ["{VAR}"] = x\n', None),
        ('os.environ["SGLANG_SPEC_ENABLE_STRICT_FILTER_CHECK"] = compute()\n', None),
        ('os.environ["SGLANG_SPEC_ENABLE_STRICT_FILTER_CHECK"] = "0"\n', ""),
    ],
)
def test_variables_that_were_on_are_taken_out(before, after):
    assert fix_text(before, dedent=False) == (before if after is None else after)


def test_descriptors_in_with():
    lead = "from sglang.srt.environ import envs\n"
    check(f"{lead}with envs.{VAR}.override(True), other():\n    pass\n", f"{lead}with other():\n    pass\n")
    check(f"{lead}with other(), envs.{VAR}.override(True):\n    pass\n", f"{lead}with other():\n    pass\n")
    check(
        f"""\
        from sglang.srt.environ import envs
        def test():
            # about it
            with envs.{VAR}.override(True):  # on
                # first
                a()

                if b:
                    text = '''
          kept'''
            c()
        """,
        """\
        from sglang.srt.environ import envs
        def test():
            # about it
            # on
            # first
            a()

            if b:
                text = '''
          kept'''
            c()
        """,
    )
    check_same(f"{lead}with envs.{VAR}.override(False):\n    pass\n", unsafe=True)
    check(f"{lead}envs.{VAR}.set(True)\nx = 1\n", f"{lead}x = 1\n")


# --- bytes ---


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"\xef\xbb\xbfx._overlap_forward_isolation(b)\r\ny = 1\r\n", b"\xef\xbb\xbfx._forward_isolation(b, overlap=True)\r\ny = 1\r\n"),
        (
            "# -*- coding: gbk -*-\nx._overlap_forward_isolation('中')".encode("gbk"),
            "# -*- coding: gbk -*-\nx._forward_isolation('中', overlap=True)".encode("gbk"),
        ),
        (b"if x:\n\ty._overlap_forward_isolation(b)\r\n\tz = 1\n", b"if x:\n\ty._forward_isolation(b, overlap=True)\r\n\tz = 1\n"),
        (b"x._overlap_forward_isolation(b)", b"x._forward_isolation(b, overlap=True)"),
        (b"x._overlap_forward_isolation(b)\n\x0c\ny = 1\n", b"x._forward_isolation(b, overlap=True)\n\x0c\ny = 1\n"),
    ],
)  # fmt: skip
def test_encodings_newlines_and_marks_are_kept(before, after):
    assert fix_text(before) == after


def test_silenced_findings_are_not_mended():
    check_same("x._overlap_forward_isolation(b)  # sv: ignore[SV301]\n")
    check_same("x._overlap_forward_isolation(b)  # noqa: SV301\n")
    check_same("# sv: ignore\nx._overlap_forward_isolation(b)\n")
    check_same("# sv: ignore-file\n\n\nx._overlap_forward_isolation(b)\n")
    check(
        "x._overlap_forward_isolation(b)  # noqa: E501\n",
        "x._forward_isolation(b, overlap=True)  # noqa: E501\n",
    )
