"""Random requests and random ways to run them together, made from a seed; and the loop that runs them.

Used by the tests, which draw and compare, and inside the engine's process, which runs.  A *request* is a prompt
with sampling parameters; a *composition* says which requests run, when each arrives, which neighbours are
aborted and when, and whether the prefix cache is emptied before.
"""

from __future__ import annotations

import random
from typing import Any

MAX_MODEL_LEN = 768
BLOCK_SIZE = 32
NUM_BLOCKS = 25
"""KV cache of the small engines: 800 tokens, one long request and little else."""

SMALL = {"num_gpu_blocks_override": NUM_BLOCKS, "block_size": BLOCK_SIZE}

LAST_ROW_ALONE = (33, 65, 17, 97)
"""Lengths of the first prompts: after chunks of 16, or a prefix hit of whole blocks, one row is left, for which
the stock engine runs another kernel."""

VOCABULARY = 49152
SENTENCES = (
    "The capital of France is",
    "List three prime numbers and explain why they are prime.",
    "def fibonacci(n):\n    ",
    "Write a short poem about rivers that forget their names.",
    "Q: Why is the sky blue?\nA:",
    "Once upon a time in a small village there lived",
    "The three laws of thermodynamics say that",
    "Translate into German: I would like a cup of coffee.",
    "1, 1, 2, 3, 5, 8, 13,",
    "In 1969 the first humans",
)


def make_pool(seed: int, encode: Any, size: int = 40, vocabulary: int = VOCABULARY) -> list[dict[str, Any]]:
    """``size`` requests, JSON-able: ``{"prompt": [token ids], "params": {...}}``.

    Args:
        seed: of everything.
        encode: text to token ids.
        size: number of requests.
        vocabulary: token ids are taken modulo this.
    """
    rng = random.Random(f"pool {seed}")
    text = [encode(sentence + " ") for sentence in SENTENCES]

    def tokens(length: int) -> list[int]:
        found: list[int] = []
        while len(found) < length:
            found += rng.choice(text) if rng.random() < 0.8 else [rng.randrange(10, VOCABULARY)]
        return found[:length]

    shared = [tokens(n) for n in (31, 32, 33, 160, 400)]
    pool = []
    for index in range(size):
        kind = rng.random()
        if index < len(LAST_ROW_ALONE):
            prompt = tokens(LAST_ROW_ALONE[index])
        elif kind < 0.35:
            prompt = tokens(rng.randint(1, 24))
        elif kind < 0.6:
            prompt = tokens(rng.randint(25, 150))
        elif kind < 0.85:
            prompt = rng.choice(shared) + tokens(rng.randint(1, 60))
        else:
            prompt = tokens(rng.randint(200, 700))
        prompt = [token % vocabulary for token in prompt]
        pool.append({"prompt": prompt, "params": make_params(rng, index, vocabulary)})
    return pool


