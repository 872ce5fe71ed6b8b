"""Whole-engine speed of servers: stock beside deterministic, in interleaved rounds.

Correctness is checked first: a fast wrong answer is not measured.  Every round visits every case on every
server, in alternating order, so that drift of the machine falls on all alike; an idle server does no work.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict, replace
from typing import Any

from det_plugin.evidence.results import VerificationResult
from det_plugin.verify import bench_servers
from det_plugin.verify.bench_client import BenchClient
from det_plugin.verify.bench_load import WARM_TOKENS, Case, PromptSource, RandomPrompts, measure, poisson_rate, wake
from det_plugin.verify.bench_options import BenchOptions
from det_plugin.verify.bench_report import METHOD, kind_of, plot, print_table, summarize
from det_plugin.verify.bench_servers import KvCache, VllmServer, environment, gpu_facts, make_server
from det_plugin.verify.client import ServerFailureError
from det_plugin.verify.options import VerifyOptions
from det_plugin.verify.prompts import Prompts
from det_plugin.verify.runner import run_verification
from det_plugin.verify.server import ServerError

POISSON_WARM_SECONDS = 3.0
IDLE_SECONDS = 5.0
"""How long a server that is not being measured may take to become idle."""


class Bench:
    """One run: its servers, samples and the report written so far."""

    def __init__(self, options: BenchOptions, say: Callable[[str], None]) -> None:
        self.options, self.say = options, say
        self.started = time.monotonic()
        self.cases = options.cases()
        self.samples: dict[str, dict[str, list[float | None]]] = {}
        self.took: dict[str, float] = {}  # case -> seconds of its last visit to all servers
        self.rate = options.poisson_rate
        self.model = options.model or ""
        self.cut = False
        self.idle: dict[str, Any] = {"checks": 0, "unknown": []}
        self.passes: dict[str, dict[str, list[Any]]] = {}
        self.clients: dict[str, BenchClient] = {}
        self.report: dict[str, Any] = {
            "environment": environment(options.commit),
            "method": METHOD,
            "suite": options.suite,
            "interleaved": not options.one_at_a_time,
            "checks": {},
            "server_args": options.server_args,
            "servers": {},
            "failed": {},
            "idle": self.idle,
            "passes": self.passes,
        }

    def save(self) -> None:
        """Bring the report up to date and write it, so that a run that is killed leaves what it had."""
        self.report |= {
            "poisson_requests_per_second": self.rate,
            "limit_reached": self.cut,
            "answers_in_one_piece": {n: f"{c.pieces[1]} of {c.pieces[0]}" for n, c in self.clients.items()},
            "seconds": round(time.monotonic() - self.started, 1),
            "cases": summarize(self.model, self.cases, self.samples),
            "rounds": self.samples,
        }
        if self.options.out is not None:
            self.options.out.parent.mkdir(parents=True, exist_ok=True)
            partial = self.options.out.with_name(self.options.out.name + ".partial")
            partial.write_text(json.dumps(self.report, indent=1) + "\n", encoding="utf-8")
            partial.replace(self.options.out)

    def over(self, case: Case, limit: float | None) -> bool:
        """Whether visiting ``case`` once more would pass the time limit."""
        if limit is None:
            return False
        now = time.monotonic() - self.started
        if now + self.took.get(case.name, 0.0) <= limit:
            return False
        if not self.cut:
            self.say(f"time limit: {now:.0f} s of {limit:.0f} s used, {case.name} is not started")
        self.cut = True
        return True

    # --- servers ------------------------------------------------------------------------------------------

    def start(self, stack: ExitStack, group: list[str]) -> dict[str, VllmServer]:
        """Start the servers of ``group`` that have no URL.

        Raises:
            ServerError: too few are left to compare.
        """
        options = self.options
        names = [name for name in group if name not in options.urls]
        kv: KvCache | None = None
        total = bench_servers.gpu_bytes()
        given = any(a.partition("=")[0] == "--kv-cache-memory-bytes" for a in options.server_args)
        if len(names) > 1 and total is not None and not given:
            kv = bench_servers.kv_cache(str(options.model), self.cases, together=len(names), total=total)
            self.report["kv_cache"] = asdict(kv)
            if kv.tokens < kv.needed_tokens:
                self.say(
                    f"KV cache: {kv.tokens} tokens fit, the largest case needs {kv.needed_tokens}: expect preemption"
                )
        servers = {
            name: make_server(name, str(options.model), options.server_args, self.cases, together=len(names), kv=kv)
            for name in names
        }
        failed = bench_servers.start_servers(stack, servers, self.say, at_once=total is not None)
        self.report["failed"] |= failed
        left = [name for name in group if name not in failed]
        if failed and (len(left) < 2 or not any(kind_of(name) == "stock" for name in left)):
            raise ServerError("; ".join(f"{name}: {reason}" for name, reason in failed.items()))
        for name in failed:
            del servers[name]
        for name, server in servers.items():
            self.report["servers"][name] = {
                "startup_seconds": server.startup_seconds,
                "started_together": len(names) if total is not None else 1,
                "arguments": server.extra_args,
                "startup_log": bench_servers.startup_log(server),
            }
        return servers

    def restart(self, stack: ExitStack, servers: Mapping[str, VllmServer], limit: float | None) -> None:
        """Stop all servers and start them again, as often as asked for: start-up on caches that are warm."""
        for _ in range(self.options.restarts):
            expected = max(server.startup_seconds or 0.0 for server in servers.values())
            if limit is not None and time.monotonic() - self.started + expected > limit:
                self.say("time limit: no further restart")
                self.cut = True
                return
            for server in servers.values():
                server.stop()
            at_once = bench_servers.gpu_bytes() is not None
            failed = bench_servers.start_servers(stack, servers, self.say, at_once=at_once)
            self.report["failed"] |= {f"{name}, restarted": reason for name, reason in failed.items()}
            for name, server in servers.items():
                if name not in failed:
                    self.report["servers"][name].setdefault("restart_seconds", []).append(server.startup_seconds)
            if failed:
                return

    def read_memory(self, servers: Mapping[str, VllmServer]) -> None:
        """Record the GPU memory that each server, and all of them, hold now."""
        self.report["gpu_memory_used_bytes"] = bench_servers.gpu_memory_used()
        for name, server in servers.items():
            self.report["servers"][name]["gpu_memory_bytes"] = bench_servers.gpu_memory_of(server)

    # --- rounds -------------------------------------------------------------------------------------------

    async def run(self, urls: Mapping[str, str], limit: float | None, warmed: Callable[[], None]) -> None:
        """Warm up, then measure interleaved rounds over running servers."""
        for name in urls:
            self.samples[name] = {row: [] for case in self.cases for row in case.rows}
        async with AsyncExitStack() as stack:
            clients: dict[str, BenchClient] = {}
            prompts: dict[str, PromptSource] = {}
            for name, url in urls.items():
                client = clients[name] = self.clients[name] = await stack.enter_async_context(
                    BenchClient(url, timeout=self.options.timeout)
                )
                facts = await client.connect()
                self.model = self.model or str(client.model)
                if self.options.prompts == "random":
                    prompts[name] = RandomPrompts.of_model(self.options.model or facts["root"])
                else:
                    prompts[name] = await Prompts.create(client)
            for case in self.cases:
                if case.load != "poisson":
                    short = replace(case, new_tokens=min(case.new_tokens, WARM_TOKENS))
                    await self.visit(short, list(urls), clients, prompts, -1, keep=False)
            warmed()
            self.say("warmed up")
            self.save()
            for number in range(self.options.rounds):
                order = list(urls) if number % 2 == 0 else list(urls)[::-1]
                for case in self.cases:
                    if self.over(case, limit):
                        return
                    if case.load == "poisson" and number == 0:
                        await self.prepare_poisson(case, clients, prompts)
                    began = time.monotonic()
                    await self.visit(case, order, clients, prompts, number)
                    self.took[case.name] = time.monotonic() - began
                    self.save()
                self.say(f"round {number + 1} of {self.options.rounds} done")

    async def prepare_poisson(
        self, case: Case, clients: Mapping[str, BenchClient], prompts: Mapping[str, PromptSource]
    ) -> None:
        """Fix the arrival rate from the stock server's decode rate, and warm up with it."""
        if self.rate is None:
            stock = next(name for name in clients if kind_of(name) == "stock")
            capacity = self.options.capacity_case()
            rates = self.samples[stock].get(capacity.name)
            if not rates:
                values = await measure(clients[stock], prompts[stock], capacity, random.Random("capacity"))
                rates = [values[capacity.name]]
            self.rate = poisson_rate(statistics.median(v for v in rates if v is not None), capacity)
        self.say(f"mixed arrivals: {self.rate:.2f} requests/s")
        short = replace(case, seconds=min(POISSON_WARM_SECONDS, case.seconds))
        await self.visit(short, list(clients), clients, prompts, -1, keep=False)

    async def visit(
        self,
        case: Case,
        order: list[str],
        clients: Mapping[str, BenchClient],
        prompts: Mapping[str, PromptSource],
        number: int,
        *,
        keep: bool = True,
    ) -> None:
        """One pass of ``case`` on every server in turn, all others idle."""
        for name in order:
            for other in order:
                if other != name:
                    await self.check_idle(other, clients[other])
            await wake(clients[name], prompts[name], random.Random(f"{number}/{case.name}/wake"))
            rng = random.Random(f"{number}/{case.name}")  # the same prompts for every server
            client = clients[name]
            client.latest = None
            before = await client.decode_seconds()
            gc.collect()
            gc.disable()  # no pause of this process's own within a pass
            try:
                values = await measure(client, prompts[name], case, rng, rate=self.rate or 0.0)
            finally:
                gc.enable()
            if keep:
                if client.latest:
                    after = await client.decode_seconds()
                    spent = None if before is None or after is None else round(after - before, 4)
                    facts = {**client.latest, "decode_seconds_in_engine": spent}
                    self.passes.setdefault(name, {}).setdefault(case.name, []).append(facts)
                for row, value in values.items():
                    self.samples[name][row].append(value)

    async def check_idle(self, name: str, client: BenchClient) -> None:
        """Wait until a server has no unfinished request.

        Raises:
            ServerFailureError: it still has one after :data:`IDLE_SECONDS`.
        """
        if name in self.idle["unknown"]:
            return
        deadline = time.monotonic() + IDLE_SECONDS
        while (unfinished := await client.unfinished()) != 0:
            if unfinished is None:
                self.idle["unknown"].append(name)
                return
            if time.monotonic() > deadline:
                raise ServerFailureError(f"{name} has {unfinished} unfinished requests while another is measured")
            await asyncio.sleep(0.1)
        self.idle["checks"] += 1


