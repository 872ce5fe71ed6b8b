"""Checks and times the operators on a CUDA GPU.

    PYTHONPATH=. python tests/gpu/ops_check.py --out FOLDER [--quick] [--seconds 150]

Writes FOLDER/ops_invariance.json (every comparison is of bytes; each group has a negative control that must
differ) and FOLDER/ops_speed.json (stock against deterministic, interleaved).  Exit code 1 when a comparison
differs, a negative control does not, or an accuracy bound is broken.
"""

import argparse
import importlib
import json
import math
import random
import sys
import threading
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch
from timing import graph_pairs, wall_time
from torch.nn.functional import linear as stock_linear
from torch.nn.functional import rms_norm as stock_rms_norm

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from linear_shapes import SHAPES

import det_plugin.ops._custom_ops  # noqa: F401  registers torch.ops.det_plugin.*
from det_plugin.evidence.fingerprint import fingerprint, package_version
from det_plugin.ops import linear_cuda, linear_fast, rows_fast
from det_plugin.ops.blocked_sum import SUM_BLOCK, blocked_product
from det_plugin.ops.bmm import bmm
from det_plugin.ops.linear_cuda import LinearDispatcher, canonical_linear, linear_reference
from det_plugin.ops.linear_plan import DEFAULT_TABLES, certification_data
from det_plugin.ops.linear_schedules import CANONICAL, Tile, run_tile, table_key
from det_plugin.ops.linear_tuning import candidates, rotating_weights
from det_plugin.ops.mean import mean, mean_reference
from det_plugin.ops.qk_norm_rope import find_contraction, qk_norm_rope, qk_norm_rope_reference

BIASED = {("Qwen2.5-7B", (4608, 3584))}
SPEED_ROWS = (1, 8, 32, 64, 128, 256, 512, 1024, 4096)
SPEED_MODELS = ("Qwen3-8B", "Qwen3-1.7B", "Llama-3.1-8B")
DEVICE = torch.device("cuda")
EPS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}

rms_norm = importlib.import_module("det_plugin.ops.rms_norm")
softmax = importlib.import_module("det_plugin.ops.softmax")

checks: list[dict] = []
speed: list[dict] = []
failures: list[str] = []


def differing_rows(a: torch.Tensor, b: torch.Tensor) -> int:
    """Rows (first dimension) whose bytes differ."""
    assert a.shape == b.shape, (a.shape, b.shape)
    assert a.dtype == b.dtype
    kind = {2: torch.int16, 4: torch.int32}[a.element_size()]
    unequal = a.contiguous().view(kind) != b.contiguous().view(kind)
    return int(unequal.reshape(a.shape[0], -1).any(1).sum()) if a.numel() else 0


def record(name: str, model: str, comparisons: int, mismatches: int, control: int | None, **more) -> None:
    """One line of the report; ``control`` None where another check of the group carries the control."""
    checks.append(
        {
            "name": name,
            "model": model,
            "backend": "ops",
            "comparisons": comparisons,
            "mismatches": mismatches,
            "negative_control_mismatches": control,
            **more,
        }
    )
    if mismatches:
        failures.append(f"{name} {model}: {mismatches} of {comparisons} differ")
    if not comparisons:
        failures.append(f"{name} {model}: nothing was compared")


def row_counts(table_bounds: list[int], seed: int, count: int = 60, top: int = 8192) -> list[int]:
    """``count`` row counts from 1 to ``top``: both sides of each threshold, the rest random."""
    fixed = {1, 2, 3, top, top - 1}
    for bound in (*table_bounds, 16, 32, 64, 128, 256, 512, 1024):
        fixed |= {bound, bound + 1}
    fixed = {c for c in fixed if c <= top}
    rng = random.Random(seed)
    while len(fixed) < count:
        fixed.add(int(math.exp(rng.uniform(0, math.log(top)))))
    return sorted(fixed)


