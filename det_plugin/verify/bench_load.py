"""The loads that ``det-plugin bench`` puts on a server, and how one pass of each is measured.

Streamed passes ask for a chunk of the answer every :data:`STREAM_INTERVAL` tokens only (the first token comes at
once): times to first and last token stay exact, while neither the server's front end nor this client spends its
time on one chunk per token.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from det_plugin.errors import ConfigError
from det_plugin.verify.bench_client import BenchClient, Timing
from det_plugin.verify.client import gather

Load = Literal["decode", "prefill", "context", "poisson"]

STREAM_INTERVAL = 32
"""Tokens per chunk of a streamed answer after its first token."""

BEAT_SECONDS = 0.005
"""How often a pass looks whether this process's event loop still turns."""

TTFT, TPOT = "time to first token", "time per output token"
RATE_UNITS = {"decode": "output tokens/s", "prefill": "prompt tokens/s", "context": "output tokens/s"}
WARM_TOKENS = 16
"""Tokens per request in the round that warms up."""


@dataclass(frozen=True)
class Case:
    """One load.

    Attributes:
        name: as in the JSON.
        concurrent: requests in flight (``poisson``: of the decode case that fixes the arrival rate).
        prompt_tokens: length of every prompt (``poisson``: the mean is near it); prompts are new in every pass, so
            no earlier pass helps the prefix cache.
        new_tokens: generated per request.
        load: ``decode`` counts generated tokens over wall time, ``prefill`` prompt tokens over wall time,
            ``context`` generated tokens from the first one on, with the prompt already in the prefix cache,
            ``poisson`` requests that arrive at random.
        stream: read answers as streams and record latencies.
        seconds: how long requests arrive (``poisson``).
    """

    name: str
    concurrent: int
    prompt_tokens: int
    new_tokens: int
    load: Load = "decode"
    stream: bool = False
    seconds: float = 0.0

    @property
    def rows(self) -> dict[str, str]:
        """Names and units of everything one pass measures; the first is the rate where there is one."""
        rows = {} if self.load == "poisson" else {self.name: RATE_UNITS[self.load]}
        if self.stream and self.load != "prefill":
            kinds = (TTFT,) if self.load == "context" else (TTFT, TPOT)
            rows |= {f"{self.name}: {kind} p{p}": "ms" for kind in kinds for p in (50, 99)}
        return rows

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        if self.load == "poisson":
            return POISSON_LONGEST * self.prompt_tokens + 2 * self.new_tokens
        return self.prompt_tokens + self.new_tokens

    @property
    def tokens_at_once(self) -> int:
        """Tokens in the KV cache at once, block rounding included (``poisson``: with room for a queue)."""
        requests = self.concurrent * (POISSON_QUEUE if self.load == "poisson" else 1)
        return requests * (self.prompt_tokens + self.new_tokens + 32)


class PromptSource(Protocol):
    """What makes prompts: :class:`det_plugin.verify.prompts.Prompts` or :class:`RandomPrompts`."""

    def prompt(self, rng: random.Random, length: int) -> list[int]: ...


class RandomPrompts:
    """Prompts of random token ids below ``vocabulary``: no tokenizer needed."""

    def __init__(self, vocabulary: int) -> None:
        if vocabulary < 64:
            raise ConfigError(f"vocabulary: got {vocabulary}, accepts 64 or above")
        self.vocabulary = vocabulary

    @classmethod
    def of_model(cls, folder: str | None) -> RandomPrompts:
        """Read ``vocab_size`` from the model folder's ``config.json``.

        Raises:
            ConfigError: no such file, or no such entry.
        """
        return cls(int(model_config(folder)["vocab_size"]))

    def prompt(self, rng: random.Random, length: int) -> list[int]:
        """``length`` random token ids; the lowest 16, often special tokens, are left out."""
        return rng.choices(range(16, self.vocabulary), k=length)


