"""The benchmark: suites, latencies, mixed arrivals, memory plan, time limit, idle servers, merged results."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import random
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from fake_vllm import FakeVllm, SocketServer
from typer.testing import CliRunner

from det_plugin.cli import app
from det_plugin.errors import ConfigError
from det_plugin.verify import bench, bench_report, bench_servers
from det_plugin.verify.bench_client import BenchClient, Timing
from det_plugin.verify.bench_load import (
    Case,
    RandomPrompts,
    arrivals,
    latencies,
    longest_pause,
    percentile,
    poisson_rate,
)
from det_plugin.verify.bench_options import BenchOptions
from det_plugin.verify.client import ServerFailureError
from det_plugin.verify.server import VllmServer

ROOT = Path(__file__).parents[2]


def load_file(name: str, path: Path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


merge_speed = load_file("merge_speed", ROOT / "benchmarks" / "merge_speed.py")
model_shapes = load_file("model_shapes", ROOT / "benchmarks" / "model_shapes.py")
tables = load_file("benchmark_tables", ROOT / "benchmarks" / "tables.py")

SMALL_GPU = [
    *("--suite", "gpu", "--concurrency", "1,2", "--prompt-tokens", 24, "--output-tokens", 6, "--prefill-prompts", 2),
    *("--prefill-tokens", 30, "--context-tokens", 50, "--poisson-seconds", 0.4, "--poisson-rate", 20, "--no-check"),
]


def invoke(*args: object):
    return CliRunner().invoke(app, ["bench", *map(str, args)])


def gpu_cases(**values) -> list[Case]:
    return BenchOptions(suite="gpu", **values).cases()


# --- suites -----------------------------------------------------------------------------------------------


def test_gpu_suite_is_the_agreed_one():
    cases = {case.name: case for case in gpu_cases()}
    assert list(cases) == [
        *(f"decode, {n} concurrent" for n in (1, 8, 64, 256)),
        "prefill, 32 x 4096",
        "decode at 30000 context, 1 concurrent",
        "decode at 30000 context, 4 concurrent",
        "mixed arrivals",
    ]
    decode = cases["decode, 256 concurrent"]
    assert (decode.prompt_tokens, decode.new_tokens, decode.longest) == (512, 256, 768)
    assert list(decode.rows.values()) == ["output tokens/s", "ms", "ms", "ms", "ms"]
    assert list(cases["prefill, 32 x 4096"].rows.values()) == ["prompt tokens/s"]
    assert set(cases["mixed arrivals"].rows.values()) == {"ms"}
    assert [case.name for case in gpu_cases(cases_filter=["context", "prefill"])] == list(cases)[4:7]


def test_suite_follows_the_machine(monkeypatch):
    assert BenchOptions().suite == "cpu"
    assert [c.stream for c in BenchOptions().cases()] == [False] * 4
    monkeypatch.setattr("det_plugin.verify.bench_options.gpu_facts", lambda: ["NVIDIA H200, 1"])
    assert BenchOptions().suite == "gpu"


@pytest.mark.parametrize(
    "args",
    [
        ["--suite", "tpu"],
        ["--cases", "nothing like it"],
        ["--prompts", "none"],
        ["--timeout", "0"],
        ["--timeout", "nan"],
        ["--commit", " "],
        ["--server-args", "--skip-tokenizer-init"],
        ["--server-args", "--skip-tokenizer-init", "--no-check"],
    ],
)
def test_bad_options_are_one_line(args, tmp_path):
    result = invoke("--host-only", "stock", "--model", tmp_path, *args)
    assert result.exit_code == 2
    assert len(result.output.strip().splitlines()) == 1


def test_mixed_arrivals_need_a_stock_server_or_a_rate(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    result = invoke("--suite", "gpu", "--host-only", "deterministic", "--model", tmp_path)
    assert result.exit_code == 2
    assert "--poisson-rate" in result.output


def test_commit_overrides_what_git_says():
    assert bench_servers.environment("abc")["commit"] == "abc"
    assert bench.Bench(BenchOptions(commit="abc"), print).report["environment"]["commit"] == "abc"
    found = bench_servers.environment()["commit"]
    assert found is None or len(found) == 40


def test_timeout_and_commit_reach_the_run(tmp_path, model):
    """A server that answers too late for ``--timeout`` ends the run with one line; a patient one is measured."""
    out = tmp_path / "speed.json"
    args = ["--suite", "gpu", "--cases", "decode, 1 ", "--prompt-tokens", 20, "--output-tokens", 8, "--rounds", 1]
    args += ["--no-check", "--model", model, "--out", out, "--commit", "abc"]
    for timeout, status in ((0.3, 2), (60, 0)):
        with SocketServer(FakeVllm(delay=0.1)) as server:
            names = f"stock={server.url},deterministic={server.url}"
            result = invoke("--servers", names, *args, "--timeout", timeout)
        assert result.exit_code == status, result.output
        assert ("did not answer in time" in result.output) == bool(status)
        if not status:
            assert json.loads(out.read_text())["environment"]["commit"] == "abc"


def test_the_check_before_measuring_has_the_same_timeout(monkeypatch):
    seen = []
    result = bench.VerificationResult(base_url="x", options={})
    monkeypatch.setattr(bench, "run_verification", lambda options: seen.append(options.timeout) or result)
    bench.check_servers({"stock": "http://localhost:1"}, print, 7.0)
    assert seen == [7.0]


# --- loads ------------------------------------------------------------------------------------------------


def test_arrivals_are_equal_for_every_server_and_share_prefixes():
    case = Case("mixed arrivals", 64, 64, 16, load="poisson", stream=True, seconds=60.0)
    first, second = (arrivals(case, 5.0, RandomPrompts(1000), random.Random("0/x")) for _ in range(2))
    assert first == second
    assert first != arrivals(case, 5.0, RandomPrompts(1000), random.Random("1/x"))
    assert 220 < len(first) < 380  # 300 expected
    assert all(0 <= a.at < 60 and len(a.prompt) + a.new_tokens <= case.longest for a in first)
    assert len({tuple(a.prompt[:8]) for a in first}) == 5
    assert len({tuple(a.prompt) for a in first}) == len(first)
    assert {a.new_tokens for a in first} == {8, 16, 24}


def test_longest_bounds_what_arrives():
    case = Case("mixed arrivals", 64, 512, 256, load="poisson", stream=True, seconds=60.0)
    plan = arrivals(case, 20.0, RandomPrompts(1000), random.Random(0))
    assert max(len(a.prompt) + a.new_tokens for a in plan) <= case.longest


def test_rate_is_seventy_per_cent_of_capacity():
    assert poisson_rate(1000.0, Case("c", 64, 512, 250)) == pytest.approx(2.8)


def test_percentiles_and_latencies():
    assert percentile(range(1, 101), 50) == 50
    assert percentile(range(1, 101), 99) == 99
    assert percentile([3.0], 99) == 3.0
    rows = latencies("c", [Timing(0.0, 0.5, 1.5, 11), Timing(1.0, 1.25, 5.25, 11)])
    assert rows["c: time to first token p50"] == 250
    assert rows["c: time to first token p99"] == 500
    assert rows["c: time per output token p50"] == pytest.approx(100)
    assert rows["c: time per output token p99"] == pytest.approx(400)


def test_answers_in_one_piece_have_no_time_per_token():
    whole = Timing(0.0, 0.9999, 1.0, 33)
    assert whole.in_one_piece
    assert not Timing(0.0, 0.9, 1.0, 33).in_one_piece
    assert not Timing(0.0, 1.0, 1.0, 1).in_one_piece
    assert latencies("c", [whole, Timing(0.0, 0.5, 1.5, 11)])["c: time per output token p99"] == pytest.approx(100)
    rows = latencies("c", [whole])
    assert rows["c: time per output token p50"] is None
    assert rows["c: time to first token p50"] == pytest.approx(999.9)
    samples = {"stock": {"c": [None, 2.0]}, "deterministic": {"c": [1.0, 1.0]}}
    (row,) = bench_report.summarize("m", [Case("c", 1, 2, 3)], samples)
    assert (row["ratio"], row["stock"], row["deterministic"], row["runs"]) == (0.5, 2.0, 1.0, 1)


def test_timed_reads_first_and_last_token():
    async def run() -> Timing:
        async with BenchClient("http://fake", model="fake", transport=FakeVllm(delay=0.02).transport) as client:
            body = client.stream_body([3, 4, 5], max_tokens=5, salt="s", interval=32)
            assert json.loads(body)["stream_interval"] == 32
            with pytest.raises(ServerFailureError, match="generated 5 tokens where 4"):
                await client.timed(body, tokens=4)
            return await client.timed(body, tokens=5)

    timing = asyncio.run(run())
    assert timing.sent < timing.first <= timing.last
    assert timing.tokens == 5


def test_timed_sees_a_chunk_when_it_is_sent():
    """Over a real socket: the second chunk comes 0.3 s after the first, and is not waited for with it."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line.split(b":")[1]) for line in head.lower().splitlines() if line.startswith(b"content-le"))
        await reader.readexactly(length)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        token, usage = {"choices": [{"text": ""}]}, {"choices": [], "usage": {"completion_tokens": 33}}
        for pause, payload in ((0.1, token), (0.3, token), (0.1, usage), (0.0, "[DONE]")):
            await asyncio.sleep(pause)
            text = payload if isinstance(payload, str) else json.dumps(payload)
            event = f"data: {text}\n\n".encode()
            writer.write(b"%x\r\n%s\r\n" % (len(event), event))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    async def run() -> list[Timing]:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, BenchClient(f"http://127.0.0.1:{port}", model="fake") as client:
            body = client.stream_body([1, 2], max_tokens=33, salt="s", interval=32)
            return await asyncio.gather(*(client.timed(body, tokens=33) for _ in range(20)))

    for timing in asyncio.run(run()):
        assert timing.first - timing.sent >= 0.1
        assert 0.15 < timing.last - timing.first < 0.4  # the usage that follows doesn't count


