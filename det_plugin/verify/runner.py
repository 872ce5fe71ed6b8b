"""Run the chosen modes against a server, print what users know from SGLang, return the result."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx

from det_plugin.evidence.results import GroupResult, ModeResult, VerificationResult
from det_plugin.verify.client import CompletionClient, NotTestedError, ServerFailureError, normalize_url
from det_plugin.verify.context import Context
from det_plugin.verify.modes import RUNNERS
from det_plugin.verify.options import TestMode, VerifyOptions
from det_plugin.verify.prompts import Prompts

MIN_DISTINCT = 8
"""A mode whose reference answers hold fewer distinct tokens and logprobs than this proves nothing."""

Echo = Callable[[str], None]


def run_verification(
    options: VerifyOptions,
    *,
    echo: Echo | None = None,
    progress: bool = False,
    transport: httpx.AsyncBaseTransport | None = None,
) -> VerificationResult:
    """Verify a running server.

    A server that is unreachable or fails doesn't raise: the result's ``error`` says what happened, and its
    status is ``not_tested``.

    Args:
        options: what to test, where.
        echo: receives the printed lines one by one; None prints nothing.
        progress: draw progress bars on stderr when it is a terminal.
        transport: replaces the network, for tests.

    Returns:
        The result; ``result.exit_code`` is 0 same, 1 different, 2 not tested.
    """
    return asyncio.run(verify(options, echo=echo, progress=progress, transport=transport))


async def verify(
    options: VerifyOptions,
    *,
    echo: Echo | None = None,
    progress: bool = False,
    transport: httpx.AsyncBaseTransport | None = None,
) -> VerificationResult:
    """:func:`run_verification` for callers that already run an event loop."""
    say = echo or (lambda _: None)
    result = VerificationResult(base_url=normalize_url(options.base_url), options=options.model_dump(mode="json"))
    started = time.perf_counter()
    try:
        async with CompletionClient(
            options.base_url,
            model=options.model,
            timeout=options.timeout,
            api_key=options.api_key,
            transport=transport,
        ) as client:
            result.server = await client.connect()
            say(_heading(client, options))
            prompts = await Prompts.create(client)
            with _bars(progress) as bars:
                for mode in options.test_modes:
                    for temperature in options.temperatures:
                        outcome = ModeResult(mode=mode, temperature=temperature, status="not_tested")
                        result.modes.append(outcome)
                        await _run_mode(client, options, prompts, mode, outcome, bars)
                        for line in mode_lines(outcome):
                            say(line)
    except ServerFailureError as failure:
        result.error = str(failure)
        if result.modes and not result.modes[-1].groups and not result.modes[-1].reason:
            result.modes[-1].reason = str(failure)
    result.elapsed_s = time.perf_counter() - started
    for line in closing_lines(result):
        say(line)
    return result


async def _run_mode(
    client: CompletionClient,
    options: VerifyOptions,
    prompts: Prompts,
    mode: TestMode,
    outcome: ModeResult,
    bars: Callable[[str], tuple[Callable[[int], None], Callable[[], None]]],
) -> None:
    expect, advance = bars(f"{mode}, temperature {outcome.temperature:g}")
    context = Context(
        client=client,
        options=options,
        prompts=prompts,
        temperature=outcome.temperature,
        # the same choices for each mode whatever else runs, so that a seed reproduces one mode alone
        rng=random.Random(f"{options.rng_seed}/{mode}"),
        expect=expect,
        advance=advance,
    )
    tokens, started = client.output_tokens, time.perf_counter()
    try:
        outcome.groups = await RUNNERS[mode](context)
    except NotTestedError as error:
        outcome.reason = str(error)
    finally:
        outcome.elapsed_s = time.perf_counter() - started
        outcome.output_tokens = client.output_tokens - tokens
        outcome.tokens_per_s = outcome.output_tokens / max(outcome.elapsed_s, 1e-9)
        outcome.facts, outcome.kl = context.facts, context.kl
    if not outcome.groups:
        return
    outcome.total = sum(group.total for group in outcome.groups)
    outcome.unique = max(group.unique for group in outcome.groups)
    outcome.differing = sum(group.unique > 1 for group in outcome.groups)
    if outcome.differing:
        outcome.status = "different"
        await _decode(client, outcome.groups)
    elif degenerate(outcome.groups):
        outcome.reason = (
            f"the model's answers are degenerate (fewer than {MIN_DISTINCT} distinct tokens and logprobs), "
            "so equality proves nothing; use another model or raise --max-new-tokens"
        )
    else:
        outcome.status = "same"


def degenerate(groups: list[GroupResult]) -> bool:
    """Whether the reference answers are so uniform that any engine would pass."""
    tokens = {token for group in groups for token in group.variants[0].token_ids}
    logprobs = {value.hex() for group in groups for value in group.variants[0].logprobs}
    return len(tokens) < MIN_DISTINCT and len(logprobs) < MIN_DISTINCT


async def _decode(client: CompletionClient, groups: list[GroupResult]) -> None:
    """Fill in the decoded tokens of the answers that differ, for display."""
    for group in groups:
        if group.unique == 1:
            continue
        for variant in group.variants:
            variant.tokens = await client.decode(variant.token_ids)
        for divergence in (group.first_divergence, *(v.divergence for v in group.variants)):
            if divergence is not None:
                texts = [
                    (await client.decode([token]))[0] if token is not None else "" for token in divergence.token_ids
                ]
                divergence.tokens = (texts[0], texts[1])


# --- what is printed --------------------------------------------------------------------------------------


def _heading(client: CompletionClient, options: VerifyOptions) -> str:
    info = client.info
    version = f"vLLM {info['version']}" if info.get("version") else "version unknown"
    return (
        f"Server {client.base_url}: {info['model']}, {version}, context {info['max_model_len']} tokens. "
        f"Sampling seed {options.sampling_seed}, verification seed {options.rng_seed}."
    )


def mode_lines(outcome: ModeResult) -> list[str]:
    """The lines printed for one mode, SGLang's ``Unique samples: N`` among them."""
    lines = [f"[{outcome.mode}] temperature {outcome.temperature:g}"]
    groups = outcome.groups
    if outcome.mode == "single" and groups:
        lines.append(f"  Total samples: {groups[0].total}, Unique samples: {groups[0].unique}{_ids_note(groups)}")
    elif outcome.mode in ("prefix", "mixed"):
        for i, group in enumerate(groups):
            lines.append(
                f"  Prompt {i} with {group.label}: total samples: {group.total}, "
                f"Unique samples: {group.unique}{_ids_note([group])}{_hits([group])}"
            )
    else:
        for kind in dict.fromkeys(group.label.split(",")[0] for group in groups):
            same_kind = [group for group in groups if group.label.startswith(kind + ",")]
            unique = max(group.unique for group in same_kind)
            lines.append(
                f"  {kind}: total samples: {sum(g.total for g in same_kind)} of {len(same_kind)} prompts, "
                f"Unique samples: {unique}{_ids_note(same_kind)}{_hits(same_kind)}"
            )
            broken = sum(group.unique > 1 for group in same_kind)
            if broken:
                lines[-1] += f"; {broken} of {len(same_kind)} prompts differ"
    if outcome.kl is not None:
        facts = outcome.facts
        lines.append(
            f"  logprobs different at {facts['positions_different']} of {facts['positions']} positions, "
            f"KL {outcome.kl:.3e} nats per token"
        )
    if outcome.first_divergence is not None:
        label = next(g.label for g in groups if g.first_divergence is not None)
        lines += [f"  {label}: " + outcome.first_divergence.lines()[0]]
        lines += ["  " + line for line in outcome.first_divergence.lines()[1:]]
    verdict = {"same": "same", "different": "DIFFERENT", "not_tested": "NOT TESTED"}[outcome.status]
    if outcome.reason:
        verdict += f": {outcome.reason}"
    lines.append(f"  {verdict} ({outcome.elapsed_s:.1f} s, {outcome.tokens_per_s:.0f} output tokens/s)")
    return lines


