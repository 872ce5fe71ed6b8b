"""Talk to a vLLM OpenAI server in token ids and exact logprobs.

Nothing is retried: a retry could hide the very failure that is looked for.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self, TypeVar

import httpx

from det_plugin.config import INT64_MAX
from det_plugin.errors import DetPluginError
from det_plugin.evidence.records import Answer
from det_plugin.verify.transport import SeparateConnections

T = TypeVar("T")

COMPLETIONS = "/v1/completions"
DIAGNOSTIC_TOP = 2
"""Top logprobs asked for in any case: they tell sampling from numerics where tokens split."""


class ServerFailureError(DetPluginError, RuntimeError):
    """The server cannot be reached, is gone, answers with an error or with something unreadable."""


class NotTestedError(DetPluginError, RuntimeError):
    """A mode cannot prove what it is meant to prove on this server; the message says what to change."""


def normalize_url(base_url: str) -> str:
    """``http://host:port`` without a trailing slash or ``/v1``; ``http://`` is added when missing."""
    url = base_url.strip().rstrip("/").removesuffix("/v1").rstrip("/")
    return url if "://" in url else f"http://{url}"


def describe_transport_error(url: str, error: Exception, *, connected: bool) -> str:
    """One line for an ``httpx`` transport error."""
    if isinstance(error, httpx.TimeoutException):
        kind = type(error).__name__
        return f"server at {url} did not answer in time ({kind}); raise --timeout if it is only slow"
    text = one_line(error) or type(error).__name__
    if isinstance(error, httpx.ConnectError) and not connected:
        return f"cannot reach a server at {url} ({text}); is it running, and is the port right?"
    return f"server at {url} stopped answering in mid-run ({text})"


def one_line(text: object, limit: int = 300) -> str:
    """``text`` on one line of printable characters: what a server sent must not steer a terminal."""
    line = " ".join(str(text).split())
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)[:limit]


