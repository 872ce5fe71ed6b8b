"""Measures every candidate schedule of the linear operator on this GPU.

    python benchmarks/tune_linear.py --out FOLDER [--seconds 90]

For each (N, K) of the listed models and each row count: microseconds per call under CUDA graph replay with
rotated weights, for stock cuBLAS, for cuBLASLt without split-K (the heuristic's first choices) and for each
tile, and whether the schedule's bits equal the canonical tile's.  Writes FOLDER/tune_linear.json; with
``--table`` FOLDER/<gpu>.json, to be put into det_plugin/ops/tuning: the committed table, with the measured choices.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from linear_shapes import SHAPES
from torch.nn.functional import linear as stock_linear

from det_plugin.evidence.certificates import first_difference
from det_plugin.evidence.fingerprint import fingerprint
from det_plugin.ops.linear_cuda import TABLES, LinearDispatcher, canonical_linear
from det_plugin.ops.linear_plan import bind_cublaslt, certification_data
from det_plugin.ops.linear_schedules import (
    CANONICAL,
    Tile,
    bind_tile,
    load_tables,
    run_tile,
    table_key,
    table_path,
)
from det_plugin.ops.linear_tuning import (
    INTERVALS,
    POINTS,
    graph_time,
    rotating_weights,
    save_table,
    splice,
)

EIGHT = [
    "swap-8x16x512-w1-s4",
    "swap-8x32x256-w2-s4",
    "swap-8x32x512-w2-s5",
    "swap-8x64x256-w4-s3",
    "swap-8x64x256-w4-s6",
    "swap-8x128x128-w4-s6",
    "tma-16x64x128-w4-s5",
]
SIXTEEN = [
    "swap-16x32x256-w2-s4",
    "swap-16x64x128-w4-s6",
    "swap-16x64x128-w4-s10",
    "swap-16x64x256-w4-s4",
    "swap-16x64x256-w4-s5",
    "swap-16x128x128-w8-s4",
    "tma-16x64x256-w4-s3",
]
THIRTY_TWO = [
    "swap-32x32x256-w2-s6",
    "swap-32x64x256-w4-s4",
]
MIDDLE = [
    "tma-32x32x128-w4-s5",
    "swap-32x64x128-w4-s5",
    "swap-64x64x128-w4-s5",
    "swap-32x128x128-w8-s4",
    "tma-64x64x128-w4-s4",
    "tma-64x128x64-w4-s4",
    "swap-64x128x64-w8-s4",
]
LARGE = [
    "tma-128x64x64-w4-s5",
    "tma-128x128x64-w8-s4",
    "persistent-128x128x64-w8-s4",
    "persistent-128x256x64-w8-s3",
    "pointer-128x128x64-w8-s3",
    "pointer-64x64x64-w4-s4",
]
ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 4096)


def tiles_for(m: int) -> list[str]:
    """Tiles worth measuring at ``m`` rows."""
    if m <= 16:
        return [*EIGHT, *SIXTEEN] if m <= 8 else SIXTEEN
    if m <= 64:
        return [*SIXTEEN, *THIRTY_TWO, *MIDDLE] if m == 32 else [*MIDDLE, "swap-16x64x128-w4-s6"]
    if m <= 256:
        return [*MIDDLE[2:], *LARGE]
    return LARGE


def unique_shapes() -> list[tuple[int, int]]:
    """Every (N, K) once, those of large models first, lm_heads last."""
    seen: dict[tuple[int, int], None] = {}
    for shapes in SHAPES.values():
        seen.update(dict.fromkeys(shapes[:4]))
    for shapes in SHAPES.values():
        seen.update(dict.fromkeys(shapes[4:]))
    return list(seen)


def compile_tiles(names: list[str]) -> None:
    """Run each tile once on a small problem, so that its machine code is in the disk cache."""
    x, w, bias = certification_data(64, 512, 512, torch.bfloat16, True, torch.device("cuda"))
    y = torch.empty(64, 512, dtype=torch.bfloat16, device="cuda")
    for name in names:
        for b in (None, bias):
            try:
                run_tile(Tile.parse(name), x, w, b, y)
            except Exception as error:
                print("does not compile:", name, type(error).__name__, str(error)[:100])


def compile_in_parallel(workers: int = 14) -> None:
    """:func:`compile_tiles` for all candidates, in processes of their own."""
    names = sorted({*EIGHT, *SIXTEEN, *THIRTY_TWO, *MIDDLE, *LARGE, CANONICAL[torch.bfloat16].name})
    jobs = [
        subprocess.Popen([sys.executable, __file__, "--compile", *names[i::workers]])
        for i in range(workers)
        if names[i::workers]
    ]
    for job in jobs:
        job.wait()


def measure(m: int, n: int, k: int, problem, weights, data, vendor_count: int) -> dict:
    """Times and bits of every candidate at one row count."""
    x, w, _ = data
    x = x[:m].contiguous()
    y = torch.empty(m, n, dtype=x.dtype, device=x.device)
    want = canonical_linear(x, w)
    result: dict = {"n": n, "k": k, "m": m, "times": {}, "equal": {}}
    canonical = bind_tile(CANONICAL[x.dtype], m, n, k)
    launches = {}
    if problem is not None:
        for algorithm in problem.algorithms(m, vendor_count):
            launches[algorithm.name] = bind_cublaslt(problem, algorithm, m, 2, canonical)
        result["vendor"] = next(iter(launches), None)
    for name in tiles_for(m):
        launches[name] = bind_tile(Tile.parse(name), m, n, k, canonical)

    def stock():
        return graph_time([lambda w=w: stock_linear(x, w) for w in weights], 5)

    result["stock_equal"] = first_difference(want, stock_linear(x, w)) is None
    before = stock()
    for name, launch in launches.items():
        stream = torch.cuda.current_stream().cuda_stream
        try:
            y.fill_(float("nan"))
            launch(x, w, None, y, stream)
            result["equal"][name] = first_difference(want, y) is None

            def call(v, launch=launch):
                launch(x, v, None, y, torch.cuda.current_stream().cuda_stream)

            result["times"][name] = round(graph_time([lambda v=v, call=call: call(v) for v in weights], 5), 3)
        except Exception as error:
            result["times"][name] = None
            result["equal"][name] = f"{type(error).__name__}: {str(error)[:120]}"
    result["stock"] = [round(before, 3), round(stock(), 3)]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--rows", type=lambda text: sorted({int(m) for m in text.split(",")}), default=ROWS)
    parser.add_argument("--no-vendor", action="store_true", help="leave cuBLASLt out")
    parser.add_argument("--compile", nargs="*")
    arguments = parser.parse_args()
    if arguments.compile is not None:
        compile_tiles(arguments.compile)
        return
    if unknown := set(arguments.rows) - {*INTERVALS, *POINTS}:
        parser.error(f"--rows: got {sorted(unknown)}, accepts {', '.join(map(str, (*INTERVALS, *POINTS)))}")
    begin = time.monotonic()
    compile_in_parallel()
    print(f"compiled in {time.monotonic() - begin:.1f} s", flush=True)
    torch.manual_seed(0)
    device = torch.device("cuda")
    dispatcher = LinearDispatcher()
    results, algorithms = [], {}
    from det_plugin.ops._cublaslt import LinearProblem

    handle = None if arguments.no_vendor else dispatcher.handle(0)
    for n, k in unique_shapes():
        if time.monotonic() - begin > arguments.seconds:
            print("out of time before", (n, k))
            break
        problem = LinearProblem(handle, n, k, "bfloat16", False) if handle else None
        if problem is not None:
            asked = time.perf_counter()
            firsts = {m: problem.algorithms(m, 1)[:1] for m in (*range(1, 513, 7), *range(576, 8193, 256))}
            named = {a.name: a.data.hex() for found in firsts.values() for a in found}
            algorithms[f"{n},{k}"] = {
                "names": len(named),
                "structures": len({a.data for found in firsts.values() for a in found}),
                "microseconds_per_query": (time.perf_counter() - asked) / len(firsts) * 1e6,
                "none": [m for m, found in firsts.items() if not found],
            }
        weights = rotating_weights(n, k, torch.bfloat16, device)
        rows = [m for m in arguments.rows if m * n <= 2**27]
        data = certification_data(max(rows), n, k, torch.bfloat16, False, device)
        for m in rows:
            count = 6 if n < 100000 else 1
            results.append(measure(m, n, k, problem, weights, data, count))
        del weights, data
        torch.cuda.empty_cache()
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "tune_linear.json").write_text(
        json.dumps({"environment": fingerprint("cuda"), "algorithms": algorithms, "results": results})
    )
    best: dict[str, dict[int, str]] = {}
    for r in results:
        times = {name: t for name, t in r["times"].items() if t is not None and r["equal"][name] is True}
        if not times:
            continue
        winner = min(times, key=lambda name: times[name] * (1 if name == r.get("vendor") else 1.02))
        print(
            f"{r['n']:>6} {r['k']:>5} M={r['m']:<5} stock {min(r['stock']):8.1f} "
            f"lt {r['times'].get(r.get('vendor')) or 0:8.1f} best {times[winner]:8.1f} {winner}"
            f"{'' if all(v is True for v in r['equal'].values()) else ' DIFFERS'}"
        )
        name = "cublaslt" if winner == r.get("vendor") else winner
        best.setdefault(table_key(torch.bfloat16, r["n"], r["k"]), {})[r["m"]] = name
    if arguments.table:
        gpu = torch.cuda.get_device_name()
        tables = load_tables(table_path(TABLES, gpu))
        for key in {**tables, **best}:
            save_table(table_path(arguments.out, gpu), gpu, key, splice(tables.get(key), best.get(key, {})))
    print(f"{time.monotonic() - begin:.1f} s")


if __name__ == "__main__":
    main()
