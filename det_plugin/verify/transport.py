"""An HTTP transport for hundreds of requests at once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import httpx

KEEPALIVE_SECONDS = 1.0
"""How long an idle connection is used again: vLLM closes idle ones after 5 s."""


class SeparateConnections(httpx.AsyncBaseTransport):
    """Every request in flight has a connection pool of its own, which serves another one afterwards.

    The pool behind ``httpx`` looks at all its connections in nested loops whenever a request starts or ends: with some
    hundreds of them it keeps the event loop for up to a second, and streamed tokens seem to come late.

    Attributes:
        pools: pools made so far, the most requests that were in flight at once.
    """

    def __init__(self) -> None:
        self._context = httpx.create_ssl_context(trust_env=False)
        self._idle: list[httpx.AsyncHTTPTransport] = []
        self._all: list[httpx.AsyncHTTPTransport] = []

    @property
    def pools(self) -> int:
        return len(self._all)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        pool = self._idle.pop() if self._idle else self._new()
        try:
            response = await pool.handle_async_request(request)
        except BaseException:
            self._idle.append(pool)
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Stream(response.stream, pool, self._idle)
        return response

    def _new(self) -> httpx.AsyncHTTPTransport:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEPALIVE_SECONDS)
        pool = httpx.AsyncHTTPTransport(verify=self._context, limits=limits, trust_env=False)
        self._all.append(pool)
        return pool

    async def aclose(self) -> None:
        """Close all connections, also when closing one of them fails."""
        async with AsyncExitStack() as stack:
            for pool in self._all:
                stack.push_async_callback(pool.aclose)


class _Stream(httpx.AsyncByteStream):
    """A response's bytes; gives the pool back when the response is closed."""

    def __init__(
        self, stream: httpx.AsyncByteStream, pool: httpx.AsyncHTTPTransport, idle: list[httpx.AsyncHTTPTransport]
    ) -> None:
        self._stream, self._pool, self._idle = stream, pool, idle
        self._open = True

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            yield part

    async def aclose(self) -> None:
        try:
            await self._stream.aclose()
        finally:
            if self._open:
                self._open = False
                self._idle.append(self._pool)
