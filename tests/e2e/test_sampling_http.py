"""Seeded sampling through the HTTP server of a real model: seeds, resume, n, neighbours, refusals."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from det_plugin.sampling.seeds import choice_seed

PROMPT = "Once upon a time, in a small village by the sea, there lived"
BASE = {
    "prompt": PROMPT,
    "max_tokens": 32,
    "temperature": 0.8,
    "ignore_eos": True,
    "logprobs": 3,
    "return_token_ids": True,
}
NEIGHBOURS = [
    {"temperature": 0},
    {"temperature": 1},
    {"temperature": 1, "top_k": 1},
    {"temperature": 1, "top_p": 0.1},
    {"temperature": 1, "min_p": 0.2},
    {"temperature": 1, "presence_penalty": 1.5, "repetition_penalty": 1.3},
    {"temperature": 1, "structured_outputs": {"choice": ["lighthouse", "harbour"]}, "ignore_eos": False},
    {"temperature": 1.7, "logprobs": 5, "seed": 42},
    {"temperature": 0.5, "logprobs": None, "seed": 1},
]


@pytest.fixture(scope="module")
def client(det_server):
    with httpx.Client(base_url=f"{det_server.base_url}/v1", timeout=600) as c:
        c.headers["Authorization"] = "Bearer none"
        yield c


@pytest.fixture(scope="module")
def model(client):
    return client.get("/models").json()["data"][0]["id"]


def ask(client, model, **change):
    reply = client.post("/completions", json={**BASE, "model": model, **change})
    assert reply.status_code == 200, reply.text
    return [(c["token_ids"], c["logprobs"]) for c in reply.json()["choices"]]


def test_seeds_repeat_and_differ(client, model):
    answers = {seed: ask(client, model, seed=seed) for seed in (42, 43, 44)}
    assert all(ask(client, model, seed=seed) == answer for seed, answer in answers.items())
    assert len({str(a) for a in answers.values()}) == 3
    assert ask(client, model) == answers[42]  # the default
    assert ask(client, model, vllm_xargs={"sampling_seed": 43}) == answers[43]
    assert ask(client, model, sampling_seed=44) == answers[44]


@pytest.mark.parametrize("size", [2, 9, 33])
def test_neighbours_change_nothing(client, model, size):
    alone = ask(client, model, seed=7)
    with ThreadPoolExecutor(size) as pool:
        others = [
            pool.submit(ask, client, model, **{"prompt": f"{PROMPT} {i}", **NEIGHBOURS[i % len(NEIGHBOURS)]})
            for i in range(size - 1)
        ]
        mine = pool.submit(ask, client, model, seed=7)
        assert mine.result() == alone
        for other in others:
            other.result()


def test_n_and_several_prompts(client, model):
    sixteen = ask(client, model, n=16, temperature=1, seed=5)
    assert len({tuple(ids) for ids, _ in sixteen}) == 16
    assert ask(client, model, n=4, temperature=1, seed=5) == sixteen[:4]
    assert ask(client, model, temperature=1, seed=5) == sixteen[:1]
    assert ask(client, model, temperature=1, seed=choice_seed(5, 3)) == sixteen[3:4]
    unseeded = ask(client, model, n=4, temperature=1)
    assert len({tuple(ids) for ids, _ in unseeded}) == 4
    both = ask(client, model, prompt=[PROMPT, "The sky is", PROMPT], n=2, temperature=1, seed=5)
    assert both[0:2] == sixteen[:2]
    assert both[4:6] == sixteen[:2]


def test_resume(client, model):
    prompt_ids = client.post("/completions", json={**BASE, "model": model, "max_tokens": 1, "logprobs": None}).json()[
        "choices"
    ][0]["prompt_token_ids"]
    whole = ask(client, model, prompt=prompt_ids, seed=11, temperature=1)[0]
    for cut in range(1, 32, 3):
        part = ask(client, model, prompt=prompt_ids + whole[0][:cut], seed=11, temperature=1, max_tokens=32 - cut)[0]
        assert part[0] == whole[0][cut:]
        assert part[1]["token_logprobs"] == whole[1]["token_logprobs"][cut:]


def test_prompt_scope(client, model):
    scoped = ask(client, model, vllm_xargs={"noise_scope": "prompt"}, seed=3)
    assert scoped == ask(client, model, vllm_xargs={"noise_scope": "prompt"}, seed=3)
    assert scoped != ask(client, model, seed=3)


def test_streaming_and_chat(client, model):
    chat = {
        "model": model,
        "messages": [{"role": "user", "content": "Name a colour."}],
        "max_tokens": 16,
        "temperature": 0.9,
        "seed": 4,
    }
    text = client.post("/chat/completions", json=chat).json()["choices"][0]["message"]["content"]
    with client.stream("POST", "/chat/completions", json={**chat, "stream": True}) as reply:
        lines = [line[6:] for line in reply.iter_lines() if line.startswith("data: {")]
    parts = [json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines]
    assert "".join(parts) == text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"seed": -1}, "seed"),
        ({"seed": -5}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"seed": "many"}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"seed": 1, "vllm_xargs": {"sampling_seed": 2}}, "sampling_seed"),
        ({"vllm_xargs": {"sampling_seed": "x"}}, "sampling_seed"),
        ({"vllm_xargs": {"sampling_seed": 2.5}}, "sampling_seed"),
        ({"vllm_xargs": {"noise_scope": "x"}}, "noise_scope"),
        ({"vllm_xargs": {"sampling_sed": 1}}, "sampling_sed"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 2}, "top_p"),
        ({"min_p": 0.1, "top_k": 5}, "min_p"),
        ({"min_p": 1.5}, "min_p"),
    ],
)
def test_refusals_name_the_field_and_the_engine_goes_on(client, model, change, field, stream):
    reply = client.post("/completions", json={**BASE, "model": model, "stream": stream, **change})
    assert reply.status_code == 400, reply.text
    assert field in reply.text
    assert ask(client, model, max_tokens=1)


def test_temperature_nan(client, model):
    body = json.dumps({"model": model, "prompt": "a", "max_tokens": 1, "temperature": float("nan")})
    reply = client.post("/completions", content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400, reply.text
    assert "temperature" in reply.text
    assert ask(client, model, max_tokens=1)


def test_negative_control_stock_cannot_resume(stock_server):
    """The stock engine's generator state starts anew with every request."""
    with httpx.Client(base_url=f"{stock_server.base_url}/v1", timeout=600) as stock:
        model = stock.get("/models").json()["data"][0]["id"]
        first = stock.post("/completions", json={**BASE, "model": model, "seed": 11, "temperature": 1}).json()
        choice = first["choices"][0]
        part = ask(
            stock,
            model,
            prompt=choice["prompt_token_ids"] + choice["token_ids"][:8],
            seed=11,
            temperature=1,
            max_tokens=24,
        )[0]
        assert part[0] != choice["token_ids"][8:]
