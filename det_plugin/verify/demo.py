"""The demonstration: a stock server and a deterministic one, the same questions, side by side.

Both servers serve the same small real model on this machine's CPU.  Every test mode runs greedily and at
temperature 0.8; throughput is measured apart, one server at a time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from det_plugin.errors import DetPluginError
from det_plugin.evidence.results import ModeResult, VerificationResult
from det_plugin.terminal import terminable
from det_plugin.verify.model import NAME, smollm2
from det_plugin.verify.options import ALL_MODES, QUICK, VerifyOptions
from det_plugin.verify.runner import run_verification
from det_plugin.verify.server import VllmServer

SERVER_ARGS = (
    "--enforce-eager",
    "--enable-prompt-tokens-details",
    *("--max-model-len", "4608", "--served-model-name", NAME),
)
"""Arguments of both servers: eager starts in half a minute, and cache hits are reported per request."""

SERVER_ENV = {"VLLM_CPU_KVCACHE_SPACE": "2"}
"""GiB of KV cache of each server."""

SHARE_CORES = 3
"""Up to this many cores each server gets cores of its own and both are verified at the same time."""

EXIT_SHOWN, EXIT_DIFFERENT, EXIT_NOT_SHOWN = 0, 1, 2

Say = Callable[[str], None]


@dataclass
class Throughput:
    """Output tokens per second of one server.

    Attributes:
        concurrency: requests at once.
        new_tokens: generated tokens of each.
        runs: tokens per second of each run.
    """

    concurrency: int = 8
    new_tokens: int = 48
    runs: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.runs) if self.runs else 0.0


@dataclass
class Demo:
    """What a demonstration found.

    Attributes:
        model: name of the model.
        results: verification of ``"stock"`` and ``"deterministic"``.
        throughput: of the same two.
        startup_seconds: of the same two, both started at once.
        side_by_side: both were verified at the same time, each bound to a core of its own.
        elapsed_s: seconds, everything included.
    """

    model: str
    results: dict[str, VerificationResult] = field(default_factory=dict)
    throughput: dict[str, Throughput] = field(default_factory=dict)
    startup_seconds: dict[str, float] = field(default_factory=dict)
    side_by_side: bool = False
    elapsed_s: float = 0.0

    @property
    def exit_code(self) -> int:
        """0: every deterministic mode held and stock differed somewhere; 1: a deterministic mode differed;
        2: something was not tested, or stock differed nowhere, so that nothing was shown.
        """
        deterministic = self.results.get("deterministic")
        stock = self.results.get("stock")
        if deterministic is not None and deterministic.status == "different":
            return EXIT_DIFFERENT
        if deterministic is None or stock is None or deterministic.status != "same" or stock.error:
            return EXIT_NOT_SHOWN
        return EXIT_SHOWN if any(mode.status == "different" for mode in stock.modes) else EXIT_NOT_SHOWN

    def verdict(self) -> str:
        """One line for the user."""
        stock, deterministic = self.results.get("stock"), self.results.get("deterministic")
        if stock is None or deterministic is None:
            return "not shown: a server was not verified"
        for name, result in (("stock", stock), ("deterministic", deterministic)):
            if result.error:
                return f"not shown: {name} server: {result.error}"
        held = sum(mode.status == "same" for mode in deterministic.modes)
        split = sum(mode.status == "different" for mode in stock.modes)
        counts = (
            f"stock changed its answer in {split} of {len(stock.modes)} runs, "
            f"deterministic held it in {held} of {len(deterministic.modes)}"
        )
        if self.exit_code == EXIT_DIFFERENT:
            return f"FAILED: {counts}"
        if self.exit_code == EXIT_SHOWN:
            return f"SHOWN: {counts}"
        if not split and deterministic.status == "same":
            return f"not shown: the stock engine differed nowhere on this machine, so nothing is proven; {counts}"
        return f"not shown: some deterministic runs were not tested; {counts}"

    def to_json(self) -> dict[str, Any]:
        """JSON-able dictionary."""
        return {
            "model": self.model,
            "verdict": self.verdict(),
            "exit_code": self.exit_code,
            "elapsed_s": self.elapsed_s,
            "startup_seconds": self.startup_seconds,
            "side_by_side": self.side_by_side,
            "throughput": {name: {**asdict(t), "median": t.median} for name, t in self.throughput.items()},
            "results": {name: result.to_json() for name, result in self.results.items()},
        }


def run_demo(
    *,
    report: str | os.PathLike[str] = "report",
    modes: Sequence[str] = ALL_MODES,
    temperatures: Sequence[float] = (0.0, 0.8),
    say: Say = print,
) -> int:
    """Start both servers, verify them, print the comparison, write the report.

    Args:
        report: folder for ``index.html``, ``demo.json`` and the servers' logs.
        modes: test modes.
        temperatures: every mode runs once with each.
        say: receives the progress lines; the table goes to stdout.

    Returns:
        Exit status: 0 shown, 1 a deterministic mode differed, 2 not shown.
    """
    started = time.monotonic()
    folder = Path(report)
    folder.mkdir(parents=True, exist_ok=True)
    options = VerifyOptions.model_validate(
        {**QUICK, "test_modes": list(modes), "temperatures": list(temperatures), "model": NAME}
    )
    demo = Demo(model=NAME)
    try:
        with terminable():
            model = smollm2(say=say)
            _run(demo, model, folder, options, say)
    except DetPluginError as error:
        say(f"demo: error: {error}")
        return EXIT_NOT_SHOWN
    demo.elapsed_s = time.monotonic() - started
    (folder / "demo.json").write_text(json.dumps(demo.to_json(), indent=1) + "\n")
    print_comparison(demo)
    page = _write_report(demo, folder)
    say(f"{demo.verdict()} ({demo.elapsed_s:.0f} s)")
    say(f"report: {page}")
    return demo.exit_code


def _run(demo: Demo, model: Path, folder: Path, options: VerifyOptions, say: Say) -> None:
    cores = sorted(os.sched_getaffinity(0))
    demo.side_by_side = apart = 2 <= len(cores) <= SHARE_CORES
    with ExitStack() as stack:
        servers: dict[str, VllmServer] = {}
        for number, name in enumerate(("stock", "deterministic")):
            log = folder / f"{name}.log"
            log.unlink(missing_ok=True)
            binding = {"VLLM_CPU_OMP_THREADS_BIND": str(cores[number])} if apart else {}
            servers[name] = VllmServer(
                model,
                deterministic=name == "deterministic",
                extra_args=SERVER_ARGS,
                env={**SERVER_ENV, **binding},
                log=log,
            )
            stack.callback(servers[name].stop)
        say(f"starting a stock and a deterministic server of {NAME} on {len(cores)} cores (logs in {folder}/)")
        for server in servers.values():
            server.start()
        for name, server in servers.items():
            server.wait_ready()
            demo.startup_seconds[name] = server.startup_seconds or 0.0
            say(f"{name} server ready after {demo.startup_seconds[name]:.0f} s")
        say("throughput, one server at a time")
        demo.throughput = asyncio.run(measure({name: server.base_url for name, server in servers.items()}, NAME))
        say("verifying: number of distinct answers to the same request, token ids and logprobs compared exactly")

        def verify(name: str) -> VerificationResult:
            return verify_server(options, servers[name].base_url, lambda line: say(f"{name:13s}  {line}"))

        with ThreadPoolExecutor(2 if apart else 1) as pool:
            futures = {name: pool.submit(verify, name) for name in servers}
            demo.results = {name: future.result() for name, future in futures.items()}


def verify_server(options: VerifyOptions, base_url: str, say: Say) -> VerificationResult:
    """Verify mode by mode, with a line to ``say`` after each."""
    total: VerificationResult | None = None
    for mode in options.test_modes:
        one = options.model_copy(update={"base_url": base_url, "test_modes": [mode]})
        result = run_verification(one)
        if total is None:
            total = result
            total.options["test_modes"] = list(options.test_modes)
        else:
            total.modes += result.modes
            total.elapsed_s += result.elapsed_s
            total.error = result.error
        for outcome in result.modes:
            say(f"{mode:11s}  temperature {outcome.temperature:<4g} {outcome_text(outcome)}")
        if total.error:
            break
    if total is None:
        raise DetPluginError("test_modes: got none, accepts at least one")
    return total


async def measure(servers: dict[str, str], model: str, *, rounds: int = 3) -> dict[str, Throughput]:
    """Output tokens per second of each server, measured in turns after one warm-up each.

    Args:
        servers: name -> base URL.
        model: name the servers serve.
        rounds: timed runs of each.

    Raises:
        DetPluginError: a server doesn't answer.
    """
    found = {name: Throughput() for name in servers}

    async def run(client: httpx.AsyncClient, url: str, shape: Throughput) -> float:
        body = {
            "model": model,
            "max_tokens": shape.new_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
        }
        prompts = [f"Here is a story about a traveller number {i}." for i in range(shape.concurrency)]
        started = time.perf_counter()
        answers = await asyncio.gather(
            *(client.post(f"{url}/v1/completions", json={**body, "prompt": prompt}) for prompt in prompts)
        )
        seconds = time.perf_counter() - started
        for answer in answers:
            answer.raise_for_status()
        return sum(answer.json()["usage"]["completion_tokens"] for answer in answers) / seconds

    try:
        async with httpx.AsyncClient(trust_env=False, timeout=600.0) as client:
            for number in range(rounds + 1):
                for name, url in servers.items():
                    rate = await run(client, url, found[name])
                    if number:
                        found[name].runs.append(rate)
    except httpx.HTTPError as error:
        raise DetPluginError(f"throughput could not be measured: {error or type(error).__name__}") from error
    return found


def outcome_text(outcome: ModeResult | None) -> str:
    """``1 of 1``-style cell: the largest number of distinct answers to one request."""
    if outcome is None or outcome.status == "not_tested":
        return f"not tested: {outcome.reason}" if outcome is not None and outcome.reason else "not tested"
    if outcome.unique == 1:
        return f"1 unique answer ({outcome.total} samples)"
    tokens = max(group.unique_token_ids for group in outcome.groups)
    what = f"{tokens} in tokens" if tokens > 1 else "in logprobs only"
    return f"{outcome.unique} unique answers, {what} ({outcome.total} samples)"


def print_comparison(demo: Demo) -> None:
    """The table: mode × temperature × server, then tokens per second."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Distinct answers to one request, {demo.model} on the CPU", title_justify="left")
    table.add_column("test mode")
    table.add_column("temperature", justify="right")
    table.add_column("stock")
    table.add_column("deterministic")
    cells = {name: {(m.mode, m.temperature): m for m in r.modes} for name, r in demo.results.items()}
    for key in dict.fromkeys(key for modes in cells.values() for key in modes):
        row = [cells.get(name, {}).get(key) for name in ("stock", "deterministic")]
        styles = {"same": "green", "different": "red"}
        table.add_row(
            key[0],
            f"{key[1]:g}",
            *(f"[{styles.get(m.status if m else '', 'yellow')}]{outcome_text(m)}[/]" for m in row),
        )
    if demo.throughput:
        stock, deterministic = demo.throughput["stock"], demo.throughput["deterministic"]
        table.add_section()
        ratio = deterministic.median / stock.median if stock.median else 0.0
        table.add_row(
            f"tokens/s, {stock.concurrency} requests",
            "0",
            f"{stock.median:.0f}",
            f"{deterministic.median:.0f} ({ratio:.2f} of stock)",
        )
    console = Console() if sys.stdout.isatty() else Console(width=120)
    console.print(table)