def model_config(folder: str | None) -> dict[str, Any]:
    """A model folder's ``config.json``.

    Raises:
        ConfigError: it can't be read, or lacks ``vocab_size``.
    """
    path = Path(folder or "") / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--model: got {folder!r}; random prompts, and several servers on one GPU, need a model folder with "
            f"config.json ({error})"
        ) from None
    config = {**config.get("text_config", {}), **config}
    if not isinstance(config.get("vocab_size"), int):
        raise ConfigError(f"--model: {path} has no vocab_size")
    return config


# --- mixed arrivals -----------------------------------------------------------------------------------

POISSON_PREFIXES = (0.125, 0.25, 0.5, 1.0, 2.0)
"""Lengths of the shared prefixes, as parts of ``prompt_tokens``."""
POISSON_TAIL = (0.125, 0.75)
"""Range of the part of a prompt that is its own."""
POISSON_LONGEST = 3
"""No prompt is longer than this many ``prompt_tokens``."""
POISSON_QUEUE = 4
"""Requests in flight that the memory plan allows, in multiples of ``concurrent``."""
POISSON_LOAD = 0.7
"""Share of the stock server's measured capacity."""


@dataclass(frozen=True)
class Arrival:
    """One request of a Poisson load: seconds after the start, prompt, tokens to generate."""

    at: float
    prompt: list[int]
    new_tokens: int


def poisson_rate(tokens_per_second: float, case: Case) -> float:
    """Requests per second that load a server of this measured decode rate to :data:`POISSON_LOAD`."""
    return POISSON_LOAD * tokens_per_second / case.new_tokens


def arrivals(case: Case, rate: float, prompts: PromptSource, rng: random.Random) -> list[Arrival]:
    """Poisson arrivals over ``case.seconds``, at least one; equal for equal ``rng``.

    Each prompt is one of five shared prefixes of different lengths and a tail of its own; the tokens generated are
    a half, one or one and a half times ``case.new_tokens``.
    """
    if not rate > 0 or not math.isfinite(rate):
        raise ConfigError(f"rate: got {rate}, accepts requests per second above 0")
    length = case.prompt_tokens
    prefixes = [prompts.prompt(rng, max(1, int(part * length))) for part in POISSON_PREFIXES]
    result: list[Arrival] = []
    at = rng.expovariate(rate)
    while at < case.seconds or not result:
        tail = prompts.prompt(rng, max(1, int(rng.uniform(*POISSON_TAIL) * length)))
        new = max(2, int(rng.choice((0.5, 1.0, 1.5)) * case.new_tokens))
        result.append(Arrival(at, rng.choice(prefixes) + tail, new))
        at += rng.expovariate(rate)
    return result


# --- measuring ----------------------------------------------------------------------------------------


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least ``percent`` % of ``values`` don't exceed."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(percent / 100 * len(ranked)) - 1)]


Values = dict[str, float | None]
"""Row -> what one pass measured; None where it could not."""


def latencies(name: str, timings: Sequence[Timing], kinds: Sequence[str] = (TTFT, TPOT)) -> Values:
    """Rows of milliseconds: p50 and p99 over requests.

    Answers that came in one piece have no time per output token; None when all did.
    """
    values = {
        TTFT: [t.first - t.sent for t in timings],
        TPOT: [(t.last - t.first) / (t.tokens - 1) for t in timings if t.tokens > 1 and not t.in_one_piece],
    }
    return {
        f"{name}: {kind} p{p}": 1e3 * percentile(values[kind], p) if values[kind] else None
        for kind in kinds
        for p in (50, 99)
    }