def decode_json(text: str) -> Any:
    """``json.loads`` whose every failure is a ValueError, nesting too deep for the parser among them."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _error_text(response: httpx.Response) -> str:
    try:
        body = decode_json(response.text)
        error = body.get("error", body) if isinstance(body, dict) else body
        text = error.get("message", error) if isinstance(error, dict) else error
    except ValueError:
        text = response.text
    return one_line(text) or "(empty body)"


class CompletionClient:
    """Asynchronous client of ``/v1/completions``.

    Args:
        base_url: ``http://host:port``, with or without ``/v1``.
        model: served name; None takes the first that ``/v1/models`` lists.
        timeout: seconds that one request may take, its whole answer included, before the server counts as gone.
        api_key: bearer token.
        transport: replaces the network, for tests.

    Raises:
        ServerFailureError: ``base_url`` is no URL, or ``timeout`` or ``api_key`` is none that can be used.

    Attributes:
        info: facts the server told, after :meth:`connect`.
        output_tokens: tokens generated for this client so far.
        max_model_len: the model's context in tokens, or None when the server doesn't say.
    """

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        timeout: float = 600.0,
        api_key: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.base_url = normalize_url(base_url)
        self.model = model
        self.info: dict[str, Any] = {}
        self.output_tokens = 0
        self.max_model_len: int | None = None
        self._connected = False
        self._decoded: dict[int, str] = {}
        self._can_decode = True
        self._nonce = secrets.token_hex(8)
        self._salts = 0
        try:
            url = httpx.URL(self.base_url)
        except httpx.InvalidURL as error:
            raise ServerFailureError(f"--base-url: got {base_url!r}, accepts http://host:port ({error})") from None
        negative = ":-" in self.base_url.partition("://")[2]
        port = 80 if url.port is None else url.port
        if url.scheme not in ("http", "https") or not url.host or not 0 < port < 65536 or negative:
            raise ServerFailureError(f"--base-url: got {base_url!r}, accepts http://host:port, ports 1 to 65535")
        if not timeout > 0:
            raise ServerFailureError(f"--timeout: got {timeout}, accepts seconds above 0")
        if not (key := api_key or "").isascii() or not key.isprintable():
            raise ServerFailureError("--api-key: accepts printable ASCII characters only")
        self._timeout = timeout if math.isfinite(timeout) else None
        self._http = httpx.AsyncClient(
            base_url=url,
            timeout=httpx.Timeout(timeout, connect=min(timeout, 15.0)),
            headers={"Authorization": f"Bearer {api_key}"} if api_key else None,
            trust_env=False,
            transport=transport or SeparateConnections(),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.aclose()

    def fresh_salt(self) -> str:
        """A ``cache_salt`` no request has used before: its first request cannot hit the prefix cache."""
        self._salts += 1
        return f"det-{self._nonce}-{self._salts}"

    # --- plumbing -----------------------------------------------------------------------------------------

    async def _send(self, method: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        try:
            content = None if body is None else json.dumps(body, allow_nan=False).encode()
        except (ValueError, TypeError, RecursionError) as error:
            raise ServerFailureError(f"the request cannot be sent as JSON ({one_line(error)})") from None
        headers = {"Content-Type": "application/json"} if content is not None else None
        try:
            # the whole answer, so that a server which sends one byte now and then is found as well
            async with asyncio.timeout(self._timeout):
                response = await self._http.request(method, path, content=content, headers=headers)
        except TimeoutError:
            raise self._late() from None
        except (httpx.RequestError, httpx.InvalidURL) as error:
            raise ServerFailureError(
                describe_transport_error(self.base_url, error, connected=self._connected)
            ) from error
        self._connected = True
        return response

    def _late(self) -> ServerFailureError:
        return ServerFailureError(
            f"server at {self.base_url} did not answer in time; raise --timeout if it is only slow"
        )

    async def _json(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        response = await self._send(method, path, body)
        self._check(response, f"{method} {path}")
        try:
            return decode_json(response.text)
        except ValueError:
            raise ServerFailureError(
                f"server at {self.base_url} answered {method} {path} with something that is not JSON "
                f"({response.text[:60]!r}); is it a vLLM OpenAI server?"
            ) from None

    def _check(self, response: httpx.Response, what: str) -> None:
        if response.status_code != httpx.codes.OK:
            raise ServerFailureError(
                f"server at {self.base_url} answered HTTP {response.status_code} to {what}: {_error_text(response)}"
            )

    async def _optional(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Like :meth:`_json` for an endpoint that may be absent: None then."""
        response = await self._send(method, path, body)
        if response.status_code != httpx.codes.OK:
            return None
        try:
            return decode_json(response.text)
        except ValueError:
            return None

    # --- server facts -------------------------------------------------------------------------------------

    async def connect(self) -> dict[str, Any]:
        """Read ``/v1/models`` and ``/version``; sets :attr:`model`, :attr:`max_model_len` and :attr:`info`.

        Raises:
            ServerFailureError: unreachable, an HTTP error, or no such model.
        """
        models = await self._json("GET", "/v1/models")
        try:
            cards = {str(card["id"]): card for card in models["data"]}
        except (TypeError, KeyError):
            raise ServerFailureError(
                f"server at {self.base_url} answered GET /v1/models without a list of models; "
                "is it a vLLM OpenAI server?"
            ) from None
        if not cards:
            raise ServerFailureError(f"server at {self.base_url} serves no model")
        if self.model is None:
            self.model = next(iter(cards))
        if self.model not in cards:
            raise ServerFailureError(
                f"model: got {self.model!r}, server at {self.base_url} serves {', '.join(sorted(cards))}"
            )
        card = cards[self.model]
        length = card.get("max_model_len")
        self.max_model_len = length if isinstance(length, int) else None
        version = await self._optional("GET", "/version")
        self.info = {
            "model": self.model,
            "root": card.get("root"),
            "max_model_len": self.max_model_len,
            "version": version.get("version") if isinstance(version, dict) else None,
        }
        return self.info

    async def tokenize(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of ``text`` as the server reads it (works without the ``/tokenize`` endpoint)."""
        answer = await self._complete(
            {
                "prompt": text,
                "max_tokens": 1,
                "temperature": 0.0,
                "logprobs": 0,
                "add_special_tokens": special,
            }
        )
        return answer.prompt_token_ids

    async def decode(self, token_ids: Sequence[int]) -> list[str]:
        """Each token on its own as text, for display; empty strings where the server cannot decode."""
        missing = [t for t in dict.fromkeys(token_ids) if t not in self._decoded]

        async def one(token: int) -> None:
            answer = await self._optional("POST", "/detokenize", {"model": self.model, "tokens": [token]})
            text = answer.get("prompt") if isinstance(answer, dict) else None
            if isinstance(text, str):
                self._decoded[token] = text
            else:
                self._can_decode = False

        for start in range(0, len(missing), 16):
            if not self._can_decode:
                break
            await gather(one(t) for t in missing[start : start + 16])
        return [self._decoded.get(t, "") for t in token_ids]

    # --- completions --------------------------------------------------------------------------------------

    async def complete(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        sampling: dict[str, Any] | None = None,
        salt: str | None = None,
        top_logprobs: int = 0,
        stream: bool = False,
        on_token: Callable[[int], None] | None = None,
    ) -> Answer:
        """Generate ``max_tokens`` tokens after the token ids ``prompt``; end-of-text is ignored.

        Args:
            prompt: token ids.
            max_tokens: tokens to generate.
            sampling: further fields of the request body.
            salt: ``cache_salt``; requests with different salts share no prefix-cache entries.
            top_logprobs: top logprobs to ask for (at least :data:`DIAGNOSTIC_TOP` are).
            stream: read the answer as a stream.
            on_token: called with the number of tokens so far, after each chunk (streams only).

        Raises:
            ServerFailureError: no answer, an HTTP error, or an answer without token ids or logprobs.
        """
        body: dict[str, Any] = {
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "logprobs": max(DIAGNOSTIC_TOP, top_logprobs),
            "ignore_eos": True,
            **(sampling or {}),
        }
        if salt is not None:
            body["cache_salt"] = salt
        if stream:
            return await self._stream(body, on_token)
        return await self._complete(body)

    async def score(self, prompt: Sequence[int], start: int, *, salt: str, top_logprobs: int = 0) -> Answer:
        """Score ``prompt[start:]`` in prefill: an :class:`Answer` whose tokens are ``prompt[start:]``.

        Raises:
            ServerFailureError: no answer, an HTTP error, or an answer without prompt logprobs.
        """
        top = max(DIAGNOSTIC_TOP, top_logprobs)
        body = {
            "prompt": list(prompt),
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": top,
            "cache_salt": salt,
        }
        data = await self._json("POST", COMPLETIONS, self._wrap(body))
        tokens = list(prompt[start:])
        try:
            choice = data["choices"][0]
            positions = [
                {int(token): float(entry["logprob"]) for token, entry in position.items()}
                for position in choice["prompt_logprobs"][start:]
            ]
            logprobs = [position[token] for position, token in zip(positions, tokens, strict=True)]
            prompt_ids = choice.get("prompt_token_ids") or []
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError):
            raise ServerFailureError(
                f"server at {self.base_url} answered POST {COMPLETIONS} without usable prompt_logprobs"
            ) from None
        self.output_tokens += 1
        return Answer(
            prompt_token_ids=prompt_ids[:start],
            token_ids=tokens,
            logprobs=logprobs,
            top_logprobs=positions,
            cached_tokens=_cached_tokens(data),
        )

    async def post(self, body: dict[str, Any]) -> list[Answer]:
        """Send a request body (plus what is needed to read ids and logprobs): one answer per choice."""
        data = await self._json("POST", COMPLETIONS, self._wrap(body))
        return self._answers(data)

    def _wrap(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"model": self.model, "return_token_ids": True, "return_tokens_as_token_ids": True, **body}

    async def _complete(self, body: dict[str, Any]) -> Answer:
        return (await self.post(body))[0]

    def _answers(self, data: Any) -> list[Answer]:
        try:
            cached = _cached_tokens(data)
            answers = []
            for choice in data["choices"]:
                ids, logprobs, top = _read_tokens(choice)
                answers.append(
                    Answer(
                        prompt_token_ids=choice["prompt_token_ids"],
                        token_ids=ids,
                        logprobs=logprobs,
                        top_logprobs=top,
                        text=choice.get("text") or "",
                        finish_reason=choice.get("finish_reason"),
                        cached_tokens=cached,
                        system_fingerprint=data.get("system_fingerprint"),
                    )
                )
            if not answers:
                raise ValueError("no choices")
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise self._unreadable(error) from None
        self.output_tokens += sum(len(a.token_ids) for a in answers)
        return answers

    def _unreadable(self, error: Exception) -> ServerFailureError:
        return ServerFailureError(
            f"server at {self.base_url} answered POST {COMPLETIONS} without usable token ids and logprobs "
            f"({type(error).__name__}: {one_line(error, 80)}); is it a vLLM OpenAI server?"
        )

    async def _stream(self, body: dict[str, Any], on_token: Callable[[int], None] | None) -> Answer:
        body = self._wrap({**body, "stream": True, "stream_options": {"include_usage": True}})
        answer = Answer(token_ids=[], logprobs=[])
        top: list[dict[int, float]] = []
        async with self._events(body) as events:
            try:
                async for data in events:
                    answer.cached_tokens = (
                        _cached_tokens(data) if _cached_tokens(data) is not None else answer.cached_tokens
                    )
                    answer.system_fingerprint = data.get("system_fingerprint") or answer.system_fingerprint
                    for choice in data["choices"]:
                        answer.prompt_token_ids = choice.get("prompt_token_ids") or answer.prompt_token_ids
                        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
                        answer.text += choice.get("text") or ""
                        if choice.get("token_ids"):
                            ids, logprobs, tops = _read_tokens(choice)
                            answer.token_ids += ids
                            answer.logprobs += logprobs
                            top += tops or []
                            self.output_tokens += len(ids)
                            if on_token is not None:
                                on_token(len(answer.token_ids))
            except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
                raise self._unreadable(error) from None
        if not answer.token_ids:
            raise self._unreadable(ValueError("the stream held no tokens"))
        answer.top_logprobs = top or None
        return answer

    @asynccontextmanager
    async def _events(self, body: dict[str, Any] | bytes) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        async def read(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
            finished = False
            async for line in response.aiter_lines():
                if not line.startswith("data:"):
                    continue
                payload = line[5:].strip()
                if payload == "[DONE]":
                    finished = True
                    continue
                try:
                    data = decode_json(payload)
                except ValueError as error:
                    raise self._unreadable(error) from None
                if not isinstance(data, dict):
                    raise self._unreadable(TypeError(f"a stream's event is {type(data).__name__}"))
                if "error" in data:
                    raise ServerFailureError(
                        f"server at {self.base_url} ended a stream with an error: {one_line(data['error'], 200)}"
                    )
                yield data
            if not finished:
                raise ServerFailureError(f"server at {self.base_url} stopped answering in mid-run (stream cut off)")

        try:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            headers = {"Content-Type": "application/json"}
            # the whole stream: comments that keep it alive don't put the end off
            async with asyncio.timeout(self._timeout):
                async with self._http.stream("POST", COMPLETIONS, content=content, headers=headers) as response:
                    if response.status_code != httpx.codes.OK:
                        await response.aread()
                        self._check(response, f"POST {COMPLETIONS}")
                    self._connected = True
                    yield read(response)
        except TimeoutError:
            raise self._late() from None
        except httpx.RequestError as error:
            raise ServerFailureError(
                describe_transport_error(self.base_url, error, connected=self._connected)
            ) from error


def _cached_tokens(data: dict[str, Any]) -> int | None:
    details = (data.get("usage") or {}).get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens")
    return cached if isinstance(cached, int) else None


def _token_id(name: str) -> int:
    return int(name.removeprefix("token_id:"))


def _read_tokens(choice: dict[str, Any]) -> tuple[list[int], list[float], list[dict[int, float]] | None]:
    ids = [int(t) for t in choice["token_ids"]]
    entry = choice["logprobs"]
    logprobs = [float(v) for v in entry["token_logprobs"]]
    if len(ids) != len(logprobs):
        raise ValueError(f"{len(ids)} token ids but {len(logprobs)} logprobs")
    if any(not 0 <= t <= INT64_MAX for t in ids):
        raise ValueError("a token id below 0 or above int64")
    if not all(map(math.isfinite, logprobs)):
        raise ValueError("a logprob that is not finite")
    top = entry.get("top_logprobs")
    if top and len(top) != len(ids):
        raise ValueError(f"{len(ids)} token ids but top logprobs of {len(top)} positions")
    tops = None if not top else [{_token_id(k): float(v) for k, v in (position or {}).items()} for position in top]
    return ids, logprobs, tops


async def gather(awaitables: Iterable[Awaitable[T]]) -> list[T]:
    """Run all at once; on the first failure cancel the rest, wait for them, and raise it."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
