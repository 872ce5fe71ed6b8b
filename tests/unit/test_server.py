"""The child-process server, tried with small stand-ins for vLLM."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time

import pytest

from det_plugin.verify.server import DETERMINISTIC_FLAG, ServerError, VllmServer, free_port

STAND_IN = """
import http.server, os, signal, subprocess, sys
port = int(sys.argv[sys.argv.index("--port") + 1])
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
print("child", child.pid, flush=True)
if "--stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *args):
        pass

http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def make_server(tmp_path, code=STAND_IN, **kwargs):
    kwargs.setdefault("deterministic", False)
    return VllmServer(
        tmp_path / "model",
        log=tmp_path / "log" / "server.log",
        command=[sys.executable, "-c", code],
        **kwargs,
    )


def child_pid(server) -> int:
    return int(server.log_path.read_text().split()[1])


def is_running(pid: int) -> bool:
    """Whether ``pid`` runs; a zombie that its new parent has not reaped yet does not."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_gone(pid: int) -> bool:
    deadline = time.monotonic() + 5
    while is_running(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_context_manager_starts_and_stops_the_whole_group(tmp_path):
    with make_server(tmp_path) as server:
        assert server.is_healthy()
        assert server.startup_seconds is not None
        pids = [server.pid, child_pid(server)]
        assert all(is_running(pid) for pid in pids)
    assert server.pid is None
    assert all(wait_gone(pid) for pid in pids)
    assert not server.is_healthy()
    server.stop()


def test_a_server_that_ignores_sigterm_is_killed(tmp_path):
    with make_server(tmp_path, extra_args=["--stubborn"], stop_timeout=0.5) as server:
        pid = server.pid
    assert wait_gone(pid)
    assert server.returncode == -signal.SIGKILL


def test_death_before_health_is_told_with_the_log(tmp_path):
    server = make_server(tmp_path, code="import sys; print('no such model', flush=True); sys.exit(3)")
    started = time.monotonic()
    with pytest.raises(ServerError, match=r"(?s)stock server.*status 3.*no such model"):
        server.start().wait_ready()
    assert time.monotonic() - started < 10


def test_timeout_stops_the_server(tmp_path):
    server = make_server(tmp_path, code="import time; time.sleep(60)", startup_timeout=0.6).start()
    pid = server.pid
    with pytest.raises(ServerError, match="not healthy after"):
        server.wait_ready()
    assert wait_gone(pid)


def test_unknown_command_is_told(tmp_path):
    server = VllmServer("m", deterministic=False, log=tmp_path / "log", command=[str(tmp_path / "absent")])
    with pytest.raises(ServerError, match="cannot start"):
        server.start()


def test_kill_takes_the_group_and_the_server_can_start_again(tmp_path):
    server = make_server(tmp_path)
    with server:
        first, child = server.pid, child_pid(server)
        server.kill()
        assert wait_gone(first)
        assert wait_gone(child)
        server.start().wait_ready()
        assert server.pid != first


def test_deterministic_decides_the_flag(tmp_path):
    assert DETERMINISTIC_FLAG not in make_server(tmp_path).command()
    assert DETERMINISTIC_FLAG in make_server(tmp_path, deterministic=True).command()


@pytest.mark.parametrize("name", ["DET_PLUGIN_ENABLE", "VLLM_BATCH_INVARIANT"])
def test_an_inherited_switch_does_not_reach_the_server(tmp_path, monkeypatch, name):
    monkeypatch.setenv(name, "1")
    assert name not in make_server(tmp_path).environment()
    assert make_server(tmp_path, env={name: "1"}).environment()[name] == "1"


def test_env_wins_over_inherited_and_defaults(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    environment = make_server(tmp_path, env={"OMP_NUM_THREADS": "1"}).environment()
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["PATH"] == os.environ["PATH"]


def test_log_tail_returns_the_last_lines(tmp_path):
    server = make_server(tmp_path)
    assert server.log_tail() == ""
    server.log_path.parent.mkdir()
    server.log_path.write_text("\n".join(f"line {i}" for i in range(200)))
    assert server.log_tail(3).splitlines() == ["line 197", "line 198", "line 199"]


def test_free_port_can_be_bound():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", free_port()))
