"""The first start on a GPU that has no tuning table: how long measuring takes, and that it changes no bit.

    PYTHONPATH=. python tests/gpu/first_start_check.py --out FOLDER [--model-name qwen3-8b-two-layers]

Takes the committed tables out of a copy of the package and starts servers on it, every cache empty.  First a stock and
a deterministic server at once, which measures; then, on warm caches and again at once: stock, a deterministic server
(it must measure nothing), one that requires certificates (it must find all), and one of the package with its tables.
Each answers the same prompts one by one and all together.  Writes FOLDER/first_start.json.

Exit code 0: every deterministic answer agrees, stock's differ (the negative control), the first start measured every
product to the end and took at most 60 s more than stock's; 1: one of these doesn't hold; 2: not shown.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import os
import pathlib
import random
import re
import shutil
import sys
import tempfile
import time

import httpx

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from engine_check import MODELS, environment, write_model

import det_plugin
from det_plugin.verify.bench_servers import start_servers
from det_plugin.verify.server import VllmServer

MEASURED = re.compile(r"linear N=(\d+) K=(\d+) (\w+): measured in ([\d.]+) s(, not to the end)?")
UNTABLED = "no tuning table for this GPU"
OVER_STOCK_SECONDS = 60.0
CACHES = {
    "DET_PLUGIN_CERTIFICATES": "certificates",
    "VLLM_CACHE_ROOT": "vllm",
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "XDG_CACHE_HOME": "cache",
}
SERVER = (
    "--skip-tokenizer-init", "--max-model-len", "4096", "--max-num-seqs", "256", "--no-enable-flashinfer-autotune",
    "--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(4 << 30),
)  # fmt: skip


def copy_without_tables(folder: pathlib.Path) -> pathlib.Path:
    """A copy of the package that knows no GPU; returns the folder to import it from."""
    source = pathlib.Path(det_plugin.__file__).resolve().parent
    shutil.copytree(source, folder / "det_plugin", ignore=shutil.ignore_patterns("__pycache__"))
    for table in (folder / "det_plugin" / "ops" / "tuning").glob("*.json"):
        table.unlink()
    return folder


def make_server(args, name: str, package: pathlib.Path | None, caches: pathlib.Path, section: dict) -> VllmServer:
    """One server; ``package``: where det_plugin is imported from, or None for this process's own."""
    env = {variable: str(caches / folder) for variable, folder in CACHES.items()}
    env |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "PYTHONSAFEPATH": "1"}  # the working folder may hold the package too
    if package is not None:
        env["PYTHONPATH"] = os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")])
    extra = [*SERVER, *(["--additional-config", json.dumps({"det_plugin": section})] if section else [])]
    log = args.out / f"{name}.log"
    return VllmServer(args.model, deterministic=name != "stock", extra_args=extra, env=env, log=log)


def ask(base_url: str, vocabulary: int, tokens: int) -> list[list[list[int]]]:
    """Token ids of answers to random prompts: each prompt alone, then all at once."""
    rng = random.Random(5)
    prompts = [[rng.randrange(2, vocabulary) for _ in range(length)] for length in (3, 17, 64, 130, 300, 700) * 4]
    with httpx.Client(base_url=f"{base_url}/v1", timeout=300, trust_env=False) as client:
        model = client.get("/models").json()["data"][0]["id"]

        def one(prompt: list[int]) -> list[int]:
            body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
            reply = client.post("/completions", json=body | {"return_token_ids": True, "detokenize": False})
            reply.raise_for_status()
            return reply.json()["choices"][0]["token_ids"]

        alone = [one(prompt) for prompt in prompts]
        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
            return [alone, list(pool.map(one, prompts))]


def run_together(args, servers: dict[str, VllmServer]) -> dict[str, dict]:
    """Start servers at once, ask them one after another, stop them."""
    found: dict[str, dict] = {}
    with contextlib.ExitStack() as stack:
        failed = start_servers(stack, servers, lambda line: print(line, flush=True), at_once=True)
        found |= {name: {"error": reason} for name, reason in failed.items()}
        for name, server in servers.items():
            if name not in found:
                text = server.log_path.read_text(encoding="utf-8", errors="replace")
                measured = [
                    {"n": int(n), "k": int(k), "dtype": dtype, "seconds": float(seconds), "whole": not cut}
                    for n, k, dtype, seconds, cut in MEASURED.findall(text)
                ]
                found[name] = {
                    "startup_s": round(server.startup_seconds or 0.0, 1),
                    "measured": measured,
                    "untabled": text.count(UNTABLED),
                }
                try:
                    found[name]["answers"] = ask(server.base_url, MODELS[args.model_name][-1], args.tokens)
                except (httpx.HTTPError, LookupError) as error:
                    found[name]["error"] = repr(error)
    return found


