"""Shell, Dockerfiles, YAML, TOML, JSON, Markdown, notebooks, patches: what is found there, and how bad it is."""

import pytest

from tests.legacy.scan_tools import S, scan_text, told, worst

V2 = "SGLANG_ENABLE_SPEC_V2"


def only(text, name, **options):
    (found,) = scan_text(text, name, dedent=False, **options)
    return found.severity, found.fixable


# --- shell ---


@pytest.mark.parametrize(
    ("line", "severity", "fixable"),
    [
        (f"{V2}=1 FOO=2 sglang serve \\\n  --model m", "warning", "safe"),
        (f"export {V2}=1", "warning", "safe"),
        (f"export {V2}=1 BAR=2", "warning", "safe"),
        (f"export BAR=2 {V2}='true'", "warning", "safe"),
        (f"export A=1 && export {V2}=1", "warning", "safe"),
        (f"docker run -e {V2}=1 image", "warning", "safe"),
        (f': "${{{V2}:=1}}"', "warning", "manual"),
        (f"env -u X {V2}=1 cmd", "warning", "manual"),
        (f"bash -c '{V2}=1 python x.py'", "warning", "manual"),
        (f"bash -c 'cd x; {V2}=1 python x.py'", "warning", "manual"),
        (f'echo "a \\" # {V2}=1"', "warning", "manual"),
        (f"export {V2}=0", "error", "manual"),
        (f"{V2}=0 python -m sglang.launch_server --model m", "error", "unsafe"),
        (f"export {V2}=0\npython -m sglang.launch_server --model m", "error", "unsafe"),
        (f"export {V2}=$FLAG", "warning", "manual"),
        (f'echo "${V2}"', "warning", "manual"),
        (f"# export {V2}=1", "info", "manual"),
        (f"unset {V2}", "info", "manual"),
    ],
)
def test_settings_in_shell(line, severity, fixable):
    assert only(line + "\n", "run.sh") == (severity, fixable)


def test_longer_names_in_shell_are_others():
    assert not scan_text(f"export MY_{V2}=1 {V2}_X=1 SGLANG_ENABLE_OVERLAP_PLAN_STREAM=1\n", "run.sh")


def test_flags_in_shell():
    text = (
        "sglang serve --mamba-scheduler-strategy extra_buffer --enable-beta-spec --disable-overlap-schedule\n"
    )
    found = scan_text(text, "run.sh")
    assert [(one.name, one.severity, one.fixable) for one in found] == [
        ("--mamba-scheduler-strategy", "error", "safe"),
        ("--enable-beta-spec", "error", "safe"),
    ]


def test_sed_of_an_installed_file():
    text = "RUN sed -i s/a/b/ /usr/lib/python3/site-packages/sglang/srt/speculative/eagle_worker.py\n"
    (found,) = scan_text(text, "Dockerfile")
    assert (found.severity, found.shape, found.fixable) == ("error", "path", "manual")
    assert not scan_text(
        "cat vendor/speculative/eagle_worker.py sglang/kernels/ops/speculative/reject_sampling.py\n", "a.sh"
    )


def test_scripts_without_an_ending():
    assert only(f"#!/usr/bin/env bash\nexport {V2}=1\n", "bin/serve") == ("warning", "safe")
    assert only(f"#!/usr/bin/env python3\nfrom {S}eagle_worker import EAGLEWorker\n", "bin/tool") == (
        "error",
        "unsafe",
    )


# --- Dockerfile, .env, Makefile ---


@pytest.mark.parametrize(
    ("name", "line", "fixable"),
    [
        ("Dockerfile", f"ENV {V2}=1\n", "safe"),
        ("Dockerfile", f"ENV A=b {V2}=1 \\\n    C=d\n", "safe"),
        ("Dockerfile", f"ENV {V2} 1\n", "safe"),
        ("docker/Dockerfile.gpu", f"RUN export {V2}=1 && make\n", "safe"),
        (".env", f"{V2}=1\n", "safe"),
        ("serve.service", f"Environment={V2}=1\n", "manual"),
        ("Makefile", f"serve:\n\t{V2}=1 python -m sglang.launch_server\n", "safe"),
    ],
)
def test_settings_elsewhere(name, line, fixable):
    assert only(line, name) == ("warning", fixable)


