"""One engine, many schedules: every request's token ids and logprobs against the same request run alone.

Run on a GPU (or on a CPU for a dry run)::

    python tests/gpu/engine_check.py --out RESULTS_DIR                       # everything, as subprocesses
    python tests/gpu/engine_check.py --single det,FLASH_ATTN,eager,8192      # one engine, in this process

Each engine is a process of its own; several run side by side on one GPU.  Within an engine every answer is
compared with the same request run alone.  The answers of all deterministic engines of a backend (eager or
compiled, any chunk size, async scheduling on or off, a cache small enough to preempt, restarted) are then compared
with each other.  The stock engine is the negative control: it must differ.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import os
import pathlib
import random
import subprocess
import sys
import time

MODELS = {
    # name: (architecture, hidden, intermediate, layers, heads, kv heads, head dim, vocabulary)
    "qwen3-0.6b": ("Qwen3ForCausalLM", 1024, 3072, 28, 16, 8, 128, 32000),
    "qwen3-tiny": ("Qwen3ForCausalLM", 256, 512, 2, 4, 2, 64, 4096),
    "llama-135m": ("LlamaForCausalLM", 576, 1536, 30, 9, 3, 64, 49152),
    "qwen3-8b-two-layers": ("Qwen3ForCausalLM", 4096, 12288, 2, 32, 8, 128, 151936),
    "gemma-256": ("LlamaForCausalLM", 1024, 4096, 12, 8, 4, 256, 32000),
}
"""Random-weight models: untied embeddings, N(0, 1/sqrt(fan_in)), lm_head x3, so that answers are diverse."""


def write_model(name: str, folder: pathlib.Path) -> pathlib.Path:
    """Write a random checkpoint (config and safetensors); returns its folder."""
    import torch
    from safetensors.torch import save_file

    arch, hidden, inter, layers, heads, kv, dim, vocab = MODELS[name]
    folder = folder / name
    if (folder / "model.safetensors").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    qwen = arch.startswith("Qwen3")
    config = {
        "architectures": [arch],
        "model_type": "qwen3" if qwen else "llama",
        "hidden_size": hidden,
        "intermediate_size": inter,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": dim,
        "vocab_size": vocab,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(11)

    def matrix(n: int, k: int, scale: float = 1.0) -> torch.Tensor:
        w = torch.randn(n, k, generator=generator, device=device) * (scale / k**0.5)
        return w.bfloat16().cpu()

    ones = lambda n: torch.ones(n, dtype=torch.bfloat16)
    tensors = {
        "model.embed_tokens.weight": (torch.randn(vocab, hidden, generator=generator, device=device)).bfloat16().cpu(),
        "lm_head.weight": matrix(vocab, hidden, 3.0),
        "model.norm.weight": ones(hidden),
    }
    for i in range(layers):
        p = f"model.layers.{i}."
        tensors[p + "input_layernorm.weight"] = ones(hidden)
        tensors[p + "post_attention_layernorm.weight"] = ones(hidden)
        for part, n, k in (
            ("self_attn.q_proj", heads * dim, hidden),
            ("self_attn.k_proj", kv * dim, hidden),
            ("self_attn.v_proj", kv * dim, hidden),
            ("self_attn.o_proj", hidden, heads * dim),
            ("mlp.gate_proj", inter, hidden),
            ("mlp.up_proj", inter, hidden),
            ("mlp.down_proj", hidden, inter),
        ):
            tensors[f"{p}{part}.weight"] = matrix(n, k)
        if qwen:
            tensors[p + "self_attn.q_norm.weight"] = ones(dim)
            tensors[p + "self_attn.k_norm.weight"] = ones(dim)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


GREEDY_ONLY = False


def prompts(vocab: int, lengths: tuple[int, ...]) -> list[list[int]]:
    """Fixed random prompts, one per length."""
    rng = random.Random(5)
    return [[rng.randrange(2, vocab) for _ in range(n)] for n in lengths]


def params(index: int, tokens: int, logprobs: int = 3):
    """Sampling parameters of request ``index``: greedy, sampled, top-k, top-p, min-p, penalised in turn."""
    from vllm import SamplingParams

    kinds = (
        {"temperature": 0.0},
        {"temperature": 0.8, "seed": 1234 + index},
        {"temperature": 1.0, "top_k": 20, "seed": 42},
        {"temperature": 0.9, "top_p": 0.9, "seed": 7},
        {"temperature": 1.2, "min_p": 0.05, "seed": 42},
        {"temperature": 0.7, "repetition_penalty": 1.1, "presence_penalty": 0.3, "seed": 2**40},
    )
    if GREEDY_ONLY:  # the stock V1 runner fails on a seeded request whose prefill is chunked
        kinds = ({"temperature": 0.0},)
    return SamplingParams(max_tokens=tokens, ignore_eos=True, logprobs=logprobs, **kinds[index % len(kinds)])


def answer(output) -> dict:
    """Token ids and exact logprobs (of the sampled token and of the top ones) of one finished request."""
    choice = output.outputs[0]
    return {
        "ids": list(choice.token_ids),
        "lp": [sorted((t, v.logprob.hex(), v.rank) for t, v in step.items()) for step in choice.logprobs],
    }


class Tally:
    """Counts comparisons and keeps the first mismatches of each check."""

    def __init__(self) -> None:
        self.checks: dict[str, dict] = {}

    def compare(self, check: str, want: dict, got: dict, what: str) -> None:
        entry = self.checks.setdefault(check, {"comparisons": 0, "mismatches": 0, "examples": []})
        entry["comparisons"] += 1
        want = json.loads(json.dumps(want))
        got = json.loads(json.dumps(got))
        if want != got or not want["ids"]:
            entry["mismatches"] += 1
            pairs = zip(want["ids"], got["ids"], want["lp"], got["lp"], strict=False)
            first = next((i for i, (a, b, x, y) in enumerate(pairs) if a != b or x != y), None)
            if len(entry["examples"]) < 3:
                entry["examples"].append({"what": what, "first_divergence": first})


def run_single(args) -> dict:
    """One engine: all checks in this process."""
    kind, backend, mode, chunk, *extra = args.single.split(",")
    options = dict(item.split("=") for item in extra)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    import torch
    from vllm import LLM, SamplingParams

    vocab = json.loads((args.model / "config.json").read_text())["vocab_size"]
    cuda = torch.cuda.is_available()
    global GREEDY_ONLY
    GREEDY_ONLY = kind == "stock" and not cuda
    keywords: dict = {}
    seqs = min(args.seqs, int(chunk))
    cache_tokens = int(options.get("kvtokens", 65536))
    if cuda:
        keywords["attention_backend"] = backend
        keywords["gpu_memory_utilization"] = (
            0.02  # not used: the cache's size is given, so that engines can share a GPU
        )
        keywords["kv_cache_memory_bytes"] = cache_tokens * token_bytes(args.model)
        keywords["enable_flashinfer_autotune"] = False
        if mode != "eager":
            keywords["compilation_config"] = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128, 256]}
    elif "kvtokens" in options:
        keywords["num_gpu_blocks_override"] = cache_tokens // 16
    if "async" in options:
        keywords["async_scheduling"] = options["async"] == "1"
    if kind == "wrong":
        lay_rows_anywhere()
    if kind in ("det", "wrong"):
        keywords["enable_deterministic_inference"] = True
        allow_unproven(backend, ("torch.compile", "CUDA graph", "attention backend"))
    started = time.time()
    llm = LLM(
        str(args.model),
        skip_tokenizer_init=True,
        max_model_len=args.context,
        max_num_batched_tokens=int(chunk),
        max_num_seqs=seqs,
        enforce_eager=mode == "eager",
        enable_chunked_prefill=True,
        enable_prefix_caching=True,
        seed=0,
        disable_log_stats=False,
        **keywords,
    )
    result: dict = {"engine": args.single, "start_s": round(time.time() - started, 1)}
    tally = Tally()
    every = (1, 17, 129, 513, 900, 2100) if args.light else (1, 5, 17, 64, 129, 300, 513, 900, 1500, 2100)
    lengths = tuple(n for n in every if n + args.tokens <= args.context)
    base = prompts(vocab, lengths)
    rng = random.Random(args.rng_seed)
    used = [0]

    def reset() -> None:
        assert llm.reset_prefix_cache(), "the prefix cache could not be reset"

    def ask(items: list[tuple[list[int], object]]):
        used[0] += len(items)
        return llm.generate([{"prompt_token_ids": p} for p, _ in items], [s for _, s in items], use_tqdm=False)

    # 1. every request alone, on an empty cache: the reference, or compared with it
    alone = []
    for i, p in enumerate(base):
        reset()
        alone.append(answer(ask([(p, params(i, args.tokens))])[0]))
    pathlib.Path(args.alone).write_text(json.dumps(alone))
    result["distinct_tokens"] = [len(set(a["ids"])) for a in alone]
    deadline = time.time() + args.seconds

    # 2. in batches, at random positions among random neighbours; half of the rounds start on an empty cache
    sizes = [s for s in (2, 3, 8, 17, 33, 64, 65, 100, 200, 256) if s <= max(64, seqs)]
    for round_ in range(args.rounds):
        size = sizes[round_ % len(sizes)]
        if round_ % 2 == 0:
            reset()
        picks = [rng.randrange(len(base)) for _ in range(size)]
        items, watch = [], []
        for pick in picks:
            if rng.random() < 0.5 or not watch:
                watch.append((len(items), pick))
                items.append((base[pick], params(pick, args.tokens, rng.choice((3, 3, 3)))))
            else:
                noise = [rng.randrange(2, vocab) for _ in range(rng.choice((1, 3, 40, 200, 700)))]
                items.append((noise, params(rng.randrange(6), rng.randrange(1, args.tokens), rng.randrange(0, 6))))
        outputs = ask(items)
        for at, pick in watch:
            tally.compare(f"batch {'cold' if round_ % 2 == 0 else 'warm'}", alone[pick], answer(outputs[at]),
                          f"round {round_} size {size} request {pick}")  # fmt: skip
        if time.time() > deadline:
            break
    result["rounds"] = round_ + 1

    # 3. cached prefix = uncached, cache filled by prefill and by decode; the second must be a hit
    hits = 0
    for i, p in enumerate(base):
        reset()
        first = ask([(p, params(i, args.tokens))])[0]
        second = ask([(p, params(i, args.tokens))])[0]
        hits += int((second.num_cached_tokens or 0) > 0)
        tally.compare("prefix hit, prefill", answer(first), answer(second), f"request {i}")
        grown = p + list(first.outputs[0].token_ids)
        if len(grown) + 8 <= args.context:
            warm = ask([(grown, params(0, 8))])[0]
            reset()
            cold = ask([(grown, params(0, 8))])[0]
            hits += int((warm.num_cached_tokens or 0) > 0)
            tally.compare("prefix hit, decode", answer(cold), answer(warm), f"request {i}")
    result["cache_hits"] = hits

    # 4. decode = prefill: the logprobs of generated tokens, scored again as a prompt
    for i, p in enumerate(base):
        ids = alone[i]["ids"]
        if len(p) + len(ids) + 1 > args.context:
            continue
        reset()
        out = ask([(p + ids, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0))])[0]
        scored = [out.prompt_logprobs[len(p) + j][t].logprob.hex() for j, t in enumerate(ids)]
        said = [next(v for t, v, _ in alone[i]["lp"][j] if t == ids[j]) for j in range(len(ids))]
        entry = tally.checks.setdefault("decode = prefill", {"comparisons": 0, "mismatches": 0, "examples": []})
        entry["comparisons"] += len(ids)
        wrong = [j for j in range(len(ids)) if scored[j] != said[j]]
        entry["mismatches"] += len(wrong)
        if wrong and len(entry["examples"]) < 3:
            entry["examples"].append({"what": f"request {i}", "first_divergence": wrong[0]})

    # 5. a sampled answer, cut at every position and sent again as a prompt, goes on identically
    for i in (1, 2):
        if i >= len(base):
            continue
        ids, tokens = alone[i]["ids"], args.tokens
        reset()
        outputs = ask([(base[i] + ids[:cut], params(i, tokens - cut)) for cut in range(1, tokens)])
        for cut, output in enumerate(outputs, start=1):
            want = {key: alone[i][key][cut:] for key in ("ids", "lp")}
            tally.compare("resume at every cut", want, answer(output), f"request {i} cut at {cut}")

    # 6. requests that join, leave and are aborted while others decode
    engine = llm.llm_engine
    reset()
    watched = {f"w{i}": i for i in range(min(6, len(base)))}
    finished: dict[str, object] = {}
    for rid, i in watched.items():
        engine.add_request(rid, {"prompt_token_ids": base[i]}, params(i, args.tokens))
    step = 0
    live: list[str] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                finished[output.request_id.split("-")[0]] = output
        if step % 3 == 0 and step < 60:
            rid = f"n{step}"
            noise = [rng.randrange(2, vocab) for _ in range(min(1 + step * 12, args.context - 70))]
            engine.add_request(rid, {"prompt_token_ids": noise}, params(step, 64, step % 5))
            live.append(rid)
        if step % 7 == 6 and live:
            with contextlib.suppress(Exception):
                engine.abort_request([live.pop(rng.randrange(len(live)))])
        step += 1
        if all(w in finished for w in watched) and step > 60:
            break
    engine.abort_request(list(live))
    for rid, i in watched.items():
        if rid in finished:
            tally.compare("join, leave, abort", alone[i], answer(finished[rid]), f"request {i}")
    used[0] += len(watched) + 20
    result.update(checks=tally.checks, requests=used[0], preemptions=preemptions(llm))
    result["seconds"] = round(time.time() - started, 1)
    return result


def allow_unproven(backend: str, features: tuple[str, ...]) -> None:
    """Switch on, through the plugin's own hook, what this check exists to prove."""
    from det_plugin.capabilities import Capability
    from det_plugin.hooks import hookimpl, plugin_manager

    class Allowed:
        @staticmethod
        @hookimpl(tryfirst=True)
        def det_plugin_capabilities() -> list[Capability]:
            return [Capability("cuda", b, f, supported=True) for b in (backend, "*") for f in features]

    plugin_manager().register(Allowed())


