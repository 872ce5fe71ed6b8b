"""Several processes: two tensor-parallel ranks, two API servers, a `fork` that the user asked for.

The control, a stock engine of two ranks, is in ``test_tensor_parallel.py``.
"""

from __future__ import annotations

import contextlib
import json
import sys
from concurrent.futures import ThreadPoolExecutor

import compositions
import engine_kit as kit
import httpx
import pytest

ARGS = ["--tensor-parallel-size", "2", "--api-server-count", "2", "--max-num-batched-tokens", "64"]
ARGS += ["--max-model-len", "2048"]
SERVE = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
ENV = {
    "VLLM_CPU_OMP_THREADS_BIND": kit.TWO_RANKS,
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}


@pytest.fixture(scope="module")
def tiny_model(model_path, tmp_path_factory):
    return kit.make_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama", model_path)


@pytest.fixture(scope="module")
def bodies(tiny_model):
    pool = compositions.make_pool(3, kit.make_encoder(tiny_model), 16, kit.TINY_VOCABULARY)
    keep = ("temperature", "seed", "top_k", "top_p", "min_p", "ignore_eos")
    return [
        {
            "prompt": request["prompt"],
            "max_tokens": 8,
            "logprobs": 2,
            **{k: v for k, v in request["params"].items() if k in keep},
        }
        for request in pool
    ]


def ask_all(server, bodies, parallel):
    with httpx.Client(base_url=f"{server.base_url}/v1", timeout=60, trust_env=False) as client:
        model = client.get("/models").json()["data"][0]["id"]

    def ask(body):
        # a connection of its own for each request: the kernel hands it to either API server
        with httpx.Client(base_url=f"{server.base_url}/v1", timeout=600, trust_env=False) as client:
            reply = client.post("/completions", json={"model": model, **body})
            assert reply.status_code == 200, reply.text
            return json.dumps(reply.json()["choices"], sort_keys=True)

    with ThreadPoolExecutor(parallel) as threads:
        return list(threads.map(ask, bodies))


@pytest.fixture(scope="module")
def alone(make_server, tiny_model, bodies):
    """A deterministic server of two ranks and two API servers, and the answers of requests run alone."""
    with contextlib.ExitStack() as stack:
        with kit.all_cores():
            server = make_server(deterministic=True, model=tiny_model, extra_args=ARGS, env=ENV, command=SERVE)
            stack.enter_context(server)
        yield server, ask_all(server, bodies, 1)


def test_two_ranks_and_two_api_servers(alone, bodies):
    server, answers = alone
    assert len(set(answers)) == len(answers)
    assert ask_all(server, bodies, 16) == answers
    assert ask_all(server, bodies[::-1], 5) == answers[::-1]


def test_every_process_is_deterministic(alone):
    """Both API servers checked the configuration; both ranks run the ordered all-reduce."""
    server, _ = alone
    log = server.log_path.read_text()
    assert log.count("deterministic inference is on") >= 2
    for rank in (0, 1):
        assert f"Worker_TP{rank}" in log
