"""Logprob modes, custom logits processors, drawn seeds and batch files, on the real model.

The second deterministic server returns processed logprobs, has two custom logits processors (one named on its
command line, one found by its entry point) and draws the seed of a request that gives none.
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from det_plugin.verify.demo import SERVER_ARGS
from det_plugin.verify.server import DETERMINISTIC_FLAG

RANDOM = ["--additional-config", json.dumps({"det_plugin": {"default_seed": "random"}})]
PROMPT = "Once upon a time, in a small village by the sea, there lived"
OTHER = "The three laws of thermodynamics say that"
SHARED = {"prompt": PROMPT, "max_tokens": 10, "ignore_eos": True, "temperature": 0}
WARM = {"temperature": 0.8, "seed": 7}
NAMED = [28, 260, 30, 1, 40000, 28]
REQUESTS = {
    "none": {},
    "top 0": {"logprobs": 0},
    "top 5": {"logprobs": 5},
    "top 20": {"logprobs": 20},
    "sampled": {**WARM, "logprobs": 3},
    "top_k": {**WARM, "top_k": 4, "logprobs": 20},
    "top_p": {**WARM, "top_p": 0.5, "logprobs": 20},
    "min_p": {**WARM, "min_p": 0.1, "repetition_penalty": 1.3, "logprobs": 2},
    "ids": {"logprob_token_ids": NAMED, "logprobs": 6},
    "other ids": {**WARM, "logprob_token_ids": [5, 6], "logprobs": 2},
    "prompt 0": {"prompt_logprobs": 0},
    "prompt 3": {"prompt_logprobs": 3, "logprobs": 1},
    "prompt 20": {**WARM, "prompt_logprobs": 20, "logprobs": 20},
    "other prompt": {"prompt": OTHER, "prompt_logprobs": 5, "logprobs": 5},
}
CUSTOM = {
    "repeat": {"vllm_xargs": {"repeat": 15.0}, "logprobs": 5},
    "repeat, sampled": {**WARM, "vllm_xargs": {"repeat": 8.0}, "logprobs": 5},
    "sharpen": {"vllm_xargs": {"sharpen": 3.0}, "logprobs": 5},
    "sharpen, sampled": {**WARM, "vllm_xargs": {"sharpen": 3.0}, "logprobs": 5},
    "both": {**WARM, "vllm_xargs": {"sharpen": 0.5, "repeat": 9.0}, "top_p": 0.9, "logprobs": 5},
}


def client_of(server):
    return httpx.Client(base_url=f"{server.base_url}/v1", timeout=600, trust_env=False)


@pytest.fixture(scope="module")
def entry_point(tmp_path_factory):
    """Folder of an installed distribution whose entry point names a logits processor."""
    folder = tmp_path_factory.mktemp("site")
    info = folder / "sharpen-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sharpen\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm.logits_processors]\nsharpen = logits_processors:Sharpen\n")
    return folder


@pytest.fixture(scope="module")
def modes_server(make_server, entry_point):
    paths = [str(Path(__file__).parent), str(entry_point), *filter(None, [os.environ.get("PYTHONPATH")])]
    arguments = ["--logprobs-mode", "processed_logprobs", "--logits-processors", "logits_processors:Repeat"]
    env = {"PYTHONPATH": os.pathsep.join(paths)}
    with make_server(deterministic=True, extra_args=[*arguments, *RANDOM], env=env) as server:
        yield server


@pytest.fixture(scope="module")
def modes(modes_server):
    with client_of(modes_server) as client:
        yield client


@pytest.fixture(scope="module")
def raw(det_server):
    with client_of(det_server) as client:
        yield client


def model_of(client):
    return client.get("/models").json()["data"][0]["id"]


def choices(client, **body):
    body = {**SHARED, "return_token_ids": True, "return_tokens_as_token_ids": True, **body}
    reply = client.post("/completions", json={"model": model_of(client), **body})
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"]


def together(client, requests, seed):
    """Each request twice, in random order, all at once: (name, answer) pairs."""
    names = [*requests, *requests]
    random.Random(seed).shuffle(names)
    with ThreadPoolExecutor(len(names)) as pool:
        return list(zip(names, pool.map(lambda name: choices(client, **requests[name]), names), strict=True))


@pytest.fixture(scope="module")
def raw_alone(raw):
    return {name: choices(raw, **body) for name, body in REQUESTS.items()}


@pytest.fixture(scope="module")
def modes_alone(modes):
    return {name: choices(modes, **body) for name, body in {**REQUESTS, **CUSTOM}.items()}


def assert_alone(answers, alone):
    different = [name for name, answer in answers if answer != alone[name]]
    assert not different


@pytest.mark.parametrize("order", [0, 1])
def test_raw_logprobs_are_a_requests_own(raw, raw_alone, order):
    assert_alone(together(raw, REQUESTS, order), raw_alone)


@pytest.mark.parametrize("order", [0, 1])
def test_processed_logprobs_and_custom_processors_are_a_requests_own(modes, modes_alone, order):
    assert_alone(together(modes, {**REQUESTS, **CUSTOM}, order), modes_alone)


def test_negative_control_stock(stock_server):
    """Greedy, because the stock engine's samples are not repeatable even alone."""
    greedy = {name: body for name, body in REQUESTS.items() if "seed" not in body}
    with client_of(stock_server) as stock:
        alone = {name: choices(stock, **body) for name, body in greedy.items()}
        assert any(answer != alone[name] for order in (0, 1) for name, answer in together(stock, greedy, order))