# --- whole runs -------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path):
    return model_shapes.write("Qwen3-0.6B", tmp_path / "models")


def test_gpu_suite_over_running_servers(tmp_path, model, monkeypatch):
    monkeypatch.setattr("det_plugin.verify.bench_options.CONTEXT_OUTPUT", 20)
    out = tmp_path / "speed.json"
    with SocketServer(FakeVllm()) as stock, SocketServer(FakeVllm(delay=0.002)) as slow:
        names = f"stock={stock.url},deterministic@TRITON_ATTN={slow.url},host_batch_invariant={slow.url}"
        result = invoke("--servers", names, "--model", model, "--out", out, "--rounds", 2, *SMALL_GPU)
    assert result.exit_code == 0, result.output
    data = json.loads(out.read_text())
    rows = {row["case"]: row for row in data["cases"]}
    measured = data["rounds"]["deterministic@TRITON_ATTN"]
    assert all(len(values) == 2 for values in measured.values())
    assert {"decode, 2 concurrent", "decode at 50 context, 4 concurrent", "prefill, 2 x 30"} < measured.keys()
    kinds = ("to first token", "per output token")
    assert {f"mixed arrivals: time {kind} p{p}" for kind in kinds for p in (50, 99)} < measured.keys()
    needed = (
        "model",
        "case",
        "backend",
        "unit",
        "stock",
        "deterministic",
        "host_batch_invariant",
        "ratio",
        "runs",
        "spread",
    )
    for row in rows.values():
        assert set(needed) <= row.keys()
        assert row["model"] == "Qwen3-0.6B"
        assert row["backend"] == "TRITON_ATTN"
    for name in ("decode, 1 concurrent", "decode, 2 concurrent", "prefill, 2 x 30"):
        assert rows[name]["runs"] == 2
        assert rows[name]["ratio"] > 0  # how large is the machine's affair
        assert rows[name]["host_ratio"] > 0
    assert data["poisson_requests_per_second"] == 20
    assert set(data["idle"]["unknown"]) == data["rounds"].keys()  # the fakes have no /metrics
    assert data["answers_in_one_piece"].keys() == data["rounds"].keys()
    passes = data["passes"]["deterministic@TRITON_ATTN"]["decode, 2 concurrent"]
    assert len(passes) == 2
    for facts in passes:
        assert len(facts["ended_at"]) == 11
        assert facts["ended_at"] == sorted(facts["ended_at"])
        assert facts["decode_seconds"] > 0
        assert facts["decode_seconds_in_engine"] is None  # no /metrics
        assert 0 <= facts["longest_client_pause"] < 60
    for facts in data["passes"]["deterministic@TRITON_ATTN"]["mixed arrivals"]:
        late = [first for _, first in facts["slowest_first_tokens_at"]]
        assert late == sorted(late, reverse=True)
    assert not list(tmp_path.glob("*.partial"))