def check_linear(dispatcher: LinearDispatcher, models: dict, dtype: torch.dtype, counts: int) -> None:
    """Rows bitwise equal over row counts and positions, repeats, accuracy, stock as negative control."""
    operator = torch.ops.det_plugin.linear
    for model, shapes in models.items():
        compared = mismatched = control = rows_run = schedules = 0
        certify_seconds = 0.0
        worst_ratio, struck = 0.0, {}
        for n, k in shapes:
            has_bias = (model, (n, k)) in BIASED
            top = 8192
            x, w, b = certification_data(top, n, k, dtype, has_bias, DEVICE)
            begin = time.monotonic()
            plan = dispatcher.plan(n, k, dtype, has_bias, 0)
            certify_seconds += time.monotonic() - begin
            schedules += len(plan.certificate.accepted)
            struck |= {f"{n},{k},{name}": str(d) for name, d in plan.certificate.struck_out.items()}
            expected = canonical_linear(x, w, b)
            stock_all = stock_linear(x, w, b)
            rng = random.Random(n + k)
            bounds = [bound for bound, _ in plan.table if bound is not None]
            for m in row_counts(bounds, n, counts, top):
                start = rng.randrange(top - m + 1)
                want = expected[start : start + m]
                mismatched += differing_rows(dispatcher(x[start : start + m], w, b), want)
                for _ in range(2):  # the second call takes the compiled path
                    mismatched += differing_rows(operator(x[start : start + m], w, b), want)
                compared += 3 * m
                rows_run += 1
            for m in (1, 2, 3, 8, 16, 33, 64, 100, 256):
                control += differing_rows(stock_linear(x[:m], w, b), stock_all[:m])
            for m in (1, 17, 100, 700):
                first = dispatcher(x[:m], w, b)
                mismatched += sum(differing_rows(dispatcher(x[:m], w, b), first) for _ in range(10))
                compared += 10 * m
            exact = x[:128].double() @ w.double().T + (0 if b is None else b.double())
            ours, theirs = ((t[:128].double() - exact).norm() / exact.norm() for t in (expected, stock_all))
            worst_ratio = max(worst_ratio, (ours / theirs).item())
            del x, w, b, expected, stock_all, exact
            torch.cuda.empty_cache()
        kind = str(dtype).removeprefix("torch.")
        record(
            f"linear rows ({kind})", model, compared, mismatched, control, row_counts=rows_run,
            error_ratio_to_cublas=round(worst_ratio, 4), struck_out=struck,
            certified_schedules=schedules, certify_seconds=round(certify_seconds, 2),
        )  # fmt: skip
        if worst_ratio > 1.01:
            failures.append(f"linear {model} {kind}: error {worst_ratio:.3f} of cuBLAS's")


