"""The command lines: exit status, one clear line on failure, files written."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest
from fake_vllm import FakeVllm, SocketServer
from typer.testing import CliRunner

from det_plugin import test_deterministic as module
from det_plugin.cli import app

SMALL = ["--batch-sizes", "1,3", "--n-trials", "1", "--max-new-tokens", "12", "--temperature", "0"]


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def invoke(*args: object):
    return CliRunner().invoke(app, [str(a) for a in args])


def test_verify_same_writes_json_and_html(tmp_path):
    with SocketServer(FakeVllm()) as server:
        result = invoke(
            *("verify", "--base-url", server.url, "--test-mode", "single,p_vs_d", *SMALL),
            *("--json", tmp_path / "r.json", "--html", tmp_path / "r.html"),
        )
    assert result.exit_code == 0, result.output
    assert "Total samples: 4, Unique samples: 1" in result.output
    data = json.loads((tmp_path / "r.json").read_text())
    assert data["status"] == "same"
    assert [m["mode"] for m in data["modes"]] == ["single", "p_vs_d"]
    assert "<svg" in (tmp_path / "r.html").read_text()


def test_verify_different_is_exit_1():
    with SocketServer(FakeVllm("phase")) as server:
        result = invoke("verify", "--base-url", server.url, "--test-mode", "p_vs_d", *SMALL)
    assert result.exit_code == 1, result.output
    assert "first divergence at output index" in result.output


def test_closed_port_is_exit_2_and_one_line():
    result = invoke("verify", "--host", "127.0.0.1", "--port", closed_port(), *SMALL)
    assert result.exit_code == 2
    assert len(result.output.strip().splitlines()) == 1
    assert "cannot reach a server at http://127.0.0.1" in result.output


@pytest.mark.parametrize("url", ["http://host:port", "ftp://127.0.0.1", "http://", "no such host"])
def test_a_url_that_is_none_is_exit_2_and_one_line(url):
    result = invoke("verify", "--base-url", url, *SMALL)
    assert result.exit_code == 2, result.output
    assert len(result.output.strip().splitlines()) == 1
    assert result.output.startswith("not tested: ")


@pytest.mark.parametrize("die_after", [2, 5])
def test_server_that_dies_in_mid_run_is_exit_2(die_after):
    with SocketServer(FakeVllm(), die_after=die_after) as server:
        result = invoke("verify", "--base-url", server.url, "--test-mode", "single", *SMALL)
    assert result.exit_code == 2, result.output
    last = result.output.strip().splitlines()[-1]
    assert last.startswith("not tested: server at ")
    assert "stopped answering in mid-run" in last
    assert "Traceback" not in result.output


def test_http_500_is_exit_2():
    with SocketServer(FakeVllm(fail_after=4)) as server:
        result = invoke("verify", "--base-url", server.url, "--test-mode", "single", *SMALL)
    assert result.exit_code == 2
    assert "answered HTTP 500 to POST /v1/completions: engine core died see the log" in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--test-mode", "every"], "--test-mode: got 'every'"),
        (["--temperature", "warm"], "--temperature: got 'warm'"),
        (["--temperature", "-1"], "--temperature: got [-1.0]"),
        (["--temperature", "nan"], "--temperature: got [nan]"),
        (["--sampling-seed", "1.5"], "--sampling-seed: got '1.5'"),
        (["--sampling-seed", "-1"], "--sampling-seed: got -1"),
        (["--batch-sizes", "0"], "--batch-sizes: got [0]"),
        (["--max-new-tokens", "1"], "--max-new-tokens: got 1"),
    ],
)
def test_bad_options_are_exit_2_and_one_line(args, message):
    result = invoke("verify", *args)
    assert result.exit_code == 2
    assert message in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_sglang_names_and_defaults():
    args = module.parser().parse_args([])
    assert (args.host, args.port, args.n_trials, args.n_start) == ("localhost", 30000, 50, 1)
    assert (args.temperature, args.sampling_seed, args.max_new_tokens) == ("0.0", "42", 100)
    assert (args.frequency_penalty, args.presence_penalty) == (0.0, 0.0)
    assert (args.return_logprob, args.stream, args.test_mode) == (False, False, "single")
    for mode in ("single", "prefix", "radix_cache", "p_vs_d", "mixed", "all"):
        assert module.parser().parse_args(["--test-mode", mode]).test_mode == mode


def test_module_against_a_server_and_a_closed_port(capsys):
    fake = FakeVllm()
    with SocketServer(fake) as server:
        port = server.server.server_port
        assert module.main(["--port", str(port), "--n-trials", "2", "--max-new-tokens", "9", "--stream"]) == 0
        assert fake.bodies[-1]["stream"]
    assert "Unique samples: 1" in capsys.readouterr().out
    assert module.main(["--port", str(closed_port()), "--host", "127.0.0.1"]) == 2
    assert module.main(["--temperature", "x"]) == 2


def test_the_command_line_starts_without_torch_and_vllm():
    code = (
        "import sys, det_plugin.cli, det_plugin.test_deterministic, det_plugin.verify, det_plugin.verify.bench;"
        "import det_plugin.evidence.report, det_plugin.verify.replay;"
        "print([m for m in ('torch', 'triton', 'vllm', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- record, replay, diff ---------------------------------------------------------------------------------


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("The first prompt\n\nThe second one\nA third\n")
    return path


def test_record_replay_diff(tmp_path, prompts):
    run_file, again = tmp_path / "run.jsonl", tmp_path / "again.jsonl"
    with SocketServer(FakeVllm()) as server:
        url = ("--base-url", server.url)
        recorded = invoke("record", *url, "--prompts", prompts, "-o", run_file, "--max-tokens", 9)
        assert recorded.exit_code == 0, recorded.output
        assert "recorded 3 requests, 27 tokens" in recorded.output
        replayed = invoke("replay", run_file, *url, "-o", again)
        assert replayed.exit_code == 0, replayed.output
        assert "SAME: 3 of 3 requests identical" in replayed.output
    assert invoke("diff", run_file, again, "--top-logprobs").exit_code == 0
    with SocketServer(FakeVllm("constant")) as server:
        other = invoke("replay", run_file, "--base-url", server.url, "--json", tmp_path / "d.json")
    assert other.exit_code == 1
    assert "first divergence at output index 0" in other.output
    assert len(json.loads((tmp_path / "d.json").read_text())["differing"]) == 3


def test_replay_and_record_against_dead_servers(tmp_path, prompts):
    run_file = tmp_path / "run.jsonl"
    port = ("--host", "127.0.0.1", "--port", closed_port())
    result = invoke("record", *port, "--prompts", prompts, "-o", run_file)
    assert result.exit_code == 2
    assert not run_file.exists()
    with SocketServer(FakeVllm()) as server:
        assert invoke("record", "--base-url", server.url, "--prompts", prompts, "-o", run_file).exit_code == 0
    result = invoke("replay", run_file, *port)
    assert result.exit_code == 2
    assert "cannot reach" in result.output


def test_bad_files_are_one_line(tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text("not json\n")
    for args in (("diff", bad, bad), ("diff", tmp_path / "absent", bad), ("replay", bad)):
        result = invoke(*args)
        assert result.exit_code == 2
        assert len(result.output.strip().splitlines()) == 1


# --- bench ------------------------------------------------------------------------------------------------


def test_bench_measures_running_servers_and_writes_the_agreed_json(tmp_path):
    out = tmp_path / "speed.json"
    with SocketServer(FakeVllm()) as stock, SocketServer(FakeVllm(delay=0.015)) as slow:
        result = invoke(
            *("bench", "--servers", f"stock={stock.url},deterministic={slow.url},other={stock.url}"),
            *("--out", out, "--rounds", 2, "--concurrency", "1,2", "--output-tokens", 8),
            *("--prefill-prompts", 2, "--prefill-tokens", 30),
        )
    assert result.exit_code == 0, result.output
    data = json.loads(out.read_text())
    assert {"cpu", "cores", "python", "torch", "det_plugin", "date"} <= data["environment"].keys()
    assert [case["case"] for case in data["cases"]] == [
        "decode, 1 concurrent",
        "decode, 2 concurrent",
        "prefill, 2 x 30",
    ]
    for case in data["cases"]:
        assert {"model", "case", "unit", "stock", "deterministic", "ratio", "runs", "spread"} <= case.keys()
        assert case["runs"] == 2
        assert len(data["rounds"]["stock"][case["case"]]) == 2
        assert case["others"]["other"]["value"] > 0
    assert data["cases"][0]["ratio"] < 1


def test_bench_refuses_to_measure_a_deterministic_server_that_is_not(tmp_path):
    fake = FakeVllm("constant")
    with SocketServer(fake) as server:
        result = invoke("bench", "--servers", f"deterministic={server.url}", "--out", tmp_path / "x.json")
    assert result.exit_code == 2
    assert not (tmp_path / "x.json").exists()


@pytest.mark.parametrize(
    "args",
    [[], ["--host-only", "fast", "--model", "m"], ["--servers", "nonsense"]],
)
def test_bench_bad_options(args):
    result = invoke("bench", *args)
    assert result.exit_code == 2
    assert len(result.output.strip().splitlines()) == 1


def test_bench_takes_the_demo_model(monkeypatch, tmp_path):
    """Without --model it benchmarks the demo's model, and says so when that can't be had."""
    from det_plugin.verify import model
    from det_plugin.verify.bench import BenchOptions

    monkeypatch.setattr(model, "smollm2", lambda: tmp_path)
    options = BenchOptions.from_command(host_only="stock", servers=None, server_args="")
    assert options.model == str(tmp_path)

    def missing():
        raise model.ModelError("no network")

    monkeypatch.setattr(model, "smollm2", missing)
    result = invoke("bench", "--host-only", "stock")
    assert result.exit_code == 2
    assert "no network" in result.output
    assert len(result.output.strip().splitlines()) == 1
