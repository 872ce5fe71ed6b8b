"""Attention on a real GPU: one byte string per row, whatever shares its batch; accuracy; speed against stock.

    python tests/gpu/attention_check.py --out DIR [--backends triton,fa3,flashinfer] [--only bits,speed]

Writes attention_invariance.json and attention_speed.json and prints a table.  Exit code 0: every check holds
and the negative control failed as it must; 1 otherwise.  FA3 needs vLLM's library (the package need not
import), FlashInfer its package.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import functools
import itertools
import json
import pathlib
import statistics
import subprocess
import sys
import time

import numpy as np
import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
from timing import interleaved

from det_plugin.attention import fa3, flashinfer, reference, triton_paged

DEV = "cuda"
HEADS = [(32, 8, 128), (9, 3, 64), (16, 8, 128), (8, 4, 256), (28, 4, 128), (8, 1, 128), (12, 12, 64), (16, 4, 96)]
CONTEXTS = [
    1,
    2,
    17,
    63,
    64,
    65,
    77,
    127,
    128,
    129,
    511,
    512,
    513,
    700,
    1000,
    2047,
    2048,
    2049,
    3072,
    3073,
    5000,
    8191,
    20000,
    40000,
]
MAX_CONTEXT = 40960
CHUNK = 37  # query rows of the prefill chunks under test


def i32(values):
    return torch.tensor(values, dtype=torch.int32, device=DEV)


class Pool:
    """A paged cache of random keys and values in the host's layout, and pages handed out at random."""

    def __init__(self, kv_heads, dim, page, tokens, dtype=torch.bfloat16, seed=0):
        torch.manual_seed(seed)
        self.page, self.pages = page, tokens // page
        kv = torch.randn(self.pages, kv_heads, page, 2 * dim, device=DEV, dtype=dtype)
        self.k, self.v = kv.transpose(1, 2).split(dim, -1)
        self.order, self.next = np.random.default_rng(seed).permutation(self.pages), 0

    def take(self, length):
        count = -(-length // self.page)
        got = self.order[self.next : self.next + count]
        if len(got) < count:
            raise RuntimeError("pool is too small")
        self.next += count
        return got


class Request:
    def __init__(self, q, pages, length):
        self.q, self.pages, self.length = q, pages, length


class Batch:
    """Requests laid out as the host lays them out: single rows first, then by number of rows."""

    def __init__(self, requests, page, width=None):
        self.requests = sorted(requests, key=lambda r: r.q.shape[0])
        self.q = torch.cat([r.q for r in self.requests])
        lens = [r.q.shape[0] for r in self.requests]
        self.start = np.concatenate([[0], np.cumsum(lens)]).astype(np.int64)
        self.lengths = np.array([r.length for r in self.requests], dtype=np.int64)
        table = np.zeros((len(lens), width or MAX_CONTEXT // page), dtype=np.int32)
        for i, r in enumerate(self.requests):
            table[i, : len(r.pages)] = r.pages
        self.table = torch.from_numpy(table).to(DEV)
        self.start_dev, self.lengths_dev = i32(self.start.tolist()), i32(self.lengths.tolist())
        self.max_query = max(lens)

    def rows(self, out, request):
        i = next(n for n, r in enumerate(self.requests) if r is request)
        return out[self.start[i] : self.start[i + 1]]


class Triton:
    name = "triton"

    def __init__(self, heads, page, dtype=torch.bfloat16, **kw):
        self.h, self.hk, self.d = heads
        self.kw = kw
        self.workspace = triton_paged.make_workspace(self.h, self.d, MAX_CONTEXT, DEV)

    def prepare(self, batch):
        return None

    def __call__(self, batch, pool, out, plan=None):
        return triton_paged.paged_attention(
            batch.q,
            pool.k,
            pool.v,
            out,
            batch.table,
            batch.start_dev,
            batch.lengths_dev,
            max_query_len=batch.max_query,
            scale=self.d**-0.5,
            workspace=self.workspace,
            **self.kw,
        )


class Fa3:
    name = "fa3"

    def __init__(self, heads, page, dtype=torch.bfloat16, **kw):
        fa3.load()
        self.h, self.hk, self.d = heads
        self.kw = kw
        self.layout = fa3.Layout(*heads, page, dtype)

    def prepare(self, batch):
        return fa3.plan_batch(self.layout, batch.start_dev, batch.lengths_dev, batch.start, batch.lengths, MAX_CONTEXT)

    def __call__(self, batch, pool, out, plan=None):
        return fa3.run(
            batch.q,
            pool.k,
            pool.v,
            out,
            batch.table,
            plan or self.prepare(batch),
            MAX_CONTEXT,
            scale=self.d**-0.5,
            **self.kw,
        )


class StockTriton:
    """The host's own Triton kernel, as its backend calls it."""

    name = "stock_triton"

    def __init__(self, heads, page, dtype=torch.bfloat16):
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention

        self.kernel = unified_attention
        self.h, self.hk, self.d = heads
        self.threshold = 128 // self.hk
        empty = lambda *shape: torch.empty(self.threshold, self.h, 16, *shape, dtype=torch.float32, device=DEV)
        self.partials = empty(self.d), empty(), empty()

    def prepare(self, batch):
        return None

    def __call__(self, batch, pool, out, plan=None):
        acc, most, total = self.partials
        self.kernel(
            q=batch.q,
            k=pool.k,
            v=pool.v,
            out=out,
            cu_seqlens_q=batch.start_dev,
            max_seqlen_q=batch.max_query,
            seqused_k=batch.lengths_dev,
            max_seqlen_k=int(batch.lengths.max()),
            softmax_scale=self.d**-0.5,
            causal=True,
            window_size=(-1, -1),
            block_table=batch.table,
            softcap=0.0,
            q_descale=None,
            k_descale=None,
            v_descale=None,
            seq_threshold_3D=self.threshold,
            num_par_softmax_segments=16,
            softmax_segm_output=acc,
            softmax_segm_max=most,
            softmax_segm_expsum=total,
        )
        return out


class FlashInfer:
    name = "flashinfer"

    def __init__(self, heads, page, dtype=torch.bfloat16, workspace=394 << 20):
        self.h, self.hk, self.d = heads
        self.layout = flashinfer.Layout(*heads, page, dtype, flashinfer.key_tile(heads[2]))
        flashinfer.kernel(dtype, self.d, False)
        self.workspace = torch.zeros(workspace, dtype=torch.uint8, device=DEV)

    def prepare(self, batch):
        if batch.max_query == 1:
            width = batch.table.shape[1]
            longest = int(batch.lengths.max())
            return flashinfer.plan_decode(self.layout, batch.start_dev, batch.lengths_dev, longest, width)
        return flashinfer.plan_rows(self.layout, batch.start, batch.lengths, batch.table, self.workspace.numel())

    def __call__(self, batch, pool, out, plan=None):
        return flashinfer.run(
            batch.q, pool.k, pool.v, out, batch.table, plan or self.prepare(batch), self.workspace, scale=self.d**-0.5
        )


class StockFlashInfer:
    """FlashInfer's own wrappers, as the host uses them where it can't fetch TensorRT-LLM's kernels: FA2 with its
    planner's split for decode, in a CUDA graph; FA3 for prefill.  One plan per batch: it holds the batch's pages."""

    name = "stock_flashinfer"

    def __init__(self, heads, page, dtype=torch.bfloat16):
        self.heads, self.page, self.dtype = heads, page, dtype
        self.workspace = torch.zeros(394 << 20, dtype=torch.uint8, device=DEV)

    def prepare(self, batch):
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper

        counts = -(-batch.lengths // self.page)
        indptr = torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))
        indices = torch.cat([batch.table[i, : int(n)] for i, n in enumerate(counts)])
        last = torch.from_numpy((batch.lengths - (counts - 1) * self.page).astype(np.int32))
        if batch.max_query == 1:
            buffers = [torch.zeros_like(x, device=DEV) for x in (indptr, indices, last)]
            wrapper = BatchDecodeWithPagedKVCacheWrapper(self.workspace, "NHD", True, True, *buffers)
            wrapper.plan(indptr, indices, last, *self.heads, self.page, q_data_type=self.dtype)
        else:
            wrapper = BatchPrefillWithPagedKVCacheWrapper(self.workspace, "NHD")
            starts = torch.from_numpy(batch.start.astype(np.int32))
            kinds = dict(causal=True, q_data_type=self.dtype)
            wrapper.plan(starts, indptr, indices, last, *self.heads, self.page, **kinds)
        return wrapper

    def __call__(self, batch, pool, out, plan=None):
        return plan.run(batch.q, (pool.k, pool.v), out=out)


class StockFa3:
    """FA3 as the host calls it; ``splits=1`` is its own batch-invariant mode."""

    name = "fa3 num_splits=1"

    def __init__(self, heads, page, dtype=torch.bfloat16, splits=1):
        fa3.load()
        self.h, self.hk, self.d = heads
        self.splits, self.page, self.dtype = splits, page, dtype

    def prepare(self, batch):
        if self.splits == 1:
            return None
        return torch.ops._vllm_fa3_C.get_scheduler_metadata(
            len(batch.lengths),
            batch.max_query,
            int(batch.lengths.max()),
            self.h,
            self.hk,
            self.d,
            self.d,
            self.dtype,
            batch.lengths_dev,
            batch.start_dev,
            None,
            None,
            None,
            None,
            self.page,
            0,
            True,
            -1,
            -1,
            False,
            self.splits,
            None,
            0,
        )

    def __call__(self, batch, pool, out, plan=None):
        torch.ops._vllm_fa3_C.fwd(
            batch.q,
            pool.k,
            pool.v,
            None,
            None,
            None,
            out,
            batch.start_dev,
            None,
            None,
            None,
            batch.lengths_dev,
            batch.max_query,
            int(batch.lengths.max()),
            batch.table,
            None,
            None,
            None,
            None,
            None,
            None,
            None,
            None,
            self.d**-0.5,
            True,
            -1,
            -1,
            0.0,
            True,
            plan,
            self.splits,
            None,
            0,
            None,
            1,
            0,
            None,
        )
        return out


def make(name, heads, page, **kw):
    kinds = (Triton, Fa3, FlashInfer, StockTriton, StockFlashInfer)
    return next(kind for kind in kinds if kind.name == name)(heads, page, **kw)


def differs(a, b):
    return (a.view(torch.int16) != b.view(torch.int16)).any().to(torch.int64)


def neighbours_check(runner, heads, page, lengths, seed=0, contexts=CONTEXTS):
    """Targets of every context, as a single row and as a chunk, beside neighbours of every length."""
    h, hk, d = heads
    rng = np.random.default_rng(seed)
    pool = Pool(hk, d, page, 2 * sum(contexts) + 1_200_000 // max(1, d // 64), seed=seed)
    q = torch.randn(max(lengths) + 8, h, d, device=DEV, dtype=torch.bfloat16)
    targets = []
    for c in contexts:
        pages = pool.take(c)
        targets.append(Request(torch.randn(1, h, d, device=DEV, dtype=torch.bfloat16), pages, c))
        rows = min(c, CHUNK)
        targets.append(Request(torch.randn(rows, h, d, device=DEV, dtype=torch.bfloat16), pages, c))
    want = []
    for t in targets:
        b = Batch([t], page)
        want.append(runner(b, pool, torch.full_like(b.q, 7)).clone())
    bad = torch.zeros((), dtype=torch.int64, device=DEV)
    count, mark = 0, pool.next
    for n in lengths:
        pool.next = mark
        others = [Request(q[:n], pool.take(n + int(rng.integers(0, 300))), 0)]
        others[0].length = len(others[0].pages) * page
        for _ in range(int(rng.choice([0, 1, 3, 30, 247]))):
            c = int(rng.integers(1, 700))
            r = int(rng.integers(1, 4)) if rng.random() < 0.2 else 1
            at = int(rng.integers(0, 8))
            others.append(Request(q[at : at + min(r, c)], pool.take(c), c))
        chosen = [int(x) for x in rng.choice(len(targets), size=int(rng.integers(1, 9)), replace=False)]
        batch = Batch([targets[i] for i in chosen] + others, page)
        out = runner(batch, pool, torch.full_like(batch.q, 7))
        for i in chosen:
            bad += differs(batch.rows(out, targets[i]), want[i])
            count += 1
    return count, int(bad)


def phases_check(runner, heads, page, length=9000, seed=1):
    """One prompt: prefilled at once, in chunks, decoded row by row; by launch and under a CUDA graph."""
    h, hk, d = heads
    pool = Pool(hk, d, page, length + 64 * page, seed=seed)
    pages = pool.take(length)
    q = torch.randn(length, h, d, device=DEV, dtype=torch.bfloat16)
    whole = Batch([Request(q, pages, length)], page)
    full = runner(whole, pool, torch.full_like(q, 7)).clone()
    bad = torch.zeros((), dtype=torch.int64, device=DEV)
    count = 0
    for size in (61, 64, 512, 1000, 2048, 8192):
        for a in range(0, length, size):
            if size < 512 and (a // size) % 9:
                continue
            b = min(a + size, length)
            batch = Batch([Request(q[a:b], pages, b)], page)
            bad += differs(runner(batch, pool, torch.full_like(batch.q, 7)), full[a:b])
            count += 1
    edges = {p for edge in (1, 16, 64, 128, 512, 2048, 3072, 4096) for p in (edge - 1, edge)}
    positions = sorted({*edges, 2049, length - 1, *range(5, length, 97)})
    positions = [p for p in positions if p < length]
    for a in range(0, len(positions), 64):
        group = positions[a : a + 64]
        batch = Batch([Request(q[p : p + 1], pages, p + 1) for p in group], page)
        out = runner(batch, pool, torch.full_like(batch.q, 7))
        bad += differs(out, torch.stack([full[r.length - 1] for r in batch.requests]))
        count += len(group)
    return count, int(bad)


def graph_check(name, heads, page, seed=2):
    """A decode batch captured once and replayed on other contents equals eager launches."""
    h, hk, d = heads
    reqs = 24
    pool = Pool(hk, d, page, 600_000 // max(1, d // 64), seed=seed)
    rng = np.random.default_rng(seed)
    runner = make(name, heads, page)
    width = MAX_CONTEXT // page
    q = torch.zeros(reqs, h, d, device=DEV, dtype=torch.bfloat16)
    out = torch.zeros_like(q)
    start, lens = i32(list(range(reqs + 1))), i32([1] * reqs)
    table = torch.zeros(reqs, width, dtype=torch.int32, device=DEV)
    if name == "triton":
        launch = lambda: triton_paged.paged_attention(
            q, pool.k, pool.v, out, table, start, lens, max_query_len=1, scale=d**-0.5, workspace=runner.workspace
        )
        refresh = lambda: None
    elif name == "fa3":
        buffers = [torch.zeros(4 * fa3.MAX_SEQUENCES + 4, dtype=torch.int32, device=DEV)]
        state = {}

        def refresh():
            state["plan"] = fa3.plan_decode(runner.layout, start, lens, MAX_CONTEXT, buffers)

        launch = lambda: fa3.run(q, pool.k, pool.v, out, table, state["plan"], MAX_CONTEXT, scale=d**-0.5)
    else:
        buffers = flashinfer.make_buffers(reqs, MAX_CONTEXT, DEV)
        state = {}

        def refresh():
            state["plan"] = flashinfer.plan_decode(runner.layout, start, lens, MAX_CONTEXT, width, buffers)

        launch = lambda: flashinfer.run(q, pool.k, pool.v, out, table, state["plan"], runner.workspace, scale=d**-0.5)
    refresh()
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    count = bad = 0
    for trial in range(6):
        pool.next = 0
        live = [24, 24, 17, 1, 24, 9][trial]
        requests = []
        for _ in range(live):
            c = int(rng.integers(1, [300, 3000, 12000, MAX_CONTEXT, 9000, 20000][trial] + 1))
            requests.append(Request(torch.randn(1, h, d, device=DEV, dtype=torch.bfloat16), pool.take(c), c))
        batch = Batch(requests, page)
        want = runner(batch, pool, torch.full_like(batch.q, 7))
        q.zero_()
        q[:live].copy_(batch.q)
        table.zero_()
        table[:live].copy_(batch.table)
        lens.zero_()
        lens[:live].copy_(batch.lengths_dev)
        start.copy_(i32([min(i, live) for i in range(reqs + 1)]))
        refresh()
        out.fill_(7)
        graph.replay()
        count += live
        bad += int((out[:live].view(torch.int16) != want.view(torch.int16)).flatten(1).any(1).sum())
        bad += int((out[live:] != 7).any())
    return count, bad


def accuracy(runner, heads, page, length=2500):
    """Relative error against float64 over the last 300 rows."""
    h, hk, d = heads
    pool = Pool(hk, d, page, length + 64 * page, seed=3)
    pages = pool.take(length)
    q = torch.randn(300, h, d, device=DEV, dtype=torch.bfloat16)
    batch = Batch([Request(q, pages, length)], page)
    out = runner(batch, pool, torch.empty_like(q)).double()
    index = torch.from_numpy(pages).to(DEV)
    k, v = reference.gather_pages(pool.k, index, length), reference.gather_pages(pool.v, index, length)
    ref = reference.attention_reference(q, k, v, scale=d**-0.5)
    return ((out - ref).norm() / ref.norm()).item()


def bits(backends, checks, flashinfer_dims, save, chosen):
    lengths = [*range(1, 301), 512, 1000, 4096]
    begun = time.time()
    control = 0
    for heads in HEADS[1:2]:
        fa3.load()
        count, bad = neighbours_check(StockFa3(heads, 16), heads, 16, [1, 2, 8, 31, 32, 33, 100, 300, 1000])
        control += bad
        print("negative control: FA3 with num_splits=1,", heads, bad, "of", count, flush=True)
    for heads in chosen:
        label = "{} query heads, {} kv heads, {}".format(*heads)
        for name in backends:
            t0 = time.time()
            if name == "flashinfer" and heads[2] not in flashinfer_dims:
                continue
            runner = make(name, heads, 16)
            count, bad = neighbours_check(runner, heads, 16, lengths)
            checks.append(dict(name="neighbours", model=label, backend=name, comparisons=count, mismatches=bad))
            for page in (16, 128):
                r = make(name, heads, page)
                count, bad = phases_check(r, heads, page)
                checks.append(
                    dict(
                        name=f"decode = prefill = chunks, page {page}",
                        model=label,
                        backend=name,
                        comparisons=count,
                        mismatches=bad,
                    )
                )
            count, bad = graph_check(name, heads, 16)
            checks.append(
                dict(
                    name="CUDA graph = eager",
                    model=label,
                    backend=name,
                    comparisons=count,
                    mismatches=bad,
                    relative_error=accuracy(runner, heads, 16),
                )
            )
            for c in checks:
                c["negative_control_mismatches"] = control
            save()
            mine = [c["mismatches"] for c in checks if c["model"] == label and c["backend"] == name]
            print(
                f"{label:40s} {name:10s}",
                mine,
                f"err {checks[-1]['relative_error']:.2e} {time.time() - t0:.1f} s",
                flush=True,
            )
    print(f"bits: {time.time() - begun:.0f} s", flush=True)
    return control > 0 and not any(c["mismatches"] for c in checks)


CASES = [
    ("decode", 1, 640),
    ("decode", 8, 640),
    ("decode", 64, 640),
    ("decode", 256, 640),
    ("decode", 1, 2000),
    ("decode", 16, 4000),
    ("decode", 1, 30000),
    ("decode", 4, 30000),
    ("prefill", 8, 4096),
    ("prefill", 1, 8192),
]


def rotated_batches(pool, heads, kind, count, context):
    """Batches of one shape at random places of the pool, enough of them to leave the L2 cache: a model's layers."""
    rows = 1 if kind == "decode" else context
    layers = max(2, min(24, int(2e8 / (count * context * 4096)))) if rows == 1 else 2
    q = torch.randn(rows, heads[0], heads[2], device=DEV, dtype=torch.bfloat16)
    batches = []
    for i in range(layers):
        free = pool.pages - count * (-(-context // pool.page))
        pool.next = int(np.random.default_rng(i).integers(0, free))
        batches.append(Batch([Request(q, pool.take(context), context) for _ in range(count)], pool.page))
    return batches


def layer_calls(name, heads, pool, batches, out):
    """One call per batch, all with the plan of the first, as the engine plans a step once for all layers."""
    first, decode = batches[0], batches[0].max_query == 1
    runner = StockFa3(heads, pool.page, splits=32 if decode else 0) if name == "stock" else make(name, heads, pool.page)
    plan = runner.prepare(first)
    if name == "fa3" and decode:
        plan = fa3.plan_decode(runner.layout, first.start_dev, first.lengths_dev, MAX_CONTEXT)
    elif name == "flashinfer" and decode:
        width = first.table.shape[1]
        plan = flashinfer.plan_decode(runner.layout, first.start_dev, first.lengths_dev, MAX_CONTEXT, width)
    later = map(runner.prepare, batches[1:]) if name == "stock_flashinfer" else itertools.repeat(plan)
    plans = itertools.chain([plan], later)
    return [functools.partial(runner, batch, pool, out, plan) for batch, plan in zip(batches, plans, strict=False)]


def speed(backends, results, save, heads=(32, 8, 128), page=16):
    """Microseconds a layer under a CUDA graph, layers' caches rotated, against stock FA3; interleaved."""
    _, hk, d = heads
    pages = {name: 64 if name == "triton" else page for name in ["stock", *backends]}  # each one's default
    pools = {p: Pool(hk, d, p, 1_000_000) for p in set(pages.values())}
    for kind, count, context in CASES:
        batches = {p: rotated_batches(pool, heads, kind, count, context) for p, pool in pools.items()}
        out = torch.empty_like(batches[page][0].q)
        sides = {name: layer_calls(name, heads, pools[p], batches[p], out) for name, p in pages.items()}
        try:
            got = interleaved(sides, 15 if kind == "decode" else 7)
        except Exception as error:
            print(kind, count, context, repr(error)[:300])
            continue
        layers = len(batches[page])
        case = dict(case=f"{kind} {count} x {context}", unit="us per layer", heads=list(heads), layers=layers)
        stock = statistics.median(got["stock"])
        for name, times in got.items():
            median = statistics.median(times)
            case[name] = round(median, 2)
            case[f"{name}_spread"] = round(max(times) - min(times), 2)
            if name != "stock":
                case[f"{name}_ratio"] = round(stock / median, 3)
        results.append(case)
        save()
        print({k: v for k, v in case.items() if "spread" not in k and k not in ("unit", "heads")}, flush=True)


def environment(commit):
    run = lambda *c: subprocess.run(c, capture_output=True, text=True, check=False).stdout.strip()
    import triton

    env = dict(
        gpu=torch.cuda.get_device_name(),
        driver=run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        torch=torch.__version__,
        triton=triton.__version__,
        commit=commit or run("git", "rev-parse", "HEAD"),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
    from importlib import metadata

    for name, package in (("vllm", "vllm"), ("flashinfer", "flashinfer-python")):
        try:
            env[name] = metadata.version(package)
        except metadata.PackageNotFoundError:
            env[name] = None
    return env


def warm(part, parts):
    """Compile a share of the Triton variants; processes side by side fill the shared cache."""
    jobs = [
        (heads, page, rows, shared)
        for heads in HEADS
        for page in (16, 128)
        for rows in (1, 300)
        for shared in (False, True)
    ]
    for heads, page, rows, shared in jobs[part::parts]:
        pool = Pool(heads[1], heads[2], page, 64 * page)
        q = torch.randn(rows, heads[0], heads[2], device=DEV, dtype=torch.bfloat16)
        length = 16 if rows == 1 else 300
        batch = Batch([Request(q, pool.take(length), length)], page)
        runner = Triton(heads, page)
        if not shared:
            runner.workspace = None
        runner(batch, pool, torch.empty_like(q))
    torch.cuda.synchronize()


def side_by_side(args, chosen, checks) -> bool:
    """One process per head configuration, ``args.jobs`` at a time; their checks, in the order of ``chosen``."""

    def one(index):
        part = args.out / f"heads-{index}"
        command = [sys.executable, __file__, "--out", str(part), "--backends", args.backends, "--only", "bits"]
        command += ["--flashinfer-dims", args.flashinfer_dims, "--heads", str(index)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        print(done.stdout if not done.returncode else done.stdout[-3000:], flush=True)
        return done.returncode, part / "attention_invariance.json"

    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        results = list(pool.map(one, chosen))
    for _, path in results:
        if path.exists():
            checks += json.loads(path.read_text())["checks"]
    return all(code == 0 for code, _ in results)


def main() -> int:
    if len(sys.argv) > 2 and sys.argv[1] == "warm":
        warm(int(sys.argv[2]), int(sys.argv[3]))
        return 0
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--out", type=pathlib.Path, required=True)
    ap.add_argument("--backends", default="triton,fa3")
    ap.add_argument("--only", default="bits,speed")
    ap.add_argument("--commit", default="", help="written into the report; default: of this checkout")
    ap.add_argument("--compare", default="", help="stock_triton,stock_flashinfer: the host's other kernels as well")
    ap.add_argument("--flashinfer-dims", default="64,128,256", help="head sizes to run on FlashInfer")
    ap.add_argument("--heads", default=",".join(map(str, range(len(HEADS)))), help=f"indices into {HEADS}")
    ap.add_argument("--jobs", type=int, default=1, help="processes that share the head configurations of 'bits'")
    args = ap.parse_args()
    chosen = [int(i) for i in args.heads.split(",")]
    backends = args.backends.split(",")
    args.out.mkdir(parents=True, exist_ok=True)
    good, env = True, environment(args.commit)
    if "triton" in backends and "bits" in args.only and len(chosen) > 1:
        begun = time.time()
        helpers = [subprocess.Popen([sys.executable, __file__, "warm", str(i), "12"]) for i in range(12)]
        for helper in helpers:
            helper.wait()
        print(f"compiled in {time.time() - begun:.0f} s", flush=True)

    def write(name, **what):
        (args.out / name).write_text(json.dumps(dict(environment=env, **what), indent=1) + "\n")

    if "bits" in args.only:
        checks: list[dict] = []
        dims = [int(d) for d in args.flashinfer_dims.split(",")]
        save = lambda: write("attention_invariance.json", checks=checks)
        if args.jobs > 1:
            good = side_by_side(args, chosen, checks)
            save()
        else:
            good = bits(backends, checks, dims, save, [HEADS[i] for i in chosen])
        worst = max(c["mismatches"] for c in checks)
        print(
            f"{sum(c['comparisons'] for c in checks)} comparisons, {worst} mismatches in the worst check, control",
            checks[0]["negative_control_mismatches"],
            "SAME" if good else "DIFFERENT",
            flush=True,
        )
    if "speed" in args.only:
        cases: list[dict] = []
        compared = args.compare.split(",") if args.compare else []
        speed(backends + compared, cases, lambda: write("attention_speed.json", cases=cases))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
