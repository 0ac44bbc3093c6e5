"""The command line, in this process, on a tiny model: what reaches stdout, what reaches stderr, exit codes."""

import io
import json
import signal
import subprocess
import sys
import threading
import warnings

import pytest

from spec_v2.cli import main
from tests.tiny_folder import save_tiny_model

COPY = "w1 w2 w3 w4 w1 w2 w3 w4 w1 w2"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_tiny_model(tmp_path_factory.mktemp("cli") / "tiny"))


@pytest.fixture
def run(model, capsys):
    """Run a command on the tiny model; gives (exit code, stdout, stderr)."""

    def _run(command, *argv):
        small = ("--model", model, "--dtype", "float64", "--max-running-requests", "3")
        before = set(threading.enumerate())
        code = main([command, *small, *argv])
        out = capsys.readouterr()
        ours = {t for t in threading.enumerate() if t.name.startswith("spec_v2-")}
        assert ours <= before  # all engines are closed
        return code, out.out, out.err

    return _run


# --- generate ---


def test_json_is_one_object_with_these_keys(run, model):
    code, out, err = run(
        "generate", "--prompt", COPY, "--prompt", "w9", "--max-new-tokens", "6", "--json",
        "--speculative-algorithm", "ngram",
    )  # fmt: skip
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert out.count("\n") == 1
    assert list(report) == [
        "model", "device", "dtype", "schedule", "speculative_algorithm", "completions", "tokens_per_second",
        "versions",
    ]  # fmt: skip
    assert (report["model"], report["dtype"], report["schedule"]) == (model, "float64", "overlap")
    assert report["speculative_algorithm"] == "NGRAM"
    assert report["tokens_per_second"] > 0
    assert list(report["versions"]) == ["spec_v2", "python", "torch", "transformers", "triton"]
    first, second = report["completions"]
    assert list(first) == [
        "text", "output_ids", "finish_reason", "prompt_tokens", "completion_tokens", "spec_verify_ct",
        "spec_accept_length", "spec_accept_rate", "forced_acceptance",
    ]  # fmt: skip
    assert (first["prompt_tokens"], second["prompt_tokens"]) == (10, 1)
    assert first["text"] == " ".join(f"w{i}" for i in first["output_ids"])
    assert first["completion_tokens"] == len(first["output_ids"]) == 6
    assert first["finish_reason"] == "length"


def test_plain_decoding_has_no_algorithm(run):
    _, out, _ = run("generate", "--prompt", COPY, "--max-new-tokens", "4", "--json")
    report = json.loads(out)
    assert report["speculative_algorithm"] is None
    (done,) = report["completions"]
    assert (done["spec_verify_ct"], done["spec_accept_length"], done["spec_accept_rate"]) == (3, 1.0, 0.0)


def test_both_schedules_give_the_same_ids(run):
    same = ("--prompt", COPY, "--max-new-tokens", "24", "--speculative-algorithm", "NGRAM", "--json")
    reports = [json.loads(run("generate", *same, *more)[1]) for more in ((), ("--disable-overlap-schedule",))]
    assert [r["schedule"] for r in reports] == ["overlap", "sync"]
    overlap, sync = (r["completions"][0] for r in reports)
    assert overlap["output_ids"] == sync["output_ids"]


def test_sampling_options_reach_the_request(run):
    base = ("--prompt", COPY, "--max-new-tokens", "12", "--json")

    def ids(*argv):
        return json.loads(run("generate", *base, *argv)[1])["completions"][0]["output_ids"]

    hot = ("--temperature", "5", "--seed")
    assert ids(*hot, "1") == ids(*hot, "1") != ids(*hot, "2")
    assert ids(*hot, "1", "--top-k", "1") == ids()
    assert ids(*hot, "1", "--top-p", "1e-9") == ids()


def test_humans_read_the_text_and_a_line_of_metrics(run):
    _, out, _ = run("generate", "--prompt", COPY, "--prompt", "w7\nw8", "--max-new-tokens", "5")
    lines = out.splitlines()
    assert lines[0] == f"--- 1: {COPY}"
    assert lines[1].startswith("w")
    assert lines[2] == (
        "[10 prompt tokens, 5 new, ended by length, 4 decode steps, accept length 1.00, accept rate 0.00]"
    )
    assert lines[3] == "--- 2: w7 w8"
    assert lines[-1].startswith("[no speculation, overlap schedule, float64 on cpu: 10 tokens in ")