def _ids_note(groups: list[GroupResult]) -> str:
    ids = max(group.unique_token_ids for group in groups)
    unique = max(group.unique for group in groups)
    return "" if unique == 1 else f" (distinct token id sequences: {ids})"


def _hits(groups: list[GroupResult]) -> str:
    hits, misses = sum(g.cache_hits for g in groups), sum(g.cache_misses for g in groups)
    return f", cache hits proven: {hits}, misses: {misses}" if hits else ""


def closing_lines(result: VerificationResult) -> list[str]:
    """The last lines: one verdict, or one line that says why there is none."""
    if result.error:
        return [f"not tested: {result.error}"]
    samples = sum(mode.total for mode in result.modes)
    names = {"same": "SAME", "different": "DIFFERENT", "not_tested": "NOT TESTED"}
    parts = [
        f"{sum(m.status == status for m in result.modes)} {label}"
        for status, label in (("same", "same"), ("different", "different"), ("not_tested", "not tested"))
        if any(m.status == status for m in result.modes)
    ]
    return [
        f"{names[result.status]}: {len(result.modes)} runs ({', '.join(parts)}), {samples} samples, "
        f"{result.elapsed_s:.1f} s"
    ]


@contextmanager
def _bars(enabled: bool) -> Iterator[Callable[[str], tuple[Callable[[int], None], Callable[[], None]]]]:
    """Progress bars on stderr; silent when disabled or when stderr is no terminal."""
    if not enabled or not sys.stderr.isatty():
        yield lambda _: ((lambda _: None), (lambda: None))
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:

        def add(name: str) -> tuple[Callable[[int], None], Callable[[], None]]:
            for old in bar.task_ids:
                bar.remove_task(old)
            task = bar.add_task(name, total=None)
            return (lambda total: bar.update(task, total=total)), (lambda: bar.advance(task))

        yield add
