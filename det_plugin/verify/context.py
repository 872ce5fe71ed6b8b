"""What the test modes work with: the server, the prompts, and groups of samples to compare."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from det_plugin.evidence.divergence import first_divergence
from det_plugin.evidence.records import Answer
from det_plugin.evidence.results import GroupResult, Variant
from det_plugin.verify.client import CompletionClient, NotTestedError
from det_plugin.verify.options import VerifyOptions
from det_plugin.verify.prompts import Prompts

MAX_VARIANTS = 8
"""Distinct answers kept per group; all are counted."""


class Group:
    """Collects the samples of one request; the first added is the reference."""

    def __init__(self, label: str, *, top: bool) -> None:
        self.label = label
        self.samples: list[tuple[str, Answer]] = []
        self._top = top

    def add(self, where: str, answer: Answer) -> None:
        self.samples.append((where, answer))

    def result(self) -> GroupResult:
        """Count the distinct samples and find the first divergence."""
        where0, reference = self.samples[0]
        counts: dict[tuple[bytes, tuple[int, ...]], int] = {}
        variants: list[Variant] = []
        first = None
        for where, answer in self.samples:
            key = (answer.key(top=self._top), tuple(answer.prompt_token_ids))
            counts[key] = counts.get(key, 0) + 1
            if counts[key] > 1:
                continue
            divergence = first_divergence(reference, answer, top=self._top, names=(where0, where))
            first = first or divergence
            variants.append(
                Variant(
                    count=1,
                    where=where,
                    token_ids=answer.token_ids,
                    logprobs=answer.logprobs,
                    text=answer.text,
                    divergence=divergence,
                )
            )
        for variant, count in zip(variants, counts.values(), strict=True):
            variant.count = count
        cached = [answer.cached_tokens for _, answer in self.samples]
        return GroupResult(
            label=self.label,
            prompt_tokens=len(reference.prompt_token_ids),
            total=len(self.samples),
            unique=len(counts),
            unique_token_ids=len({tuple(answer.token_ids) for _, answer in self.samples}),
            tokens_compared=sum(len(answer.token_ids) for _, answer in self.samples[1:]),
            cache_hits=sum(c is not None and c > 0 for c in cached),
            cache_misses=sum(c == 0 for c in cached),
            variants=variants[:MAX_VARIANTS],
            first_divergence=first,
        )


@dataclass
class Context:
    """What a mode works with.

    Attributes:
        client: the server.
        options: the run's options.
        prompts: source of prompts.
        temperature: of the requests under test.
        rng: the mode's own random generator.
        advance: call once per finished sample (progress bar).
        expect: call once with the number of samples to come.
        facts: counts for the report.
    """

    client: CompletionClient
    options: VerifyOptions
    prompts: Prompts
    temperature: float
    rng: random.Random
    advance: Callable[[], None] = lambda: None
    expect: Callable[[int], None] = lambda _: None
    facts: dict[str, Any] = field(default_factory=dict)
    kl: float | None = None

    @property
    def room(self) -> int:
        """Longest prompt that leaves room for the new tokens."""
        limit = self.client.max_model_len or 4096
        return limit - self.options.max_new_tokens - 1

    def fit(self, length: int) -> int:
        """``length`` cut to the model's context."""
        return max(1, min(length, self.room))

    def sampling(self) -> dict[str, Any]:
        """Sampling fields of the requests under test."""
        options = self.options
        fields: dict[str, Any] = {"temperature": self.temperature}
        if self.temperature > 0:
            fields |= {"seed": options.sampling_seed, "top_p": options.top_p}
            fields |= {"top_k": options.top_k, "min_p": options.min_p}
        fields |= {
            "frequency_penalty": options.frequency_penalty or None,
            "presence_penalty": options.presence_penalty or None,
        }
        return {name: value for name, value in fields.items() if value is not None}

    def group(self, label: str) -> Group:
        return Group(label, top=self.options.top_logprobs > 0)

    async def sample(self, prompt: list[int], *, salt: str | None = None, miss: bool = True) -> Answer:
        """One answer under test.

        Args:
            prompt: token ids.
            salt: cache salt; None takes a fresh one.
            miss: whether a reported cache hit is an error of the test.

        Raises:
            NotTestedError: a miss was needed, and the server reports cached tokens; or top logprobs are to be
                compared, and it sends none.
        """
        answer = await self.client.complete(
            prompt,
            max_tokens=self.options.max_new_tokens,
            sampling=self.sampling(),
            salt=salt or self.client.fresh_salt(),
            top_logprobs=self.options.top_logprobs,
            stream=self.options.stream,
        )
        if miss and answer.cached_tokens:
            raise NotTestedError(
                f"a request with a fresh cache_salt took {answer.cached_tokens} tokens from the prefix "
                "cache, so an uncached answer cannot be had from this server"
            )
        if self.options.top_logprobs and not answer.top_logprobs:
            raise NotTestedError("--top-logprobs: the server sends no top logprobs, so they cannot be compared")
        self.advance()
        return answer

    async def neighbour(self, prompt: list[int], max_tokens: int, sampling: dict[str, Any], **kw: Any) -> Answer:
        """A request that only keeps the others company."""
        return await self.client.complete(
            prompt, max_tokens=max_tokens, sampling=sampling, salt=self.client.fresh_salt(), **kw
        )

    async def settle(self) -> None:
        """Let the server finish with what was aborted before: one token, alone."""
        await self.neighbour(self.prompts.prompt(self.rng, 4), 1, {})
