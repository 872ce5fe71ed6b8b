"""A vLLM OpenAI server as a child process, for the demo, the end-to-end tests and the benchmarks.

The server runs in a process group of its own, so that stopping it also stops its engine, worker and API
processes.  vLLM itself is never imported here.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx

from det_plugin.config import ENABLE_ENV
from det_plugin.errors import DetPluginError

DETERMINISTIC_FLAG = "--enable-deterministic-inference"

_SWITCHES = (ENABLE_ENV, "VLLM_BATCH_INVARIANT")
"""Variables that would change what a server is; a child inherits none of them."""

_DEFAULT_ENV = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1"}


class ServerError(DetPluginError, RuntimeError):
    """The server could not start, died, or was not healthy in time; the message quotes its log."""


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port on ``host`` that nothing listens on at this moment."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _deferred_signals() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP that arrive inside act when it is left (in the main thread, where they arrive)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    numbers = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda n, _: arrived.append(n)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for caught in arrived:
            signal.raise_signal(caught)


class VllmServer:
    """Start and stop one vLLM OpenAI server.

    Use it as a context manager, which waits for ``/health``, or call :meth:`start`, :meth:`wait_ready` and
    :meth:`stop` (to start several servers at the same time).

    Args:
        model: model folder or name.
        deterministic: pass ``--enable-deterministic-inference``.  When False, neither the flag nor an
            inherited environment variable switches the plugin on.
        extra_args: further command-line arguments of the server.
        env: environment variables on top of this process's own; they win over every default.
        port: TCP port; None picks a free one.
        log: file that receives stdout and stderr; None makes a temporary one.
        host: address to listen on.
        startup_timeout: seconds from start to a healthy server.
        stop_timeout: seconds between SIGTERM and SIGKILL.
        command: the command before the arguments; None runs vLLM's server module with this interpreter.
            ``model`` and the host's own arguments follow it.

    Attributes:
        base_url: ``http://HOST:PORT`` (without ``/v1``).
        startup_seconds: seconds from start to healthy; None before.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        deterministic: bool,
        extra_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        port: int | None = None,
        log: str | os.PathLike[str] | None = None,
        host: str = "127.0.0.1",
        startup_timeout: float = 420.0,
        stop_timeout: float = 20.0,
        command: Sequence[str] | None = None,
    ) -> None:
        self.model = os.fspath(model)
        self.deterministic = deterministic
        self.extra_args = list(extra_args)
        self.env = dict(env or {})
        self.host = host
        self.port = free_port(host) if port is None else port
        self.startup_timeout = startup_timeout
        self.stop_timeout = stop_timeout
        self.startup_seconds: float | None = None
        self._command = list(command or (sys.executable, "-m", "vllm.entrypoints.openai.api_server"))
        if log is None:
            handle, name = tempfile.mkstemp(prefix="det-plugin-server-", suffix=".log")
            os.close(handle)
            log = name
        self.log_path = Path(log)
        self._process: subprocess.Popen[bytes] | None = None
        self._group: int | None = None
        self._started = 0.0

    @property
    def base_url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def pid(self) -> int | None:
        """Process id of the server's first process; None when it isn't running."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    @property
    def returncode(self) -> int | None:
        """Exit status; None while it runs or before it was started."""
        return None if self._process is None else self._process.poll()

    def command(self) -> list[str]:
        """The full command line."""
        switch = [DETERMINISTIC_FLAG] if self.deterministic else []
        return [
            *self._command,
            *("--model", self.model, "--host", self.host, "--port", str(self.port)),
            *switch,
            *self.extra_args,
        ]

    def environment(self) -> dict[str, str]:
        """The child's full environment."""
        inherited = {name: value for name, value in os.environ.items() if name not in _SWITCHES}
        local = {"HF_HUB_OFFLINE": "1"} if Path(self.model).is_dir() else {}
        return {**_DEFAULT_ENV, **local, **inherited, **self.env}

    def log_tail(self, lines: int = 40) -> str:
        """The last ``lines`` lines of the log; empty when there is none."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(0, os.SEEK_END)
                log.seek(max(0, log.tell() - 400 * lines))
                return "\n".join(log.read().decode(errors="replace").splitlines()[-lines:])
        except OSError:
            return ""

    def start(self) -> VllmServer:
        """Start the process and return at once.

        Raises:
            ServerError: it already runs, or the command cannot be executed.
        """
        if self.pid is not None:
            raise ServerError(f"server on {self.base_url} already runs (process {self.pid})")
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._started = time.monotonic()
        self.startup_seconds = None
        # a signal between the fork and the registration would leave a server that nobody stops
        with self.log_path.open("ab") as log, _deferred_signals():
            try:
                self._process = subprocess.Popen(
                    self.command(),
                    env=self.environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise ServerError(f"cannot start {self._command[0]}: {error}") from error
            self._group = self._process.pid  # start_new_session makes the child the leader of its group
            atexit.register(self.stop)
        return self

    def is_healthy(self) -> bool:
        """Whether ``GET /health`` answers 200 now."""
        try:
            with httpx.Client(trust_env=False, timeout=5.0) as client:
                return client.get(f"{self.base_url}/health").status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def wait_ready(self) -> VllmServer:
        """Block until the server is healthy.

        Raises:
            ServerError: the process ended, or ``startup_timeout`` seconds have passed since the start.  The
                server is stopped first.
        """
        while not self.poll_ready():
            time.sleep(0.25)
        return self

    def poll_ready(self) -> bool:
        """Whether the server is healthy now; sets :attr:`startup_seconds` the first time it is.

        Raises:
            ServerError: as :meth:`wait_ready`.
        """
        if self._process is None:
            raise ServerError("server was not started")
        status = self._process.poll()
        if status is not None:
            self.stop()
            raise ServerError(self._failure(f"ended with status {status} before it was healthy"))
        if self.is_healthy():
            if self.startup_seconds is None:
                self.startup_seconds = time.monotonic() - self._started
            return True
        if time.monotonic() > self._started + self.startup_timeout:
            self.stop()
            raise ServerError(self._failure(f"not healthy after {self.startup_timeout:.0f} s"))
        return False

    def kill(self) -> None:
        """SIGKILL to the whole process group, at once (for crash tests)."""
        self._signal_group(signal.SIGKILL)
        self._reap()

    def stop(self) -> None:
        """SIGTERM, then SIGKILL whatever of the process group is left.  Safe to call twice."""
        process = self._process
        if process is None:
            return
        with _deferred_signals():  # an impatient second Ctrl-C would leave the server behind
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(self.stop_timeout)
            self._signal_group(signal.SIGKILL)
            self._reap()

    def __enter__(self) -> VllmServer:
        try:
            return self.start().wait_ready()
        except BaseException:
            self.stop()
            raise

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _signal_group(self, number: int) -> None:
        if self._group is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._group, number)

    def _reap(self) -> None:
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
        self._group = None
        atexit.unregister(self.stop)

    def _failure(self, what: str) -> str:
        kind = "deterministic" if self.deterministic else "stock"
        return f"{kind} server on {self.base_url} {what}; log {self.log_path}, last lines:\n{self.log_tail(25)}"
