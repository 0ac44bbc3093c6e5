"""What `fix` does to everything that is not Python, letter by letter."""

import json
import tomllib

import pytest
import yaml

from tests.legacy.scan_tools import S, fix_text

V2 = "SGLANG_ENABLE_SPEC_V2"


def check(name, before, after, **options):
    assert fix_text(before, name, dedent=False, **options) == after


# --- shell ---


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (f"{V2}=1 FOO=2 sglang serve \\\n  --model m\n", "FOO=2 sglang serve \\\n  --model m\n"),
        (f"FOO=2 {V2}=1 sglang serve\n", "FOO=2 sglang serve\n"),
        (f"FOO=2 \\\n{V2}=1 \\\nsglang serve\n", "FOO=2 \\\nsglang serve\n"),
        (f"{V2}=1 \\\n  sglang serve\n", "sglang serve\n"),
        (f"export {V2}=1 BAR=2\n", "export BAR=2\n"),
        (f"export BAR=2 {V2}='1'\n", "export BAR=2\n"),
        (f"export BAR=2 \\\n  {V2}=1\nx\n", "export BAR=2\nx\n"),
        (f"a\nexport {V2}=1\nb\n", "a\nb\n"),
        (f"a\n  export {V2}=1  # why\nb\n", "a\nb\n"),
        (f"export {V2}=1 && serve\n", "serve\n"),
        (f"cd x && export {V2}=1\n", "cd x\n"),
        (f"export {V2}=1; serve\n", "serve\n"),
        (f"if x; then\n  export {V2}=1\nfi\n", "if x; then\n  :\nfi\n"),
        (f"if x; then\n  # why\n  export {V2}=1\nelse\n  y\nfi\n", "if x; then\n  # why\n  :\nelse\n  y\nfi\n"),
        (f"f() {{\n  export {V2}=1\n}}\n", "f() {\n  :\n}\n"),
        (f"f() {{\n  export {V2}=1\n  g\n}}\n", "f() {\n  g\n}\n"),
        (f"docker run -e {V2}=1 -e A=b image\n", "docker run -e A=b image\n"),
        (f"docker run \\\n  -e {V2}=1 \\\n  --env {V2}=1 \\\n  image\n", "docker run \\\n  image\n"),
        (f"a\r\nexport {V2}=1\r\nb\r\n", "a\r\nb\r\n"),
        (f"{V2}=1\nx\n", "x\n"),
        (f"export {V2}=1", ""),
        (f"a\nexport {V2}=1 SGLANG_SPEC_ENABLE_STRICT_FILTER_CHECK=1\nb\n", "a\nb\n"),
        ("serve --mamba-scheduler-strategy x\n# sglang\n", "serve --mamba-radix-cache-strategy x\n# sglang\n"),
        ("sglang serve \\\n  --enable-beta-spec \\\n  --port 1\n", "sglang serve \\\n  --port 1\n"),
        ("sglang serve --port 1 --enable-beta-spec\n", "sglang serve --port 1\n"),
        (f"SGLANG_ENABLE_OVERLAP_PLAN_STREAM=1 {V2}=1 sglang serve\n", "SGLANG_ENABLE_OVERLAP_PLAN_STREAM=1 sglang serve\n"),
        (f"{V2}=1 sglang serve --disable-overlap-schedule\n", "sglang serve --disable-overlap-schedule\n"),
    ],
)  # fmt: skip
def test_shell(before, after):
    check("run.sh", before, after)


@pytest.mark.parametrize(
    "text",
    [
        f': "${{{V2}:=1}}"\n',
        f"env -u X {V2}=1 cmd\n",
        f"bash -c '{V2}=1 cmd'\n",
        f"# export {V2}=1\n",
        f"export {V2}=$X\n",
        f'export {V2}="$(f)"\n',
        f"export {V2}=0\n",
        f"{V2}=1$X cmd\n",
        f"sudo {V2}=1 cmd\n",
    ],
)
def test_shell_that_is_left_alone(text):
    check("run.sh", text, text, unsafe=True)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            f"{V2}=0 python -m sglang.launch_server --model m\n",
            "python -m sglang.launch_server --disable-overlap-schedule --model m\n",
        ),
        (
            f"export {V2}=0\nsglang serve \\\n  --model m\n",
            "sglang serve --disable-overlap-schedule \\\n  --model m\n",
        ),
        (
            f"export {V2}=0\nsglang serve \\\n  --disable-overlap-schedule\n",
            "sglang serve \\\n  --disable-overlap-schedule\n",
        ),
        (f"export {V2}=0\nsglang serve --port 1\nsglang serve --port 2\n", None),
        (f"{V2}=0 ./serve.sh\n", None),
        (f"if x; then\n  export {V2}=0\nfi\nsglang serve\n", None),
        (f"export {V2}=0\n{V2}=$X sglang serve\n", None),
    ],
)
def test_a_variable_that_was_off_becomes_the_flag(before, after):
    check("run.sh", before, before)
    check("run.sh", before, before if after is None else after, unsafe=True)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (f"FROM x\nENV {V2}=1\nRUN y\n", "FROM x\nRUN y\n"),
        (f"ENV A=b {V2}=1 \\\n    C=d\n", "ENV A=b C=d\n"),
        (f"ENV A=b \\\n    {V2}=1 \\\n    C=d\n", "ENV A=b \\\n    C=d\n"),
        (f"ENV A=b \\\n    {V2}=1\nRUN y\n", "ENV A=b\nRUN y\n"),
        (f"FROM x\nENV {V2} 1\n", "FROM x\n"),
        (f"RUN export {V2}=1 && make\n", "RUN make\n"),
    ],
)
def test_dockerfiles(before, after):
    check("Dockerfile", before, after)