# --- YAML, TOML, JSON ---


@pytest.mark.parametrize(
    ("text", "fixable"),
    [
        (f'env: {{{V2}: "1", A: b}}\n', "safe"),
        (f'env:\n  {V2}: "1"  # on\n  A: b\n', "safe"),
        (f"env:\n  {V2}: true\n", "safe"),
        (f'env:\n  "{V2}": 1\n', "safe"),
        (f'env:\n  - name: {V2}\n    value: "1"\n', "safe"),
        (f"environment:\n  - {V2}=1\n  - A=b\n", "safe"),
        (f"script:\n  - export {V2}=1\n", "safe"),
        (f"run: |\n  export {V2}=1\n  make\n", "safe"),
        (f'env:\n  {V2}: &on "1"\n', "manual"),
        (f"command: {V2}=1 python -m sglang.launch_server\n", "manual"),
        (f'env:\n  - {V2}: "1"\n    A: b\n', "manual"),
        (f'env:\n  - {V2}: "1"\n  - A: b\n', "safe"),
        (f"target: sglang.srt.environ.envs.{V2}.get\n", "manual"),
    ],
)
def test_settings_in_yaml(text, fixable):
    found = scan_text(text, "values.yaml", dedent=False)
    assert [one.fixable for one in found] == [fixable]
    assert found[0].severity in ("warning", "error")


def test_falsy_and_templated_values_in_yaml():
    assert only(f'env:\n  {V2}: "0"\n', "a.yml") == ("error", "manual")
    assert only(f"env:\n  {V2}: ${{{{ matrix.v2 }}}}\n", "a.yml") == ("warning", "manual")


def test_a_companion_flag_in_yaml():
    text = f'env: {{{V2}: "1"}}\nargs: ["--mamba-scheduler-strategy", "extra_buffer"]\nmamba-scheduler-strategy: extra_buffer\n'
    found = scan_text(text, "a.yaml")
    assert [(one.severity, one.fixable) for one in found] == [
        ("warning", "safe"),
        ("error", "safe"),
        ("warning", "safe"),
    ]


def test_patch_targets_in_yaml():
    (found,) = scan_text(f"patches:\n  - target: {S}eagle_worker.EAGLEWorker.draft_forward\n", "toggle.yaml")
    assert (found.severity, found.fixable) == ("error", "unsafe")
    assert found.edit.new == S + "eagle_worker_v2.EagleDraftWorker.draft_forward"
    assert not scan_text(f"target: {S}eagle_worker_v2.EagleDraftWorker.draft_forward\n", "toggle.yaml")


def test_settings_in_toml_and_json():
    assert only(f'[env]\n{V2} = "1"\n', "a.toml") == ("warning", "safe")
    assert only(f'env = {{ {V2} = "1", A = "b" }}\n', "a.toml") == ("warning", "safe")
    assert only(f'{{"env": {{"{V2}": "1"}}}}\n', "a.json") == ("warning", "safe")
    assert only(f'{{"command": "{V2}=1 sglang serve"}}\n', "a.json") == ("warning", "manual")


def test_json_in_a_shell_word():
    line = f'ray job submit --runtime-env-json=\'{{"env_vars": {{"{V2}": "1", "A": "b"}}}}\'\n'
    assert only(line, "run.sh") == ("warning", "safe")
    escaped = line.replace('"', '\\"').replace("'", '"')
    assert only(escaped, "run.sh") == ("warning", "safe")
    broken = line.replace('"A": "b"', '"A": b')
    assert only(broken, "run.sh") == ("warning", "manual")