def test_a_pause_of_the_client_is_seen():
    async def stop(seconds):
        async with longest_pause() as pause:
            await asyncio.sleep(0.03)
            time.sleep(seconds)  # the event loop stands still
            await asyncio.sleep(0.03)
        return max(pause)

    assert asyncio.run(stop(0.4)) > 0.35
    assert asyncio.run(stop(0.0)) < 0.35


def test_a_killed_run_leaves_what_it_had(tmp_path, model):
    """The file holds every finished case: the stock server dies in the second round."""
    out = tmp_path / "speed.json"
    args = ["--suite", "gpu", "--concurrency", "1,2", "--prompt-tokens", 24, "--output-tokens", 6, "--no-check"]
    args += ["--cases", "decode, 1;decode, 2", "--rounds", 3, "--out", out, "--model", model]
    with SocketServer(FakeVllm(fail_after=12)) as stock, SocketServer(FakeVllm()) as other:
        result = invoke("--servers", f"stock={stock.url},deterministic={other.url}", *args)
    assert result.exit_code == 2
    data = json.loads(out.read_text())
    assert {row["case"]: row["runs"] for row in data["cases"]}["decode, 1 concurrent"] == 2
    assert {row["case"]: row["runs"] for row in data["cases"]}["decode, 2 concurrent"] == 1