def split_k(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A deliberately wrong schedule: K in two halves."""
    half = x.shape[-1] // 2
    parts = [
        canonical_linear(x[:, part].contiguous(), w[:, part].contiguous()) for part in (slice(half), slice(half, None))
    ]
    return parts[0] + parts[1]


def check_float32_order(dispatcher: LinearDispatcher) -> None:
    """Every float32 tile against the order in plain torch, bit for bit; control: one chain over all of K."""
    compared = mismatched = control = 0
    tiles = {*candidates(torch.float32, 0, 0), *(name for _, name in DEFAULT_TABLES[torch.float32])}
    for n, k in [(576, 576), (128, 1536), (65, 333), (33, 33), (16, 32), (5, 31)]:
        x, w, b = certification_data(70, n, k, torch.float32, True, DEVICE)
        want = linear_reference(x, w, b)
        for name in sorted(tiles):
            y = torch.empty_like(want)
            run_tile(Tile.parse(name), x, w, b, y)
            mismatched += differing_rows(y, want)
        for m in (1, 33, 70):
            mismatched += differing_rows(dispatcher(x[:m], w, b), want[:m])
        compared += len(tiles) * 70 + 104
        chain = differing_rows(blocked_product(x, w, k) + b, want)
        control += chain
        if bool(chain) != (k > SUM_BLOCK):
            failures.append(f"float32 order N={n} K={k}: {chain} rows of one chain differ")
    record("linear float32 order", "", compared, mismatched, control)


def check_linear_shapes(dispatcher: LinearDispatcher) -> None:
    """N-d, strided, unaligned, odd and empty inputs against the canonical tile on contiguous copies."""
    compared = mismatched = control = 0

    def same(y: torch.Tensor, want: torch.Tensor) -> None:
        nonlocal compared, mismatched
        want = want.reshape(y.shape)
        compared += max(1, y.shape[0])
        mismatched += differing_rows(y, want) if y.numel() else 0

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for n, k in [(577, 333), (1, 1), (129, 8), (264, 520)]:
            base = torch.randn(260, k + 9, device=DEVICE, dtype=dtype)
            w = torch.randn(n, k, device=DEVICE, dtype=dtype)
            b = torch.randn(n, device=DEVICE, dtype=dtype)
            x = base[:, :k].contiguous()
            want = canonical_linear(x, w, b)
            control += differing_rows(split_k(x, w), canonical_linear(x, w)) if k > 1 else 0
            exact = x.double() @ w.double().T + b.double()
            error = ((want.double() - exact).norm() / exact.norm()).item()
            if not error < 4 * max(EPS[dtype], 2.0**-24 * k**0.5):
                failures.append(f"linear {dtype} N={n} K={k}: error {error:.2e}")
            for m in (1, 2, 17, 64, 65, 129, 260):
                same(dispatcher(x[:m], w, b), want[:m])
            same(dispatcher(base[:, :k], w, b), want)
            shifted = torch.empty(260 * k + 1, device=DEVICE, dtype=dtype)[1:].view(260, k).copy_(x)
            same(dispatcher(shifted, w, b), want)
            same(dispatcher(x.T.contiguous().T, w, b), want)
            same(dispatcher(x[::2], w, b), want[::2])
            same(dispatcher(x.view(2, 130, k), w, b), want)
            same(dispatcher(x.view(2, 130, k)[:, ::3], w, b), want.view(2, 130, n)[:, ::3])
            same(dispatcher(x, w.T.contiguous().T, b), want)
            same(dispatcher(x[7], w, b), want[7:8])
            same(dispatcher(x[:1].expand(5, k), w, b), want[:1].expand(5, n))
            assert dispatcher(x[:0], w, b).shape == (0, n)
            assert dispatcher(x[:0].view(0, 4, k), w, None).shape == (0, 4, n)
            assert dispatcher(x.new_empty(3, 0), x.new_empty(n, 0), None).eq(0).all()
    for arguments, words in [
        ((torch.ones(2, 3, device=DEVICE, dtype=torch.int32), torch.ones(4, 3, device=DEVICE)), "x: got dtype"),
        ((torch.ones(2, 3, device=DEVICE), torch.ones(4, 5, device=DEVICE)), "x: got shape"),
        ((torch.ones(2, 3, device=DEVICE), torch.ones(4, 3, device=DEVICE).half()), "weight: got"),
    ]:
        try:
            dispatcher(*arguments)
            failures.append(f"linear accepted {words}")
        except ValueError as error:
            if words not in str(error):
                failures.append(f"linear said {error}, expected {words}")
    record("linear shapes", "", compared, mismatched, control)


def check_linear_modes() -> None:
    """Two tuning tables, CUDA graph replay, torch.compile and another process's plan: one set of bytes."""
    compared = mismatched = control = 0
    for n, k in [(6144, 4096), (1024, 3072)]:
        x, w, _ = certification_data(700, n, k, torch.bfloat16, False, DEVICE)
        control += differing_rows(split_k(x, w), canonical_linear(x, w))
        key = table_key(torch.bfloat16, n, k)
        tiles = ((8, "pointer-16x32x128-w4-s4"), (64, "swap-64x64x128-w4-s5"), (None, "tma-128x128x64-w8-s4"))
        first = LinearDispatcher(tables={key: ((None, "cublaslt"),)})
        second = LinearDispatcher(tables={key: tiles})
        names: set[str] = set()
        for m in (1, 8, 9, 64, 65, 700):
            a, b = first(x[:m], w), second(x[:m], w)
            mismatched += differing_rows(a, b)
            compared += m
            plans = (first.plan(n, k, torch.bfloat16, False, 0), second.plan(n, k, torch.bfloat16, False, 0))
            names |= {plan.schedule(m).split("-")[0] for plan in plans}
            static, graph = x[:m].clone(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = (first(static, w), second(static, w))
            graph.replay()
            mismatched += sum(differing_rows(c, a) for c in captured)
            compiled = torch.compile(
                lambda t, v: torch.ops.det_plugin.linear(t, v),  # noqa: PLW0108 (a packet is no function)
                fullgraph=True,
                backend="aot_eager",
            )
            mismatched += differing_rows(compiled(x[:m], w), a)
            compared += 3 * m
        if len(names) < 4:
            failures.append(f"two tables ran only {sorted(names)}")
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            LinearDispatcher()(x[:3], w)
        failures.append("a plan was made during capture")
    except linear_cuda.CertificateError:
        pass
    record("linear two tables, graph, compile", "", compared, mismatched, control)


def check_norms() -> None:
    """Reference bit for bit, row counts, positions, strides, fused against unfused."""
    for width in (128, 576, 2560, 4096, 12288):
        compared = mismatched = 0
        w = torch.randn(width, device=DEVICE, dtype=torch.bfloat16)
        x = torch.randn(4096, width, device=DEVICE, dtype=torch.bfloat16)
        r = torch.randn_like(x)
        for offset in (0.0, 1.0) if width == 2560 else (0.0,):  # 1.0: Gemma
            want = rms_norm.rms_norm_reference(x, w, 1e-6, offset)
            fused_want, total_want = rms_norm.fused_add_rms_norm_reference(x, r, w, 1e-6, offset)
            for m in row_counts([255, 256], width, 40, 4096):
                start = random.Random(m).randrange(4096 - m + 1)
                rows = slice(start, start + m)
                y = rms_norm.rms_norm(x[rows], w, 1e-6, offset)
                fx, fr = rms_norm.fused_add_rms_norm(x[rows], r[rows], w, 1e-6, offset)
                unfused = rms_norm.rms_norm(x[rows] + r[rows], w, 1e-6, offset)
                for got, expected in (
                    (y, want[rows]), (fx, fused_want[rows]), (fr, total_want[rows]), (fx, unfused),
                ):  # fmt: skip
                    mismatched += differing_rows(got, expected)
                    compared += m
        wide = torch.randn(300, width + 8, device=DEVICE, dtype=torch.bfloat16)
        for view in (wide[:, :width], wide[:, 1 : width + 1], wide[::3, 4 : width + 4]):
            got = rms_norm.rms_norm(view, w)
            mismatched += differing_rows(got, rms_norm.rms_norm(view.contiguous(), w))
            mismatched += differing_rows(got, rms_norm.rms_norm_reference(view, w, 1e-6))
            compared += 2 * len(view)
        heads = torch.randn(64, 3 * width, device=DEVICE, dtype=torch.bfloat16)[:, width:].view(64, 2, width)
        got = rms_norm.rms_norm(heads, w).view(128, width)
        mismatched += differing_rows(got, rms_norm.rms_norm_reference(heads, w, 1e-6).view(128, width))
        compared += 128
        y32 = torch.randn(512, width, device=DEVICE)
        kept, rms_norm.MAX_LANES = rms_norm.MAX_LANES, 64  # control: a tree of 64 lanes
        wrong = rms_norm.rms_norm_reference(y32, None, 1e-6)
        rms_norm.MAX_LANES = kept
        right = rms_norm.rms_norm(y32, None)
        mismatched += differing_rows(right, rms_norm.rms_norm_reference(y32, None, 1e-6))
        compared += 512
        control = differing_rows(wrong, right)
        record("rms_norm, fused_add_rms_norm", f"width {width}", compared, mismatched, control)


def check_softmax() -> None:
    """Row counts, positions, strides; accuracy against float64; another segment width as control."""
    for width in (128, 32000, 151936, 262144):
        compared = mismatched = 0
        rows_total = 64 if width > 10000 else 512
        x = torch.randn(rows_total, width, device=DEVICE, dtype=torch.bfloat16) * 4
        for log, function in ((False, softmax.softmax), (True, softmax.log_softmax)):
            want = function(x)
            exact = (torch.log_softmax if log else torch.softmax)(x.double(), -1)
            error = (want.double() - exact).abs().max().item()
            relative = error if log else ((want.double() - exact).abs() / exact).max().item()
            if relative > 1e-5:
                failures.append(f"softmax width {width} log={log}: error {relative:.2e}")
            for m in row_counts([], width, 20, rows_total):
                start = random.Random(m).randrange(rows_total - m + 1)
                mismatched += differing_rows(function(x[start : start + m]), want[start : start + m])
                compared += m
            wide = torch.cat([x[:9], x[:9]], 1)[:, 1 : width + 1]
            mismatched += differing_rows(function(wide), function(wide.contiguous()))
            compared += 9
        kept, softmax.SEGMENT = softmax.SEGMENT, 64  # control: other segments
        control = differing_rows(softmax.log_softmax(x[:16]), want[:16])
        softmax.SEGMENT = kept
        record("softmax, log_softmax", f"width {width}", compared, mismatched, control)


def check_bmm_and_mean() -> None:
    """bmm against linear's canonical tile, mean against its reference; torch's own as control."""
    compared = mismatched = control = 0
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        a = torch.randn(16, 130, 512, device=DEVICE, dtype=dtype)
        b = torch.randn(16, 512, 128, device=DEVICE, dtype=dtype)
        whole = bmm(a, b)
        for i in (0, 7, 15):
            mismatched += differing_rows(whole[i], canonical_linear(a[i], b[i].T.contiguous()))
            compared += 130
        for m in (1, 3, 16, 64, 65, 129):
            mismatched += differing_rows(bmm(a[:, :m], b), whole[:, :m])
            mismatched += differing_rows(bmm(a[3:5, :m].contiguous(), b[3:5]), whole[3:5, :m])
            compared += 18
            stock = torch.bmm(a, b)
            control += differing_rows(torch.bmm(a[:1, :m], b[:1]), stock[:1, :m])
    halves = bmm(a[..., :256], b[:, :256]) + bmm(a[..., 256:], b[:, 256:])  # control: K split in two, float32
    wrong = differing_rows(halves.flatten(0, 1), whole.flatten(0, 1))
    record("bmm", "", compared, mismatched, wrong, stock_mismatches=control)
    compared = mismatched = 0
    x = torch.randn(700, 3, 1300, device=DEVICE, dtype=torch.bfloat16)
    for dim in ([-1], [1], [0, 2], [0]):
        whole = mean(x, dim)
        mismatched += differing_rows(whole[None], mean_reference(x, dim, False)[None])
        compared += 1
    want = mean(x, -1)
    for m in (1, 2, 17, 128, 699):
        mismatched += differing_rows(mean(x[:m], -1), want[:m])
        compared += m
    y32 = torch.randn(700, 1300, device=DEVICE)
    mismatched += differing_rows(mean(y32, -1), mean_reference(y32, [-1], False))
    compared += 700
    control = differing_rows(mean(y32.flip(-1), -1)[:, None], mean(y32, -1)[:, None])  # the other way round
    record("mean", "", compared, mismatched, control)


def host_norms_and_rotary(qkv, positions, q_weight, k_weight, cos_sin, heads, kv_heads, eps):
    """Queries and keys by the norm operator and the host's rotary kernel, one after another."""
    size = q_weight.shape[0]
    q, k, _ = qkv.split([heads * size, kv_heads * size, kv_heads * size], dim=-1)
    q = torch.ops.det_plugin.rms_norm(q.view(-1, heads, size), q_weight, eps, 0.0).view(-1, heads * size)
    k = torch.ops.det_plugin.rms_norm(k.view(-1, kv_heads, size), k_weight, eps, 0.0).view(-1, kv_heads * size)
    torch.ops._C.rotary_embedding(positions, q, k, size, cos_sin, True)
    return q, k


def check_qk_norm_rope() -> None:
    """The fused operator against its reference at many token counts, against the operators apart, and timed."""
    import vllm._custom_ops  # noqa: F401  registers torch.ops._C.rotary_embedding

    for heads, kv_heads, size in ((32, 8, 128), (16, 8, 128), (9, 3, 64), (8, 4, 256)):
        tokens = 4096
        qkv = torch.randn(tokens, (heads + 2 * kv_heads) * size, device=DEVICE, dtype=torch.bfloat16)
        weights = [1 + 0.2 * torch.randn(size, device=DEVICE, dtype=torch.bfloat16) for _ in range(2)]
        positions = torch.randint(0, 40960, (tokens,), device=DEVICE)
        angles = torch.arange(40960, device=DEVICE)[:, None] * 1e6 ** (
            -torch.arange(size // 2, device=DEVICE) * 2 / size
        )
        cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1).bfloat16()
        rest = (*weights, cos_sin, heads, kv_heads, 1e-6)
        found = find_contraction(host_norms_and_rotary, qkv, positions, *rest)
        whole = qk_norm_rope(qkv, positions, *rest, found or "first")
        compared, mismatched = 1, int(found is None)
        reference = qk_norm_rope_reference(qkv[:300], positions[:300], *rest, found or "first")
        mismatched += sum(differing_rows(a[:300], b) for a, b in zip(whole, reference, strict=True))
        compared += 600
        for m in row_counts([], size, 30, tokens):
            start = random.Random(m).randrange(tokens - m + 1)
            part = qk_norm_rope(qkv[start : start + m], positions[start : start + m], *rest, found or "first")
            mismatched += sum(differing_rows(a, b[start : start + m]) for a, b in zip(part, whole, strict=True))
            compared += 2 * m
        wide = [t.float() for t in (qkv, *weights)]  # control: heads not rounded between norm and rotation
        unrounded = qk_norm_rope(wide[0], positions, *wide[1:], *rest[2:])
        control = sum(differing_rows(a.to(b.dtype), b) for a, b in zip(unrounded, whole, strict=True))
        record("qk_norm_rope", f"{heads}, {kv_heads}, {size}", compared, mismatched, control, contraction=found)
        for m in (1, 64, 256, 4096):
            arguments = (qkv[:m], positions[:m], *rest)
            fused = [partial(qk_norm_rope, *arguments, found or "first")] * 20
            apart = [partial(host_norms_and_rotary, *arguments)] * 20
            pairs = graph_pairs(apart, fused, 3)
            name = f"qk_norm_rope {m} tokens, heads {heads}, {kv_heads}, {size}; stock: norms and rotary apart"
            case("", name, "us", [p[0] for p in pairs], [p[1] for p in pairs])


def case(model: str, name: str, unit: str, stock: list[float], ours: list[float], **more) -> dict:
    """One line of ops_speed.json: times, and ratio = stock time / our time (1 is parity, more is faster)."""
    ratios = sorted(s / o for s, o in zip(stock, ours, strict=True))
    line = {
        "model": model,
        "case": name,
        "backend": "ops",
        "unit": unit,
        "stock": round(sorted(stock)[len(stock) // 2], 3),
        "deterministic": round(sorted(ours)[len(ours) // 2], 3),
        "host_batch_invariant": None,
        "ratio": round(ratios[len(ratios) // 2], 4),
        "runs": len(stock),
        "spread": round((ratios[-1] - ratios[0]) / ratios[len(ratios) // 2], 4),
        **more,
    }
    speed.append(line)
    return line


def time_linear(dispatcher: LinearDispatcher, models, rows, rounds: int, deadline: float) -> None:
    """Stock against ours: under CUDA graph replay, and wall time outside graphs; interleaved."""
    done: set[tuple[int, int]] = set()
    for model in models:
        for n, k in SHAPES[model]:
            if (n, k) in done:
                continue
            if time.monotonic() > deadline:
                print("no time left for the timing of", model, (n, k))
                return
            done.add((n, k))
            has_bias = (model, (n, k)) in BIASED
            weights = rotating_weights(n, k, torch.bfloat16, DEVICE)
            bias = torch.randn(n, device=DEVICE, dtype=torch.bfloat16) if has_bias else None
            plan = dispatcher.plan(n, k, torch.bfloat16, has_bias, 0)
            for m in rows:
                if n > 100000 and m > 256:
                    continue
                x = torch.randn(m, k, device=DEVICE, dtype=torch.bfloat16)
                stock_calls = [partial(stock_linear, x, w, bias) for w in weights]
                calls = [partial(torch.ops.det_plugin.linear, x, w, bias) for w in weights]
                pairs = graph_pairs(stock_calls, calls, rounds)
                name = plan.schedule(m)
                case(
                    model, f"linear N={n} K={k} M={m}, CUDA graph", "us", [p[0] for p in pairs],
                    [p[1] for p in pairs], n=n, k=k, m=m, schedule=name,
                )  # fmt: skip
                few = max(6, min(200, int(8000 / pairs[0][1])))  # about 8 ms of device work
                repeats = -(-few // len(weights))
                stock_wall, our_wall = (stock_calls * repeats)[:few], (calls * repeats)[:few]
                wall_time(our_wall)
                pairs = [(wall_time(stock_wall), wall_time(our_wall)) for _ in range(max(3, rounds))]
                case(
                    model, f"linear N={n} K={k} M={m}, no graph", "us", [p[0] for p in pairs],
                    [p[1] for p in pairs], n=n, k=k, m=m, schedule=name,
                )  # fmt: skip
            del weights
            torch.cuda.empty_cache()


def time_rows(rounds: int) -> None:
    """Norms and softmax against torch's kernels, with the bytes per second they move."""
    for width, rows in [(4096, 1), (4096, 64), (4096, 8192), (2048, 64), (128, 32 * 64), (128, 32 * 8192)]:
        w = torch.randn(width, device=DEVICE, dtype=torch.bfloat16)
        copies = max(2, min(64, 2**28 // (rows * width * 2)))
        xs = [torch.randn(rows, width, device=DEVICE, dtype=torch.bfloat16) for _ in range(copies)]
        stock_calls = [partial(stock_rms_norm, x, (width,), w, 1e-6) for x in xs]
        calls = [partial(torch.ops.det_plugin.rms_norm, x, w, 1e-6, 0.0) for x in xs]
        pairs = graph_pairs(stock_calls, calls, rounds)
        line = case("", f"rms_norm {rows}x{width}", "us", [p[0] for p in pairs], [p[1] for p in pairs])
        line["GB/s"] = round(2 * rows * width * 2 / line["deterministic"] / 1e3, 1)  # read x, write y
        fused = [partial(torch.ops.det_plugin.fused_add_rms_norm, x, xs[i - 1], w, 1e-6, 0.0)
                 for i, x in enumerate(xs)]  # fmt: skip
        separate = [
            partial(lambda a, b, w=w, width=width: stock_rms_norm(a.add_(b), (width,), w, 1e-6), x, xs[i - 1])
            for i, x in enumerate(xs)
        ]
        pairs = graph_pairs(separate, fused, rounds)
        case("", f"fused_add_rms_norm {rows}x{width}", "us", [p[0] for p in pairs], [p[1] for p in pairs])
    for width, rows in [(151936, 1), (151936, 64), (151936, 256), (262144, 64)]:
        xs = [torch.randn(rows, width, device=DEVICE, dtype=torch.bfloat16) for _ in range(4)]
        stock_calls = [partial(torch.log_softmax, x, -1, dtype=torch.float32) for x in xs]
        calls = [partial(torch.ops.det_plugin.log_softmax, x) for x in xs]
        pairs = graph_pairs(stock_calls, calls, rounds)
        line = case("", f"log_softmax {rows}x{width}", "us", [p[0] for p in pairs], [p[1] for p in pairs])
        line["GB/s"] = round(rows * width * (2 + 2 + 4) / line["deterministic"] / 1e3, 1)  # x twice, y once


def environment(commit: str | None) -> dict:
    """What the results were measured on."""
    facts = fingerprint("cuda")
    return {
        "gpu": facts["gpu"],
        "driver": facts["driver"],
        "torch": torch.__version__,
        "triton": package_version("triton"),
        "cublaslt": linear_cuda.dispatcher.handle(0).version if linear_cuda.dispatcher.handle(0) else None,
        "source": facts["source"],
        "commit": commit,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def compare_paths(name: str, form: str, arguments: tuple) -> tuple[int, int, int]:
    """One call by C++ and by Python: rows compared, rows that differ, and rows that differ from those of a call with
    its rows in another order (the control)."""
    ops = torch.ops.det_plugin
    want = getattr(ops, f"{name}_python")(*arguments)
    before = ops._rows_launches()
    got = getattr(ops, name)(*arguments)
    if ops._rows_launches() != before + 1:
        failures.append(f"{name}, {form}: the compiled path did not serve the call")
    other = getattr(ops, name)(arguments[0].flip(0), *arguments[1:])
    compared = mismatched = control = 0
    for a, b, c in zip(*((t,) if isinstance(t, torch.Tensor) else t for t in (want, got, other)), strict=True):
        compared, mismatched = compared + a.shape[0], mismatched + differing_rows(a, b)
        control += differing_rows(a, c)
    return compared, mismatched, control


def check_compiled_rows() -> None:
    """Norms and qk_norm_rope: the C++ path against the Python path, and what a call of each costs the processor."""
    ops, compared, mismatched, control = torch.ops.det_plugin, 0, 0, 0
    costs = {}
    w, heads = torch.randn(4096, device="cuda", dtype=torch.bfloat16), torch.randn(128, device="cuda").bfloat16()
    table = torch.randn(4096, 128, device="cuda")
    for m in (1, 2, 7, 64, 513, 4096):
        x, r = (torch.randn(m, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        qkv = torch.randn(m, 48 * 128, device="cuda", dtype=torch.bfloat16)
        rope = (qkv, torch.arange(m, device="cuda"), heads, heads.flip(0), table, 32, 8, 1e-6, "first")
        for name, arguments in (
            ("rms_norm", (x, w, 1e-6, 0.0)),
            ("fused_add_rms_norm", (x, r, w, 1e-6, 0.0)),
            ("qk_norm_rope", rope),
        ):
            count, wrong, other = compare_paths(name, f"{m} rows", arguments)
            compared, mismatched, control = compared + count, mismatched + wrong, control + other
            if m == 64:
                for side, call in (("compiled", getattr(ops, name)), ("python", getattr(ops, f"{name}_python"))):
                    torch.cuda.synchronize()
                    begin = time.perf_counter()
                    for _ in range(200):
                        call(*arguments)
                    costs[f"{name} {side}"] = cost = round((time.perf_counter() - begin) / 200 * 1e6, 1)
                    print(f"{name} {side}: {cost} us of processor time a call")
                    torch.cuda.synchronize()
    for dtype, width, offset, scaled in (  # other forms: two passes, no weight, Gemma's offset, other dtypes
        (torch.bfloat16, 12288, 0.0, True),
        (torch.bfloat16, 2304, 1.0, True),
        (torch.float16, 576, 0.0, True),
        (torch.float32, 4096, 0.0, True),
        (torch.bfloat16, 128, 0.0, False),
    ):
        x, r = (torch.randn(65, width, device="cuda").to(dtype) for _ in range(2))
        w = torch.randn(width, device="cuda") if scaled else None
        for name, arguments in (("rms_norm", (x, w, 1e-5, offset)), ("fused_add_rms_norm", (x, r, w, 1e-5, offset))):
            form = f"{dtype}, width {width}"
            count, wrong, other = compare_paths(name, form, arguments)
            compared, mismatched, control = compared + count, mismatched + wrong, control + other
            if not other:
                failures.append(f"{name}, {form}: rows in another order give the same bytes")
    answers: list[torch.Tensor] = []  # a thread's first call: no context is current in it
    thread = threading.Thread(target=lambda: answers.append(torch.ops.det_plugin.rms_norm(x, None, 1e-5, 0.0)))
    thread.start()
    thread.join()
    if not answers or differing_rows(answers[0], ops.rms_norm(x, None, 1e-5, 0.0)):
        failures.append("rms_norm in a fresh thread failed or differs")
    record(
        "norms and rotary embedding, C++ against Python",
        "1 to 4096 rows",
        compared,
        mismatched,
        control,
        processor_us=costs,
    )


def geometric_mean(values: list[float]) -> float:
    """exp of the mean logarithm; NaN when empty."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else float("nan")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="few shapes, row counts and rounds")
    parser.add_argument("--seconds", type=float, default=100, help="no further timing case after this")
    parser.add_argument("--commit", help="commit of the source, for the report")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    begin = time.monotonic()
    dispatcher = linear_cuda.dispatcher
    started = time.monotonic()
    linear_cuda.configure(None, measure=False)
    dispatcher.plan(64, 64, torch.bfloat16, False, 0)
    print(f"compiled path {linear_fast.active()}, {time.monotonic() - started:.1f} s with a first plan")
    if not linear_fast.active():
        failures.append("the compiled path of linear is off")
    if not rows_fast.activate():
        failures.append("the compiled path of norms is off")
    quick = arguments.quick
    models = {"Qwen3-0.6B": SHAPES["Qwen3-0.6B"][:4], "Qwen2.5-7B": SHAPES["Qwen2.5-7B"][:1]} if quick else SHAPES
    some = {"Qwen3-1.7B": [(2048, 6144)], "SmolLM2-135M": SHAPES["SmolLM2-135M"][:4]}
    rounds, counts = (1, 20) if quick else (3, 60)
    timed = ["Qwen3-0.6B"] if quick else [*SPEED_MODELS, *sorted(SHAPES)]
    deadline = begin + arguments.seconds
    stages = [
        ("time rows", partial(time_rows, rounds)),
        ("norms", check_norms),
        ("softmax", check_softmax),
        ("bmm, mean", check_bmm_and_mean),
        ("qk_norm_rope", check_qk_norm_rope),
        ("linear bf16", partial(check_linear, dispatcher, models, torch.bfloat16, counts)),
        ("time linear", partial(time_linear, dispatcher, timed, SPEED_ROWS, rounds, deadline)),
        ("linear fp32", partial(check_linear, dispatcher, some, torch.float32, counts)),
        ("float32 order", partial(check_float32_order, dispatcher)),
        ("linear fp16", partial(check_linear, dispatcher, some, torch.float16, counts)),
        ("compiled rows", check_compiled_rows),
        ("modes", check_linear_modes),
        ("shapes", partial(check_linear_shapes, dispatcher)),
    ]
    for name, stage in stages:
        started = time.monotonic()
        try:
            stage()
        except Exception as error:
            import traceback

            traceback.print_exc()
            failures.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
        print(f"{name}: {time.monotonic() - started:.1f} s", flush=True)
        arguments.out.mkdir(parents=True, exist_ok=True)
        for file, field, content in (("ops_invariance", "checks", checks), ("ops_speed", "cases", speed)):
            document = {"environment": environment(arguments.commit), field: content, "failures": failures}
            (arguments.out / f"{file}.json").write_text(json.dumps(document, indent=1))
    controls = sum(c["negative_control_mismatches"] or 0 for c in checks if c["name"].startswith("linear rows"))
    if not controls:
        failures.append("stock cuBLAS showed no difference: the linear checks have no negative control")
    for check in checks:
        if not check["name"].startswith("linear rows") and not check["negative_control_mismatches"]:
            failures.append(f"{check['name']} {check['model']}: the negative control does not differ")
    for check in checks:
        print(
            f"{check['name']:<34} {check['model']:<14} {check['comparisons']:>9} compared "
            f"{check['mismatches']:>5} differ, control {check['negative_control_mismatches']} "
            f"{check.get('error_ratio_to_cublas', '')}"
        )
    graph = [c for c in speed if c["case"].endswith("CUDA graph")]
    wall = [c for c in speed if c["case"].endswith("no graph")]
    for c in speed:
        if not c["case"].endswith("no graph"):
            twin = next((v for v in wall if v["case"] == c["case"].replace("CUDA graph", "no graph")), None)
            print(
                f"{c['case']:<44} stock {c['stock']:>9.1f} ours {c['deterministic']:>9.1f} ratio {c['ratio']:.3f}"
                + (f"  wall {twin['ratio']:.3f}" if twin else "")
                + f"  {c.get('schedule', c.get('GB/s', ''))}"
            )
    print(f"geometric mean, CUDA graph {geometric_mean([c['ratio'] for c in graph]):.4f} over {len(graph)}")
    print(f"geometric mean, no graph {geometric_mean([c['ratio'] for c in wall]):.4f} over {len(wall)}")
    for failure in failures:
        print("FAILED", failure)
    print(f"{time.monotonic() - begin:.1f} s, canonical {CANONICAL[torch.bfloat16].name}")
    return 1 if failures else 0


if __name__ == "__main__":
    assert Tile.parse(CANONICAL[torch.bfloat16].name)
    sys.exit(main())
