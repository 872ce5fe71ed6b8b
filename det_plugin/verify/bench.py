"""Whole-engine speed of servers: stock beside deterministic, in interleaved rounds.

Correctness is checked first: a fast wrong answer is not measured.  Every round visits every case on every
server, in alternating order, so that drift of the machine falls on all alike; an idle server does no work.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import os
import platform
import random
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from det_plugin.errors import ConfigError
from det_plugin.evidence.fingerprint import PACKAGES, cpu_model, package_version
from det_plugin.evidence.results import VerificationResult
from det_plugin.verify.client import CompletionClient, gather
from det_plugin.verify.options import VerifyOptions
from det_plugin.verify.prompts import Prompts
from det_plugin.verify.runner import run_verification
from det_plugin.verify.server import VllmServer

KINDS = ("stock", "deterministic", "host_batch_invariant")
METHOD = (
    "median over rounds of tokens per wall-clock second; ratio: median over rounds of the round's own "
    "deterministic / stock; spread: [smallest, largest] over rounds"
)


@dataclass(frozen=True)
class Case:
    """One load: ``concurrent`` requests at once.

    Attributes:
        name: as in the JSON.
        concurrent: requests in flight.
        prompt_tokens: length of every prompt; prompts are new in every round, so no cache hit helps.
        new_tokens: generated per request.
        prefill: count prompt tokens instead of generated ones.
    """

    name: str
    concurrent: int
    prompt_tokens: int
    new_tokens: int
    prefill: bool = False

    @property
    def unit(self) -> str:
        return "prompt tokens/s" if self.prefill else "output tokens/s"


@dataclass
class BenchOptions:
    """What to measure; see ``det-plugin bench --help``."""

    variants: list[str] = field(default_factory=list)
    urls: dict[str, str] = field(default_factory=dict)
    model: str | None = None
    out: Path | None = None
    concurrency: list[int] = field(default_factory=lambda: [1, 8, 32])
    rounds: int = 5
    prompt_tokens: int = 64
    output_tokens: int = 48
    prefill_prompts: int = 8
    prefill_tokens: int = 512
    server_args: list[str] = field(default_factory=list)
    one_at_a_time: bool = False
    check: bool = True

    @classmethod
    def from_command(
        cls, *, host_only: str | None, servers: str | None, server_args: str, **values: Any
    ) -> BenchOptions:
        """Read the command line's strings.

        Raises:
            ConfigError: naming the option, what it got and what it accepts.
        """
        if (host_only is None) == (servers is None):
            raise ConfigError("give either --host-only (servers to start) or --servers (running ones)")
        options = cls(**values)
        if any(number < 1 for number in options.concurrency):
            raise ConfigError(f"--concurrency: got {options.concurrency}, accepts 1 or above")
        if servers is not None:
            for part in servers.split(","):
                name, mark, url = part.partition("=")
                if not mark or not name.strip() or not url.strip():
                    raise ConfigError(f"--servers: got {part!r}, accepts NAME=URL")
                options.urls[name.strip()] = url.strip()
            options.one_at_a_time = False
            return options
        options.variants = [part.strip() for part in (host_only or "").split(",") if part.strip()]
        for variant in options.variants:
            if variant.partition("@")[0] not in KINDS:
                raise ConfigError(f"--host-only: got {variant!r}, accepts {', '.join(KINDS)}, each with @BACKEND")
        if not options.variants:
            raise ConfigError(f"--host-only: got nothing, accepts {', '.join(KINDS)}")
        if options.model is None:
            from det_plugin.verify.model import ModelError, smollm2

            try:
                options.model = str(smollm2())
            except ModelError as error:
                raise ConfigError(f"--model: not given, and the demo's model can't be had: {error}") from None
        try:
            options.server_args = shlex.split(server_args)
        except ValueError as error:
            raise ConfigError(f"--server-args: got {server_args!r} ({error})") from None
        return options

    def new_tokens(self, concurrent: int) -> int:
        """Tokens per request: ``output_tokens``, up to four times that at low concurrency (steadier timing)."""
        return self.output_tokens * max(1, 4 // concurrent)

    def cases(self) -> list[Case]:
        """The cases, in the order they are measured."""
        decode = [Case(f"decode, {n} concurrent", n, self.prompt_tokens, self.new_tokens(n)) for n in self.concurrency]
        name = f"prefill, {self.prefill_prompts} x {self.prefill_tokens}"
        return [*decode, Case(name, self.prefill_prompts, self.prefill_tokens, 1, prefill=True)]


# --- servers ------------------------------------------------------------------------------------------


def _gpu_facts() -> list[str]:
    """``name, driver`` of every visible NVIDIA GPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.strip().splitlines() if done.returncode == 0 else []