def test_limit_counts_what_the_case_took_last_time():
    state = bench.Bench(BenchOptions(suite="gpu"), lambda _: None)
    case = state.cases[0]
    state.started -= 50
    assert not state.over(case, None)
    assert not state.over(case, 60.0)
    state.took[case.name] = 20.0
    assert not state.over(case, 1000.0)
    assert not state.cut
    assert state.over(case, 60.0)
    assert state.cut


@pytest.mark.parametrize(("limit", "rounds"), [(25_000, 2), (5_000, 0)])
def test_limit_stops_before_a_round_that_would_pass_it(limit, rounds, tmp_path, model, monkeypatch):
    """On a clock that moves by 10,000 s before each visit."""
    original = bench.Bench.over

    def over(self, case, seconds):
        self.started -= 10_000
        return original(self, case, seconds)

    monkeypatch.setattr(bench.Bench, "over", over)
    out = tmp_path / "speed.json"
    args = ["--suite", "gpu", "--cases", "decode, 1 ", "--output-tokens", 4, "--prompt-tokens", 20, "--no-check"]
    with SocketServer(FakeVllm()) as server:
        names = f"stock={server.url},deterministic={server.url}"
        result = invoke("--servers", names, *args, "--rounds", 9, "--limit", limit, "--out", out, "--model", model)
    assert result.exit_code == (0 if rounds else 2), result.output
    data = json.loads(out.read_text())
    assert data["limit_reached"]
    assert [len(values) for values in data["rounds"]["stock"].values()] == [rounds] * 5