async def measure(
    client: BenchClient, prompts: PromptSource, case: Case, rng: random.Random, *, rate: float = 0.0
) -> Values:
    """One pass of ``case``: a value for each of :attr:`Case.rows`.

    Args:
        client: connected to the server.
        prompts: source of prompts.
        case: the load.
        rng: equal generators give equal prompts and arrival times.
        rate: requests per second (``poisson``).
    """
    if case.load == "poisson":
        return await _poisson(client, arrivals(case, rate, prompts, rng), case)
    texts = [prompts.prompt(rng, case.prompt_tokens) for _ in range(case.concurrent)]
    if case.load == "context":
        return await _context(client, texts, case)
    if not case.stream:
        started = time.perf_counter()
        counts = await gather(
            client.generate(text, max_tokens=case.new_tokens, salt=client.fresh_salt()) for text in texts
        )
        tokens = case.concurrent * case.prompt_tokens if case.load == "prefill" else sum(counts)
        return {case.name: tokens / (time.perf_counter() - started)}
    bodies = [_body(client, text, case.new_tokens, client.fresh_salt()) for text in texts]
    started = time.perf_counter()
    async with longest_pause() as pause:
        timings = await gather(client.timed(body, tokens=case.new_tokens) for body in bodies)
    seconds = max(t.last for t in timings) - started
    ends = [t.last - started for t in timings]
    deciles = {"ended_at": [round(percentile(ends, p), 4) for p in range(0, 101, 10)]}
    client.latest = _pass_facts(timings, pause) | deciles
    tokens = case.concurrent * (case.prompt_tokens if case.load == "prefill" else case.new_tokens)
    row: Values = {case.name: tokens / seconds}
    return row if case.load == "prefill" else row | latencies(case.name, timings)


@asynccontextmanager
async def longest_pause() -> AsyncIterator[list[float]]:
    """Seconds that each turn of this process's own event loop came too late: answers cannot be seen in between."""
    late = [0.0]

    async def beat() -> None:
        while True:
            due = time.perf_counter() + BEAT_SECONDS
            await asyncio.sleep(BEAT_SECONDS)
            late.append(time.perf_counter() - due)

    task = asyncio.create_task(beat())
    try:
        yield late
    finally:
        task.cancel()


def _pass_facts(timings: Sequence[Timing], pause: Sequence[float]) -> dict[str, object]:
    """What the report says of every streamed pass."""
    return {
        "longest_client_pause": round(max(pause), 4),
        "decode_seconds": round(sum(t.last - t.first for t in timings), 4),
    }


def _body(client: BenchClient, prompt: list[int], new_tokens: int, salt: str) -> bytes:
    return client.stream_body(prompt, max_tokens=new_tokens, salt=salt, interval=STREAM_INTERVAL)


async def wake(client: BenchClient, prompts: PromptSource, rng: random.Random) -> None:
    """One short request that isn't measured: caches and clocks recover from the server's idle time."""
    await client.timed(_body(client, prompts.prompt(rng, 16), 8, client.fresh_salt()), tokens=8)


async def _context(client: BenchClient, texts: list[list[int]], case: Case) -> Values:
    """Fill the prefix cache with the prompts (their time to first token), then decode from there."""
    salts = [client.fresh_salt() for _ in texts]
    filling = [_body(client, text, 1, salt) for text, salt in zip(texts, salts, strict=True)]
    filled = await gather(client.timed(body, tokens=1) for body in filling)
    bodies = [_body(client, text, case.new_tokens, salt) for text, salt in zip(texts, salts, strict=True)]
    timings = await gather(client.timed(body, tokens=case.new_tokens) for body in bodies)
    seconds = max(t.last for t in timings) - min(t.first for t in timings)
    tokens = sum(t.tokens - 1 for t in timings)
    held_back = any(t.in_one_piece for t in timings)
    return {case.name: None if held_back else tokens / seconds, **latencies(case.name, filled, (TTFT,))}


async def _poisson(client: BenchClient, plan: Sequence[Arrival], case: Case) -> Values:
    salt = client.fresh_salt()  # one for all: prefixes are shared within the pass, never with an earlier one
    bodies = [_body(client, arrival.prompt, arrival.new_tokens, salt) for arrival in plan]
    started = time.perf_counter()

    async def one(arrival: Arrival, body: bytes) -> Timing:
        await asyncio.sleep(max(0.0, started + arrival.at - time.perf_counter()))
        return await client.timed(body, tokens=arrival.new_tokens)

    async with longest_pause() as pause:
        timings = await gather(one(a, b) for a, b in zip(plan, bodies, strict=True))
    slowest = sorted(timings, key=lambda t: t.sent - t.first)[:10]
    late = {"slowest_first_tokens_at": [[round(t.sent - started, 3), round(t.first - t.sent, 4)] for t in slowest]}
    client.latest = _pass_facts(timings, pause) | late
    return latencies(case.name, timings)