def make_server(variant: str, options: BenchOptions, *, together: int) -> VllmServer:
    """A server of one variant, not started.

    Args:
        variant: ``stock``, ``deterministic`` or ``host_batch_invariant``, with an optional ``@BACKEND``.
        options: model and further arguments.
        together: how many servers share the device.
    """
    kind, _, backend = variant.partition("@")
    args = list(options.server_args)
    env: dict[str, str] = {}
    if backend:
        args += ["--attention-backend", backend]
    if kind == "host_batch_invariant":
        env["VLLM_BATCH_INVARIANT"] = "1"
    if _gpu_facts():
        if together > 1 and not any(a.startswith("--gpu-memory-utilization") for a in args):
            args += ["--gpu-memory-utilization", f"{0.88 / together:.2f}"]
    elif "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
        env["VLLM_CPU_KVCACHE_SPACE"] = "2"
    longest = max(case.prompt_tokens + case.new_tokens for case in options.cases())
    if not any(a.startswith("--max-model-len") for a in args):
        args += ["--max-model-len", str(max(2048, longest + 64))]
    return VllmServer(str(options.model), deterministic=kind == "deterministic", extra_args=args, env=env)


def environment() -> dict[str, Any]:
    """Machine and versions, as a benchmark must record them."""
    from det_plugin import __version__

    root = Path(__file__).resolve().parents[2]
    commit = None
    if (root / ".git").exists():
        done = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        )
        commit = done.stdout.strip() or None
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cpu": cpu_model(),
        "cores": affinity,
        "gpus": _gpu_facts(),
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: version for name in PACKAGES if (version := package_version(name))},
        "det_plugin": __version__,
        "commit": commit,
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
    }


# --- measuring ----------------------------------------------------------------------------------------


async def measure(client: CompletionClient, prompts: Prompts, case: Case, rng: random.Random) -> float:
    """Tokens per second of one pass of ``case``."""

    async def one(prompt: list[int]) -> int:
        usage = await client.generate(prompt, max_tokens=case.new_tokens, salt=client.fresh_salt())
        return len(prompt) if case.prefill else usage

    texts = [prompts.prompt(rng, case.prompt_tokens) for _ in range(case.concurrent)]
    started = time.perf_counter()
    tokens = sum(await gather(one(text) for text in texts))
    return tokens / (time.perf_counter() - started)


async def _measure_all(
    urls: Mapping[str, str], options: BenchOptions, say: Callable[[str], None]
) -> tuple[str, dict[str, dict[str, list[float]]]]:
    """Interleaved rounds over running servers: (model, server -> case -> tokens/s per round)."""
    samples: dict[str, dict[str, list[float]]] = {name: {c.name: [] for c in options.cases()} for name in urls}
    async with AsyncExitStack() as stack:
        clients: dict[str, CompletionClient] = {}
        prompts: dict[str, Prompts] = {}
        for name, url in urls.items():
            clients[name] = await stack.enter_async_context(CompletionClient(url))
            await clients[name].connect()
            prompts[name] = await Prompts.create(clients[name])
        for number in range(-1, options.rounds):  # round -1 warms up and is not kept
            order = list(urls) if number % 2 == 0 else list(urls)[::-1]
            for case in options.cases():
                for name in order:
                    rng = random.Random(f"{number}/{case.name}")  # the same prompts for every server
                    rate = await measure(clients[name], prompts[name], case, rng)
                    if number >= 0:
                        samples[name][case.name].append(rate)
            say(f"round {number + 1} of {options.rounds} done" if number >= 0 else "warmed up")
        return str(next(iter(clients.values())).model), samples


def check_servers(urls: Mapping[str, str], say: Callable[[str], None]) -> dict[str, VerificationResult]:
    """A short single-mode verification of every server, before it is measured."""
    results = {}
    for name, url in urls.items():
        options = VerifyOptions(
            base_url=url,
            test_modes=["single"],
            batch_sizes=[1, 5, 12],
            max_new_tokens=16,
            temperatures=[0.0],
        )
        results[name] = run_verification(options)
        mode = results[name].modes[-1] if results[name].modes else None
        found = f"{mode.unique} unique in {mode.total} samples" if mode else results[name].error
        say(f"check {name}: {results[name].status}, {found}")
    return results


def summarize(
    model: str, options: BenchOptions, samples: Mapping[str, Mapping[str, Sequence[float]]]
) -> list[dict[str, Any]]:
    """The ``cases`` of the JSON: medians, ratios and spreads.

    The first server whose name starts with ``deterministic`` is compared with the first that starts with
    ``stock``; further servers stand under ``others``.
    """
    stock = next((n for n in samples if n.startswith("stock")), None)
    det = next((n for n in samples if n.startswith("deterministic")), None)
    cases = []
    for case in options.cases():
        rates = {name: list(values[case.name]) for name, values in samples.items()}
        median = {name: statistics.median(values) for name, values in rates.items()}
        spread: dict[str, Any] = {name: [min(v), max(v)] for name, v in rates.items()}
        ratios = _ratios(rates, stock, det)
        if ratios:
            spread["ratio"] = [min(ratios), max(ratios)]
        others = {}
        for name in samples:
            if name not in (stock, det):
                other = _ratios(rates, stock, name)
                others[name] = {"value": median[name], "ratio": statistics.median(other) if other else None}
        cases.append(
            {
                "model": Path(model).name,
                "case": case.name,
                "unit": case.unit,
                "stock": median[stock] if stock else None,
                "deterministic": median[det] if det else None,
                "ratio": statistics.median(ratios) if ratios else None,
                "runs": options.rounds,
                "spread": spread,
                **({"others": others} if others else {}),
            }
        )
    return cases