def tops(choice):
    """Per position: [(token id, logprob)] in the order of the answer, the sampled token first."""
    return [
        [(int(name.removeprefix("token_id:")), value) for name, value in top.items()]
        for top in choice["logprobs"]["top_logprobs"]
    ]


def in_order(entries):
    return entries == sorted(entries, key=lambda entry: (-entry[1], entry[0]))


@pytest.mark.parametrize("kind", ["raw", "processed"])
def test_top_logprobs_are_ordered_and_only_grow(kind, raw_alone, modes_alone):
    alone = raw_alone if kind == "raw" else modes_alone
    [five], [twenty], [zero], [none] = (alone[name] for name in ("top 5", "top 20", "top 0", "none"))
    assert five["token_ids"] == twenty["token_ids"] == zero["token_ids"] == none["token_ids"]
    assert all(in_order(entries) and len(entries) == 20 for entries in tops(twenty))
    assert [entries[:5] for entries in tops(twenty)] == tops(five)
    assert [entries[:1] for entries in tops(twenty)] == tops(zero)
    [sampled] = alone["sampled"]
    assert any(entries[0] != max(entries, key=lambda entry: entry[1]) for entries in tops(sampled))
    assert all(in_order(entries[1:]) for entries in tops(sampled))


@pytest.mark.parametrize("kind", ["raw", "processed"])
def test_logprob_token_ids(kind, raw_alone, modes_alone):
    alone = raw_alone if kind == "raw" else modes_alone
    [named], [twenty] = alone["ids"], alone["top 20"]
    assert named["token_ids"] == twenty["token_ids"]
    seen = 0
    for asked, known in zip(tops(named), tops(twenty), strict=True):
        assert {token for token, _ in asked} == {known[0][0], *NAMED}
        values = dict(known)
        for token, value in asked:
            assert value < 0
            if token in values:
                assert value == values[token]
                seen += 1
            else:
                assert value <= known[-1][1]
    assert seen > len(tops(named)), "no named token was among the likeliest: the values were not compared"


