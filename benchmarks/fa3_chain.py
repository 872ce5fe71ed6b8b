"""A second schedule of FlashAttention 3's order, for few requests: measured here, not used by the engine yet.

    PYTHONPATH=. python benchmarks/fa3_chain.py --out FOLDER

FA3 walks a row's key blocks one after another in one program, so a single request keeps 8 of an H200's 132
multiprocessors busy (one for each key head).  The order of its sums leaves more than that to do at once:

1. Scores of a key block need no other block: one program for each block and key head.
2. Maxima are exact, so the running maximum follows from the blocks' own.
3. A column of the result needs one column of the values: the chain of blocks runs once for each slice of columns.

Only the chain itself, in which each block is added to what came before, stays one after another.  The arithmetic is
FA3's (softmax.h, mainloop_fwd_sm90_tma_gmma_ws.hpp): exponentials by ``ex2.approx.ftz`` of one fused multiply-add,
row sums by four partial sums a row, each adding the keys that one thread of FA3 holds, in its order.

Compares bytes with FA3 over many lengths (the control walks the blocks upwards and must differ), then times both
under a CUDA graph, layers' caches rotated.  Writes FOLDER/fa3_chain.json.  Exit code 1: bytes differ; 2: the control
doesn't.

Source: Shah et al., FlashAttention-3 (2024); slicing by column is ours.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import triton
import triton.language as tl

from det_plugin.attention.reference import attention_reference, gather_pages
from det_plugin.ops._triton import INTERPRET, begin

BLOCK = 128
ROWS = 8
"""Query heads of a group, filled up to what a matrix instruction takes."""

LOG2E = 1.4426950408889634
LENGTHS = (
    *(1, 2, 3, 7, 16, 31, 64, 100, 127, 128, 129, 130, 200, 255, 256, 257, 300, 384, 385, 511, 512, 513, 640, 777),
    *(1000, 1024, 1025, 1500, 2000, 2047, 2048, 2049, 2500, 3000, 3071, 3072),
)


@triton.jit
def _exp2(x, APPROXIMATE: tl.constexpr):
    if APPROXIMATE:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp2(x)


@triton.jit
def _reciprocal(x, APPROXIMATE: tl.constexpr):
    if APPROXIMATE:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), x)


@triton.jit
def _scores(
    q, k, table, lengths, scores, maxima, q_row, q_head, k_page, k_slot, k_head, table_row, blocks_most,
    PAGE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, KV_HEADS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Scores [128 keys, ROWS] and their maxima of one key block of one key head."""
    begin(OVERLAP)
    pair, block = tl.program_id(0), tl.program_id(1)
    request, head = pair // KV_HEADS, pair % KV_HEADS
    length = tl.load(lengths + request)
    if block * 128 >= length:
        return
    keys = block * 128 + tl.arange(0, 128)
    columns, row = tl.arange(0, DIM), tl.arange(0, ROWS)
    page = tl.load(table + request * table_row + keys // PAGE, mask=keys < length, other=0).to(tl.int64)
    block_k = tl.load(k + page[:, None] * k_page + (keys % PAGE)[:, None] * k_slot + head * k_head + columns[None, :])
    rows_q = tl.load(
        q + request * q_row + (head * GROUP + row)[:, None] * q_head + columns[None, :],
        mask=(row < GROUP)[:, None],
        other=0.0,
    )
    x = tl.where((keys < length)[:, None], tl.dot(block_k, tl.trans(rows_q)), float("-inf"))
    place = (pair * blocks_most + block).to(tl.int64)
    tl.store(scores + place * 128 * ROWS + tl.arange(0, 128)[:, None] * ROWS + row[None, :], x)
    tl.store(maxima + place * ROWS + row, tl.max(x, 0))


@triton.jit
def _add_in_turn(total, terms, ROWS: tl.constexpr, COUNT: tl.constexpr):
    """``total`` [ROWS, 4] and the terms of the last dimension of [ROWS, 4, COUNT], one after another."""
    if COUNT == 1:
        return total + tl.reshape(terms, (ROWS, 4))
    else:
        HALF: tl.constexpr = COUNT // 2
        first, second = tl.split(tl.permute(tl.reshape(terms, (ROWS, 4, 2, HALF)), (0, 1, 3, 2)))
        return _add_in_turn(_add_in_turn(total, first, ROWS, HALF), second, ROWS, HALF)


@triton.jit
def _values(
    scores, maxima, v, table, lengths, out, scale_log2, blocks_most, v_page, v_slot, v_head, table_row, o_row, o_head,
    PAGE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, SLICE: tl.constexpr, KV_HEADS: tl.constexpr,
    APPROXIMATE: tl.constexpr, ROUNDED: tl.constexpr, UPWARDS: tl.constexpr, IN_REGISTERS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Columns ``SLICE`` of the result of one key head: blocks downwards, as FA3 walks them."""
    begin(OVERLAP)
    pair, part = tl.program_id(0), tl.program_id(1)
    request, head = pair // KV_HEADS, pair % KV_HEADS
    length = tl.load(lengths + request)
    blocks = tl.cdiv(length, 128)
    row, quad, key, columns = tl.arange(0, ROWS), tl.arange(0, 4), tl.arange(0, 128), part * SLICE + tl.arange(0, SLICE)
    result = tl.zeros((SLICE, ROWS), tl.float32)
    sums = tl.zeros((ROWS, 4), tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    for i in range(blocks):
        block = i if UPWARDS else blocks - 1 - i
        place = (pair * blocks_most + block).to(tl.int64)
        at = scores + place * 128 * ROWS
        higher = tl.maximum(top, tl.load(maxima + place * ROWS + row))
        shrink = _exp2((top - higher) * scale_log2, APPROXIMATE)
        top = higher
        offset = -(higher * scale_log2)
        x = tl.load(at + key[:, None] * ROWS + row[None, :])
        p = _exp2(tl.fma(x, tl.full((128, ROWS), 1.0, tl.float32) * scale_log2, offset[None, :] + tl.zeros_like(x)),
                  APPROXIMATE)  # fmt: skip
        sums = sums * shrink[:, None]
        if IN_REGISTERS:  # key 8j + 2q + b is term 2j + b of FA3's thread q
            terms = tl.permute(tl.reshape(p, (16, 4, 2, ROWS)), (3, 1, 0, 2))
            sums = _add_in_turn(sums, tl.reshape(terms, (ROWS, 4, 32)), ROWS, 32)
        else:
            for n in tl.static_range(32):
                y = tl.load(at + (8 * (n // 2) + n % 2 + 2 * quad)[None, :] * ROWS + row[:, None])
                y = tl.fma(y, tl.full((ROWS, 4), 1.0, tl.float32) * scale_log2, offset[:, None] + tl.zeros_like(y))
                sums += _exp2(y, APPROXIMATE)
        keys = block * 128 + key
        page = tl.load(table + request * table_row + keys // PAGE, mask=keys < length, other=0).to(tl.int64)
        slice_v = tl.load(
            v + page[:, None] * v_page + (keys % PAGE)[:, None] * v_slot + head * v_head + columns[None, :]
        )
        result = tl.dot(tl.trans(slice_v), p.to(slice_v.dtype), result * shrink[None, :])
    total = tl.sum(tl.sum(tl.reshape(sums, (ROWS, 2, 2)), axis=1), axis=1)
    y = (result * _reciprocal(total, APPROXIMATE and not ROUNDED)[None, :]).to(out.dtype.element_ty)
    tl.store(
        out + request * o_row + (head * GROUP + row)[None, :] * o_head + columns[:, None],
        y,
        mask=(row < GROUP)[None, :],
    )


@dataclass(frozen=True)
class Form:
    """How the second kernel is compiled: columns a program, warps, stages of its loop, and where row sums are made
    (from registers, or by reading the scores once more).  Wrong on purpose: a ``rounded`` reciprocal, blocks walked
    ``upwards``."""

    columns: int = 64
    warps: int = 4
    stages: int = 3
    in_registers: bool = True
    rounded: bool = False
    upwards: bool = False


class Chain:
    """Decode attention of ``requests`` single rows over up to ``longest`` keys; no scores beyond 3,072 keys are split.

    Args:
        heads, kv_heads, dim: of the layer; at most 8 heads a group.
        page: keys per page.
        device: where to allocate the scores, float32 ``[requests, kv_heads, blocks, 128, 8]``.
    """

    def __init__(self, heads: int, kv_heads: int, dim: int, page: int, requests: int, longest: int, device) -> None:
        self.heads, self.kv_heads, self.dim, self.page = heads, kv_heads, dim, page
        self.blocks = -(-longest // BLOCK)
        self.scores = torch.empty(requests * kv_heads * self.blocks * BLOCK * ROWS, device=device)
        self.maxima = torch.empty(requests * kv_heads * self.blocks * ROWS, device=device)
        self.scale_log2 = float(np.float32(float(np.float32(dim**-0.5)) * LOG2E))

    def __call__(self, q, k, v, out, table, lengths, form: Form = Form()):
        """q, out ``[requests, heads, dim]``; k, v ``[pages, page, kv_heads, dim]``; table, lengths int32."""
        self.run_scores(q, k, table, lengths)
        _values[(q.shape[0] * self.kv_heads, self.dim // form.columns)](
            self.scores, self.maxima, v, table, lengths, out, self.scale_log2, self.blocks, *v.stride()[:3],
            table.stride(0), *out.stride()[:2], PAGE=self.page, GROUP=self.heads // self.kv_heads, ROWS=ROWS,
            SLICE=form.columns, KV_HEADS=self.kv_heads, APPROXIMATE=not INTERPRET, ROUNDED=form.rounded,
            UPWARDS=form.upwards, IN_REGISTERS=form.in_registers, OVERLAP=not INTERPRET,
            num_warps=form.warps, num_stages=form.stages, **_options(),
        )  # fmt: skip
        return out

    def run_scores(self, q, k, table, lengths) -> None:
        """The first kernel alone."""
        _scores[(q.shape[0] * self.kv_heads, self.blocks)](
            q, k, table, lengths, self.scores, self.maxima, *q.stride()[:2], *k.stride()[:3], table.stride(0),
            self.blocks, PAGE=self.page, GROUP=self.heads // self.kv_heads, ROWS=ROWS, DIM=self.dim,
            KV_HEADS=self.kv_heads, OVERLAP=not INTERPRET, num_warps=4, **_options(),
        )  # fmt: skip


def _options() -> dict:
    return {} if INTERPRET else {"launch_pdl": True, "enable_fp_fusion": False}


def make_batch(heads, kv_heads, dim, page, lengths, device, dtype=torch.bfloat16, seed=0):
    """Queries, a paged cache in random order, block table and lengths."""
    generator = torch.Generator(device).manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, device=device, generator=generator).to(dtype)
    need = [-(-n // page) for n in lengths]
    k, v = (normal(sum(need) + 3, page, kv_heads, dim) for _ in range(2))
    order = torch.randperm(len(k), generator=torch.Generator().manual_seed(seed)).int()
    table = torch.zeros(len(lengths), max(need), dtype=torch.int32)
    for i, pages in enumerate(order[: sum(need)].split(need)):
        table[i, : len(pages)] = pages
    counts = torch.tensor(lengths, dtype=torch.int32, device=device)
    return normal(len(lengths), heads, dim), k, v, table.to(device), counts


def reference(q, k, v, table, lengths):
    """float64 ``[requests, heads, dim]``."""
    rows = []
    for i, n in enumerate(lengths.tolist()):
        keys, values = (gather_pages(t, table[i].long(), n) for t in (k, v))
        rows.append(attention_reference(q[i : i + 1], keys, values, scale=q.shape[-1] ** -0.5))
    return torch.cat(rows)


FORMS = {
    "64 columns, 4 warps": Form(),
    "64 columns, 4 warps, 2 stages": Form(stages=2),
    "128 columns, 4 warps": Form(columns=128),
    "32 columns, 2 warps": Form(columns=32, warps=2),
    "32 columns, 1 warp": Form(columns=32, warps=1),
    "16 columns, 1 warp": Form(columns=16, warps=1),
    "64 columns, 4 warps, scores read twice": Form(in_registers=False),
    "32 columns, 2 warps, 5 stages, scores read twice": Form(columns=32, warps=2, stages=5, in_registers=False),
}

CONTROLS = {
    "control: blocks upwards": Form(upwards=True),
    "control: reciprocal rounded to nearest": Form(rounded=True),
}


def compare(device, save) -> tuple[int, int]:
    """Bytes against FA3's; returns mismatching rows, and those of the control."""
    from det_plugin.attention import fa3

    wrong = control = 0
    for heads, kv_heads, dim in ((32, 8, 128), (16, 8, 128)):
        layout = fa3.Layout(heads, kv_heads, dim, 16, torch.bfloat16)
        rng = np.random.default_rng(heads)
        lengths = [*LENGTHS, *rng.integers(1, 3073, 400).tolist()]
        q, k, v, table, used = make_batch(heads, kv_heads, dim, 16, lengths, device)
        start = torch.arange(len(lengths) + 1, dtype=torch.int32, device=device)
        chain = Chain(heads, kv_heads, dim, 16, len(lengths), 3072, device)
        for sharpness in (1.0, 4.0):
            sharp = (q.float() * sharpness).to(q.dtype)
            plan = fa3.plan_decode(layout, start, used, 3072)
            want = _vendor(plan, 3072, sharp, k, v, table, used, torch.full_like(q, 7))
            for name, form in {**FORMS, **CONTROLS}.items():
                got = chain(sharp, k, v, torch.full_like(q, 9), table, used, form)
                unequal = (got.view(torch.int16) != want.view(torch.int16)).flatten(1)
                rows = int(unequal.any(1).sum())
                first = next((lengths[i] for i, bad in enumerate(unequal.any(1).tolist()) if bad), None)
                save(
                    "bits", form=name, heads=(heads, kv_heads, dim), sharpness=sharpness, comparisons=len(lengths),
                    mismatches=rows, elements=int(unequal.sum()), shortest=first,
                )  # fmt: skip
                if name in CONTROLS:
                    control += rows
                else:
                    wrong += rows
    return wrong, control


def _vendor(plan, longest, q, k, v, table, used, out):
    from det_plugin.attention import fa3

    return fa3.run(q, k, v, out, table, plan, longest, scale=q.shape[-1] ** -0.5)


def measure(device, save, deadline: float) -> None:
    """Microseconds a layer under a CUDA graph."""
    from det_plugin.attention import fa3
    from det_plugin.ops.linear_tuning import graph_time

    heads, kv_heads, dim = 32, 8, 128
    layout = fa3.Layout(heads, kv_heads, dim, 16, torch.bfloat16)
    for requests, n in ((1, 640), (1, 2000), (1, 3072), (2, 3072), (4, 2000), (8, 640), (8, 3072)):
        if time.monotonic() > deadline:
            return
        copies = max(2, min(40, (200 << 20) // (requests * n * kv_heads * dim * 4) + 1))
        layers = [make_batch(heads, kv_heads, dim, 16, [n] * requests, device, seed=i) for i in range(copies)]
        outs = [torch.empty_like(layer[0]) for layer in layers]
        start = torch.arange(requests + 1, dtype=torch.int32, device=device)
        plan = fa3.plan_decode(layout, start, layers[0][4], n)
        chain = Chain(heads, kv_heads, dim, 16, requests, n, device)
        vendor = [partial(_vendor, plan, n, *layer, out) for layer, out in zip(layers, outs, strict=True)]
        times = {"fa3": graph_time(vendor, 5)}
        parts = [partial(chain.run_scores, q, k, table, used) for q, k, _, table, used in layers]
        times["scores alone"] = graph_time(parts, 5)
        for name, form in FORMS.items():
            calls = [
                partial(chain, q, k, v, out, table, used, form)
                for (q, k, v, table, used), out in zip(layers, outs, strict=True)
            ]
            times[name] = graph_time(calls, 5)
        times["fa3 again"] = graph_time(vendor, 5)
        save("microseconds", requests=requests, keys=n, **{name: round(t, 2) for name, t in times.items()})
        del layers, outs, vendor, parts, calls
        torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=150, help="no case is begun after this")
    parser.add_argument("--commit", help="commit of the source, for the report")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    from det_plugin.attention import fa3
    from det_plugin.evidence.fingerprint import fingerprint

    begun = time.monotonic()
    fa3.load()
    device = torch.device("cuda")
    report: dict = {"environment": {**fingerprint("cuda"), "commit": arguments.commit}, "bits": [], "microseconds": []}

    def save(kind: str, **row) -> None:
        report[kind].append(row)
        print(kind, row, flush=True)
        (arguments.out / "fa3_chain.json").write_text(json.dumps(report, indent=1) + "\n")

    wrong, control = compare(device, save)
    measure(device, save, begun + arguments.seconds)
    print(f"{time.monotonic() - begun:.0f} s; mismatches {wrong}, of the control {control}")
    return 1 if wrong else 0 if control else 2


if __name__ == "__main__":
    sys.exit(main())