def preemptions(llm) -> int:
    """Preemptions so far, from the engine's own counters."""
    try:
        return sum(int(m.value) for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
    except Exception:
        core = llm.llm_engine.engine_core.engine_core
        return int(getattr(core.scheduler, "num_preemptions", -1))


def lay_rows_anywhere() -> None:
    """A deliberately wrong schedule: FlashInfer's query tiles start where a chunk of a prompt does."""
    from det_plugin.attention import flashinfer

    flashinfer.Layout.__post_init__ = lambda self: None
    flashinfer.Layout.cut = property(lambda self: 1)


def token_bytes(model: pathlib.Path) -> int:
    """Bytes of keys and values per token, in bfloat16."""
    config = json.loads((model / "config.json").read_text())
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * dim * 2


ENGINES = {
    "compile": ["det,{b},compile,512"],
    "stock": ["stock,{b},eager,8192"],
    "cpu": ["det,CPU_ATTN,eager,2048", "det,CPU_ATTN,eager,64,kvtokens=640", "stock,CPU_ATTN,eager,2048"],
    "quick": ["det,{b},eager,8192", "det,{b},compile,512", "{control},{b},eager,512"],
    "full": [
        "det,{b},eager,8192",
        "det,{b},compile,512",
        "det,{b},compile,8192,kvtokens=20000",
        "det,{b},eager,64,kvtokens=12000,async=0",
        "{control},{b},eager,512",
    ],
}


def environment() -> dict:
    """Versions and devices, for the report."""
    import torch

    from det_plugin.evidence.fingerprint import fingerprint

    facts = fingerprint("cuda" if torch.cuda.is_available() else "cpu")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {**facts, "commit": commit or None, "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}


def main() -> int:
    """Run every engine of the plan; print a table; write JSON; exit code 1 on a mismatch, 2 on a failed engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--single")
    parser.add_argument("--plan", default="quick", choices=sorted(ENGINES))
    parser.add_argument("--backends", default="TRITON_ATTN")
    parser.add_argument("--model-name", default="qwen3-0.6b", help=f"a random model: {', '.join(MODELS)}")
    parser.add_argument("--model", type=pathlib.Path, help="a checkpoint's folder instead")
    parser.add_argument("--work", type=pathlib.Path, default=pathlib.Path("/tmp/engine_check"))
    parser.add_argument("--alone", help="where a single engine writes its answers of requests run alone")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--seqs", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=60, help="no further batch round after this")
    parser.add_argument("--light", action="store_true", help="six watched requests instead of ten")
    parser.add_argument("--rng-seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="engines at a time")
    parser.add_argument("--limit", type=float, default=560, help="seconds for the whole plan")
    parser.add_argument("--commit", help="commit of the source, for the report")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("/tmp/engine_check/results"))
    args = parser.parse_args()
    if args.single:
        print("RESULT " + json.dumps(run_single(args)), flush=True)
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    args.work.mkdir(parents=True, exist_ok=True)
    if args.model is None:
        if args.model_name not in MODELS:
            parser.error(f"--model-name: got {args.model_name}, accepts {', '.join(MODELS)}; or give --model")
        args.model = write_model(args.model_name, args.work)
    else:
        args.model_name = args.model.name
    started = time.time()
    control = lambda b: "wrong" if b == "FLASHINFER" else "stock"
    backends = args.backends.split(",")
    plan = [(b, single.format(b=b, control=control(b))) for single in ENGINES[args.plan] for b in backends]
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        rows = [row for row in pool.map(lambda job: run_engine(args, started, *job), plan) if row]
    failed = sorted({single for _, single in plan} - {row["engine"] for row in rows})
    for backend in args.backends.split(","):
        compare_engines([row for row in rows if row["backend"] == backend])
    return write_report(args, rows, failed)


def run_engine(args, started: float, backend: str, single: str) -> dict | None:
    """One engine as a subprocess: its result, or None when it failed or had no time."""
    left = args.limit - (time.time() - started)
    if left < 30:
        print(f"NO TIME {single}", flush=True)
        return None
    name = single.replace(",", "_").replace("=", "-")
    alone = args.work / f"alone-{args.model_name}-{name}.json"
    alone.unlink(missing_ok=True)
    command = [
        sys.executable, __file__, "--single", single, "--model", str(args.model), "--model-name", args.model_name,
        "--alone", str(alone), "--context", str(args.context), "--seqs", str(args.seqs),
        "--tokens", str(args.tokens), "--rounds", str(args.rounds), "--seconds", str(args.seconds),
        "--rng-seed", str(args.rng_seed), *(["--light"] if args.light else []),
    ]  # fmt: skip
    log = args.out / f"{name}.log"
    with log.open("w") as file:
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=file, text=True, timeout=left, check=False)
            text = done.stdout
        except subprocess.TimeoutExpired as error:
            text = error.stdout.decode() if isinstance(error.stdout, bytes) else (error.stdout or "")
            text += f"\ncut off after {left:.0f} s"
        file.write(text)
    lines = [line for line in text.splitlines() if line.startswith("RESULT ")]
    if not lines:
        lines = log.read_text().splitlines()
        errors = [line for line in lines if "Error" in line][-6:]
        print(f"FAILED {single}\n" + "\n".join(errors + lines[-12:])[-2500:], flush=True)
        return None
    row = json.loads(lines[-1][7:])
    print(f"-- {single}: start {row['start_s']} s, total {row['seconds']} s, {row['requests']} requests", flush=True)
    return {**row, "model": args.model_name, "backend": backend, "alone": json.loads(alone.read_text())}


def compare_engines(rows: list[dict]) -> None:
    """Compare the answers of one backend's engines: deterministic with deterministic, stock with stock."""
    for deterministic in (True, False):
        first = None
        for row in rows:
            if row["engine"].startswith("det") != deterministic:
                continue
            if first is None:
                first = row
                continue
            tally = Tally()
            for i, (want, got) in enumerate(zip(first["alone"], row["alone"], strict=True)):
                tally.compare("another engine", want, got, f"request {i}, against {first['engine']}")
            row["checks"].update(tally.checks)


def write_report(args, rows: list[dict], failed: list[str]) -> int:
    """Print the table, write engine_invariance.json; the exit code (1: a mismatch, or a control without any)."""
    wrong = 0
    checks: dict = {}
    for row in rows:
        for name, entry in row["checks"].items():
            key = (name, row["backend"])
            at = checks.setdefault(key, {
                "name": name, "model": args.model_name, "backend": row["backend"], "comparisons": 0, "mismatches": 0,
                "negative_control_mismatches": 0, "negative_control_comparisons": 0,
            })  # fmt: skip
            stock = row["engine"].startswith(("stock", "wrong"))
            at["negative_control_mismatches" if stock else "mismatches"] += entry["mismatches"]
            at["negative_control_comparisons" if stock else "comparisons"] += entry["comparisons"]
            wrong += 0 if stock else entry["mismatches"]
    for row in rows:
        del row["alone"]
    facts = environment()
    facts["commit"] = args.commit or facts["commit"]
    report = {"environment": facts, "engines": rows, "checks": list(checks.values()), "failed": failed}
    (args.out / "engine_invariance.json").write_text(json.dumps(report, indent=1))
    print(f"{'check':28} {'backend':12} {'comparisons':>11} {'mismatches':>10} {'stock differs':>16}")
    for entry in checks.values():
        print(f"{entry['name']:28} {entry['backend']:12} {entry['comparisons']:11} {entry['mismatches']:10} "
              f"{entry['negative_control_mismatches']:7} of {entry['negative_control_comparisons']}")  # fmt: skip
    for row in rows:
        print(
            row["engine"],
            "distinct",
            row["distinct_tokens"],
            "preemptions",
            row["preemptions"],
            "hits",
            row["cache_hits"],
            {k: v["examples"] for k, v in row["checks"].items() if v["examples"]}
            if row["engine"].startswith("det")
            else "",
        )
    silent = silent_controls(report["checks"])
    print("failed:", failed, *(["controls that found nothing:", silent] if silent else []))
    return 2 if failed else (1 if wrong or silent else 0)


def silent_controls(checks: list[dict]) -> list[str]:
    """Backends whose negative control ran and differed nowhere: their checks could not have failed."""
    backends: dict[str, list[dict]] = {}
    for entry in checks:
        backends.setdefault(entry["backend"], []).append(entry)
    total = lambda entries, name: sum(entry[f"negative_control_{name}"] for entry in entries)
    return [b for b, rows in backends.items() if total(rows, "comparisons") and not total(rows, "mismatches")]


if __name__ == "__main__":
    sys.exit(main())
