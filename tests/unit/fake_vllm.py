"""A vLLM OpenAI server in a few lines, deterministic or broken in a chosen way; no network, no model.

Token distributions are a hash of the tokens before, so that every request has one right answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import struct
import threading
from collections.abc import AsyncIterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

BLOCK = 16


def float32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]


class FakeVllm:
    """State and faults of the fake.

    Args:
        fault: ``""`` deterministic, or one of

            - ``batch``: logprobs move by one bit as soon as two requests are in flight;
            - ``batch_token``: another token is drawn then, with equal logprobs (sampling);
            - ``batch_inputs``: the prompt is read differently then;
            - ``cache``: logprobs move when the prefix cache is hit;
            - ``decode_cache``: only when what was hit had been filled by decoding;
            - ``phase``: prompt logprobs differ from decode's;
            - ``long``: logprobs move while a prompt of 200 tokens or more is in flight;
            - ``constant``: always the same token with probability one.
        details: report ``cached_tokens``.
        caching: keep a prefix cache.
        leaky: ignore ``cache_salt`` (a flush that doesn't flush).
        fail_after: answer HTTP 500 after this many completions.
        garbage: answer completions with something that isn't JSON.
        max_model_len: reported context.
    """

    def __init__(
        self,
        fault: str = "",
        *,
        details: bool = True,
        caching: bool = True,
        leaky: bool = False,
        fail_after: int | None = None,
        garbage: bool = False,
        max_model_len: int = 4608,
        delay: float = 0.0005,
    ) -> None:
        self.fault, self.details, self.caching, self.leaky = fault, details, caching, leaky
        self.fail_after, self.garbage, self.max_model_len, self.delay = fail_after, garbage, max_model_len, delay
        self.completions = 0
        self.aborted = 0
        self.active: dict[int, int] = {}
        self.cache: dict[tuple[str, bytes], bool] = {}
        self.bodies: list[dict[str, Any]] = []

    @property
    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self.handle)

    async def handle(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else {}
        path = request.url.path
        if path == "/v1/models":
            card = {"id": "fake", "root": "fake", "max_model_len": self.max_model_len}
            return httpx.Response(200, json={"data": [card]})
        if path == "/version":
            return httpx.Response(200, json={"version": "0.32.0"})
        if path == "/detokenize":
            return httpx.Response(200, json={"prompt": "".join(f"<{t}>" for t in body["tokens"])})
        if path == "/v1/completions":
            self.completions += 1
            self.bodies.append(body)
            if self.garbage:
                return httpx.Response(200, text="<html>hello</html>")
            if self.fail_after is not None and self.completions > self.fail_after:
                return httpx.Response(500, json={"error": {"message": "engine core died\nsee the log", "code": 500}})
            if body.get("stream"):
                return httpx.Response(200, content=self._stream(body))
            return httpx.Response(200, json=await self._complete(body))
        return httpx.Response(404, json={"error": {"message": "Not Found"}})

    # --- the model ----------------------------------------------------------------------------------------

    def distribution(self, before: list[int]) -> list[tuple[int, float]]:
        if self.fault == "constant":
            return [(7, 0.0), (8, -40.0), (9, -41.0)]
        digest = hashlib.sha256(struct.pack(f"<I{len(before[-12:])}I", len(before), *before[-12:])).digest()
        tokens = [2 + digest[i] for i in range(4)]
        tokens = list(dict.fromkeys(tokens))
        return [(t, float32(-0.3 - i - digest[8 + i] / 256)) for i, t in enumerate(tokens)]

    def _state(self, key: int) -> str:
        """What the load of this moment changes."""
        if len(self.active) > 1:
            if self.fault in ("batch", "batch_token", "batch_inputs"):
                return self.fault
            if self.fault == "long" and max(n for k, n in self.active.items() if k != key) >= 200:
                return "batch"
        return ""

    def _read(self, body: dict[str, Any]) -> list[int]:
        prompt = body["prompt"]
        if isinstance(prompt, str):
            special = [1] if body.get("add_special_tokens", True) else []
            return special + [2 + b for b in prompt.encode()]
        return list(prompt)

    def _lookup(self, salt: str, ids: list[int]) -> tuple[int, bool]:
        """Tokens found in the cache, and whether decoding had put any of them there."""
        hit, decoded = 0, False
        for end in range(BLOCK, len(ids), BLOCK):
            key = (salt, struct.pack(f"<{end}I", *ids[:end]))
            if key not in self.cache:
                break
            hit, decoded = end, decoded or self.cache[key]
        return hit, decoded

    def _store(self, salt: str, ids: list[int], prompt_length: int) -> None:
        for end in range(BLOCK, len(ids), BLOCK):
            self.cache.setdefault((salt, struct.pack(f"<{end}I", *ids[:end])), end > prompt_length)

    async def _steps(self, body: dict[str, Any], ids: list[int]) -> AsyncIterator[tuple[int, float, dict, int]]:
        salt = "" if self.leaky else body.get("cache_salt", "")
        scoring = body.get("prompt_logprobs") is not None
        hit, decoded = self._lookup(salt, ids) if self.caching and not scoring else (0, False)
        moved = (self.fault == "cache" and hit > 0) or (self.fault == "decode_cache" and decoded)
        temperature, seed = body.get("temperature", 1.0), body.get("seed", 0)
        key = id(body)
        self.active[key] = len(ids)
        out: list[int] = []
        try:
            await asyncio.sleep(self.delay)
            for _ in range(body["max_tokens"]):
                await asyncio.sleep(self.delay)
                state = self._state(key)
                ranks = self.distribution(ids + out)
                if moved or state == "batch":
                    ranks = [(t, float32(v * (1 + 2e-7))) for t, v in ranks]
                pick = 0
                if temperature:
                    pick = (hash((seed, len(ids) + len(out))) >> 3) % len(ranks)
                if state == "batch_token" and len(out) == 3:
                    pick = (pick + 1) % len(ranks)
                token, logprob = ranks[pick]
                out.append(token)
                yield token, logprob, dict([ranks[pick], *ranks[: body.get("logprobs") or 0]]), hit
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted += 1
            raise
        finally:
            del self.active[key]
        if self.caching:
            self._store(salt, ids + out, len(ids))

    def _choice(self, ids: list[int], steps: list[tuple[int, float, dict, int]], text: bool = True) -> dict:
        return {
            "index": 0,
            "text": "".join(f"<{s[0]}>" for s in steps),
            "finish_reason": "length",
            "token_ids": [s[0] for s in steps],
            "prompt_token_ids": ids,
            "logprobs": {
                "tokens": [f"token_id:{s[0]}" for s in steps],
                "token_logprobs": [s[1] for s in steps],
                "top_logprobs": [{f"token_id:{t}": v for t, v in s[2].items()} for s in steps],
            },
        }

    def _usage(self, ids: list[int], new: int, hit: int) -> dict:
        details = {"cached_tokens": hit} if self.details else None
        return {"prompt_tokens": len(ids), "completion_tokens": new, "prompt_tokens_details": details}

    async def _complete(self, body: dict[str, Any]) -> dict:
        ids = self._read(body)
        said = ids
        steps = []
        async for step in self._steps(body, ids):
            if self._state(id(body)) == "batch_inputs":
                said = [*ids[:-1], 999]
            steps.append(step)
        choice = self._choice(said, steps)
        if body.get("prompt_logprobs") is not None:
            positions: list[dict | None] = [None]
            for i in range(1, len(ids)):
                full = dict(self.distribution(ids[:i]))
                ranks = {ids[i]: full.get(ids[i], -9.0)}
                ranks |= dict(list(full.items())[: body["prompt_logprobs"]])
                if self.fault == "phase" and i == len(ids) - 2:
                    ranks = {t: float32(v * (1 + 2e-7)) for t, v in ranks.items()}
                positions.append({str(t): {"logprob": v, "rank": 1} for t, v in ranks.items()})
            choice["prompt_logprobs"] = positions
        return {"choices": [choice], "usage": self._usage(ids, len(steps), steps[0][3])}

    async def _stream(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        ids = self._read(body)
        hit = 0
        count = 0
        async for step in self._steps(body, ids):
            choice = self._choice(ids, [step])
            if count:
                choice["prompt_token_ids"] = None
            hit, count = step[3], count + 1
            yield b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
        yield b"data: " + json.dumps({"choices": [], "usage": self._usage(ids, count, hit)}).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"


class SocketServer:
    """The fake behind a real socket.

    Args:
        fake: what answers.
        die_after: close every connection without an answer, and the port, after this many completions.
    """

    def __init__(self, fake: FakeVllm, *, die_after: int | None = None) -> None:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _answer(self) -> None:
                content = self.rfile.read(int(self.headers.get("content-length") or 0))
                if die_after is not None and fake.completions >= die_after:
                    self.close_connection = True
                    threading.Thread(target=outer.server.shutdown, daemon=True).start()
                    outer.server.socket.close()
                    return

                async def run() -> None:
                    request = httpx.Request(self.command, f"http://fake{self.path}", content=content)
                    response = await fake.handle(request)
                    self.send_response(response.status_code)
                    if "content-length" in response.headers:
                        payload = await response.aread()
                        self.send_header("content-length", str(len(payload)))
                        self.end_headers()
                        self.wfile.write(payload)
                        return
                    self.send_header("transfer-encoding", "chunked")
                    self.end_headers()
                    async for event in response.aiter_bytes():
                        self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
                    self.wfile.write(b"0\r\n\r\n")

                asyncio.run(run())

            do_GET = do_POST = _answer  # noqa: N815

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    def __enter__(self) -> SocketServer:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join(5)
