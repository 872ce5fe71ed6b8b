"""Failures published about other systems (docs/known_holes.md) that need a whole server to show.

Both servers are the session's; the stock one is the control.
"""

from __future__ import annotations

import random
import re
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

TOGETHER = 48
"""Row 21: wrong from about 44 sequences on, clean with 8."""

WATCHED = range(0, TOGETHER, 8)


def tokens(seed: int, count: int) -> list[int]:
    rng = random.Random(f"known holes {seed}")
    return [rng.randrange(100, 40_000) for _ in range(count)]


class Client:
    """Sends completions; answers are token ids and logprobs as the server prints them."""

    def __init__(self, server) -> None:
        self.server = server
        self.http = httpx.Client(
            base_url=server.base_url, timeout=600, trust_env=False, limits=httpx.Limits(max_connections=TOGETHER + 2)
        )
        self.model = self.http.get("/v1/models").json()["data"][0]["id"]

    def reply(self, **body) -> dict:
        fixed = {"model": self.model, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        reply = self.http.post("/v1/completions", json={**fixed, **body})
        assert reply.status_code == 200, reply.text
        return reply.json()

    def ask(self, **body) -> list:
        [choice] = self.reply(**body)["choices"]
        return [choice["token_ids"], choice["logprobs"], choice.get("prompt_logprobs")]

    def running(self) -> int:
        found = re.findall(r"^vllm:num_requests_running\S* (\S+)$", self.http.get("/metrics").text, re.MULTILINE)
        return int(sum(map(float, found)))


@pytest.fixture(scope="module")
def det(det_server):
    client = Client(det_server)
    yield client
    client.http.close()


@pytest.fixture(scope="module")
def stock(stock_server):
    client = Client(stock_server)
    yield client
    client.http.close()


# --- row 9: prompt logprobs and the order of requests, prefix caching on --------------------------------------------

PREFIX = tokens(0, 200)
SCORED = [PREFIX[:length] + tokens(1 + i, 5 + 9 * i) for i, length in enumerate((200, 200, 128, 160, 200, 64))]


def score(client: Client, order: list[int], warm: bool, parallel: int) -> list:
    """Answers by request, from a cache that is empty at first, or holds the prefix."""
    salt = uuid.uuid4().hex
    if warm:
        client.reply(prompt=PREFIX, max_tokens=1, cache_salt=salt)
        usage = client.reply(prompt=SCORED[0], max_tokens=1, cache_salt=salt)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= 128, "the prefix was not cached"
    body = {"max_tokens": 4, "logprobs": 2, "prompt_logprobs": 2, "cache_salt": salt}
    with ThreadPoolExecutor(parallel) as pool:
        found = dict(zip(order, pool.map(lambda i: client.ask(prompt=SCORED[i], **body), order), strict=True))
    return [found[i] for i in range(len(SCORED))]


def scored_in_every_order(client: Client) -> list[list]:
    order = list(range(len(SCORED)))
    return [
        score(client, order, False, 1),
        score(client, order[::-1], False, 1),
        score(client, order, True, 1),
        score(client, order, False, len(order)),
        score(client, order[::-1], True, len(order)),
    ]


def test_row_9_prompt_logprobs_in_every_order(det):
    first, *others = scored_in_every_order(det)
    for tokens_, _, prompt in first:
        assert len(tokens_) == 4
        assert len(prompt) > 60
    for other in others:
        assert other == first


def test_row_9_control(stock):
    first, *others = scored_in_every_order(stock)
    assert any(other != first for other in others), "the stock engine gave equal answers: this test cannot fail"


# --- row 21: more than 44 sequences at once -----------------------------------------------------------------------


def crowd(client: Client) -> tuple[list, list, int]:
    """Watched requests alone and among all others, and the most that ran at once."""
    bodies = [{"prompt": tokens(100 + i, 3 + i % 13), "max_tokens": 24, "logprobs": 3} for i in range(TOGETHER)]
    alone = [client.ask(**bodies[i]) for i in WATCHED]
    done, most = threading.Event(), [0]

    def watch() -> None:
        while not done.wait(0.2):
            most.append(client.running())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with ThreadPoolExecutor(TOGETHER) as pool:
            answers = list(pool.map(lambda body: client.ask(**body), bodies))
    finally:
        done.set()
        watcher.join()
    return alone, [answers[i] for i in WATCHED], max(most)


def test_row_21_48_sequences_at_once(det):
    alone, together, most = crowd(det)
    assert most >= 44, f"at most {most} sequences ran at once: nothing was tested"
    assert len({t for answer in alone for t in answer[0]}) > 24, "degenerate answers prove nothing"
    assert together == alone


def test_row_21_control(stock):
    alone, together, _ = crowd(stock)
    assert together != alone, "the stock engine gave equal answers: this test cannot fail"