# --- YAML ---


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (f'env: {{{V2}: "1", A: b}}\n', "env: {A: b}\n"),
        (f'env: {{A: b, {V2}: "1"}}  # c\n', "env: {A: b}  # c\n"),
        (f'env: {{{V2}: "1"}}\nx: 1\n', "env: {}\nx: 1\n"),
        (f'env:\n  A: b  # a\n  {V2}: "1"  # v\n  C: d\n', "env:\n  A: b  # a\n  C: d\n"),
        (f'x: 1\nenv:\n  {V2}: "1"\ny: 2\n', "x: 1\ny: 2\n"),
        (f'svc:\n  env:\n    {V2}: "1"\n  y: 2\n', "svc:\n  y: 2\n"),
        (f'svc:\n  env:\n    {V2}: "1"\nother: 1\n', "svc:\n  env: {}\nother: 1\n"),
        (f'env: &common\n  {V2}: "1"\nother: *common\n', "env: &common {}\nother: *common\n"),
        (f'env:\n  # about A\n  A: b\n  {V2}: "1"\n', "env:\n  # about A\n  A: b\n"),
        (f'env:\n  # why\n  {V2}: "1"\nx: 1\n', "env:\n  # why\nx: 1\n"),
        (
            f'c:\n  - name: A\n    value: b\n  - name: {V2}\n    value: "1"\n',
            "c:\n  - name: A\n    value: b\n",
        ),
        (f'x: 1\nenv:\n- name: {V2}\n  value: "1"\ny: 2\n', "x: 1\ny: 2\n"),
        (f"environment:\n  - {V2}=1\n  - A=b\n", "environment:\n  - A=b\n"),
        (f'environment:\n  - "{V2}=1"\nx: 1\n', "x: 1\n"),
        (f"run: |\n  export {V2}=1\n  make\n", "run: |\n  make\n"),
        (f'env:\n  {V2}: "1"\n', "env: {}\n"),
        (
            f'env: {{{V2}: "1"}}\nargs: ["--mamba-scheduler-strategy", "x"]  # c\n',
            'env: {}\nargs: ["--mamba-radix-cache-strategy", "x"]  # c\n',
        ),
        (f'env: &e {{{V2}: "1", A: b}}\n', "env: &e {A: b}\n"),
    ],
)
def test_yaml(before, after):
    check("a.yaml", before, after)
    assert isinstance(yaml.safe_load(after), dict)


@pytest.mark.parametrize(
    "text",
    [
        f'env:\n  {V2}: "0"\n',
        f'env:\n  {V2}: &on "1"\nx: *on\n',
        f"env:\n  {V2}: >\n    1\n",
        f'# env:\n#   {V2}: "1"\n',
        f"command: {V2}=1 sglang serve\n",
    ],
)
def test_yaml_that_is_left_alone(text):
    check("a.yaml", text, text, unsafe=True)


def test_patch_targets_in_yaml():
    check(
        "toggle.yaml",
        f"# {S}eagle_worker\n- target: '{S}eagle_worker.EAGLEWorker.draft_forward'\n",
        f"# {S}eagle_worker\n- target: '{S}eagle_worker_v2.EagleDraftWorker.draft_forward'\n",
        unsafe=True,
    )


# --- TOML and JSON ---


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("a.toml", f'[env]\n{V2} = "1"  # v\nA = "b"\n', '[env]\nA = "b"\n'),
        ("a.toml", f'env = {{ {V2} = "1", A = "b" }}\n', 'env = { A = "b" }\n'),
        ("a.toml", f'env = {{ A = "b", {V2} = "1" }}\n', 'env = { A = "b" }\n'),
        ("a.json", f'{{"env": {{"{V2}": "1", "A": "b"}}}}\n', '{"env": {"A": "b"}}\n'),
        ("a.json", f'{{\n  "A": "b",\n  "{V2}": "1"\n}}\n', '{\n  "A": "b"\n}\n'),
        ("a.json", f'{{\n  "{V2}": "1",\n  "A": "b"\n}}\n', '{\n  "A": "b"\n}\n'),
        ("a.json", f'{{\n  "{V2}": "1"\n}}\n', "{}\n"),
        ("a.json", f'{{"a": ["{V2}=1", "x"]}}\n', '{"a": ["x"]}\n'),
    ],
)
def test_toml_and_json(name, before, after):
    check(name, before, after)
    (tomllib.loads if name.endswith("toml") else json.loads)(after)


def test_json_in_a_shell_word():
    before = f'ray job --env=\'{{"env_vars": {{"{V2}": "1", "A": "b"}}}}\' x\n'
    check("run.sh", before, 'ray job --env=\'{"env_vars": {"A": "b"}}\' x\n')
    check(
        "run.sh",
        before.replace('"', '\\"').replace("'", '"'),
        'ray job --env="{\\"env_vars\\": {\\"A\\": \\"b\\"}}" x\n',
    )
    broken = before.replace('"A": "b"', '"A": b')
    check("run.sh", broken, broken, unsafe=True)


# --- records ---


@pytest.mark.parametrize(
    "name", ["fix.patch", "CHANGELOG.md", "notes.rst", "log.txt", "rows.jsonl", "result.json"]
)
def test_records_are_never_edited(name):
    text = f'--- a/x\n+++ b/x\n@@ -1 +1 @@\n-import {S}eagle_worker\n+"engine": "x {V2}=1"\n'
    check(name, text, text, unsafe=True)