def test_a_busy_server_is_not_measured_beside(monkeypatch):
    monkeypatch.setattr(bench, "IDLE_SECONDS", 0.2)
    text = 'x 1\nvllm:num_requests_running{engine="0",model_name="m"} %s\nvllm:num_requests_waiting{engine="0"} 2.0\n'

    def client(running: str) -> BenchClient:
        transport = httpx.MockTransport(lambda _: httpx.Response(200, text=text % running))
        return BenchClient("http://fake", transport=transport)

    state = bench.Bench(BenchOptions(suite="gpu"), print)
    assert asyncio.run(client("1.0").unfinished()) == 3
    with pytest.raises(ServerFailureError, match="stock has 3 unfinished requests"):
        asyncio.run(state.check_idle("stock", client("1.0")))
    monkeypatch.setattr(BenchClient, "unfinished", lambda _: asyncio.sleep(0, 0))
    asyncio.run(state.check_idle("stock", client("0.0")))
    assert state.idle == {"checks": 1, "unknown": []}


# --- servers ----------------------------------------------------------------------------------------------

STAND_IN = """
import http.server, sys, time
time.sleep(float(sys.argv[sys.argv.index("--wait") + 1]))
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *args):
        pass
if "--fail" in sys.argv:
    sys.exit("no such backend")
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def stand_in(*args: str) -> VllmServer:
    return VllmServer("m", deterministic=False, extra_args=args, command=[sys.executable, "-c", STAND_IN])


def test_servers_start_at_the_same_time_and_a_failure_is_told():
    servers = {"a": stand_in("--wait", "1.5"), "b": stand_in("--wait", "0"), "c": stand_in("--wait", "0", "--fail")}
    said: list[str] = []
    with ExitStack() as stack:
        failed = bench_servers.start_servers(stack, servers, said.append, at_once=True)
        assert list(failed) == ["c"]
        assert "no such backend" in failed["c"]
        assert said[:3] == ["starting a", "starting b", "starting c"]
        assert servers["b"].startup_seconds < servers["a"].startup_seconds
        assert all(servers[name].is_healthy() for name in "ab")
    assert servers["a"].pid is servers["b"].pid is None


@pytest.mark.parametrize(("limit", "restarts"), [(None, 2), (0.001, 0)])
def test_servers_are_started_again(limit, restarts):
    run = bench.Bench(BenchOptions(suite="cpu", restarts=2), lambda _: None)
    servers = {"stock": stand_in("--wait", "0.2"), "deterministic": stand_in("--wait", "0.2")}
    run.report["servers"] = {name: {} for name in servers}
    with ExitStack() as stack:
        assert not bench_servers.start_servers(stack, servers, lambda _: None, at_once=True)
        first = {name: server.pid for name, server in servers.items()}
        run.restart(stack, servers, limit)
        assert all((server.pid != first[name]) == bool(restarts) for name, server in servers.items())
        assert all(server.is_healthy() for server in servers.values())
    for facts in run.report["servers"].values():
        again = facts.get("restart_seconds", [])
        assert len(again) == restarts
        assert all(seconds > 0.2 for seconds in again)
    assert run.cut == (restarts == 0)


def test_servers_that_were_not_started_here_are_not_started_again():
    result = invoke("--suite", "cpu", "--servers", "stock=http://localhost:1", "--restarts", 1)
    assert result.exit_code == 2
    assert "--restarts" in result.output


def test_a_server_that_does_not_start_again_is_told(tmp_path):
    run = bench.Bench(BenchOptions(suite="cpu", restarts=2), lambda _: None)
    servers = {"stock": stand_in("--wait", "0"), "deterministic": stand_in("--wait", "0")}
    run.report["servers"] = {name: {} for name in servers}
    with ExitStack() as stack:
        bench_servers.start_servers(stack, servers, lambda _: None, at_once=True)
        servers["stock"].extra_args.append("--fail")
        run.restart(stack, servers, None)
    assert "no such backend" in run.report["failed"]["stock, restarted"]
    assert len(run.report["servers"]["deterministic"]["restart_seconds"]) == 1
    assert "restart_seconds" not in run.report["servers"]["stock"]


def test_nvidia_smi_is_read(tmp_path, monkeypatch):
    """With a stand-in of the tool: facts, totals, and the memory of a server's own processes only."""
    tool = tmp_path / "nvidia-smi"
    with stand_in("--wait", "0") as server:
        tool.write_text(
            "#!/bin/sh\ncase $1 in\n"
            f"*compute-apps*) echo '{server.pid}, 1000'; echo '{os.getpid()}, 7'; echo '999999999, 5';;\n"
            "*memory.total*) echo 143771;;\n*memory.used*) echo 1500;;\n*utilization*) echo 3;;\n"
            "*) echo 'NVIDIA H200, 580.1';;\nesac\n"
        )
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        assert bench_servers.gpu_facts() == ["NVIDIA H200, 580.1"]
        assert bench_servers.gpu_bytes() == 143771 << 20
        assert bench_servers.gpu_memory_used() == 1500 << 20
        assert bench_servers.gpu_utilization() == 3
        assert bench_servers.gpu_memory_of(server) == 1000 << 20
        server.log_path.write_text("(E) INFO 1 [a.py:1] Graph capturing finished in 9 secs, took 1.00 GiB\nother\n")
        assert bench_servers.startup_log(server) == ["Graph capturing finished in 9 secs, took 1.00 GiB"]