def _ratios(rates: Mapping[str, Sequence[float]], base: str | None, name: str | None) -> list[float]:
    if base is None or name is None:
        return []
    return [b / a for a, b in zip(rates[base], rates[name], strict=True)]


def run_bench(options: BenchOptions, say: Callable[[str], None] | None = None) -> int:
    """Start or find the servers, check, measure, print a table, write JSON and a plot.

    Returns:
        0; 1 when a deterministic server failed its check; 2 when a server could not be checked.

    Raises:
        ServerError, ServerFailureError: a server could not start or failed.
    """
    say = say or (lambda line: print(line, file=sys.stderr, flush=True))
    env = environment()
    samples: dict[str, dict[str, list[float]]] = {}
    checks: dict[str, str] = {}
    model = ""
    names = options.variants or list(options.urls)
    for group in [[name] for name in names] if options.one_at_a_time else [names]:
        with ExitStack() as stack:
            urls = {name: options.urls.get(name, "") for name in group}
            for name in group:
                if name not in options.urls:
                    say(f"starting {name}")
                    server = stack.enter_context(make_server(name, options, together=len(group)))
                    urls[name] = server.base_url
                    say(f"{name} is up after {server.startup_seconds:.0f} s")
            if options.check:
                for name, result in check_servers(urls, say).items():
                    checks[name] = result.status
                    if name.startswith("deterministic") and result.exit_code:
                        say(f"{name} failed its check; nothing is measured. {result.error}")
                        return result.exit_code
            model, measured = asyncio.run(_measure_all(urls, options, say))
            samples.update(measured)
    report: dict[str, Any] = {
        "environment": env,
        "method": METHOD,
        "interleaved": not options.one_at_a_time,
        "checks": checks,
        "server_args": options.server_args,
        "cases": summarize(options.model or model, options, samples),
        "rounds": samples,
    }
    print_table(report["cases"], list(samples))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        say(f"wrote {options.out}")
        picture = plot(report, options.out.with_suffix(".png"))
        say(f"wrote {picture}" if picture else "no plot: matplotlib is not installed (extra 'bench')")
    return 0


def print_table(cases: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """Print medians and ratios."""
    from rich.console import Console
    from rich.table import Table

    others = [n for n in names if any(n in c.get("others", {}) for c in cases)]
    table = Table(title="tokens per second, median over rounds")
    for column in ("case", "stock", "deterministic", "ratio", "spread of ratio", *others):
        table.add_column(column, justify="left" if column == "case" else "right", no_wrap=column != "case")
    for case in cases:
        spread = case["spread"].get("ratio")
        row = [
            f"{case['case']} ({case['unit']})",
            *(f"{case[k]:.1f}" if case[k] is not None else "-" for k in ("stock", "deterministic")),
            f"{case['ratio']:.3f}" if case["ratio"] is not None else "-",
            f"{spread[0]:.2f} to {spread[1]:.2f}" if spread else "-",
        ]
        for name in others:
            entry = case["others"][name]
            row.append(f"{entry['value']:.1f}" + (f" ({entry['ratio']:.2f})" if entry["ratio"] else ""))
        table.add_row(*row)
    Console().print(table)


def plot(report: Mapping[str, Any], path: Path) -> Path | None:
    """Bars of every server relative to stock, with the rounds' spread; None without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return None
    rounds, cases = report["rounds"], [case["case"] for case in report["cases"]]
    base = next((n for n in rounds if n.startswith("stock")), next(iter(rounds)))
    figure, axes = pyplot.subplots(figsize=(1.8 + 1.5 * len(cases), 4))
    width = 0.8 / len(rounds)
    for k, name in enumerate(rounds):
        ratios = [_ratios({"b": rounds[base][c], "n": rounds[name][c]}, "b", "n") for c in cases]
        middle = [statistics.median(r) for r in ratios]
        low = [m - min(r) for m, r in zip(middle, ratios, strict=True)]
        high = [max(r) - m for m, r in zip(middle, ratios, strict=True)]
        where = [i + (k - (len(rounds) - 1) / 2) * width for i in range(len(cases))]
        axes.bar(where, middle, width * 0.92, yerr=[low, high], capsize=3, label=name)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_xticks(range(len(cases)), cases, rotation=12)
    axes.set_ylabel(f"tokens per second relative to {base}")
    axes.set_title(f"{report['cases'][0]['model']}, {', '.join(report['environment']['gpus']) or 'CPU'}")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path