def test_prompt_logprobs(raw_alone, modes_alone):
    """The prompt's own token, then the likeliest in order; asking for more only appends; the same in both modes."""

    def positions(choice):
        return [[(int(t), v["logprob"]) for t, v in p.items()] for p in choice["prompt_logprobs"][1:]]

    for alone in (raw_alone, modes_alone):
        zero, three, twenty = (positions(alone[f"prompt {k}"][0]) for k in (0, 3, 20))
        assert len(zero) > 10
        for own, few, many in zip(zero, three, twenty, strict=True):
            assert own == few[:1] == many[:1]
            assert in_order(few[1:])
            assert in_order(many[1:])
            ranked = sorted(many, key=lambda entry: (-entry[1], entry[0]))[:3]  # the own token is among many or last
            assert set(few) == {*ranked, *own}
    for name in ("prompt 3", "prompt 20", "other prompt"):
        assert raw_alone[name][0]["prompt_logprobs"] == modes_alone[name][0]["prompt_logprobs"]


def test_processed_logprobs_are_those_of_what_is_drawn_from(raw_alone, modes_alone):
    """Same tokens in both modes; greedy logprobs equal the raw ones; filters leave minus infinity."""
    for name in REQUESTS:
        assert raw_alone[name][0]["token_ids"] == modes_alone[name][0]["token_ids"], name
    for name in ("top 20", "ids"):
        assert raw_alone[name] == modes_alone[name]
    for name, kept in (("top_k", range(1, 5)), ("top_p", range(1, 20))):
        [raw_choice], [choice] = raw_alone[name], modes_alone[name]
        assert tops(raw_choice) != tops(choice)
        for entries in tops(choice):
            finite = [value for _, value in entries if value > -9999]
            assert len(finite) in kept
            assert entries[0][1] > -9999
            assert abs(sum(map(math.exp, finite)) - 1) < 1e-5
    [warm] = modes_alone["sampled"]
    assert warm["logprobs"]["token_logprobs"] != raw_alone["sampled"][0]["logprobs"]["token_logprobs"]


def test_decode_and_prefill_logprobs_are_equal(raw, raw_alone):
    """Sampled at temperature 0.8, scored again as a prompt."""
    [choice] = raw_alone["sampled"]
    ids = choice["prompt_token_ids"] + choice["token_ids"]
    [scored] = choices(raw, prompt=ids, max_tokens=1, prompt_logprobs=0)
    tail = scored["prompt_logprobs"][-len(choice["token_ids"]) :]
    found = [p[str(t)]["logprob"] for p, t in zip(tail, choice["token_ids"], strict=True)]
    assert found == choice["logprobs"]["token_logprobs"]


def test_custom_processors_act(modes, modes_alone):
    plain, sharp = modes_alone["sampled"][0], modes_alone["sharpen, sampled"][0]
    assert len(set(modes_alone["repeat"][0]["token_ids"])) < len(set(modes_alone["top 5"][0]["token_ids"]))
    assert plain["logprobs"]["token_logprobs"] != sharp["logprobs"]["token_logprobs"]
    # of a greedy request, the processors that change no argmax are not asked, alone or not
    assert modes_alone["sharpen"] == modes_alone["top 5"]
    for name, body in CUSTOM.items():
        assert choices(modes, **body) == modes_alone[name]
    [whole] = choices(modes, **{**CUSTOM["both"], "max_tokens": 16})
    assert whole["token_ids"][:10] == modes_alone["both"][0]["token_ids"]


# --- default_seed: "random" ---------------------------------------------------------------------------------------