def differing(a: list[list[list[int]]], b: list[list[list[int]]]) -> tuple[int, int]:
    """Answers compared, and how many differ."""
    pairs = [(x, y) for first, second in zip(a, b, strict=True) for x, y in zip(first, second, strict=True)]
    return len(pairs), sum(x != y for x, y in pairs)


def main() -> int:
    """Both rounds, JSON, a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--model-name", default="qwen3-8b-two-layers", choices=sorted(MODELS))
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path(tempfile.gettempdir()) / "engine_check")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--commit", help="commit of the source, for the report")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    args.work.mkdir(parents=True, exist_ok=True)
    begun = time.time()
    args.model = write_model(args.model_name, args.work)
    with tempfile.TemporaryDirectory(dir=args.work) as temporary:
        folder = pathlib.Path(temporary)
        bare = copy_without_tables(folder / "bare")
        stock_caches, caches, tabled = folder / "stock", folder / "det", folder / "tabled"
        first = run_together(args, {
            "stock": make_server(args, "stock", None, stock_caches, {}),
            "first start": make_server(args, "first start", bare, caches, {}),
        })  # fmt: skip
        kept = [json.loads(p.read_text())["schedules"] for p in caches.glob("certificates/**/tuning/*.json")]
        second = run_together(args, {
            "stock": make_server(args, "stock", None, stock_caches, {}),
            "again": make_server(args, "again", bare, caches, {}),
            "required": make_server(args, "required", bare, caches, {"certificates": "require"}),
            "committed table": make_server(args, "committed table", None, tabled, {}),
        })  # fmt: skip
    facts = environment()
    facts["commit"] = args.commit or facts["commit"]
    errors = {name: row["error"] for rows in (first, second) for name, row in rows.items() if "error" in row}
    report: dict = {"environment": facts, "model": args.model_name, "errors": errors}
    problems, silent = [f"{name}: {error}" for name, error in errors.items()], True
    if not errors:
        reference = first["first start"].pop("answers")
        alone_twice = [reference[0], reference[0]]
        compared, mismatches = differing([reference[0]], [reference[1]])
        of = control = 0
        for name in ("again", "required", "committed table"):
            count, wrong = differing(alone_twice, second[name].pop("answers"))
            compared, mismatches = compared + count, mismatches + wrong
        for row in (first["stock"], second["stock"]):
            answers = row.pop("answers")
            count, wrong = differing([answers[0]], [answers[1]])
            of, control = of + count, control + wrong
        silent = control == 0
        over = round(first["first start"]["startup_s"] - first["stock"]["startup_s"], 1)
        warm = round(second["required"]["startup_s"] - second["stock"]["startup_s"], 1)
        report |= {
            "cold": first, "warm": second, "cold_over_stock_s": over, "warm_over_stock_s": warm,
            "measuring_s": round(sum(m["seconds"] for m in first["first start"]["measured"]), 1),
            "tables_kept": sum(map(len, kept)), "kept": kept,
            "comparisons": compared, "mismatches": mismatches,
            "negative_control_comparisons": of, "negative_control_mismatches": control,
        }  # fmt: skip
        problems += ["a deterministic answer differs"] if mismatches else []
        problems += [f"{over} s over stock"] if over > OVER_STOCK_SECONDS else []
        measured, tables = first["first start"]["measured"], sum(map(len, kept))
        problems += ["nothing was measured"] if not measured else []
        problems += ["measuring was cut short"] if not all(m["whole"] for m in measured) else []
        if first["first start"]["untabled"] != len(measured) or tables != len(measured):
            problems.append(f"{len(measured)} products measured, {tables} tables kept")
        for name in ("again", "required", "committed table"):
            problems += [f"{name}: a product had no table"] if second[name]["untabled"] else []
    (args.out / "first_start.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({k: v for k, v in report.items() if k not in ("environment", "kept")}, indent=1)[:6000])
    print(f"{time.time() - begun:.0f} s", "problems:", problems, "control silent" if silent else "control differs")
    return 2 if errors else 1 if problems else 2 if silent else 0


if __name__ == "__main__":
    sys.exit(main())
