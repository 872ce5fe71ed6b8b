"""The benchmark's client: short requests and answers, and the times of streamed tokens."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import httpx

from det_plugin.verify.client import COMPLETIONS, CompletionClient, ServerFailureError


@dataclass(frozen=True)
class Timing:
    """When one streamed answer was asked for, began and ended (``time.perf_counter`` seconds), and its tokens."""

    sent: float
    first: float
    last: float
    tokens: int

    @property
    def in_one_piece(self) -> bool:
        """Whether the server's front end held the first token back until the last: no time between tokens."""
        return self.tokens > 1 and self.last - self.first <= ONE_PIECE * (self.last - self.sent)


ONE_PIECE = 0.01
"""Share of an answer's time within which all its tokens came, for it to count as sent in one piece."""


class BenchClient(CompletionClient):
    """A client that asks for neither token ids nor logprobs.

    Attributes:
        pieces: timed answers of more than one token so far, and those of them that came in one piece.
        latest: facts about the last pass of timed answers that no percentile of a latency shows, for the report.
    """

    pieces: tuple[int, int] = (0, 0)
    latest: Mapping[str, object] | None = None

    def _greedy(self, prompt: Sequence[int], max_tokens: int, salt: str) -> dict[str, object]:
        """The body of a request for exactly ``max_tokens`` tokens that shares no cache with another salt's."""
        return {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "cache_salt": salt,
        }

    async def generate(self, prompt: Sequence[int], *, max_tokens: int, salt: str) -> int:
        """Generate greedily without asking for ids or logprobs; returns the number of tokens (benchmarks).

        Raises:
            ServerFailureError: no answer, an HTTP error, or fewer tokens than asked for.
        """
        data = await self._json("POST", COMPLETIONS, self._greedy(prompt, max_tokens, salt))
        count = (data.get("usage") or {}).get("completion_tokens") if isinstance(data, dict) else None
        if count != max_tokens:
            raise ServerFailureError(
                f"server at {self.base_url} generated {count} tokens where {max_tokens} were asked for"
            )
        self.output_tokens += max_tokens
        return max_tokens

    def stream_body(self, prompt: Sequence[int], *, max_tokens: int, salt: str, interval: int) -> bytes:
        """The encoded request for :meth:`timed`, made ahead so that encoding isn't timed.

        Args:
            prompt: token ids.
            max_tokens: tokens to generate, greedily; end-of-text is ignored.
            salt: ``cache_salt``.
            interval: tokens per chunk after the first token; servers that don't know the field send every token.
        """
        stream = {"stream": True, "stream_interval": interval, "stream_options": {"include_usage": True}}
        return json.dumps(self._greedy(prompt, max_tokens, salt) | stream).encode()

    async def timed(self, body: bytes, *, tokens: int) -> Timing:
        """Send a body of :meth:`stream_body` and time its answer's first and last token.

        Raises:
            ServerFailureError: no answer, an HTTP error, or another number of tokens than ``tokens``.
        """
        count: int | None = None
        sent = time.perf_counter()
        first = last = 0.0
        async with self._events(body) as events:
            async for data in events:
                if data.get("choices"):
                    last = time.perf_counter()
                    first = first or last
                if data.get("usage"):
                    count = data["usage"].get("completion_tokens")
        if count != tokens or not first:
            raise ServerFailureError(
                f"server at {self.base_url} generated {count} tokens where {tokens} were asked for"
            )
        self.output_tokens += tokens
        timing = Timing(sent, first, last, tokens)
        if tokens > 1:
            self.pieces = (self.pieces[0] + 1, self.pieces[1] + timing.in_one_piece)
        return timing

    async def unfinished(self) -> int | None:
        """Requests running or waiting in the server as ``/metrics`` tells; None when it doesn't.

        Raises:
            ServerFailureError: no answer.
        """
        found = await self._metric("num_requests_(?:running|waiting)")
        return None if found is None else int(found)

    async def decode_seconds(self) -> float | None:
        """Seconds that the engine itself saw from first to last token, summed over all requests that it finished; None
        when ``/metrics`` doesn't tell.

        Raises:
            ServerFailureError: no answer.
        """
        return await self._metric("request_decode_time_seconds_sum")

    async def _metric(self, name: str) -> float | None:
        """Sum of the server's metrics whose name after ``vllm:`` matches the pattern."""
        response = await self._send("GET", "/metrics")
        if response.status_code != httpx.codes.OK:
            return None
        found = re.findall(rf"^vllm:{name}(?:\{{[^}}]*\}})? ([0-9.e+-]+)$", response.text, re.M)
        return sum(map(float, found)) if found else None