def check_servers(
    urls: Mapping[str, str], say: Callable[[str], None], timeout: float = 600.0
) -> dict[str, VerificationResult]:
    """A short single-mode verification of every server, before it is measured; ``timeout``: seconds per request."""
    results = {}
    for name, url in urls.items():
        options = VerifyOptions(
            base_url=url,
            test_modes=["single"],
            batch_sizes=[1, 5, 12],
            max_new_tokens=16,
            temperatures=[0.0],
            timeout=timeout,
        )
        results[name] = run_verification(options)
        mode = results[name].modes[-1] if results[name].modes else None
        found = f"{mode.unique} unique in {mode.total} samples" if mode else results[name].error
        say(f"check {name}: {results[name].status}, {found}")
    return results


def run_bench(options: BenchOptions, say: Callable[[str], None] | None = None) -> int:
    """Start or find the servers, check, measure, print a table, write JSON and a plot.

    Returns:
        0; 1 when a deterministic server failed its check; 2 when a server did not start or could not be checked, or
        when the time limit left nothing measured.

    Raises:
        ServerError, ServerFailureError: too few servers started, or one failed.
        ConfigError: the servers don't fit the GPU, or the prompts can't be made.
    """
    say = say or (lambda line: print(line, file=sys.stderr, flush=True))
    bench = Bench(options, say)
    names = options.variants or list(options.urls)
    groups = [[name] for name in names] if options.one_at_a_time else [names]
    for number, group in enumerate(groups):
        limit = None if options.limit is None else options.limit * (number + 1) / len(groups)
        with ExitStack() as stack:
            servers = bench.start(stack, group)
            urls = {
                n: servers[n].base_url if n in servers else options.urls[n]
                for n in group
                if n in servers or n in options.urls
            }
            if options.check:
                for name, result in check_servers(urls, say, options.timeout).items():
                    bench.report["checks"][name] = result.status
                    if name.startswith("deterministic") and result.exit_code:
                        say(f"{name} failed its check; nothing is measured. {result.error}")
                        return result.exit_code

            def warmed(servers: Mapping[str, VllmServer] = servers) -> None:
                bench.read_memory(servers)
                if gpu_facts():
                    time.sleep(1.5)  # nvidia-smi's sample covers up to a second
                    bench.idle["gpu_utilization_percent"] = bench_servers.gpu_utilization()

            try:
                asyncio.run(bench.run(urls, limit, warmed))
            except ServerFailureError as error:
                for name, server in servers.items():
                    if server.returncode is not None:
                        raise ServerError(
                            f"{name} ended with status {server.returncode}: {error}\n{server.log_tail(25)}"
                        ) from error
                raise
            bench.read_memory(servers)
            bench.restart(stack, servers, limit)
    bench.save()
    if not bench.report["cases"]:
        say("nothing was measured: the time limit left no round")
        return 2
    print_table(bench.report["cases"])
    if options.out is not None:
        say(f"wrote {options.out}")
        picture = plot(bench.report, options.out.with_suffix(".png"))
        say(f"wrote {picture}" if picture else "no plot: matplotlib is not installed, or nothing to compare")
    return 2 if bench.report["failed"] else 0
