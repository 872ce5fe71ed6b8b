"""Servers of a real model on a GPU, side by side: every verification mode over HTTP, the same answers from every
deterministic server of a backend (also after SIGKILL), and text to read.

    python tests/gpu/server_check.py --model FOLDER --out DIR [--backends FLASH_ATTN,TRITON_ATTN,FLASHINFER]

Writes server_verification.json and prints a table.  The stock server is the negative control: it must differ.
Exit code 0: every deterministic server held and a stock server differed; 1: one differed; 2: not shown.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import pathlib
import signal
import sys
import time

import httpx

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from engine_check import environment, token_bytes

from det_plugin.verify.options import VerifyOptions
from det_plugin.verify.runner import run_verification
from det_plugin.verify.server import ServerError, VllmServer

QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about rain.",
    "Name three colours.",
    "Why is the sky blue?",
)
OPTIONS = {
    "batch_sizes": [1, 2, 5, 12, 33, 64, 65, 130],
    "n_trials": 8,
    "max_new_tokens": 32,
    "prefix_lengths": [1, 511, 2048, 4097],
    "long_prompt_tokens": 2048,
    "temperatures": [0.0, 0.8],
    "top_logprobs": 3,
}


def make_server(args, kind: str, backend: str, eager: bool) -> VllmServer:
    """One server that leaves room for others on the same GPU."""
    extra = ["--attention-backend", backend, "--enable-prompt-tokens-details", "--max-num-seqs", "256"]
    extra += ["--gpu-memory-utilization", "0.02", "--kv-cache-memory-bytes", str(131072 * token_bytes(args.model))]
    extra += ["--max-model-len", str(args.context), "--no-enable-flashinfer-autotune"]
    extra += ["--enforce-eager"] if eager else []
    return VllmServer(
        args.model,
        deterministic=kind == "deterministic",
        extra_args=extra,
        env={"VLLM_USE_FLASHINFER_SAMPLER": "0"},
        log=args.out / f"{kind}-{backend}-{'eager' if eager else 'compiled'}.log",
    )


def ask(base_url: str) -> list[dict]:
    """Answers to chat questions, greedy and sampled: text and logprobs."""
    answers = []
    with httpx.Client(base_url=f"{base_url}/v1", timeout=300, trust_env=False) as client:
        model = client.get("/models").json()["data"][0]["id"]
        for question in QUESTIONS:
            for temperature in (0.0, 0.8):
                body = {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": 40}
                body |= {"temperature": temperature, "logprobs": True}
                reply = client.post("/chat/completions", json=body)
                reply.raise_for_status()
                choice = reply.json()["choices"][0]
                logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
                text = choice["message"]["content"]
                answers.append({"question": question, "temperature": temperature, "text": text, "logprobs": logprobs})
    return answers


def check(args, kind: str, backend: str, eager: bool) -> dict:
    """Start, verify, ask; kill and ask again."""
    entry: dict = {"server": kind, "backend": backend, "mode": "eager" if eager else "compiled, CUDA graphs"}
    started = time.time()
    try:
        with make_server(args, kind, backend, eager) as server:
            entry["startup_s"] = round(server.startup_seconds or 0.0, 1)
            options = VerifyOptions.model_validate({**OPTIONS, "base_url": server.base_url})
            result = run_verification(options)
            entry.update(status=result.status, error=result.error)
            entry["modes"] = [
                {"mode": m.mode, "temperature": m.temperature, "status": m.status, "reason": m.reason,
                 "unique": m.unique, "samples": m.total, "kl": m.kl}
                for m in result.modes
            ]  # fmt: skip
            entry["answers"] = ask(server.base_url)
            os.killpg(server.pid, signal.SIGKILL)
        if kind == "deterministic" and not eager:
            with make_server(args, kind, backend, eager) as server:
                entry["restart_s"] = round(server.startup_seconds or 0.0, 1)
                entry["same_after_restart"] = ask(server.base_url) == entry["answers"]
    except (ServerError, httpx.HTTPError) as error:
        entry.update(status="not_tested", error=str(error)[-1500:])
    entry["seconds"] = round(time.time() - started, 1)
    return entry


def main() -> int:
    """All servers, a table, JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--backends", default="FLASH_ATTN,TRITON_ATTN,FLASHINFER")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--jobs", type=int, default=7, help="servers at a time")
    parser.add_argument("--commit", help="commit of the source, for the report")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    backends = args.backends.split(",")
    jobs = [("stock", backends[0], True)]
    jobs += [("deterministic", backend, eager) for backend in backends for eager in (False, True)]
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        entries = list(pool.map(lambda job: check(args, *job), jobs))
    for backend in backends:
        group = [e for e in entries if e["backend"] == backend and e["server"] == "deterministic" and e.get("answers")]
        for entry in group:
            entry["same_as_other_servers"] = entry["answers"] == group[0]["answers"]
    facts = environment()
    facts["commit"] = args.commit or facts["commit"]
    report = {"environment": facts, "model": args.model.name, "options": OPTIONS, "servers": entries}
    (args.out / "server_verification.json").write_text(json.dumps(report, indent=1) + "\n")
    held = split = True
    for entry in entries:
        modes = " ".join(
            f"{m['mode']}@{m['temperature']:g}:{m['unique']}/{m['samples']}" for m in entry.get("modes", [])
        )
        facts = {k: entry.get(k) for k in ("startup_s", "same_after_restart", "same_as_other_servers", "seconds")}
        print(entry["server"], entry["backend"], entry["mode"], entry["status"], modes, facts, entry["error"][-600:])
        if entry["server"] == "stock":
            split = entry["status"] == "different"
        else:
            same = [entry.get(k, True) for k in ("same_after_restart", "same_as_other_servers")]
            held = held and entry["status"] == "same" and all(same)
    for answer in next((e["answers"] for e in entries if e["server"] == "deterministic" and e.get("answers")), []):
        print(f"{answer['temperature']:g} {answer['question']} -> {answer['text']!r}")
    if any(e["server"] == "deterministic" and e["status"] == "different" for e in entries):
        return 1
    return 0 if held and split else 2


if __name__ == "__main__":
    sys.exit(main())
