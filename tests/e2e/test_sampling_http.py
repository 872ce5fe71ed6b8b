"""Seeded sampling through the HTTP server of a real model: seeds, resume, n, neighbours, routes, refusals.

Logprob modes, custom logits processors, drawn seeds and batch files are in ``test_sampling_modes.py``.
"""

from __future__ import annotations

import json
import time
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


def test_numbers_too_small_for_fp32_count_as_zero(client, model):
    sampled = {"temperature": 1, "seed": 5}
    assert ask(client, model, **sampled, min_p=1e-46) == ask(client, model, **sampled)
    best = ask(client, model, **sampled, top_p=1e-46)
    assert [ids for ids, _ in best] == [ids for ids, _ in ask(client, model, temperature=0)]
    assert best != ask(client, model, **sampled)


OWN = [
    {"seed": 7},
    {"seed": 7, "temperature": 1, "top_p": 0.95},
    {"temperature": 0, "logprobs": 5},
]


def work_done(server):
    """Tokens generated and steps taken by the engine since it started."""
    lines = httpx.get(f"{server.base_url}/metrics", timeout=600, trust_env=False).text.splitlines()

    def total(name):
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{"))

    return total("vllm:generation_tokens_total"), total("vllm:iteration_tokens_total_count")


def ask_together(server, model, bodies, *, behind=()):
    """All at once, each from a thread of its own; answers in order.

    ``behind`` are requests with long prompts, sent first: while the engine reads them the others arrive, and then
    start in the same step.
    """
    count = len(bodies) + len(behind)
    limits = httpx.Limits(max_connections=count)
    with httpx.Client(base_url=f"{server.base_url}/v1", timeout=600, trust_env=False, limits=limits) as client:
        with ThreadPoolExecutor(count) as pool:
            for body in behind:
                pool.submit(ask, client, model, **body)
            time.sleep(0.2 if behind else 0)
            return [f.result() for f in [pool.submit(ask, client, model, **body) for body in bodies]]


@pytest.fixture(scope="module")
def own_alone(client, model):
    """Batches of one."""
    return [ask(client, model, max_tokens=16, **own) for own in OWN]


@pytest.mark.parametrize("size", [2, 64, 65, 256])
def test_neighbours_change_nothing(det_server, model, own_alone, size):
    bodies = [{"prompt": f"{i} birds", "max_tokens": 12, **NEIGHBOURS[i % len(NEIGHBOURS)]} for i in range(size)]
    places = {0: 0, 1: 1} if size == 2 else {0: 0, size // 3: 1, size // 2: 2, size - 1: 0}
    for place, own in places.items():
        bodies[place] = {"max_tokens": 16, **OWN[own]}
    words = {2: 100, 64: 1000, 65: 1000, 256: 1800}[size]
    long_prompts = [
        {"prompt": f"{size} {i} " + "grey geese " * words, "max_tokens": 1, "temperature": 0}
        for i in range(2 if size == 256 else 1)
    ]
    before = work_done(det_server)
    answers = ask_together(det_server, model, bodies, behind=long_prompts)
    tokens, steps = (now - then for now, then in zip(work_done(det_server), before, strict=True))
    for place, own in places.items():
        assert answers[place] == own_alone[own], f"place {place}"
    print(f"{tokens:.0f} tokens in {steps:.0f} steps with {size} requests")
    assert tokens / steps > size / 4, "the requests hardly shared their batches"


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


def test_resume(client, det_server, model):
    """64 sampled tokens, cut at every position."""
    first = client.post("/completions", json={**BASE, "model": model, "max_tokens": 1, "logprobs": None})
    prompt_ids = first.json()["choices"][0]["prompt_token_ids"]
    whole = ask(client, model, prompt=prompt_ids, seed=11, temperature=1, max_tokens=64)[0]
    assert len(set(whole[0])) > 20
    parts = ask_together(
        det_server,
        model,
        [
            {"prompt": prompt_ids + whole[0][:cut], "seed": 11, "temperature": 1, "max_tokens": 64 - cut}
            for cut in range(1, 64)
        ],
    )
    for cut, [(tokens, logprobs)] in enumerate(parts, 1):
        assert tokens == whole[0][cut:], f"cut at {cut}"
        for field in ("token_logprobs", "top_logprobs"):
            assert logprobs[field] == whole[1][field][cut:], f"cut at {cut}"


def test_prompt_scope(client, model):
    scoped = ask(client, model, vllm_xargs={"noise_scope": "prompt"}, seed=3)
    assert scoped == ask(client, model, vllm_xargs={"noise_scope": "prompt"}, seed=3)
    assert scoped != ask(client, model, seed=3)


CHAT = {
    "messages": [{"role": "user", "content": "Name a colour and a river."}],
    "max_tokens": 24,
    "temperature": 0.9,
    "top_p": 0.95,
    "seed": 4,
}


def events(client, path, body):
    """The JSON of each event of a stream."""
    with client.stream("POST", path, json={**body, "stream": True}) as reply:
        assert reply.status_code == 200, reply.read()
        return [json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: {")]


def test_every_route_gives_the_same_tokens(client, model):
    """Chat, completions, responses, a batch of chats; streamed and not.  (A batch file: test_sampling_modes.)"""
    body = {**CHAT, "model": model, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    chat = client.post("/chat/completions", json=body).json()
    choice = chat["choices"][0]
    tokens, text = choice["token_ids"], choice["message"]["content"]
    logprobs = [(p["token"], p["logprob"]) for p in choice["logprobs"]["content"]]
    assert len(tokens) > 8

    parts = [e["choices"][0] for e in events(client, "/chat/completions", body) if e["choices"]]
    assert "".join(p["delta"].get("content") or "" for p in parts) == text
    assert [t for p in parts for t in p.get("token_ids") or []] == tokens
    assert [(x["token"], x["logprob"]) for p in parts if p["logprobs"] for x in p["logprobs"]["content"]] == logprobs

    batch = {**body, "messages": [CHAT["messages"], [{"role": "user", "content": "Hello"}], CHAT["messages"]]}
    several = client.post("/chat/completions/batch", json=batch).json()["choices"]
    assert [several[i]["token_ids"] for i in (0, 2)] == [tokens, tokens]
    assert several[1]["token_ids"] != tokens

    sampling = {k: v for k, v in CHAT.items() if k != "messages"}
    plain = {"model": model, "prompt": chat["prompt_token_ids"], "logprobs": 2, "return_token_ids": True, **sampling}
    completion = client.post("/completions", json=plain).json()["choices"][0]
    assert (completion["token_ids"], completion["text"]) == (tokens, text)
    assert completion["logprobs"]["token_logprobs"] == [value for _, value in logprobs]
    parts = [e["choices"][0] for e in events(client, "/completions", plain) if e["choices"]]
    assert [t for p in parts for t in p["token_ids"] or []] == tokens
    assert "".join(p["text"] for p in parts) == text

    asked = {
        "model": model,
        "input": CHAT["messages"],
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
        **{k: v for k, v in sampling.items() if k != "max_tokens"},
        "max_output_tokens": sampling["max_tokens"],
    }
    response = client.post("/responses", json=asked).json()
    content = response["output"][-1]["content"][0]
    assert content["text"] == text
    assert [(p["token"], p["logprob"]) for p in content["logprobs"]] == logprobs
    stream = events(client, "/responses", asked)
    assert "".join(e["delta"] for e in stream if e["type"] == "response.output_text.delta") == text


def test_beam_search_draws_no_noise(client, model):
    """Neither seed nor neighbours matter; its results are ordered, distinct and repeatable."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": 8, "use_beam_search": True, "n": 4, "temperature": 0}

    def beams(**change):
        reply = client.post("/completions", json={**body, **change})
        assert reply.status_code == 200, reply.text
        return [choice["text"] for choice in reply.json()["choices"]]

    alone = beams()
    assert len(set(alone)) == 4
    with ThreadPoolExecutor(6) as pool:
        others = [pool.submit(ask, client, model, **neighbour) for neighbour in NEIGHBOURS[:5]]
        assert pool.submit(beams, seed=5).result() == alone
        for other in others:
            other.result()
    for change, field in (({"seed": -1}, "seed"), ({"vllm_xargs": {"sampling_sed": 1}}, "sampling_sed")):
        reply = client.post("/completions", json={**body, **change})
        assert reply.status_code == 400, reply.text
        assert field in reply.text


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
        ({"noise_scope": "x"}, "noise_scope"),
        ({"noise_scope": "seed", "vllm_xargs": {"noise_scope": "prompt"}}, "noise_scope"),
        ({"allowed_token_ids": [5, 6], "stop_token_ids": [5, 6], "min_tokens": 3}, "min_tokens"),
        ({"vllm_xargs": {"sampling_sed": 1}}, "sampling_sed"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 2}, "top_p"),
        ({"min_p": 0.1, "top_k": 5}, "min_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"top_p": -0.5}, "top_p"),
        ({"best_of": 4}, "best_of"),
        ({"n": 2, "best_of": 4}, "best_of"),
    ],
)
def test_refusals_name_the_field_and_the_engine_goes_on(client, model, change, field, stream):
    reply = client.post("/completions", json={**BASE, "model": model, "stream": stream, **change})
    assert reply.status_code == 400, reply.text
    assert field in reply.text
    assert ask(client, model, max_tokens=1)


@pytest.mark.parametrize(
    "field", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]
)
def test_nan(client, model, field):
    for value in ("NaN", "Infinity"):
        body = json.dumps({"model": model, "prompt": "a", "max_tokens": 1})[:-1] + f', "{field}": {value}}}'
        reply = client.post("/completions", content=body, headers={"content-type": "application/json"})
        assert reply.status_code == 400, reply.text
        assert field in reply.text
    assert ask(client, model, max_tokens=1)


def test_bias_that_is_no_number(client, model):
    for value in ("NaN", "Infinity"):
        body = (
            json.dumps({"model": model, "prompt": "a", "max_tokens": 1})[:-1] + f', "logit_bias": {{"100": {value}}}}}'
        )
        reply = client.post("/completions", content=body, headers={"content-type": "application/json"})
        assert reply.status_code == 400, reply.text
        assert "logit_bias" in reply.text


def test_noise_scope_in_the_body_is_that_of_the_extra_arguments(client, model):
    outer = ask(client, model, noise_scope="prompt")
    assert outer == ask(client, model, vllm_xargs={"noise_scope": "prompt"})
    assert outer != ask(client, model, noise_scope="seed")


@pytest.mark.parametrize("stream", [False, True])
def test_refusals_of_the_other_routes(client, model, stream):
    messages = CHAT["messages"]
    for path, body in (
        ("/chat/completions", {"messages": messages}),
        ("/responses", {"input": messages}),
    ):
        for change, field in (
            ({"seed": -1}, "seed"),
            ({"vllm_xargs": {"sampling_sed": 1}}, "sampling_sed"),
            ({"min_p": 0.1, "top_k": 5}, "min_p"),
            ({"top_p": 2}, "top_p"),
        ):
            reply = client.post(path, json={"model": model, **body, "stream": stream, **change})
            assert reply.status_code == 400, (path, change, reply.text)
            assert field in reply.text, (path, change, reply.text)
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


def test_negative_control_stock_follows_its_neighbours(stock_server, model):
    """Greedy: the stock engine's sampled answers aren't repeatable even alone."""
    greedy = {"temperature": 0, "max_tokens": 16, "logprobs": 5}
    with httpx.Client(base_url=f"{stock_server.base_url}/v1", timeout=600, trust_env=False) as stock:
        alone = ask(stock, model, **greedy)
        assert ask(stock, model, **greedy) == alone
    bodies = [{"prompt": f"{i} birds", "max_tokens": 8, "temperature": 0} for i in range(65)]
    for place in (0, 32, 64):
        bodies[place] = greedy
    answers = ask_together(stock_server, model, bodies)
    assert any(answers[place] != alone for place in (0, 32, 64))
