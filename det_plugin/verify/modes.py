"""The five test modes.  Each returns its groups of samples; nothing here prints."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

from det_plugin.evidence.divergence import kl_divergence
from det_plugin.evidence.records import Answer
from det_plugin.evidence.results import GroupResult
from det_plugin.verify.client import NotTestedError, gather
from det_plugin.verify.context import Context, Group
from det_plugin.verify.options import TestMode

DETAILS_HINT = (
    "the server does not report cached_tokens, so no cache hit can be proven; "
    "start it with --enable-prompt-tokens-details"
)


# --- single ---------------------------------------------------------------------------------------------


async def run_single(ctx: Context) -> list[GroupResult]:
    """One prompt alone, then at random positions of batches among other prompts of mixed length."""
    rng, new = ctx.rng, ctx.options.max_new_tokens
    sizes = ctx.options.sizes
    copies = [max(1, (size + 1) // 2) for size in sizes]
    ctx.expect(1 + sum(copies))
    prompt = ctx.prompts.prompt(rng, ctx.fit(37))
    group = ctx.group("one prompt")
    await ctx.settle()
    group.add("alone", await ctx.sample(prompt))
    for size, mine in zip(sizes, copies, strict=True):
        slots = set(rng.sample(range(size), mine))
        calls = []
        for slot in range(size):
            if slot in slots:
                calls.append(ctx.sample(prompt))
            else:
                other = ctx.prompts.prompt(rng, ctx.fit(rng.choice((1, 3, 11, 60, 130, 220))))
                calls.append(ctx.neighbour(other, rng.randint(1, new), ctx.sampling()))
        answers = await gather(calls)
        for slot in sorted(slots):
            group.add(f"batch of {size}, slot {slot}", answers[slot])
    ctx.facts["batch_sizes"] = list(sizes)
    return [group.result()]


# --- mixed ----------------------------------------------------------------------------------------------

NEIGHBOURS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "top_k": 5, "seed": 7},
    {"temperature": 0.7, "top_p": 0.9, "seed": 8},
    {"temperature": 1.3, "min_p": 0.05},
    {"temperature": 0.9, "frequency_penalty": 0.8, "presence_penalty": 0.4},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logprobs": 7},
    {"temperature": 1.0, "top_k": 40, "top_p": 0.8, "seed": 9},
)
"""How the neighbours of ``mixed`` sample."""


async def run_mixed(ctx: Context) -> list[GroupResult]:
    """Short requests; a long prompt joins in mid-decode, a request leaves, neighbours sample differently."""
    rng, new = ctx.rng, ctx.options.max_new_tokens
    rounds = ctx.options.n_trials
    lengths = (5, 23, 71)
    ctx.expect(len(lengths) * (rounds + 1))
    prompts = [ctx.prompts.prompt(rng, ctx.fit(length)) for length in lengths]
    groups = [ctx.group(f"short request of {len(prompt)} tokens") for prompt in prompts]
    await ctx.settle()
    for prompt, group in zip(prompts, groups, strict=True):
        group.add("alone", await ctx.sample(prompt))
    joined = left = 0
    for number in range(rounds):
        joins, leaves = await _mixed_round(ctx, number, prompts, groups, new)
        joined, left = joined + joins, left + leaves
    ctx.facts |= {"rounds": rounds, "joined_in_mid_decode": joined, "left_in_mid_decode": left}
    if not joined:
        raise NotTestedError("no long prompt joined while a short request was decoding; raise --max-new-tokens")
    return [group.result() for group in groups]


async def _mixed_round(
    ctx: Context, number: int, prompts: list[list[int]], groups: list[Group], new: int
) -> tuple[int, int]:
    """One round; returns whether the long prompt joined, and whether a request left, in mid-decode."""
    rng = ctx.rng
    started, running = asyncio.Event(), asyncio.Event()

    def pace(tokens: int) -> None:
        if tokens >= 2:
            started.set()
        if tokens >= min(6, new):
            running.set()

    styles = [NEIGHBOURS[(number + k) % len(NEIGHBOURS)] for k in range(2 + number % 5)]
    targets = [asyncio.create_task(ctx.sample(prompt)) for prompt in prompts]
    pacer = asyncio.create_task(
        ctx.neighbour(ctx.prompts.prompt(rng, 9), new, {"temperature": 0.0}, stream=True, on_token=pace)
    )
    leaver = asyncio.create_task(
        ctx.neighbour(ctx.prompts.prompt(rng, ctx.fit(40)), 4 * new, {"temperature": 1.0}, stream=True)
    )
    company = [pacer, leaver] + [
        asyncio.create_task(
            ctx.neighbour(ctx.prompts.prompt(rng, ctx.fit(rng.randint(2, 150))), rng.randint(2, new), dict(style))
        )
        for style in styles
    ]
    joins = leaves = 0
    try:
        await _first(started, *targets, pacer)
        long_prompt = ctx.prompts.prompt(rng, ctx.fit(ctx.options.long_prompt_tokens + 7 * number))
        joins = int(any(not task.done() for task in targets))
        company.append(asyncio.create_task(ctx.neighbour(long_prompt, 4, {"temperature": 0.0})))
        await _first(running, *targets, pacer)
        leaves = int(any(not task.done() for task in targets) and not leaver.done())
        leaver.cancel()
        answers = await gather(targets)
        for group, answer in zip(groups, answers, strict=True):
            group.add(f"round {number}, {len(styles)} neighbours", answer)
        for task in company:  # a neighbour that failed on its own is a failure of the server
            if task.done() and not task.cancelled():
                task.result()
    finally:
        for task in (*targets, *company):
            task.cancel()
        await asyncio.gather(*targets, *company, return_exceptions=True)
    await ctx.settle()
    return joins, leaves


async def _first(event: asyncio.Event, *tasks: asyncio.Task) -> None:
    """Wait for the event; return early when all tasks are done, raise at once what one of them raised."""
    waiter = asyncio.create_task(event.wait())
    pending: set[asyncio.Task] = set(tasks)
    try:
        while pending and not waiter.done():
            done, _ = await asyncio.wait({waiter, *pending}, return_when=asyncio.FIRST_COMPLETED)
            for task in done & pending:
                task.result()
            pending -= done
    finally:
        waiter.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await waiter


# --- prefix ---------------------------------------------------------------------------------------------


async def run_prefix(ctx: Context) -> list[GroupResult]:
    """Prompts that share prefixes of one long text, in batches that fill and hit the prefix cache."""
    rng = ctx.rng
    tail = 12
    lengths = sorted({min(length, ctx.room - tail) for length in ctx.options.prefix_lengths})
    lengths = [length for length in lengths if length >= 1]
    if not lengths:
        raise NotTestedError(f"the model's context of {ctx.client.max_model_len} tokens leaves no room for a prefix")
    text = ctx.prompts.prompt(rng, max(lengths))
    prompts = [text[:length] + ctx.prompts.take(rng, rng.randint(5, tail)) for length in lengths]
    groups = [ctx.group(f"prefix length {length}") for length in lengths]
    sizes = ctx.options.sizes
    ctx.expect(len(lengths) + 2 * sum(sizes))
    await ctx.settle()
    for group, prompt in zip(groups, prompts, strict=True):
        group.add("alone, uncached", await ctx.sample(prompt))
    _require_details(groups[0].samples[0][1])
    block = 0
    warm_hits = [0] * len(lengths)
    warm_total = [0] * len(lengths)
    for size in sizes:
        salt = ctx.client.fresh_salt()
        slots = [rng.randrange(len(lengths)) for _ in range(size)]
        if size >= len(lengths):
            slots[: len(lengths)] = rng.sample(range(len(lengths)), len(lengths))
        for wave in ("cold", "warm"):
            rng.shuffle(slots)
            answers = await gather(ctx.sample(prompts[k], salt=salt, miss=False) for k in slots)
            for k, answer in zip(slots, answers, strict=True):
                groups[k].add(f"{wave} batch of {size}, {answer.cached_tokens} tokens cached", answer)
                if wave == "warm":
                    warm_total[k] += 1
                    warm_hits[k] += bool(answer.cached_tokens)
                block = math.gcd(block, answer.cached_tokens or 0)
    ctx.facts |= {"prefix_lengths": lengths, "cache_granularity": block, "warm_hits": warm_hits}
    ctx.facts["warm_samples"] = warm_total
    if not block:
        raise NotTestedError(
            "no request hit the prefix cache; is prefix caching on (--enable-prefix-caching), and is a "
            f"prefix longer than a cache block (longest tested: {lengths[-1]} tokens)?"
        )
    for k, prompt in enumerate(prompts):
        if warm_total[k] and len(prompt) > block and not warm_hits[k]:
            raise NotTestedError(
                f"prefix length {lengths[k]}: none of {warm_total[k]} repeated requests hit the prefix cache "
                "(is the KV cache too small to keep it?)"
            )
    return [group.result() for group in groups]


def _require_details(answer: Answer) -> None:
    if answer.cached_tokens is None:
        raise NotTestedError(DETAILS_HINT)


def waves(trials: int, width: int) -> Iterator[range]:
    """Cut ``range(trials)`` into waves that run at once: 1, ``width``, 2, ``width``, 3, ... requests.

    A request alone meets other schedules than one among many, so both kinds occur.
    """
    start, alone, wide = 0, 1, False
    while start < trials:
        size = width if wide else min(alone, width)
        yield range(start, min(trials, start + size))
        start, alone, wide = start + size, alone + (not wide), not wide


# --- radix_cache ----------------------------------------------------------------------------------------


async def _cache_boundary(ctx: Context) -> int:
    """A prompt length at which the prefix cache has a block boundary, found by asking twice.

    Raises:
        NotTestedError: the server doesn't report cached tokens, or caches nothing.
    """
    for length in (300, 1100, 2300, 4400):
        prompt = ctx.prompts.prompt(ctx.rng, ctx.fit(length))
        salt = ctx.client.fresh_salt()
        for repeat in (False, True):
            answer = await ctx.client.complete(prompt, max_tokens=1, salt=salt)
            _require_details(answer)
            if repeat and answer.cached_tokens:
                return answer.cached_tokens
        if len(prompt) < length:
            break
    raise NotTestedError(
        "a prompt sent twice did not hit the prefix cache; is prefix caching on (--enable-prefix-caching), "
        "and is the context longer than a cache block?"
    )


async def run_radix_cache(ctx: Context) -> list[GroupResult]:
    """Cached against uncached: the cache filled by a prefill, and by decoding (second turn of a chat)."""
    rng, new, trials = ctx.rng, ctx.options.max_new_tokens, ctx.options.n_trials
    ctx.expect(5 * trials)
    await ctx.settle()
    step = await _cache_boundary(ctx)
    ctx.facts["cache_boundary"] = step
    boundary = step
    while boundary < new + 8:
        boundary += step
    if boundary + 48 > ctx.room:
        raise NotTestedError(
            f"a cache boundary at {boundary} tokens leaves no room in the model's context of "
            f"{ctx.client.max_model_len} tokens; lower --max-new-tokens"
        )
    groups: list[GroupResult] = []
    for batch in waves(trials, ctx.options.concurrency):
        groups += await _prefill_filled(ctx, batch, step, rng)
        groups += await _decode_filled(ctx, batch, boundary, rng)
    groups.sort(key=lambda group: group.label)
    return groups


async def _prefill_filled(ctx: Context, batch: range, step: int, rng: random.Random) -> list[GroupResult]:
    prompts = [ctx.prompts.prompt(rng, step + rng.choice((1, 2, 5, 19, 40))) for _ in batch]
    salts = [ctx.client.fresh_salt() for _ in batch]
    cold = await gather(ctx.sample(p, salt=s) for p, s in zip(prompts, salts, strict=True))
    warm = await gather(ctx.sample(p, salt=s, miss=False) for p, s in zip(prompts, salts, strict=True))
    return [
        _pair(ctx, f"cache filled by prefill, prompt {i}", cold[k], warm[k], at_least=1) for k, i in enumerate(batch)
    ]


async def _decode_filled(ctx: Context, batch: range, boundary: int, rng: random.Random) -> list[GroupResult]:
    # the KV entries of all new tokens but the last are in the cache when a turn ends
    turns = [ctx.prompts.prompt(rng, boundary - ctx.options.max_new_tokens + 1) for _ in batch]
    salts = [ctx.client.fresh_salt() for _ in batch]
    answers = await gather(ctx.sample(p, salt=s) for p, s in zip(turns, salts, strict=True))
    second = [
        turn + answer.token_ids + ctx.prompts.take(rng, rng.choice((1, 4, 13, 30)))
        for turn, answer in zip(turns, answers, strict=True)
    ]
    warm = await gather(ctx.sample(p, salt=s, miss=False) for p, s in zip(second, salts, strict=True))
    cold = await gather(ctx.sample(p) for p in second)
    return [
        _pair(ctx, f"cache filled by decode, chat {i}", cold[k], warm[k], at_least=len(turns[k]) + 1)
        for k, i in enumerate(batch)
    ]


def _pair(ctx: Context, label: str, cold: Answer, warm: Answer, *, at_least: int) -> GroupResult:
    """Compare an uncached answer with one whose hit of ``at_least`` tokens must be proven."""
    _require_details(cold)
    if (warm.cached_tokens or 0) < at_least:
        raise NotTestedError(
            f"{label}: expected at least {at_least} tokens from the prefix cache, got {warm.cached_tokens} "
            "(is the KV cache too small to keep them?)"
        )
    group = ctx.group(label)
    group.add("uncached", cold)
    group.add(f"{warm.cached_tokens} tokens cached", warm)
    return group.result()


# --- p_vs_d ---------------------------------------------------------------------------------------------


async def run_p_vs_d(ctx: Context) -> list[GroupResult]:
    """Logprobs scored again in prefill against those returned while decoding."""
    rng, trials = ctx.rng, ctx.options.n_trials
    ctx.expect(trials)
    await ctx.settle()
    decoded: list[float] = []
    scored: list[float] = []
    groups = []
    for batch in waves(trials, ctx.options.concurrency):
        prompts = [ctx.prompts.prompt(rng, ctx.fit(rng.choice((4, 17, 90, 260)))) for _ in batch]
        answers = await gather(ctx.sample(prompt) for prompt in prompts)
        again = await gather(
            ctx.client.score(
                p + a.token_ids, len(p), salt=ctx.client.fresh_salt(), top_logprobs=ctx.options.top_logprobs
            )
            for p, a in zip(prompts, answers, strict=True)
        )
        for i, answer, score in zip(batch, answers, again, strict=True):
            group = ctx.group(f"decode against prefill, prompt {i}")
            group.add("decode", answer)
            group.add("prefill", score)
            groups.append(group.result())
            decoded += answer.logprobs
            scored += score.logprobs
    ctx.kl = kl_divergence(decoded, scored)
    different = sum(a.hex() != b.hex() for a, b in zip(decoded, scored, strict=True))
    ctx.facts |= {"positions": len(decoded), "positions_different": different}
    return groups


RUNNERS: dict[TestMode, Callable[[Context], Any]] = {
    "single": run_single,
    "prefix": run_prefix,
    "radix_cache": run_radix_cache,
    "p_vs_d": run_p_vs_d,
    "mixed": run_mixed,
}
