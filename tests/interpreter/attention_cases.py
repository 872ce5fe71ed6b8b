"""Cases of the Triton attention kernel under the interpreter; run by test_attention.py, prints one JSON object.

Queries and keys are small integers and the scale is small, so that weights lie in [1/8, 1] and every product
sum is exact in fp32 whatever its order: then tiles of any height must agree bit for bit in the interpreter
too, and with a numpy emulation of the contract's steps.
"""

from __future__ import annotations

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch

from det_plugin.attention import reference, triton_paged
from det_plugin.attention.triton_schedules import Schedule, Schedules

TALL = Schedules(Schedule(16, 4, 3), Schedule(16, 4, 3), Schedule(128, 4, 3))
SHORT = Schedules(Schedule(16, 4, 3), Schedule(16, 4, 3), Schedule(32, 4, 3))


def batch(heads, kv_heads, dim, query_lens, lengths, page, exact, seed=0, poison=True):
    """A paged batch; slots that hold no key are NaN."""
    g = torch.Generator().manual_seed(seed)
    counts = [-(-n // page) for n in lengths]
    kv = torch.full((sum(counts) + 3, kv_heads, page, 2 * dim), float("nan") if poison else 0.0, dtype=torch.float16)
    k_cache, v_cache = kv.transpose(1, 2).split(dim, -1)
    order = torch.randperm(kv.shape[0] - 1, generator=torch.Generator().manual_seed(seed)).int() + 1  # page 0: poison
    table = torch.zeros(len(lengths), max(counts) + 2, dtype=torch.int32)
    draw = (
        (lambda *s: torch.randint(-2, 3, s, generator=g).half())
        if exact
        else (lambda *s: torch.randn(*s, generator=g).half())
    )
    at, keys, values = 0, [], []
    for i, (n, c) in enumerate(zip(lengths, counts, strict=True)):
        table[i, :c] = order[at : at + c]
        at += c
        k, v = draw(n, kv_heads, dim), draw(n, kv_heads, dim)
        for j in range(0, n, page):
            k_cache[table[i, j // page], : min(page, n - j)] = k[j : j + page]
            v_cache[table[i, j // page], : min(page, n - j)] = v[j : j + page]
        keys.append(k)
        values.append(v)
    q = draw(sum(query_lens), heads, dim)
    start = torch.tensor([0, *np.cumsum(query_lens).tolist()], dtype=torch.int32)
    return dict(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        table=table,
        start=start,
        lens=torch.tensor(lengths, dtype=torch.int32),
        keys=keys,
        values=values,
    )


def launch(b, schedules, shared=False, **kw):
    heads, dim = b["q"].shape[1:]
    out = torch.full_like(b["q"], 7)
    workspace = triton_paged.make_workspace(heads, dim, 4096, "cpu") if shared else None
    triton_paged.paged_attention(
        b["q"],
        b["k_cache"],
        b["v_cache"],
        out,
        b["table"],
        b["start"],
        b["lens"],
        max_query_len=int((b["start"][1:] - b["start"][:-1]).max()),
        workspace=workspace,
        schedules=schedules,
        **kw,
    )
    if workspace is not None:
        assert not workspace.tickets.any()
    return out


def segments_of(length, fine=2048, short=128, long=512):
    """Segments (begin, end) of the contract, written down once more."""
    return [(n, n + (short if n < fine else long)) for n in [*range(0, fine, short), *range(fine, length, long)]]


def emulate(q, k, v, scale, block=64, window=0, **sizes):
    """The contract in numpy fp32: products exact, a fused multiply and add rounded once, all else as numpy does."""
    f = np.float32
    fma = lambda x, y, z: (np.asarray(x, np.float64) * y + z).astype(f)  # the product is exact in 53 bits
    rows, heads, dim = q.shape
    length, kv_heads, _ = k.shape
    c = f(scale * 1.4426950408889634)
    out = np.zeros((rows, heads, dim), np.float16)
    for row in range(rows):
        pos = length - rows + row
        for h in range(heads):
            kk, vv = k[:, h // (heads // kv_heads)].astype(f), v[:, h // (heads // kv_heads)].astype(f)
            o, big_m, big_l = np.zeros(dim, f), f(-np.inf), f(0)
            for seg, seg_end in segments_of(pos + 1, **sizes):
                acc, m, total = np.zeros(dim, f), f(-np.inf), f(0)
                for n in range(seg, min(seg_end, pos + 1), block):
                    at = np.arange(n, min(n + block, pos + 1))
                    if window:
                        at = at[at > pos - window]
                    if not len(at):
                        continue
                    s = kk[at] @ q[row, h].astype(f)
                    m_new = max(m, s.max())
                    w = np.exp2(fma(s, c, -m_new * c)).astype(np.float16).astype(f)
                    a = np.exp2((m - m_new) * c) if m != -np.inf else f(0)
                    total = total * a + w.sum(dtype=f)
                    acc = acc * a + (w[:, None] * vv[at]).sum(0, dtype=f)
                    m = m_new
                m_new = max(big_m, m)
                if m_new == -np.inf:
                    continue
                a = np.exp2((big_m - m_new) * c) if big_m != -np.inf else f(0)
                b = np.exp2((m - m_new) * c) if m != -np.inf else f(0)
                o, big_l, big_m = fma(o, a, acc * b), fma(big_l, a, total * b), m_new
            out[row, h] = (o / big_l + f(0)).astype(np.float16)
    return torch.from_numpy(out)


def different(a, b):
    return int((a.view(torch.int16) != b.view(torch.int16)).sum())


def main() -> None:
    found = {}
    # accuracy against float64: grouped, one key head, one group; head sizes; windows; soft-cap; sinks
    for name, args, kw in [
        ("gqa", (9, 3, 64, [1, 5, 40, 0, 1], [700, 5, 90, 0, 1], 16), {}),
        ("mqa", (8, 1, 64, [3, 1], [70, 1030], 64), {}),
        ("mha", (2, 2, 128, [20, 1], [600, 130], 128), {}),
        ("padded head", (4, 2, 96, [1, 3, 20], [1100, 600, 20], 32), dict(window=130)),
        ("wide head", (2, 1, 256, [9, 1], [65, 520], 48), dict(softcap=5.0)),
        ("sinks", (4, 2, 64, [1, 20], [530, 100], 16), dict(sinks=True)),
    ]:
        b = batch(*args, exact=False)
        heads, dim = args[0], args[2]
        options = dict(kw)
        if options.pop("sinks", False):
            options["sinks"] = torch.linspace(-2, 3, heads)
        for shared in (False, True):
            out = launch(b, TALL, shared, scale=dim**-0.5, **options)
            worst = 0.0
            for i, n in enumerate(args[4]):
                rows = slice(int(b["start"][i]), int(b["start"][i + 1]))
                if n:
                    ref = reference.attention_reference(
                        b["q"][rows], b["keys"][i], b["values"][i], scale=dim**-0.5, **options
                    )
                    worst = max(worst, float((out[rows].double() - ref).norm() / ref.norm()))
            found[f"error {name}{' shared' if shared else ''}"] = worst

    # bits: tile heights, shared tiles, pages, chunks, single rows, and the emulated order
    heads, kv_heads, dim, length, scale = 4, 2, 64, 2700, 1 / 96
    b = batch(heads, kv_heads, dim, [70], [length], 16, exact=True)
    base = launch(b, TALL, scale=scale)
    found["tile height"] = different(launch(b, SHORT, scale=scale), base)
    found["shared tiles"] = different(launch(b, SHORT, True, scale=scale), base)
    wide = batch(heads, kv_heads, dim, [70], [length], 64, exact=True)
    found["page size"] = different(launch(wide, TALL, scale=scale), base)
    singles = chunks = 0
    for row in (0, 1, 33, 69):
        end = length - 70 + row + 1
        one = dict(
            b,
            q=b["q"][row : row + 1],
            start=torch.tensor([0, 1], dtype=torch.int32),
            lens=torch.tensor([end], dtype=torch.int32),
        )
        for shared in (False, True):
            singles += different(launch(one, TALL, shared, scale=scale)[0], base[row])
    for first, last in ((0, 25), (25, 70)):
        part = dict(
            b,
            q=b["q"][first:last],
            start=torch.tensor([0, last - first], dtype=torch.int32),
            lens=torch.tensor([length - 70 + last], dtype=torch.int32),
        )
        chunks += different(launch(part, TALL, scale=scale), base[first:last])
    found["decode"], found["chunks"] = singles, chunks
    rows = [0, 37, 69]
    k, v = b["keys"][0].numpy(), b["values"][0].numpy()
    for name, options, kw in (
        ("order", {}, {}),
        ("window order", dict(window=600), dict(window=600)),
        ("control: wrong segments", {}, dict(short=192)),
        ("control: one segment length", {}, dict(long=128)),
        ("control: wrong blocks", {}, dict(block=128)),
    ):
        out = launch(b, TALL, scale=scale, **options) if options else base
        found[name] = 0
        for row in rows:
            end = length - 70 + row + 1
            want = emulate(b["q"][row : row + 1].numpy(), k[:end], v[:end], scale, **kw)
            found[name] += different(out[row : row + 1], want)

    # neighbours: the same request alone and in a batch; freed pages of a window point at poisoned page 0
    many = batch(heads, kv_heads, dim, [70, 1, 3, 0, 33], [length, 400, 3, 0, 600], 16, exact=True)
    alone = dict(many, q=many["q"][:70], start=many["start"][:2], lens=many["lens"][:1], table=many["table"][:1])
    found["neighbours"] = different(launch(many, TALL, scale=scale)[:70], launch(alone, TALL, scale=scale))
    freed = dict(b, table=b["table"].clone())
    full = launch(b, TALL, scale=scale, window=100)
    freed["table"][:, : (length - 70 - 100) // 16] = 0
    found["freed pages"] = different(launch(freed, TALL, scale=scale, window=100), full)
    padded = dict(b, q=torch.cat([b["q"], b["q"][:5]]))
    out = launch(padded, TALL, scale=scale)
    found["padding rows written"] = int((out[70:] != 7).sum())
    found["nan"] = int(sum(torch.isnan(x).sum() for x in (base, full, out)))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