def _write_report(demo: Demo, folder: Path) -> Path:
    from det_plugin.evidence.report import write_report

    cases = []
    if demo.throughput:
        stock, deterministic = demo.throughput["stock"], demo.throughput["deterministic"]
        cases.append(
            {
                "case": f"decoding, {stock.concurrency} requests of {stock.new_tokens} tokens",
                "unit": "output tokens/s",
                "stock": stock.median,
                "deterministic": deterministic.median,
                "ratio": deterministic.median / stock.median if stock.median else None,
            }
        )
    notes = [demo.verdict(), f"Model: {demo.model} on the CPU. Servers started with {' '.join(SERVER_ARGS)}."]
    if demo.side_by_side:
        notes.append(
            "Both servers were verified at the same time, each on a core of its own, so the tokens/s of a test "
            "mode say little; the table of speeds was measured with one server working at a time."
        )
    return write_report(
        folder / "index.html",
        demo.results,
        title="The same request: stock and deterministic",
        notes=notes,
        bench={"cases": cases},
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """``det-plugin demo``; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="det-plugin demo",
        description="Verify a stock and a deterministic server of a small real model and compare them. "
        "Exit status: 0 shown, 1 a deterministic run differed, 2 not shown.",
    )
    parser.add_argument("--report", default="report", help="folder of the report and the logs [report]")
    parser.add_argument("--test-mode", default="all", help=f"comma-separated: {', '.join(ALL_MODES)}, or all")
    parser.add_argument("--temperature", default="0,0.8", help="comma-separated [0,0.8]")
    options = parser.parse_args(arguments)
    modes = ALL_MODES if options.test_mode == "all" else tuple(options.test_mode.split(","))
    if unknown := [mode for mode in modes if mode not in ALL_MODES]:
        parser.error(f"--test-mode: got {', '.join(unknown)}, accepts {', '.join(ALL_MODES)} or all")
    try:
        temperatures = [float(value) for value in options.temperature.split(",")]
    except ValueError:
        temperatures = [-1.0]
    if not all(0 <= value < float("inf") for value in temperatures):
        parser.error(f"--temperature: got {options.temperature!r}, accepts numbers from 0 such as 0,0.8")
    return run_demo(report=options.report, modes=modes, temperatures=temperatures)


if __name__ == "__main__":
    sys.exit(main())
