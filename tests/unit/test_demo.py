"""The demo's verdict and exit status, and what happens when a server dies or the demo is ended."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from det_plugin.evidence.results import GroupResult, ModeResult, Variant, VerificationResult
from det_plugin.verify import demo as demo_module
from det_plugin.verify.demo import Demo, Throughput, main, print_comparison, run_demo
from det_plugin.verify.server import VllmServer


def mode(status, name="single", temperature=0.0):
    unique = {"same": 1, "different": 2, "not_tested": 0}[status]
    variants = [
        Variant(count=1, where=f"batch of {k + 1}", token_ids=[1, 2 + k], logprobs=[-0.5, -1.0 - k])
        for k in range(unique)
    ]
    group = GroupResult(
        label="one prompt",
        prompt_tokens=3,
        total=4,
        unique=unique,
        unique_token_ids=unique,
        tokens_compared=6,
        variants=variants,
    )
    return ModeResult(
        mode=name,
        temperature=temperature,
        status=status,
        reason="no cached_tokens" if status == "not_tested" else "",
        groups=[group] if unique else [],
        total=4 if unique else 0,
        unique=unique,
        differing=int(unique > 1),
    )


def result(*states, error=""):
    names = ("single", "prefix", "mixed")
    modes = [mode(state, name) for state, name in zip(states, names, strict=False)]
    return VerificationResult(base_url="http://localhost:1", modes=modes, error=error)


def demo_of(stock, deterministic):
    found = Demo(model="m", results={"stock": stock, "deterministic": deterministic})
    found.throughput = {"stock": Throughput(runs=[100, 110]), "deterministic": Throughput(runs=[90, 95])}
    return found


@pytest.mark.parametrize(
    ("stock", "deterministic", "status", "words"),
    [
        (("different", "same"), ("same", "same"), 0, "SHOWN: stock changed its answer in 1 of 2 runs"),
        (("different", "same"), ("same", "different"), 1, "FAILED"),
        (("same", "same"), ("same", "different"), 1, "FAILED"),
        (("same", "same"), ("same", "same"), 2, "stock engine differed nowhere"),
        (("different", "same"), ("same", "not_tested"), 2, "not tested"),
        (("different", "not_tested"), ("same", "same"), 0, "SHOWN"),
    ],
)
def test_exit_status_and_verdict(stock, deterministic, status, words):
    found = demo_of(result(*stock), result(*deterministic))
    assert found.exit_code == status
    assert words in found.verdict()
    assert "\n" not in found.verdict()


@pytest.mark.parametrize("broken", ["stock", "deterministic"])
def test_a_server_that_failed_in_mid_run_is_named(broken):
    whole, error = result("different"), "server at http://localhost:1 stopped answering in mid-run"
    results = {"stock": whole, "deterministic": result("same")}
    results[broken] = result("not_tested", error=error)
    found = demo_of(**results)
    assert found.exit_code == 2
    assert found.verdict() == f"not shown: {broken} server: {error}"


def test_a_difference_found_before_the_server_failed_counts():
    found = demo_of(result("different"), result("different", error="server gone"))
    assert found.exit_code != 0


def test_the_table_shows_both_servers_and_their_speed(capsys):
    print_comparison(demo_of(result("different", "same", "not_tested"), result("same", "same", "same")))
    out = capsys.readouterr().out
    assert "2 unique answers, 2 in tokens (4 samples)" in out
    assert "1 unique answer (4 samples)" in out
    assert "not tested: no cached_tokens" in out
    assert "105" in out
    assert "(0.88 of stock)" in out


def test_the_report_and_the_json_are_written(tmp_path):
    found = demo_of(result("different"), result("same"))
    page = demo_module._write_report(found, tmp_path)
    text = page.read_text()
    assert "<svg" in text
    assert "SHOWN" in text
    assert "http" not in text.replace("http://www.w3.org", "").replace("http://localhost", "")
    assert json.loads(json.dumps(found.to_json()))["throughput"]["stock"]["median"] == 105


def test_a_server_that_cannot_start_ends_the_demo_with_status_2(tmp_path, monkeypatch):
    dying = [sys.executable, "-c", "import sys; print('out of luck', flush=True); sys.exit(3)"]
    monkeypatch.setattr(demo_module, "VllmServer", functools.partial(VllmServer, command=dying))
    monkeypatch.setattr(demo_module, "smollm2", lambda say: tmp_path)
    lines = []
    assert run_demo(report=tmp_path / "report", say=lines.append) == 2
    assert "stock server" in lines[-1]
    assert "status 3" in lines[-1]
    assert "out of luck" in lines[-1]


def test_a_bad_mode_or_temperature_is_refused(capsys):
    for arguments in (["--test-mode", "all,nonsense"], ["--temperature", "warm"], ["--temperature", "-1"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
        assert arguments[0] in capsys.readouterr().err


ENDED = """
import functools, pathlib, signal, sys
from det_plugin.verify import demo, server
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits it ignored
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and one under nohup this
folder = pathlib.Path(sys.argv[1])
waiting = [sys.executable, "-c", "import os, pathlib, signal, sys, time; p = pathlib.Path({!r}) / str(os.getpid()); "
           "signal.signal(signal.SIGTERM, lambda *_: (time.sleep({}), sys.exit())); "
           "p.touch(); time.sleep(60)".format(str(folder / "pids"), sys.argv[2])]
(folder / "pids").mkdir()
demo.VllmServer = functools.partial(server.VllmServer, command=waiting)
demo.smollm2 = lambda say: folder
sys.exit(demo.run_demo(report=folder / "report"))
"""


ENDED_BENCH = (
    ENDED.partition("demo.VllmServer")[0]
    + """
from det_plugin import cli
from det_plugin.verify import bench_servers
(folder / "config.json").write_text("{}")
bench_servers.VllmServer = functools.partial(server.VllmServer, command=waiting)
start = bench_servers.start_servers
bench_servers.start_servers = lambda *args, at_once: start(*args, at_once=True)
sys.argv = ["det-plugin", "bench", "--model", str(folder), "--host-only", "stock,deterministic", "--suite", "cpu"]
cli.app()
"""
)


@pytest.mark.parametrize(
    ("number", "times"),
    [(signal.SIGTERM, 1), (signal.SIGHUP, 1), (signal.SIGINT, 1), (signal.SIGTERM, 8), (signal.SIGINT, 8)],
)
@pytest.mark.parametrize("code", [ENDED, ENDED_BENCH], ids=["demo", "bench"])
def test_ending_a_command_stops_its_servers(tmp_path, code, number, times):
    """Also an impatient end: signals that arrive while the servers take their time to stop."""
    arguments = [sys.executable, "-c", code, str(tmp_path), "0" if times == 1 else "0.7"]
    running = subprocess.Popen(arguments, stderr=subprocess.DEVNULL)
    pids: list[int] = []
    there = lambda: [pid for pid in pids if os.path.exists(f"/proc/{pid}/exe")]
    try:
        deadline = time.monotonic() + 60
        while len(pids) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
            pids = [int(path.name) for path in (tmp_path / "pids").glob("*")]
        assert len(pids) == 2
        for _ in range(times):
            running.send_signal(number)
            time.sleep(0.15 if times > 1 else 0)
        assert running.wait(30) != 0
        deadline = time.monotonic() + 5
        while there() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not there()
    finally:
        running.kill()
        for pid in there():
            os.kill(pid, signal.SIGKILL)
