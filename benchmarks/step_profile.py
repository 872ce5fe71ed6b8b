"""Processor time of a decode step, stock beside deterministic: where a small model's step goes on the host.

``python benchmarks/step_profile.py --model FOLDER --out FILE`` starts one engine per side inside a process of its own
(decode in full CUDA graphs, layers uncompiled: the host's work is that of a default engine, its start takes seconds).
Sides are measured in turn, never together.  ``step_ms`` is wall time, ``waiting_ms`` the part of it spent waiting for
the GPU, ``host_ms`` the rest, under cProfile; ``functions`` are the most expensive ones by their own time.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from kernel_results import SIDES

WAITS = ("synchronize", "wait")
"""Parts of the names of functions that only wait for the GPU."""


def decode(engine: Any, requests: int, steps: int, vocabulary: int, tag: str, prompt: int = 512) -> dict[str, Any]:
    """Wall time of ``steps`` decode steps of ``requests`` requests, then as many under a profiler."""
    from vllm import SamplingParams

    rng = random.Random(f"{tag}/{requests}")
    for i in range(requests):
        ids = rng.choices(range(16, vocabulary), k=prompt)
        params = SamplingParams(temperature=0.0, max_tokens=2 * steps + 60, ignore_eos=True)
        engine.add_request(f"{tag}-{requests}-{i}", {"prompt_token_ids": ids}, params)
    for _ in range(40 + requests // 8):  # past the prompts
        engine.step()
    walls = []
    for _ in range(steps):
        begin = time.perf_counter()
        engine.step()
        walls.append(time.perf_counter() - begin)
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(steps):
        engine.step()
    profile.disable()
    while engine.has_unfinished_requests():
        engine.step()
    stats = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    own = {f"{Path(f).name}:{line}({name})": (calls, total) for (f, line, name), (_, calls, total, *_) in stats.items()}
    waiting = sum(total for name, (_, total) in own.items() if any(w in name for w in WAITS))
    everything = sum(total for _, total in own.values())
    top = sorted(own.items(), key=lambda item: -item[1][1])[:40]
    per_step = lambda seconds: round(1e3 * seconds / steps, 4)
    return {
        "requests": requests,
        "step_ms": round(1e3 * statistics.median(walls), 4),
        "step_ms_p90": round(1e3 * sorted(walls)[int(0.9 * len(walls))], 4),
        "host_ms": per_step(everything - waiting),
        "waiting_ms": per_step(waiting),
        "functions": [[name, round(calls / steps, 2), per_step(total)] for name, (calls, total) in top],
    }


def one_side(options: argparse.Namespace) -> None:
    """Child process: start the engine, wait for the turn, measure, write."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    vocabulary = json.loads((options.model / "config.json").read_text())["vocab_size"]
    switch = {"enable_deterministic_inference": True} if options.side == "deterministic" else {}
    backend = {"attention_backend": options.backend} if options.backend else {}
    llm = LLM(
        str(options.model),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=4096,
        gpu_memory_utilization=0.02,  # not used: the cache's size is given
        kv_cache_memory_bytes=12 << 30,
        enable_flashinfer_autotune=False,
        disable_log_stats=True,
        compilation_config={
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64],
        },
        **switch,
        **backend,
    )
    ready = options.out.with_suffix(f".{options.side}.ready")
    ready.touch()
    go = options.out.with_suffix(f".{options.side}.go")
    while not go.exists():
        time.sleep(0.05)
    rows = []
    for turn in range(2):
        for n in options.requests:
            rows.append({"turn": turn} | decode(llm.llm_engine, n, options.steps, vocabulary, str(turn)))
    options.out.with_suffix(f".{options.side}.json").write_text(json.dumps(rows))


def both_sides(options: argparse.Namespace) -> dict[str, Any] | None:
    """Start both children, give each its turn; their rows, or None when one failed.  None outlives this call."""
    command = [sys.executable, __file__, *sys.argv[1:], "--side"]
    mark = lambda side, what: options.out.with_suffix(f".{side}.{what}")

    def clear() -> None:
        for side in SIDES:
            for what in ("ready", "go", "json"):
                mark(side, what).unlink(missing_ok=True)

    clear()  # of a run that was killed
    children = {}
    found: dict[str, Any] = {}
    try:
        for side in SIDES:
            with mark(side, "log").open("w") as log:
                children[side] = subprocess.Popen([*command, side], stdout=log, stderr=subprocess.STDOUT)
        while not all(mark(side, "ready").exists() for side in SIDES):
            if any(child.poll() is not None for child in children.values()):
                print("an engine did not start; see the logs beside", options.out, file=sys.stderr)
                return None
            time.sleep(0.1)
        for side, child in children.items():
            mark(side, "go").touch()
            if child.wait():
                print(f"{side} failed; see {mark(side, 'log')}", file=sys.stderr)
                return None
            found[side] = json.loads(mark(side, "json").read_text())
    finally:
        for child in children.values():
            child.kill()
        clear()
    return found


def main() -> int:
    """Start both sides, give them their turns, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--backend", help="attention backend; default: the host's choice")
    parser.add_argument("--requests", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8, 64])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        one_side(options)
        return 0
    found = both_sides(options)
    if found is None:
        return 1
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from det_plugin.evidence.fingerprint import fingerprint

    facts = {"environment": fingerprint("cuda"), "model": options.model.name, "backend": options.backend or "default"}
    options.out.write_text(json.dumps(facts | found, indent=1) + "\n")
    for stock, ours in zip(found["stock"], found["deterministic"], strict=True):
        cells = [f"{side['step_ms']:.3f} (host {side['host_ms']:.3f})" for side in (stock, ours)]
        print(f"{stock['requests']:4d} requests: stock {cells[0]} ms, deterministic {cells[1]} ms a step")
    return 0


if __name__ == "__main__":
    sys.exit(main())