def test_an_older_release_that_is_pinned_beside_it():
    found = scan_text(
        f"FROM lmsysorg/sglang:v0.5.9\nRUN pip install 'sglang[all]==0.5.9'\nENV {V2}=1\n", "Dockerfile"
    )
    assert [(one.code, one.severity, one.span.line) for one in found] == [
        ("SV905", "info", 1), ("SV905", "info", 2), ("SV601", "warning", 3),
    ]  # fmt: skip
    assert not scan_text(
        "FROM lmsysorg/sglang:v0.5.9\n", "Dockerfile"
    )  # nothing else to say, so nothing to raise it for


# --- records ---


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("fix.patch", f"--- a/x\n+++ b/x\n@@ -1 +1 @@\n-import {S}eagle_worker\n+{V2}=1\n"),
        ("result.json", f'{{"engine": "sglang {V2}=0"}}\n'),
        ("run.sh", f"# export {V2}=1\n"),
        ("CHANGELOG.md", f"- {V2} is on by default\n"),
        ("CHANGELOG", f"- {V2}=0 turns it off\n"),
        ("notes.rst", f"Set {V2}=1. See _overlap_forward_isolation.\n"),
        ("log.txt", f"{V2}=1 sglang serve\n"),
        ("rows.jsonl", f'{{"{V2}": "1"}}\n'),
    ],
)
def test_records_are_notes(name, text):
    found = scan_text(text, name, dedent=False)
    assert found
    assert {(one.severity, one.fixable) for one in found} == {("info", "manual")}


def test_a_patch_is_told_once():
    text = f"--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n-from {S}eagle_worker import EAGLEWorker\n+import {S}standalone_worker\n"
    (found,) = scan_text(text, "docker/sglang.patch")
    assert found.code == "SV904"


# --- files that resist ---


def test_python_that_does_not_parse_is_read_as_text():
    found = scan_text(f"print 'python 2'\nimport {S}eagle_worker\nx = ''\n")
    assert told(found)[0] == ("warning", "remark", "SV900")
    assert [(one.span.line, one.severity, one.fixable) for one in found[1:]] == [(2, "warning", "manual")]


@pytest.mark.parametrize(
    "data",
    [
        b"\xef\xbb\xbffrom sglang.srt.speculative.eagle_worker import EAGLEWorker\r\n",
        "# -*- coding: gbk -*-\n# 中文\nfrom sglang.srt.speculative.eagle_worker import EAGLEWorker\n".encode(
            "gbk"
        ),
        "# -*- coding: latin-1 -*-\nx = 'é'\nfrom sglang.srt.speculative.eagle_worker import EAGLEWorker\n".encode(
            "latin-1"
        ),
        b"def f():\n\tif x:\n\t\tfrom sglang.srt.speculative.eagle_worker import EAGLEWorker\n",
        b"x = 1\rfrom sglang.srt.speculative.eagle_worker import EAGLEWorker\r",
        b"x = '\\d'\nx is 'a'\nfrom sglang.srt.speculative.eagle_worker import EAGLEWorker\n",  # Python itself warns
    ],
)
def test_encodings_and_newlines(data):
    (found,) = scan_text(data)
    assert (found.severity, found.shape) == ("error", "import")


def test_bytes_that_are_no_text():
    found = scan_text(b"x = '\xff\xfe\xfa'\nimport sglang.srt.speculative.eagle_worker\n")
    assert found[0].code == "SV900"
    assert not scan_text(b"\x00\x01sglang.srt.speculative.eagle_worker\x00", "a.dat")
    wide = f"export {V2}=1\n".encode("utf-16")
    assert told(scan_text(wide, "run.sh"))[0][:2] == ("warning", "setting")


def test_nesting_deeper_than_pythons_stack():
    deep = "x = " + "(" * 3000 + "1" + ")" * 3000 + f"\nimport {S}eagle_worker\n"
    assert scan_text(deep)[0].code == "SV900"
    long = "x = " + " + ".join(["'a'"] * 3000) + f"\nimport {S}eagle_worker\n"
    assert worst(scan_text(long)) in ("error", "warning")
