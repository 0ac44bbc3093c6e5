"""Strings in Python code: patch targets, dynamic imports, paths, names of classes, variables and flags."""

import pytest

from tests.legacy.scan_tools import S, code_of, scan_text, told, worst

MODULE = code_of(S + "eagle_worker")


def test_targets_of_mock_patch_go_to_different_classes():
    found = scan_text(f"""\
        from unittest.mock import patch
        @patch("{S}eagle_worker.EAGLEWorker.draft")
        @patch('{S}eagle_worker.EAGLEWorker.verify')
        @patch("{S}" "eagle_worker.EAGLEWorker.verify")
        def test(a, b, c): ...
        """)
    assert [(one.severity, one.shape, one.span.line) for one in found] == [
        ("error", "string", n) for n in (2, 3, 4)
    ]
    assert [one.row.sglang_replacement for one in found] == [
        S + "eagle_worker_v2.EagleDraftWorker.draft",
        S + "eagle_worker_v2.EAGLEWorkerV2.verify",
        S + "eagle_worker_v2.EAGLEWorkerV2.verify",
    ]
    assert found[0].fixable == "unsafe"
    assert found[2].fixable == "manual"  # a literal in two pieces


def test_targets_of_pr_fix_toggle():
    found = scan_text(f"""\
        PATCHES = [{{"target": "{S}eagle_worker.EAGLEWorker.draft_forward", "pr": 1}}]
        """)
    assert told(found) == [("error", "string", code_of(S + "eagle_worker.EAGLEWorker.draft_forward"))]
    assert found[0].row.sglang_replacement == S + "eagle_worker_v2.EagleDraftWorker.draft_forward"


@pytest.mark.parametrize(
    "text",
    [
        'mods = [f"sglang.srt.speculative.{m}" for m in ("eagle_worker", "eagle_info")]\n',
        'for m in ("eagle_worker", "eagle_info"):\n    __import__(f"sglang.srt.speculative.{m}", fromlist=[m])\n',
        'for m, c in [("eagle_worker", "X"), ("eagle_info", "Y")]:\n    load("sglang.srt.speculative." + m)\n',
        'NAMES = ["eagle_info", "eagle_worker"]\nfor m in NAMES:\n    load("sglang.srt.speculative.%s" % m)\n',
        'm = "eagle_worker"\nload("sglang.srt.speculative.{}".format(m))\n',
        'BASE = "sglang.srt.speculative"\nload(f"{BASE}.eagle_worker")\n',
        'load(".".join(["sglang", "srt", "speculative", "eagle_worker"]))\n',
        'for k, m in {"a": "eagle_worker"}.items():\n    load(f"sglang.srt.speculative.{m}")\n',
    ],
)
def test_paths_put_together_from_constants(text):
    (found,) = scan_text(text)
    assert (found.severity, found.code) == ("error", MODULE)


def test_the_literal_that_makes_the_path_is_pointed_at():
    (found,) = scan_text('mods = [f"sglang.srt.speculative.{m}" for m in ("eagle_worker", "eagle_info")]\n')
    assert found.source[found.span.column - 1 : found.span.end_column - 1] == '"eagle_worker"'


def test_paths_that_only_a_run_would_tell():
    (found,) = scan_text(
        'def f(name):\n    return importlib.import_module(f"sglang.srt.speculative.{name}")\n'
    )
    assert (found.severity, found.code) == ("info", "SV903")
    assert not scan_text('importlib.import_module(f"sglang.srt.layers.nothing.{name}")\n')


def test_names_of_classes_that_are_compared():
    for text in (
        "import sglang\nassert type(w).__name__ == 'EAGLEWorker'\n",
        "import sglang\nok = cls.__name__ in ('EAGLEWorker', 'Other')\n",
    ):
        (found,) = scan_text(text)
        assert (found.severity, found.shape) == ("error", "name")
    assert not scan_text("import sglang\nif 'MultiLayer' in type(w).__name__: ...\n")
    assert (
        worst(scan_text("assert type(w).__name__ == 'EAGLEWorker'\n")) == "info"
    )  # nothing says that it is SGLang's


@pytest.mark.parametrize(
    "expression",
    [
        'root / "srt" / "speculative" / "eagle_worker.py"',
        'os.path.join(site, "sglang", "srt", "speculative", "eagle_worker.py")',
        'Path("/usr/lib/sglang/srt/speculative/eagle_worker.py")',
        'Path(site, "sglang/srt/speculative", "eagle_worker.py")',
        '"python/sglang/srt/speculative/eagle_worker.py"',
    ],
)
def test_paths_of_files(expression):
    (found,) = scan_text(f"worker = {expression}\n")
    assert (found.severity, found.shape, found.code, found.fixable) == ("error", "path", MODULE, "manual")