def test_a_drawn_seed_is_in_the_answer_and_repeats_it(modes):
    model = model_of(modes)
    body = {"model": model, "prompt": [PROMPT, OTHER], "n": 2, "max_tokens": 12, "temperature": 1, "ignore_eos": True}

    def post(path, **body):
        reply = modes.post(path, json={"model": model, **body})
        assert reply.status_code == 200, reply.text
        return reply

    one, two = post("/completions", **body), post("/completions", **body)
    seeds = [reply.json()["sampling_seed"] for reply in (one, two)]
    assert seeds[0] != seeds[1]
    assert one.json()["choices"] != two.json()["choices"]
    assert [int(reply.headers["x-sampling-seed"]) for reply in (one, two)] == seeds
    for reply, seed in ((one, seeds[0]), (two, seeds[1])):
        for spelled in ({"seed": seed}, {"sampling_seed": seed}, {"vllm_xargs": {"sampling_seed": seed}}):
            again = post("/completions", **body, **spelled)
            assert again.json()["choices"] == reply.json()["choices"]
            assert "x-sampling-seed" not in again.headers
            assert "sampling_seed" not in again.json()

    messages = [{"role": "user", "content": "Name a colour and a river."}]
    chat = {"messages": messages, "max_tokens": 12, "temperature": 1}
    first = post("/chat/completions", **chat).json()
    assert post("/chat/completions", **chat, seed=first["sampling_seed"]).json()["choices"] == first["choices"]
    asked = {"input": messages, "max_output_tokens": 12, "temperature": 1}
    first = post("/responses", **asked).json()
    again = post("/responses", **asked, seed=first["sampling_seed"]).json()
    assert again["output"][-1]["content"] == first["output"][-1]["content"]


@pytest.mark.parametrize("path", ["/completions", "/chat/completions", "/responses"])
def test_a_drawn_seed_of_a_stream_is_in_the_header(modes, path):
    messages = [{"role": "user", "content": "Name a colour and a river."}]
    body = {"model": model_of(modes), "temperature": 1, "stream": True}
    body |= {
        "/completions": {"prompt": PROMPT, "max_tokens": 12},
        "/chat/completions": {"messages": messages, "max_tokens": 12},
        "/responses": {"input": messages, "max_output_tokens": 12},
    }[path]

    def text(**change):
        parts = []
        with modes.stream("POST", path, json={**body, **change}) as reply:
            assert reply.status_code == 200, reply.read()
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line[6:])
                    if path == "/responses":
                        parts.append(event["delta"] if event["type"] == "response.output_text.delta" else "")
                    else:
                        [choice] = event["choices"]
                        parts.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
        return "".join(parts), reply.headers.get("x-sampling-seed")

    said, seed = text()
    other, another = text()
    assert seed != another
    assert said != other
    assert text(seed=int(seed)) == (said, None)


def test_a_batch_file(raw, tmp_path, model_path):
    """The tokens of the chat route; a drawn seed in the answer; one bad line spoils no other."""
    model = model_of(raw)
    messages = [{"role": "user", "content": "Name a colour and a river."}]
    body = {"model": model, "messages": messages, "max_tokens": 16, "temperature": 0.9, "return_token_ids": True}
    lines = {
        "seeded": {**body, "seed": 4},
        "named otherwise": {**body, "vllm_xargs": {"sampling_seed": 5}},
        "drawn": body,
        "bad": {**body, "seed": -1},
        "several": {**body, "seed": 4, "n": 3},
    }
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(
        "".join(
            json.dumps({"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": line}) + "\n"
            for name, line in lines.items()
        )
    )
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "run-batch", "-i", source, "-o", target]
    command += ["--model", model_path, *SERVER_ARGS, *RANDOM, DETERMINISTIC_FLAG]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(list(map(str, command)), env=env, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    answers = {line["custom_id"]: line for line in map(json.loads, target.read_text().splitlines())}
    assert set(answers) == set(lines)
    bad = answers.pop("bad")
    assert (bad["response"]["status_code"], bad["error"]["error"]["param"]) == (400, "seed")
    bodies = {name: answer["response"]["body"] for name, answer in answers.items()}
    seed = bodies["drawn"]["sampling_seed"]
    for name, given in (("seeded", {}), ("named otherwise", {}), ("several", {}), ("drawn", {"seed": seed})):
        http = raw.post("/chat/completions", json={**lines[name], **given}).json()
        assert [c["token_ids"] for c in bodies[name]["choices"]] == [c["token_ids"] for c in http["choices"]], name
        assert ("sampling_seed" in bodies[name]) == (name == "drawn")
