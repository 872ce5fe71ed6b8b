"""Bits and speed of the GPU sampler.  Run as a script on a machine with a CUDA device.

    python tests/gpu/sampler_check.py [--out sampler_speed.json] [--stock DIR]

``DIR`` holds an importable ``vllm`` package with the stock sampling kernels; without it nothing is compared
with stock, and the report says so.  Exit status 1 when a bit differs.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from timing import interleaved

from det_plugin.sampling import filters, gpu, gpu_logprobs, noise, reference

VOCAB = 151936
FAILURES: list[str] = []


def check(name: str, ok: bool, detail: str = "") -> None:
    print(f"{'same' if ok else 'DIFFERENT'}  {name} {detail}", flush=True)
    if not ok:
        FAILURES.append(f"{name} {detail}")


class Batch:
    """Rows with parameters, as the sampler takes them."""

    def __init__(self, logits: torch.Tensor, rows: list[reference.RowParams]) -> None:
        self.logits, self.rows = logits, rows
        device = logits.device
        column = lambda values, dtype: torch.tensor(values, dtype=dtype, device=device)
        self.requests = torch.arange(len(rows), dtype=torch.int32, device=device)
        self.positions = column([r.position - 1 for r in rows], torch.int64)
        self.temperature = column([r.temperature for r in rows], torch.float32)
        self.seeds = column([r.seed for r in rows], torch.int64)
        self.top_k = column([r.top_k for r in rows], torch.int32)
        self.top_p = column([r.top_p for r in rows], torch.float32)
        self.log_min_p = column([float(reference.log_min_p(r.min_p)) for r in rows], torch.float32)
        self.with_top_k = any(r.temperature > 0 and 0 < r.top_k < logits.shape[1] for r in rows)
        self.filtered = any(
            r.temperature > 0 and (0 < r.top_k < logits.shape[1] or r.top_p < 1 or r.min_p > 0) for r in rows
        )

    def sample(self, index: torch.Tensor | None = None) -> torch.Tensor:
        pick = (lambda t: t) if index is None else (lambda t: t[index].contiguous())
        return gpu.sample(
            pick(self.logits), self.requests if index is None else index.int(), pick(self.positions),
            self.temperature, self.seeds, self.top_k, self.top_p, self.log_min_p, filtered=self.filtered,
            with_top_k=self.with_top_k,
        )  # fmt: skip


def mixed_rows(n: int, rng: np.random.Generator) -> list[reference.RowParams]:
    return [
        reference.RowParams(
            float(rng.choice([0, 0.1, 0.8, 1, 5])),
            int(rng.choice([0, 0, 1, 20, 300, 3000])),
            float(rng.choice([1, 0.95, 0.5, 0.1])),
            float(rng.choice([0, 0, 0.05])),
            int(rng.integers(0, 2**63)),
            int(rng.integers(1, 40000)),
        )
        for _ in range(n)
    ]


def check_bits() -> None:
    rng = np.random.default_rng(0)
    for dtype in (torch.float32, torch.bfloat16):
        for spread in (1.0, 4.0):
            n = 20
            logits = (torch.randn(n, VOCAB, device="cuda") * spread).to(dtype)
            logits[0] = -torch.inf
            logits[1, 1:] = -torch.inf
            logits[2] = logits[2].round()
            logits[3, torch.rand(VOCAB, device="cuda") < 0.99] = -torch.inf
            rows = mixed_rows(n, rng)
            got = Batch(logits, rows).sample().tolist()
            host = logits.float().cpu().numpy()
            want = [reference.sample_reference(host[i], rows[i]) for i in range(n)]
            check(f"tokens equal the numpy reference, {dtype}, spread {spread}", got == want)
    batch = Batch((torch.randn(256, VOCAB, device="cuda") * 3).bfloat16(), mixed_rows(256, rng))
    whole = batch.sample()
    wide = Batch(batch.logits.float(), batch.rows).sample()
    check("bf16 and fp32 logits of equal value", torch.equal(whole, wide))
    for size in (1, 2, 7, 64, 65, 128):
        index = torch.from_numpy(rng.permutation(256)[:size].copy()).cuda()
        check(f"{size} rows of 256, shuffled", torch.equal(batch.sample(index), whole[index]))
    for _ in range(20):
        if not torch.equal(batch.sample(), whole):
            check("20 repeats", False)
            break
    else:
        check("20 repeats", True)
    n = 32
    rows = batch.rows[:n]
    scale = lambda r: reference.inverse_temperature(r.temperature)
    masked = filters.masked_logits(
        batch.logits[:n], batch.temperature[:n], batch.top_k[:n], batch.top_p[:n], batch.log_min_p[:n]
    )
    host = batch.logits[:n].float().cpu().numpy()
    same = True
    for i, row in enumerate(rows):
        if row.temperature > 0:
            keep = reference.kept_tokens(host[i], row)
            same &= bool(np.array_equal(np.where(keep, host[i] * scale(row), -np.inf), masked[i].cpu().numpy()))
    check("masked logits equal the numpy reference", same)


def check_logprobs() -> None:
    logits = (torch.randn(256, VOCAB, device="cuda") * 3).bfloat16()
    tokens = torch.randint(0, VOCAB, (256,), device="cuda")
    ids = gpu_logprobs.top_ids(logits, 20)
    columns = torch.cat([tokens[:, None], ids], 1)
    values, ranks = gpu_logprobs.scores(logits, tokens, columns)
    exact = logits.double().log_softmax(-1).gather(1, columns)
    error = (values.double() - exact).abs().max().item()
    check("logprobs against float64", error < 2e-6, f"max error {error:.2e}")
    order = torch.sort(logits.float(), descending=True, stable=True, dim=-1).indices[:, :20]
    check("top ids: ties by id", torch.equal(ids, order))
    check("a larger k only appends", torch.equal(gpu_logprobs.top_ids(logits, 5), ids[:, :5]))
    own = (logits >= logits.gather(1, tokens[:, None])).sum(-1)
    check("ranks", torch.equal(ranks, own))
    one = lambda i: gpu_logprobs.scores(logits[i : i + 1], tokens[i : i + 1], columns[i : i + 1])[0]
    alone = torch.cat([one(i) for i in range(40)])
    check("rows alone", torch.equal(alone, values[:40]))
    check("fp32 logits", torch.equal(gpu_logprobs.scores(logits.float(), tokens, columns)[0], values))
    stock = logits[:64].log_softmax(-1, dtype=torch.float32).gather(1, columns[:64])
    print(f"      (torch log_softmax differs in {(stock != values[:64]).float().mean().item():.1%} of the values)")


def check_noise() -> None:
    host = noise.gumbel_noise(123456789012345, 777, np.arange(VOCAB))
    flat = torch.zeros(1, VOCAB, device="cuda")
    row = reference.RowParams(seed=123456789012345, position=777)
    left = np.ones(VOCAB, bool)
    same = True
    for _ in range(50):  # the order of the noise, largest first
        got = int(Batch(flat, [row]).sample()[0])
        want = int(np.argmax(np.where(left, host, -np.inf)))
        same &= got == want
        left[want] = False
        flat[0, want] = -torch.inf
    check("noise order of the 50 largest equals numpy", same)


def stock_step(directory: str | None = None):
    """One step by the host's kernels, of ``vllm`` in ``directory`` or as installed: a function of a batch, whether
    it has top-k and whether it has top-p.

    Raises:
        ImportError: there is no ``vllm``.
    """
    if directory:
        sys.path.insert(0, directory)
    from vllm.v1.sample.ops.topk_topp_triton import apply_top_k_top_p_triton
    from vllm.v1.worker.gpu.sample.gumbel import apply_temperature, gumbel_sample

    def step(b: Batch, use_k: bool, use_p: bool):
        logits = b.logits
        processed = bool(use_k or use_p or b.rows[0].temperature not in (0.0, 1.0))
        if processed:
            logits = torch.empty_like(logits, dtype=torch.float32).copy_(logits)
            apply_temperature(logits, b.requests, b.temperature)
            k = b.top_k[b.requests] if use_k else None
            p = b.top_p[b.requests] if use_p else None
            if use_k or use_p:
                logits = apply_top_k_top_p_triton(logits, k, p)
        return gumbel_sample(
            logits, b.requests, b.temperature, b.seeds, b.positions, apply_temperature=False, is_drafting=False
        )

    return step


def measure(functions: dict, repeats: int = 30) -> dict:
    """Median and spread in microseconds, functions interleaved, one CUDA graph each, L2 flushed before each."""
    times = interleaved({name: [f] for name, f in functions.items()}, repeats, flush=True)
    out = {}
    for name, values in times.items():
        values.sort()
        out[name] = {
            "median_us": round(statistics.median(values), 1),
            "p10_us": round(values[len(values) // 10], 1),
            "p90_us": round(values[-1 - len(values) // 10], 1),
        }
    return out


def peaked_logits(rows: int, vocab: int = VOCAB, device: str = "cuda") -> torch.Tensor:
    """About what a language model gives, float32 [rows, vocab]: a few tokens carry the mass."""
    logits = torch.randn(rows, vocab, device=device) * 2.0
    top = torch.randint(0, vocab, (rows, 40), device=device)
    return logits.scatter_add_(1, top, 20.0 - 0.3 * torch.arange(40.0, device=device).expand(rows, 40))


def speed(stock_dir: str | None) -> list[dict]:
    results = []
    stock = stock_step(stock_dir) if stock_dir else None
    cases = {
        "greedy": dict(temperature=0.0),
        "temperature 1": dict(temperature=1.0),
        "temperature 0.8": dict(temperature=0.8),
        "temperature 0.8, top_p 0.95": dict(temperature=0.8, top_p=0.95),
        "temperature 0.8, top_k 20, top_p 0.95": dict(temperature=0.8, top_k=20, top_p=0.95),
        "temperature 0.8, top_k 50": dict(temperature=0.8, top_k=50),
        "temperature 0.8, top_k 3000, top_p 0.95": dict(temperature=0.8, top_k=3000, top_p=0.95),
    }
    for rows in (256, 64, 8, 1):
        for name, kw in cases.items():
            for shape, spread in (("normal, spread 3", 3.0), ("peaked", 0.0)):
                torch.manual_seed(rows)
                logits = torch.randn(rows, VOCAB, device="cuda") * spread if spread else peaked_logits(rows)
                b = Batch(
                    logits.bfloat16(),
                    [reference.RowParams(seed=i, position=100 + i, **kw) for i in range(rows)],
                )
                functions = {"det": b.sample}
                if stock:
                    functions["stock"] = lambda b=b, kw=kw: stock(b, "top_k" in kw, "top_p" in kw)
                timing = measure(functions)
                entry = {"rows": rows, "vocab": VOCAB, "case": name, "logits": shape, **timing}
                if stock:
                    entry["ratio"] = round(timing["det"]["median_us"] / timing["stock"]["median_us"], 3)
                results.append(entry)
    return results


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    parser.add_argument("--stock")
    options = parser.parse_args()
    torch.manual_seed(0)
    check_noise()
    check_bits()
    check_logprobs()
    results = speed(options.stock)
    import triton

    report = {
        "what": "one sampling step under a CUDA graph, device time, L2 flushed, interleaved",
        "stock": "vLLM 0.32.0 V2 runner's kernels with explicit seeds (no FlashInfer)" if options.stock else None,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "failures": FAILURES,
        "results": results,
    }
    if options.out:
        Path(options.out).write_text(json.dumps(report, indent=1) + "\n")
    for r in results:
        stock = r.get("stock", {}).get("median_us", "-")
        det = r["det"]["median_us"]
        print(f"{r['rows']:4} {r['case']:38} {r['logits']:17} det {det:8} stock {stock:>8} {r.get('ratio', '')}")
    print("FAILURES:", FAILURES or "none")
    return bool(FAILURES)


if __name__ == "__main__":
    raise SystemExit(main())
