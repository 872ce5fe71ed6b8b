"""What the engine tests share: the probe process, exact comparison of answers, and random compositions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FLAG = "--enable-deterministic-inference"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "TOKENIZERS_PARALLELISM": "false",
}
SWITCHES = ("DET_PLUGIN_ENABLE", "VLLM_BATCH_INVARIANT", "DET_PLUGIN_REFUSAL_FILE", "VLLM_PLUGINS")


def environment(**extra: str) -> dict[str, str]:
    """This process's environment without any switch of the plugin."""
    inherited = {name: value for name, value in os.environ.items() if name not in SWITCHES}
    return {**inherited, **ENVIRONMENT, **extra}


class Answer(dict):
    """What one child of the probe gave: ``rc``, ``out``, ``err``, ``config``, ``result``."""

    @property
    def last_line(self) -> str:
        lines = [line for line in self["err"].splitlines() if line.strip()]
        return lines[-1] if lines else ""

    def text(self) -> str:
        return f"status {self['rc']}\n{self['out'][-3000:]}\n{self['err'][-6000:]}"


class Probe:
    """A process that has imported vLLM once and forks a child for each request; see ``probe_server.py``."""

    def __init__(self, cwd: Path, *, bare: bool = False) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "probe_server.py"), *(["--bare"] if bare else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=cwd,
            env=environment(),
        )

    def _ask(self, request: dict[str, Any]) -> Answer:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the probe ended with status {self._process.wait()}"
        return Answer(json.loads(line))

    def cli(self, *argv: str, module: str | None = None, **env: str | None) -> Answer:
        """``vllm ARGV`` (or ``python -m MODULE ARGV``) up to the finished configuration."""
        return self._ask({"argv": list(argv), "env": env, **({"module": module} if module else {})})

    def code(self, code: str, *, stop: bool = True, **env: str | None) -> Answer:
        """Python code; its global ``result`` comes back."""
        return self._ask({"code": code, "env": env, "stop": stop})

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(30)