def test_prose_in_strings_and_docstrings_are_notes():
    found = scan_text(f'''\
        """Built on {S}eagle_worker.EAGLEWorker."""
        raise RuntimeError("needs {S}eagle_worker of old")
        # see {S}eagle_worker
        ''')
    assert [(one.severity, one.span.line) for one in found] == [("info", 1), ("info", 2), ("info", 3)]


def test_code_in_a_string():
    (found,) = scan_text(f'exec("from {S}eagle_worker import EAGLEWorker")\n')
    assert (found.severity, found.fixable) == ("warning", "manual")


# --- environment variables ---

V2 = "SGLANG_ENABLE_SPEC_V2"


@pytest.mark.parametrize(
    ("text", "severity", "fixable"),
    [
        (f'os.environ["{V2}"] = "1"', "warning", "safe"),
        (f'os.environ["{V2}"] = "0"', "error", "manual"),
        (f'os.environ["{V2}"] = flag', "warning", "manual"),
        (f'os.environ.setdefault("{V2}", "true")', "warning", "safe"),
        (f'os.environ["{V2}"] = os.environ["B"] = "1"', "warning", "manual"),
        (f'monkeypatch.setenv("{V2}", "1")', "warning", "safe"),
        (f'env = {{"{V2}": "1", "A": "b"}}', "warning", "safe"),
        (f'env = {{"{V2}": "1" if a.spec else "0"}}', "error", "manual"),
        (f'env = dict(os.environ, {V2}="1")', "warning", "safe"),
        (f'x = os.getenv("{V2}", "0")', "warning", "manual"),
        (f'if "{V2}" in os.environ: ...', "warning", "manual"),
        (f'forwarded = ["PATH", "{V2}"]', "info", "manual"),
        (f'run("{V2}=1 python -m sglang.launch_server", shell=True)', "warning", "manual"),
        (f'run("{V2}=0 python -m sglang.launch_server", shell=True)', "error", "manual"),
        (f'run(f"{V2}={{x}} sglang serve", shell=True)', "warning", "manual"),
        (f'log("warning: {V2}=1 is ignored")', "info", "manual"),
        (f'monkeypatch.delenv("{V2}", raising=False)', "info", "manual"),
    ],
)
def test_a_variable_in_python(text, severity, fixable):
    (found,) = scan_text(text + "\n")
    assert (found.severity, found.fixable) == (severity, fixable)


def test_the_flag_to_pass_instead_is_named():
    (found,) = scan_text(f'os.environ["{V2}"] = "0"\n')
    assert "--disable-overlap-schedule" in found.message


def test_descriptors_of_envs():
    found = scan_text(f"""\
        from sglang.srt.environ import envs
        with envs.{V2}.override(True), other():
            envs.{V2}.set(True)
            envs.{V2}.set(False)
            x = envs.{V2}.get()
        """)
    assert [(one.severity, one.fixable) for one in found] == [
        ("error", "safe"), ("error", "safe"), ("error", "manual"), ("error", "manual"),
    ]  # fmt: skip
    assert "--disable-overlap-schedule" in found[2].message
    assert not scan_text(f"from mine import envs\nenvs.{V2}.get()\n")


def test_a_patch_through_a_descriptor():
    (found,) = scan_text(
        f'@patch("sglang.srt.server_args.envs.{V2}.get", return_value=True)\ndef test(m): ...\n'
    )
    assert (found.severity, found.shape) == ("error", "string")


# --- flags ---


def test_flags_in_python():
    found = scan_text("""\
        import sglang as sgl
        engine = sgl.Engine(model_path="m", mamba_scheduler_strategy="extra_buffer")
        launch(mamba_scheduler_strategy="extra_buffer")
        cmd = ["sglang", "serve", "--mamba-scheduler-strategy", "extra_buffer"]
        parser.add_argument("--mamba-scheduler-strategy")
        """)
    assert [(one.severity, one.fixable) for one in found] == [
        ("error", "safe"), ("warning", "manual"), ("error", "safe"), ("info", "manual"),
    ]  # fmt: skip
    assert worst(scan_text('cmd = ["serve", "--enable-nan-detection"]\n')) in ("none", "info")


# --- comments ---


def test_a_hash_in_a_string_is_not_a_comment():
    assert not scan_text(f"x = '# {V2} '\n") or worst(scan_text(f"x = '# {V2} '\n")) == "info"
    (found,) = scan_text(f"x = 1  # {V2}=1\n")
    assert (found.severity, found.shape) == ("info", "comment")