def test_memory_plan_gives_the_cases_what_they_need(tmp_path):
    folder = str(model_shapes.write("Qwen3-1.7B", tmp_path))
    plan = bench_servers.kv_cache(folder, gpu_cases(), together=3, total=140 << 30)
    assert plan.tokens >= plan.needed_tokens - 1 >= 256 * 768
    assert plan.bytes == pytest.approx(plan.needed_tokens * 2 * 2 * 28 * 8 * 128)
    weights = bench_servers.weight_bytes(folder, model_shapes.SHAPES["Qwen3-1.7B"])
    assert weights == pytest.approx(3.44e9, rel=0.01)


def test_memory_plan_on_a_full_gpu(tmp_path):
    folder = str(model_shapes.write("Qwen3-8B", tmp_path))
    assert bench_servers.weight_bytes(folder, model_shapes.SHAPES["Qwen3-8B"]) == pytest.approx(16.38e9, rel=0.01)
    plan = bench_servers.kv_cache(folder, gpu_cases(), together=3, total=140 << 30)
    assert plan.tokens < plan.needed_tokens
    assert 3 * (plan.bytes + bench_servers.weight_bytes(folder, model_shapes.SHAPES["Qwen3-8B"])) < 140 << 30
    with pytest.raises(ConfigError, match="compare fewer servers"):
        bench_servers.kv_cache(folder, gpu_cases(), together=3, total=40 << 30)
    with pytest.raises(ConfigError, match="config"):
        bench_servers.kv_cache("no/such", gpu_cases(), together=3, total=140 << 30)


def test_arguments_of_servers_that_share_a_gpu(monkeypatch):
    monkeypatch.setattr(bench_servers, "gpu_facts", lambda: ["NVIDIA H200, 1"])
    plan = bench_servers.KvCache(1 << 30, 1000, 1000)
    server = bench_servers.make_server("deterministic@TRITON_ATTN", "m", [], gpu_cases(), together=3, kv=plan)
    args = " ".join(server.extra_args)
    assert server.deterministic
    assert "--attention-backend TRITON_ATTN" in args
    assert f"--kv-cache-memory-bytes {1 << 30} --gpu-memory-utilization 0.17" in args
    assert "--max-model-len 30192" in args
    given = ["--kv-cache-memory-bytes=5", "--gpu-memory-utilization=0.1"]
    server = bench_servers.make_server("host_batch_invariant", "m", given, gpu_cases(), together=3, kv=plan)
    assert server.extra_args == [*given, "--max-model-len", "30192"]
    assert server.env == {"VLLM_BATCH_INVARIANT": "1"}


# --- results ----------------------------------------------------------------------------------------------


def row_values(**values: float) -> dict[str, dict[str, list[float]]]:
    return {name.replace("__", "@"): {"decode, 8 concurrent": [value, value]} for name, value in values.items()}


CASE = [Case("decode, 8 concurrent", 8, 512, 256)]