def greedy_pool(pool: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same prompts, greedy: the stock engine draws other samples every time, and dies of a seed on the CPU."""
    keep = ("max_tokens", "ignore_eos", "logprobs", "prompt_logprobs", "repetition_penalty")
    return [
        {
            "prompt": request["prompt"],
            "params": {"temperature": 0.0, **{k: v for k, v in request["params"].items() if k in keep}},
        }
        for request in pool
    ]


def make_params(rng: random.Random, index: int, vocabulary: int = VOCABULARY) -> dict[str, Any]:
    """Keyword arguments of ``SamplingParams``."""
    params: dict[str, Any] = {"max_tokens": rng.choice((4, 12, 24, 40)), "ignore_eos": True, "logprobs": 0}
    params["temperature"] = 0.0 if index % 2 else rng.choice((0.3, 0.8, 1.0, 1.5))
    if params["temperature"]:
        if rng.random() < 0.7:
            params["seed"] = rng.choice((0, 1, 42, 2**63 - 1, rng.randrange(2**63)))
        filters = rng.choice(((), ("top_k",), ("top_p",), ("top_k", "top_p"), ("min_p",), ("min_p", "top_p")))
        values = {"top_k": rng.choice((1, 5, 50)), "top_p": rng.choice((0.1, 0.7, 0.95)), "min_p": 0.05}
        params.update({name: values[name] for name in filters})
    if rng.random() < 0.25:
        params["logprobs"] = rng.choice((1, 5, 20))
    if rng.random() < 0.15:
        params["prompt_logprobs"] = rng.choice((0, 3))
    if rng.random() < 0.2:
        params[rng.choice(("frequency_penalty", "presence_penalty"))] = rng.choice((-0.5, 0.4))
    if rng.random() < 0.15:
        params["repetition_penalty"] = 1.2
    if rng.random() < 0.1:
        params["logit_bias"] = {str(rng.randrange(vocabulary)): 3.0}
    if params["temperature"] and rng.random() < 0.2:
        params["n"] = 2
    return params


def batches(seed: int, pool_size: int, sizes: tuple[int, ...] = (1, 2, 3, 5, 8, 13, 24)) -> list[dict[str, Any]]:
    """Request 0, and others, in batches of these sizes at random positions, all arriving at once."""
    rng = random.Random(f"batches {seed}")
    found = []
    for size in sizes:
        members = [rng.randrange(pool_size) for _ in range(size)]
        members[rng.randrange(size)] = 0
        found.append({"members": [{"request": m, "arrival": 0, "abort": None} for m in members], "cold": True})
    return found


def make_composition(seed: int, index: int, pool_size: int, most: int = 24) -> dict[str, Any]:
    """Composition ``index`` of a seed.

    Returns:
        ``{"members": [{"request", "arrival", "abort"}], "cold"}``: indices into the pool, the step at which the
        request arrives, the step at which it is aborted or None, and whether the prefix cache is emptied before.
    """
    rng = random.Random(f"composition {seed} {index}")
    count = rng.choice((1, 2, 3, 5, 8, 12, 16, most))
    spread = rng.choice((0, 0, 3, 15, 40))
    members = []
    for _ in range(count):
        arrival = rng.randint(0, spread)
        abort = arrival + rng.randint(1, 20) if rng.random() < 0.2 else None
        members.append({"request": rng.randrange(pool_size), "arrival": arrival, "abort": abort})
    if all(member["abort"] is not None for member in members):
        members[0]["abort"] = None
    return {"members": members, "cold": rng.random() < 0.4}


def alone(index: int) -> dict[str, Any]:
    """The composition of one request, cache empty."""
    return {"members": [{"request": index, "arrival": 0, "abort": None}], "cold": True}


# --- inside the engine's process --------------------------------------------------------------------------------


def sampling_params(params: dict[str, Any]) -> Any:
    from vllm import SamplingParams

    params = dict(params)
    if "logit_bias" in params:
        params["logit_bias"] = {int(token): value for token, value in params["logit_bias"].items()}
    return SamplingParams(**params)


def exact(output: Any) -> list[Any]:
    """Everything an answer says, floats by their bits: prompt logprobs, then token ids and logprobs per choice."""

    def position(logprobs: Any) -> Any:
        if logprobs is None:
            return None
        return [[token, value.logprob.hex(), value.rank] for token, value in logprobs.items()]

    prompt = None if output.prompt_logprobs is None else [position(p) for p in output.prompt_logprobs]
    return [
        prompt,
        *(
            [choice.index, list(choice.token_ids), [position(p) for p in choice.logprobs], choice.finish_reason]
            for choice in output.outputs
        ),
    ]


def run_composition(llm: Any, pool: list[dict[str, Any]], composition: dict[str, Any]) -> list[Any]:
    """Answers of the members in order; None for aborted ones."""
    from vllm import TokensPrompt

    engine = llm.llm_engine
    if composition["cold"] and not llm.reset_prefix_cache():
        raise RuntimeError("the prefix cache was not emptied")
    members = composition["members"]
    waiting = sorted(range(len(members)), key=lambda i: members[i]["arrival"])
    answers: list[Any] = [None] * len(members)
    running: set[int] = set()
    step = 0
    while waiting or engine.has_unfinished_requests():
        while waiting and members[waiting[0]]["arrival"] <= step:
            index = waiting.pop(0)
            request = pool[members[index]["request"]]
            prompt = TokensPrompt(prompt_token_ids=request["prompt"])
            engine.add_request(f"m{index}", prompt, sampling_params(request["params"]))
            running.add(index)
        for index in list(running):
            if members[index]["abort"] is not None and members[index]["abort"] <= step:
                engine.abort_request([f"m{index}"])
                running.discard(index)
        for output in engine.step():
            index = int(output.request_id[1:])
            if output.finished and index in running:
                answers[index] = exact(output)
                running.discard(index)
        step += 1
    return [None if member["abort"] is not None else answer for member, answer in zip(members, answers, strict=True)]


def hide_plugin() -> None:
    """Make this process one in which det_plugin is not installed: no metadata, no import."""
    import importlib.metadata
    import sys

    if any(name.partition(".")[0] in ("vllm", "det_plugin") for name in sys.modules):
        raise RuntimeError("vLLM or the plugin is imported already")
    discover = importlib.metadata.Distribution.discover.__func__

    def without(cls: Any, **kwargs: Any) -> Any:
        return (found for found in discover(cls, **kwargs) if found.metadata["Name"] != "det-plugin")

    importlib.metadata.Distribution.discover = classmethod(without)  # type: ignore[method-assign]

    class Absent:
        @staticmethod
        def find_spec(name: str, path: Any = None, target: Any = None) -> None:
            if name.partition(".")[0] == "det_plugin":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, Absent)  # type: ignore[arg-type]


def counters(llm: Any) -> dict[str, float]:
    """Preemptions and prefix-cache hits since the engine started."""
    wanted = {"vllm:num_preemptions": "preemptions", "vllm:prefix_cache_hits": "hits"}
    return {wanted[m.name]: m.value for m in llm.get_metrics() if m.name in wanted}


_running: list[Any] = []
"""Keeps the engine to the process's end: taking it apart would cost a second, and the process ends at once."""


def serve(job: dict[str, Any]) -> dict[str, Any]:
    """Start one engine as ``job["engine"]`` says, run ``job["compositions"]`` on it; answers and counters.

    ``job["cores"]`` are the cores that the engine may use and ``job["threads"]`` is how many threads it computes
    with, when that matters.
    """
    import os
    import sys
    import time

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if job.get("hide_plugin"):
        hide_plugin()
    if "cores" in job:
        os.sched_setaffinity(0, job["cores"])
    import torch
    from vllm import LLM

    if "threads" in job:
        torch.set_num_threads(job["threads"])
    started = time.monotonic()
    usual = {
        "max_model_len": MAX_MODEL_LEN,
        "block_size": BLOCK_SIZE,
        "disable_log_stats": False,
        "skip_tokenizer_init": True,
    }
    llm = LLM(**{**usual, **job["engine"]})
    _running.append(llm)
    ready = time.monotonic()
    answers = [run_composition(llm, job["pool"], composition) for composition in job["compositions"]]
    return {
        "answers": answers,
        **counters(llm),
        "plugin_loaded": any(name.partition(".")[0] == "det_plugin" for name in sys.modules),
        "threads": torch.get_num_threads(),
        "compilation": llm.llm_engine.vllm_config.compilation_config.mode.name,
        "start_seconds": ready - started,
        "run_seconds": time.monotonic() - ready,
    }
