"""The servers that ``det-plugin bench`` compares: their arguments, memory and start, and facts about the machine."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from det_plugin.errors import ConfigError
from det_plugin.evidence.fingerprint import PACKAGES, cpu_model, package_version, source_digest
from det_plugin.verify.bench_load import Case, model_config
from det_plugin.verify.server import ServerError, VllmServer

KINDS = ("stock", "deterministic", "host_batch_invariant")
GIB = 1 << 30
USABLE = 0.95
"""Share of the GPU's memory that all servers together may take."""
RESERVE = 3 * GIB
"""Per server: CUDA context, activations, CUDA graphs, workspaces."""
KV_SLACK = 1.03


def nvidia_smi(query: str, what: str = "gpu") -> list[list[str]]:
    """Rows of ``nvidia-smi --query-WHAT=QUERY``; empty without the tool or a GPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, f"--query-{what}={query}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = done.stdout.strip().splitlines() if done.returncode == 0 else []
    return [[part.strip() for part in line.split(",")] for line in lines]


def gpu_facts() -> list[str]:
    """``name, driver`` of every visible NVIDIA GPU."""
    return [", ".join(row) for row in nvidia_smi("name,driver_version")]


def gpu_bytes() -> int | None:
    """Memory of the first GPU; None without one."""
    rows = nvidia_smi("memory.total")
    return int(float(rows[0][0])) << 20 if rows else None


def gpu_utilization() -> float | None:
    """Per cent of time the first GPU was busy in nvidia-smi's last sample; None without one."""
    rows = nvidia_smi("utilization.gpu")
    return float(rows[0][0]) if rows and rows[0][0].replace(".", "").isdigit() else None


def gpu_memory_of(server: VllmServer) -> int | None:
    """Bytes of GPU memory that a server's processes hold; None where nvidia-smi doesn't list them."""
    held = []
    for pid, mebibytes in nvidia_smi("pid,used_memory", "compute-apps"):
        # the server leads a session of its own, so its engine and worker processes share its id
        with contextlib.suppress(OSError, ValueError):
            if os.getsid(int(pid)) == server.pid:
                held.append(int(mebibytes) << 20)
    return sum(held) or None


def gpu_memory_used() -> int | None:
    """Bytes in use on the first GPU by everyone; None without one."""
    rows = nvidia_smi("memory.used")
    return int(float(rows[0][0])) << 20 if rows else None


STARTUP_LINES = re.compile(
    r"(Model loading took|torch\.compile took|Graph capturing finished|GPU KV cache size|init engine \().*"
)


def startup_log(server: VllmServer) -> list[str]:
    """What the server's log says about the parts of its start.

    Memory that it measured from the GPU's free memory is off where several servers start at once.
    """
    try:
        text = server.log_path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return [match[0].strip() for match in STARTUP_LINES.finditer(text)][:12]


def environment(commit: str | None = None) -> dict[str, Any]:
    """Machine and versions, as a benchmark must record them.

    Args:
        commit: of the source; None asks git, where this is a checkout.
    """
    from det_plugin import __version__

    root = Path(__file__).resolve().parents[2]
    if commit is None and (root / ".git").exists() and shutil.which("git"):
        done = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        )
        commit = done.stdout.strip() or None
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": cpu_model(),
        "cores": affinity,
        "gpus": gpu_facts(),
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: version for name in PACKAGES if (version := package_version(name))},
        "det_plugin": __version__,
        "commit": commit,
        "source": source_digest(),
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
    }


# --- memory -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KvCache:
    """KV cache of each server on a shared GPU.

    Attributes:
        bytes: size given to every server.
        tokens: that many tokens fit.
        needed_tokens: the largest case holds that many at once; with fewer, requests are preempted.
    """

    bytes: int
    tokens: int
    needed_tokens: int


def weight_bytes(folder: str, config: Mapping[str, Any]) -> int:
    """Bytes of the weights: of the safetensors files, else of a dense 16-bit transformer of these dimensions."""
    files = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
    if files:
        return files
    hidden, inter, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads, dim = _heads(config)
    layer = hidden * dim * (2 * heads + 2 * kv_heads) + 3 * hidden * inter
    embeddings = vocab * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return 2 * (config["num_hidden_layers"] * layer + embeddings)


def _heads(config: Mapping[str, Any]) -> tuple[int, int, int]:
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    return heads, kv_heads, config.get("head_dim") or config["hidden_size"] // heads