def test_every_deterministic_backend_is_compared_with_its_own():
    samples = row_values(stock=10, stock__B=20, deterministic=9, deterministic__B=19, host_batch_invariant=5)
    rows = {row["backend"]: row for row in bench_report.summarize("m", CASE, samples)}
    assert (rows["default"]["stock"], rows["default"]["ratio"], rows["default"]["host_ratio"]) == (10, 0.9, 0.5)
    assert (rows["B"]["stock"], rows["B"]["ratio"], rows["B"]["host_ratio"]) == (20, 0.95, 0.25)
    assert rows["B"]["servers"]["stock"] == "stock@B"


def document(run: str, **values: float) -> dict:
    cases = bench_report.summarize("Qwen3-8B", CASE, row_values(**values))
    return {"environment": {"gpus": ["NVIDIA H200, 1"], "date": run}, "method": "m", "servers": {}, "cases": cases}


def test_merged_files_keep_the_hosts_mode_with_its_own_ratio():
    first, second = document("1", stock=10, deterministic=9), document("2", stock=20, host_batch_invariant=5)
    for merged in (merge_speed.merge([first, second]), merge_speed.merge([second, first])):
        (row,) = merged["cases"]
        assert (row["stock"], row["deterministic"], row["ratio"]) == (10, 9, 0.9)
        assert (row["host_batch_invariant"], row["host_ratio"]) == (5, 0.25)
        dates = [session["environment"]["date"] for session in merged["sessions"]]
        assert (dates[row["run"]], dates[row["host_run"]]) == ("1", "2")
    again = merge_speed.merge([merged, document("3", stock=10, deterministic=10)])
    assert (again["cases"][0]["ratio"], again["cases"][0]["host_ratio"]) == (1.0, 0.25)
    assert [session["environment"]["date"] for session in again["sessions"]] == ["2", "3"]
    other = document("4", stock=1, deterministic=1)
    other["environment"]["gpus"] = ["NVIDIA H100, 1"]
    with pytest.raises(ValueError, match="different devices"):
        merge_speed.merge([first, other])


def test_tables_and_plot_show_a_merged_file(tmp_path):
    merged = merge_speed.merge([document("1", stock=10, deterministic=9, host_batch_invariant=5)])
    lines = tables.speed_table(merged)
    assert lines[0].count("|") == lines[1].count("|") == lines[2].count("|")
    numbers = "10 | 9 | 0.900 | 0.90 to 0.90 | 5 | 0.500 | 2"
    assert f"| Qwen3-8B | decode, 8 concurrent | output tokens/s | {numbers} |" in lines
    assert "NVIDIA H200, driver 1" in tables.environment(merged)
    pytest.importorskip("matplotlib")
    assert bench_report.plot(merged, tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"


def test_without_rich_and_matplotlib_the_table_is_plain(tmp_path):
    program = """
import sys
import time
sys.modules["rich"] = sys.modules["matplotlib"] = sys.modules["platformdirs"] = None
sys.modules["rich.console"] = sys.modules["rich.table"] = None
from det_plugin.verify import bench
from det_plugin.verify.bench_load import Case
from det_plugin.verify.bench_report import plot, print_table, summarize
cases = summarize("m", [Case("c", 1, 2, 3)], {"stock": {"c": [2.0]}, "deterministic": {"c": [1.0]}})
print_table(cases)
print(plot({"cases": cases, "environment": {}}, "x.png"))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "0.500" in done.stdout
    assert done.stdout.rstrip().endswith("None")


def test_model_shapes_writes_what_is_asked_for(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / "model_shapes.py"), str(tmp_path)]
    subprocess.run([*command, "Qwen3-8B"], check=True, capture_output=True)
    assert [path.name for path in tmp_path.iterdir()] == ["Qwen3-8B"]
    assert subprocess.run([*command, "GPT-2"], check=False, capture_output=True).returncode == 2
    for name, size in (("Qwen3-0.6B", 0.596e9), ("Qwen3-8B", 8.19e9), ("Llama-3.1-8B", 8.03e9)):
        folder = model_shapes.write(name, tmp_path)
        config = json.loads((folder / "config.json").read_text())
        assert bench_servers.weight_bytes(str(folder), config) / 2 == pytest.approx(size, rel=0.01)
