"""A killed server, started again, gives the same bytes: compiled with a cold and a warm cache, and eager."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import compositions
import engine_kit as kit
import httpx
import pytest

REQUESTS = 50
COMPILED = ["--compilation-config", '{"mode": 3}']


@pytest.fixture(scope="module")
def bodies(model_path):
    """50 requests: short and long, greedy and sampled, with and without a seed, chat and completion."""
    pool = compositions.make_pool(5, kit.make_encoder(model_path), REQUESTS)
    found = []
    for index, request in enumerate(pool):
        params = {k: v for k, v in request["params"].items() if k not in ("prompt_logprobs", "logit_bias")}
        body = {"prompt": request["prompt"], **params, "max_tokens": 12, "logprobs": min(params["logprobs"], 5)}
        if index % 10 == 9:
            text = compositions.SENTENCES[index % len(compositions.SENTENCES)]
            body = {"messages": [{"role": "user", "content": text}], "max_tokens": 12, "logprobs": True}
            body["temperature"] = params["temperature"]
        found.append(body)
    return found


def ask_all(server, bodies, parallel):
    """What each answer says, as bytes: everything but its id and the time."""
    with httpx.Client(base_url=f"{server.base_url}/v1", timeout=600, trust_env=False) as client:
        model = client.get("/models").json()["data"][0]["id"]

        def ask(body):
            path = "/chat/completions" if "messages" in body else "/completions"
            reply = client.post(path, json={"model": model, **body})
            assert reply.status_code == 200, reply.text
            return json.dumps(reply.json()["choices"], sort_keys=True).encode()

        with ThreadPoolExecutor(parallel) as threads:
            return list(threads.map(ask, bodies))


def compiled_files(folder: Path) -> dict[Path, int]:
    """Shared libraries of compiled kernels in a compile cache, with the times they were written."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*.so")}


@pytest.mark.timeout(900)
def test_sigkill_and_start_again(make_server, det_server, bodies, tmp_path):
    """Cold compile cache, SIGKILL in the middle of work, warm cache; several at once; and eager.

    Without ahead-of-time artifacts, which the host writes on the CPU but fails to load, the second start takes all
    kernels from the cache.  (With them: ``test_invariance.py::test_compiled_equals_eager``.)
    """
    cache = tmp_path / "inductor"
    env = {"TORCHINDUCTOR_CACHE_DIR": str(cache), "VLLM_USE_AOT_COMPILE": "0"}
    server = make_server(deterministic=True, eager=False, extra_args=COMPILED, env=env)
    try:
        server.start().wait_ready()
        written = compiled_files(cache)
        assert written, "nothing was compiled: the cache was not tested"
        cold = ask_all(server, bodies, 16)
        with ThreadPoolExecutor(1) as background:
            busy = background.submit(ask_all, server, bodies, 16)
            server.kill()
            with pytest.raises((httpx.HTTPError, AssertionError)):
                busy.result()
        server.start().wait_ready()
        assert compiled_files(cache) == written, "the second start compiled again: it was not warm"
        warm = ask_all(server, bodies, 4)
    finally:
        server.stop()
    assert len(set(cold)) > REQUESTS // 2, "the answers hardly differ from each other: nothing was tested"
    assert warm == cold
    assert ask_all(det_server, bodies, 7) == cold, "the eager server answers otherwise"