def kv_cache(folder: str, cases: Sequence[Case], *, together: int, total: int) -> KvCache:
    """KV cache per server: what the cases need, or what fits when that is less.

    Args:
        folder: model folder with ``config.json`` of a dense transformer.
        cases: what will be measured.
        together: servers that share the GPU.
        total: its memory in bytes.

    Raises:
        ConfigError: no config, unknown dimensions, or the servers don't fit.
    """
    config = model_config(folder)
    try:
        _, kv_heads, dim = _heads(config)
        per_token = 2 * 2 * config["num_hidden_layers"] * kv_heads * dim
        weights = weight_bytes(folder, config)
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"{folder}/config.json lacks {error}, so the memory of {together} servers on one GPU can't be planned; "
            "add --kv-cache-memory-bytes and --gpu-memory-utilization to --server-args, or use --one-at-a-time"
        ) from None
    longest = max(case.longest for case in cases)
    needed = max(case.tokens_at_once for case in cases)
    needed = int(KV_SLACK * max(needed, longest + 64))
    room = int(total * USABLE) // together - weights - RESERVE
    size = min(needed * per_token, room)
    if size < (longest + 64) * per_token:
        raise ConfigError(
            f"{together} servers of {weights / GIB:.1f} GiB weights each leave {room / GIB:.1f} GiB KV cache apiece on "
            f"a GPU of {total / GIB:.0f} GiB, and one sequence of {longest} tokens needs "
            f"{longest * per_token / GIB:.1f} GiB; compare fewer servers, or use --one-at-a-time"
        )
    return KvCache(size, size // per_token, needed)


# --- servers ------------------------------------------------------------------------------------------


def _given(args: Sequence[str], *names: str) -> bool:
    return any(arg.partition("=")[0] in names for arg in args)


def make_server(
    variant: str,
    model: str,
    server_args: Sequence[str],
    cases: Sequence[Case],
    *,
    together: int = 1,
    kv: KvCache | None = None,
) -> VllmServer:
    """A server of one variant, not started.

    Args:
        variant: ``stock``, ``deterministic`` or ``host_batch_invariant``, with an optional ``@BACKEND``.
        model: model folder or name.
        server_args: further arguments; they win over what is set here.
        cases: what will be measured: the context must hold the longest.
        together: how many servers share the device.
        kv: KV cache of each of them; None leaves it to the server.
    """
    kind, _, backend = variant.partition("@")
    args = list(server_args)
    env: dict[str, str] = {}
    if backend:
        args += ["--attention-backend", backend]
    if kind == "host_batch_invariant":
        env["VLLM_BATCH_INVARIANT"] = "1"
    if gpu_facts():
        if kv is not None and not _given(args, "--kv-cache-memory-bytes"):
            args += ["--kv-cache-memory-bytes", str(kv.bytes)]
        if together > 1 and not _given(args, "--gpu-memory-utilization"):
            # with a fixed KV cache it only guards the start: the last server must still find this share free
            share = 0.5 if _given(args, "--kv-cache-memory-bytes") else 0.88
            args += ["--gpu-memory-utilization", f"{share / together:.2f}"]
    elif "VLLM_CPU_KVCACHE_SPACE" not in os.environ and not _given(args, "--kv-cache-memory-bytes"):
        env["VLLM_CPU_KVCACHE_SPACE"] = "2"
    if not _given(args, "--max-model-len"):
        args += ["--max-model-len", str(max(2048, max(case.longest for case in cases) + 64))]
    return VllmServer(model, deterministic=kind == "deterministic", extra_args=args, env=env)


def start_servers(
    stack: ExitStack,
    servers: Mapping[str, VllmServer],
    say: Callable[[str], None],
    *,
    at_once: bool,
) -> dict[str, str]:
    """Start all servers and wait until each is healthy or has failed; ``stack`` stops them.

    Args:
        stack: receives each server's ``stop``.
        servers: not started yet.
        say: progress.
        at_once: start all together rather than one after another.

    Returns:
        The last line of why servers failed, by name (``say`` gets all of it); empty when all are up.
    """
    failed: dict[str, str] = {}
    for group in [list(servers)] if at_once else [[name] for name in servers]:
        waiting = list(group)
        for name in group:
            say(f"starting {name}")
            stack.callback(servers[name].stop)
            servers[name].start()
        while waiting:
            for name in list(waiting):
                try:
                    if not servers[name].poll_ready():
                        continue
                    say(f"{name} is up after {servers[name].startup_seconds:.0f} s")
                except ServerError as error:
                    failed[name] = (str(error).strip().splitlines() or ["unknown"])[-1][:400]
                    say(f"{name} did not start: {error}")
                waiting.remove(name)
            if waiting:
                time.sleep(0.25)
    return failed
