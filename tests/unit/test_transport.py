"""One connection pool per request in flight: reuse, errors, cancellation, and what it is for."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager, suppress

import httpx
import pytest

from det_plugin.verify.transport import SeparateConnections

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ntransfer-encoding: chunked\r\n\r\n"


class Server:
    """Answers each request with two chunks, the second one when ``go`` is set; counts connections."""

    def __init__(self) -> None:
        self.connections = 0
        self.waiting = 0
        self.go = asyncio.Event()
        self.hang_up = False

    async def handle(self, reader, writer) -> None:
        self.connections += 1
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(HEAD + b"3\r\none\r\n")
                await writer.drain()
                self.waiting += 1
                await self.go.wait()
                self.waiting -= 1
                writer.write(b"3\r\ntwo\r\n0\r\n\r\n")
                await writer.drain()
                if self.hang_up:
                    break
        writer.close()


@asynccontextmanager
async def running(transport):
    server = Server()
    listener = await asyncio.start_server(server.handle, "127.0.0.1", 0, backlog=512)
    url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    async with httpx.AsyncClient(base_url=url, transport=transport, trust_env=False, timeout=30) as client:
        yield server, client
    listener.close()
    await asyncio.sleep(0.05)  # the server's side sees its connections end


async def ask(client) -> str:
    async with client.stream("GET", "/") as response:
        return "".join([part async for part in response.aiter_text()])


async def wave(server, client, count) -> list[str]:
    """``count`` requests, all in flight before the first one ends."""
    server.go.clear()
    tasks = [asyncio.create_task(ask(client)) for _ in range(count)]
    while server.waiting < count:
        await asyncio.sleep(0.002)
    server.go.set()
    return await asyncio.gather(*tasks)


def test_connections_are_used_again():
    async def main():
        transport = SeparateConnections()
        async with running(transport) as (server, client):
            for count in (5, 9, 3):
                assert await wave(server, client, count) == ["onetwo"] * count
            assert transport.pools == server.connections == 9

    asyncio.run(main())


def test_a_connection_that_the_server_closed_is_made_anew():
    async def main():
        transport = SeparateConnections()
        async with running(transport) as (server, client):
            server.hang_up = True
            assert await wave(server, client, 4) == ["onetwo"] * 4
            await asyncio.sleep(0.05)
            assert await wave(server, client, 4) == ["onetwo"] * 4
            assert server.connections == 8
            assert transport.pools == 4

    asyncio.run(main())


def test_cancelled_and_failed_requests_give_their_pool_back():
    async def main():
        transport = SeparateConnections()
        async with running(transport) as (server, client):
            server.go.clear()
            tasks = [asyncio.create_task(ask(client)) for _ in range(6)]
            while server.waiting < 6:
                await asyncio.sleep(0.002)
            for task in tasks[::2]:
                task.cancel()
            server.go.set()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert [isinstance(r, asyncio.CancelledError) for r in results] == [True, False] * 3
            assert results[1::2] == ["onetwo"] * 3
            with pytest.raises(httpx.ConnectError):
                await client.get("http://127.0.0.1:1/")
            assert await wave(server, client, 6) == ["onetwo"] * 6
            assert transport.pools == 6

    asyncio.run(main())


def test_many_requests_that_end_together_cost_little():
    """Processor time of 200 answers that end at once.  Control: the one pool that httpx keeps."""

    async def cost(transport):
        async with running(transport) as (server, client):
            await wave(server, client, 200)
            begin = time.process_time()
            await wave(server, client, 200)
            return time.process_time() - begin

    unlimited = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    ours = asyncio.run(cost(SeparateConnections()))
    theirs = asyncio.run(cost(httpx.AsyncHTTPTransport(limits=unlimited)))
    assert 1.5 * ours < theirs