def test_prompts_come_from_files_and_stdin(run, tmp_path, monkeypatch):
    (tmp_path / "prompt.txt").write_text(COPY + "\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("w5 w6 w7\n"))
    argv = ("--prompt", "-", "--prompt-file", str(tmp_path / "prompt.txt"), "--max-new-tokens", "1", "--json")
    report = json.loads(run("generate", *argv)[1])
    assert [c["prompt_tokens"] for c in report["completions"]] == [3, 10]


def test_the_trace_is_written(run, tmp_path):
    place = tmp_path / "trace.json"
    _, out, err = run("generate", "--prompt", COPY, "--max-new-tokens", "3", "--json", "--trace", str(place))
    json.loads(out)
    assert err == f"spec-v2: trace written to {place}\n"
    names = {event["name"] for event in json.loads(place.read_text())["traceEvents"]}
    assert {"schedule", "launch", "prefill", "verify", "stash"} <= names


# --- info ---


def test_info_tells_what_there_is(run, model):
    code, out, _ = run("info", "--json", "--num-threads", "1", "--max-total-tokens", "200")
    facts = json.loads(out)
    assert code == 0
    assert facts["model"]["layers"] == 3
    assert (facts["model"]["attention_heads"], facts["model"]["kv_heads"]) == (4, 2)
    assert facts["model"]["kv_bytes_per_token"] == 3 * 2 * (8 + 8) * 8  # layers, heads, key + value, float64
    assert facts["model"]["context_length"] == 512
    assert facts["kv_pool"] == {"tokens": 200, "bytes": 200 * facts["model"]["kv_bytes_per_token"]}
    assert facts["threads"] == 1
    assert "NGRAM" in facts["algorithms"]
    assert facts["server_args"]["model_path"] == model


def test_info_counts_what_an_algorithm_adds(run, model):
    argv = ("--speculative-algorithm", "STANDALONE", "--speculative-draft-model", model)
    facts = json.loads(run("info", "--json", *argv)[1])
    assert facts["model"]["draft_kv_bytes_per_token"] == facts["model"]["kv_bytes_per_token"]
    assert facts["server_args"]["speculative_num_draft_tokens"] == 4  # filled in


def test_info_is_a_list_for_humans(run):
    lines = run("info")[1].splitlines()
    assert "server_args" in lines
    assert any(line.split() == ["layers", "3"] for line in lines)
    assert any(line.split() == ["speculative_algorithm", "-"] for line in lines)


# --- errors ---


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ((), "no prompt"),
        (("--prompt", ""), "prompt 1 is empty"),
        (("--prompt", "-", "--prompt-file", "-"), "stdin"),
        (("--prompt-file", "/no/such/file"), "--prompt-file /no/such/file"),
        (("--prompt", "w1", "--temperature", "-1"), "temperature"),
        (("--prompt", "w1", "--max-new-tokens", "0"), "max_new_tokens"),
        (("--prompt", "w1", "--seed", "-1"), "seed"),
        (("--prompt", "w1", "--trace", "/no/such/folder/x.json"), "--trace"),
        (("--prompt", "w1", "--model", "/no/such/model"), "model_path='/no/such/model'"),
        (("--prompt", "w1", "--page-size", "0"), "--page-size"),
        (("--prompt", "w1", "--context-length", "9999"), "--context-length"),
        (("--prompt", "w1", "--speculative-algorithm", "NGRAMM"), "Did you mean NGRAM?"),
        (("--prompt", "w1", "--speculative-algorithm", "STANDALONE"), "--speculative-draft-model-path"),
        (("--prompt", "w1", "--speculative-algorithm", "FROZEN_KV_MTP", "--speculative-draft-model", "x"), "config.json"),
        (("--prompt", "w1", "--speculative-num-steps", "3"), "--speculative-num-steps 3"),
        (("--prompt", "w1 " * 600), "prompts[0] has 600 tokens"),
        (("--prompt", "w1", "--max-total-tokens", "20"), "--max-total-tokens"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_one_line_on_stderr(run, argv, named):
    code, out, err = run("generate", "--json", *argv)
    assert (code, out) == (2, "")
    assert err.startswith("spec-v2: error: ")
    assert err.count("\n") == 1
    assert named in err


@pytest.mark.parametrize(
    "argv",
    [
        (),
        ("sing",),
        ("generate", "--prompts", "w1"),
        ("generate", "--max-new", "3"),
        ("info", "--prompt", "w1"),
    ],
)
def test_bad_flags_leave_stdout_empty(argv, capsys):
    with pytest.raises(SystemExit) as leaving:
        main(argv)
    out = capsys.readouterr()
    assert (leaving.value.code, out.out) == (2, "")
    assert "usage: spec-v2" in out.err


def test_what_libraries_print_does_not_reach_stdout(run, monkeypatch):
    from spec_v2.engine import Engine

    close = Engine.close
    monkeypatch.setattr(Engine, "close", lambda self: (print("chatter"), close(self)))
    _, out, err = run("generate", "--prompt", "w1", "--max-new-tokens", "1", "--json")
    json.loads(out)
    assert "chatter" in err


def test_warnings_are_one_line_on_stderr(run, monkeypatch):
    monkeypatch.setenv("SGLANG_ENABLE_SPEC_V2", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        _, out, err = run("generate", "--prompt", "w1", "--max-new-tokens", "1", "--json")
    json.loads(out)
    assert err.startswith("spec-v2: warning: the environment variable SGLANG_ENABLE_SPEC_V2='1'")
    assert err.count("\n") == 1


def test_ctrl_c_exits_130(run, monkeypatch):
    from spec_v2.engine import Engine

    generate = Engine.generate

    def interrupted(self, *args, **kwargs):
        # a real signal, while steps are running
        threading.Timer(0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(Engine, "generate", interrupted)
    many = [argument for _ in range(200) for argument in ("--prompt", "w1")]
    code, out, err = run("generate", *many, "--max-new-tokens", "500", "--json")
    assert (code, out, err) == (130, "", "spec-v2: interrupted\n")


def test_help_is_quick():
    """Without torch: a newcomer's first command answers at once."""
    code = "import sys, spec_v2.cli; spec_v2.cli.build_parser(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
