"""Rewrite the tables of README.md and docs/results.md from the JSON files under ``benchmarks/results``.

``python benchmarks/tables.py`` writes; ``--check`` exits with 1 when a table is out of date.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- tables:begin -->", "<!-- tables:end -->"


def load(name: str) -> dict[str, Any] | None:
    """One result file, or None when it was never made."""
    path = RESULTS / name
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def environment(document: dict[str, Any]) -> str:
    """One line: device, driver and versions."""
    facts = document.get("environment") or {}
    gpus = [", driver ".join(gpu.split(", ", 1)) for gpu in facts.get("gpus") or ()]
    device = facts.get("gpu") or next(iter(gpus), None) or facts.get("cpu") or document.get("device") or "?"
    parts = [str(device)]
    for key, label in (
        ("cores", "cores"),
        ("driver", "driver"),
        ("torch", "torch"),
        ("package:torch", "torch"),
        ("triton", "triton"),
        ("package:triton", "triton"),
        ("vllm", "vLLM"),
        ("package:vllm", "vLLM"),
        ("flashinfer", "FlashInfer"),
    ):
        value = facts.get(key, document.get(key))
        if value and not any(p.startswith(f"{label} ") for p in parts):
            parts.append(f"{label} {value}")
    if facts.get("date"):
        parts.append(str(facts["date"])[:10])
    return ", ".join(parts)


def geometric_mean(values: list[float]) -> float:
    """Of positive numbers."""
    return math.exp(sum(map(math.log, values)) / len(values))


def rate(value: float | None) -> str:
    """Four figures; empty for None."""
    return "" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def ratio(value: float | None) -> str:
    """Three decimals; empty for None."""
    return "" if value is None else f"{value:.3f}"


def ratio_range(case: dict[str, Any]) -> str:
    """Smallest and largest ratio of a round; empty where there is only one."""
    low, high = case.get("spread", {}).get("ratio") or (None, None)
    return "" if low is None or case.get("runs", 0) < 2 else f"{low:.2f} to {high:.2f}"


def is_headline(case: dict[str, Any]) -> bool:
    """Throughput, and the p99 latencies of the mixed load: what the README shows."""
    return case["unit"] != "ms" or (case["case"].startswith("mixed") and case["case"].endswith("p99"))


def speed_table(document: dict[str, Any], short: bool = False) -> list[str]:
    """``cases`` with stock, deterministic and the host's own mode, and both ratios to stock.

    In ms rows a ratio below 1 is faster than stock, in all others above 1.
    """
    cases = [c for c in document["cases"] if c.get("stock") and (not short or is_headline(c))]
    cases = [c for c in cases if c.get("deterministic") or c.get("host_batch_invariant")]
    host = any(c.get("host_batch_invariant") for c in cases)
    columns = ["model", "case", "unit", "stock", "deterministic", "ratio", "over rounds"]
    columns += ["host's batch-invariant mode", "its ratio"] if host else []
    lines = [f"| {' | '.join([*columns, 'runs'])} |", "|---" * (len(columns) + 1) + "|"]
    for c in cases:
        backend = c.get("backend") or "default"
        cells = [c["model"], c["case"] + (f" ({backend})" if backend != "default" else ""), c["unit"]]
        cells += [rate(c["stock"]), rate(c.get("deterministic")), ratio(c.get("ratio")), ratio_range(c)]
        if host:
            cells += [rate(c.get("host_batch_invariant")), ratio(c.get("host_ratio"))]
        lines.append(f"| {' | '.join([*cells, str(c.get('runs', ''))])} |")
    return lines


def geometric_means(document: dict[str, Any]) -> list[str]:
    """Per model and backend: the mean decode ratio over the numbers of requests."""
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for c in document["cases"]:
        if c["case"].startswith("decode, ") and c["unit"] != "ms" and c.get("ratio"):
            groups[(c["model"], c.get("backend") or "default")].append(c["ratio"])
    return [
        f"Geometric mean of the decode ratios, {model}"
        + (f" ({backend})" if backend != "default" else "")
        + f": {geometric_mean(ratios):.3f}."
        for (model, backend), ratios in groups.items()
        if len(ratios) > 1
    ]


def startup_table(document: dict[str, Any]) -> list[str]:
    """Start-up seconds (first, then restarts) and GPU memory of every server of every run."""
    lines = ["| run | server | start-up s | restarted s | started together | GPU memory GiB |", "|---" * 6 + "|"]
    for number, session in enumerate(document.get("sessions") or [document]):
        for name, facts in (session.get("servers") or {}).items():
            memory = facts.get("gpu_memory_bytes")
            again = ", ".join(f"{seconds:.1f}" for seconds in facts.get("restart_seconds", ()))
            lines.append(
                f"| {number} | {name} | {facts['startup_seconds']:.1f} | {again} | {facts['started_together']} "
                f"| {'' if memory is None else f'{memory / 2**30:.1f}'} |"
            )
    return lines


def draw(name: str) -> None:
    """Redraw the plot beside a result of ``det-plugin bench``; nothing without matplotlib."""
    sys.path.insert(0, str(ROOT))
    from det_plugin.verify.bench_report import plot

    if document := load(name):
        plot(document, (RESULTS / name).with_suffix(".png"))


def invariance_table(document: dict[str, Any]) -> list[str]:
    """``checks`` summed by name and backend, with the commit they ran on."""
    sums: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    commits: dict[tuple[str, str], set[str]] = defaultdict(set)
    for check in document["checks"]:
        key = (check["name"], check.get("backend") or "")
        entry = sums[key]
        entry[0] += check["comparisons"]
        entry[1] += check["mismatches"]
        entry[2] += check.get("negative_control_mismatches") or 0
        commits[key].add(str(check.get("commit") or document["environment"].get("commit") or "?")[:7])
    lines = [
        "| check | backend | comparisons | mismatches | negative control's mismatches | commit |",
        "|---|---|---|---|---|---|",
    ]
    return lines + [
        f"| {n} | {b} | {c:,} | {m} | {k:,} | {', '.join(sorted(commits[n, b]))} |"
        for (n, b), (c, m, k) in sums.items()
    ]


def engine_table(document: dict[str, Any], short: bool) -> list[str]:
    """Whole engines: one row per backend (``short``), or per engine."""
    lines = [
        "| backend | engines | requests | comparisons | mismatches | the control's mismatches |",
        "|---|---|---|---|---|---|",
    ]
    tally = lambda engine, field: sum(entry[field] for entry in engine["checks"].values())
    engines = document["engines"]
    for backend in dict.fromkeys(engine["backend"] for engine in engines):
        mine = [e for e in engines if e["backend"] == backend and e["engine"].startswith("det")]
        control = [e for e in engines if e["backend"] == backend and not e["engine"].startswith("det")]
        kinds = ", ".join(e["engine"].split(",")[0] for e in control)
        of = sum(tally(e, "comparisons") for e in control)
        differ = f"{sum(tally(e, 'mismatches') for e in control):,} of {of:,} ({kinds})" if control else "none ran"
        lines.append(
            f"| {backend} | {len(mine)} | {sum(e['requests'] for e in mine):,} "
            f"| {sum(tally(e, 'comparisons') for e in mine):,} | {sum(tally(e, 'mismatches') for e in mine):,} "
            f"| {differ} |"
        )
    if short:
        return lines
    lines += ["", "| engine | requests | preemptions | comparisons | mismatches | in |", "|---|---|---|---|---|---|"]
    for e in engines:
        wrong = [name for name, entry in e["checks"].items() if entry["mismatches"]]
        lines.append(
            f"| `{e['engine']}` | {e['requests']:,} | {e['preemptions']} | {tally(e, 'comparisons'):,} "
            f"| {tally(e, 'mismatches'):,} | {', '.join(wrong) or '-'} |"
        )
    return lines + [f"| `{name}` | not run or cut off | | | | |" for name in document["failed"]]


def server_table(document: dict[str, Any]) -> list[str]:
    """Verified servers: one row each."""
    lines = ["| server | backend | mode | modes that held | after SIGKILL | samples |", "|---|---|---|---|---|---|"]
    for e in document["servers"]:
        modes = e.get("modes") or []
        held = (
            f"{sum(m['status'] == 'same' for m in modes)} of {len(modes)}" if modes else f"not run: {e['error'][-90:]}"
        )
        again = {True: "same answers", False: "different", None: "-"}[e.get("same_after_restart")]
        samples = sum(m["samples"] for m in modes)
        lines.append(f"| {e['server']} | {e['backend']} | {e['mode']} | {held} | {again} | {samples:,} |")
    return lines


def attention_table(document: dict[str, Any]) -> list[str]:
    """Attention kernels: microseconds per layer, and stock time over ours."""
    others = {"stock_triton": "stock Triton", "stock_flashinfer": "stock FlashInfer"}
    others = {name: label for name, label in others.items() if any(name in c for c in document["cases"])}
    columns = ["case", "stock FA3", "fa3", "ratio", "triton", "ratio", "flashinfer", "ratio", *others.values()]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for c in document["cases"]:
        lines.append(
            f"| {c['case']} | {c['stock']} | {c.get('fa3', '')} | {c.get('fa3_ratio', '')} "
            f"| {c.get('triton', '')} | {c.get('triton_ratio', '')} "
            f"| {' | '.join(str(c.get(k, '')) for k in ('flashinfer', 'flashinfer_ratio', *others))} |"
        )
    return lines


def kernel_table(document: dict[str, Any]) -> list[str]:
    """Kernels: geometric means per operator, then every case with rates and their share of the measured peaks.

    Rates are the deterministic side's; ratios are stock time over deterministic time (above 1: faster than stock).
    """
    peaks = document["peaks"]
    groups: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for c in document["cases"]:
        if c["ratio"]:
            groups[c["operator"], c["backend"], c["stock_runs"]].append(c["ratio"])
    lines = [
        f"Peaks in the same run: a device copy reads and writes {peaks['copy_bytes_per_s'] / 1e9:,.0f} GB/s, "
        f"a bfloat16 matrix product does {peaks['matmul_flop_per_s'] / 1e12:,.0f} TFLOP/s.",
        "",
        "| operator | backend | stock runs | cases | geometric mean of stock / ours | lowest |",
        "|---|---|---|---|---|---|",
    ]
    for (operator, backend, runs), ratios in groups.items():
        mean = geometric_mean(ratios)
        lines.append(f"| {operator} | {backend} | {runs} | {len(ratios)} | {mean:.3f} | {min(ratios):.3f} |")
    lines += [
        "",
        "| operator | case | backend | stock µs | ours µs | ratio | GB/s | of copy | TFLOP/s | of matmul |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for c in document["cases"]:
        side = "deterministic"
        cells = [c["operator"], f"{c['model']} {c['case']}".strip(), c["backend"]]
        cells += [rate(c["stock"]), rate(c[side]), ratio(c["ratio"])]
        for name, unit, share in (
            ("bytes_per_s", 1e9, "fraction_of_copy"),
            ("flop_per_s", 1e12, "fraction_of_matmul"),
        ):
            value, part = c[name].get(side), c[share].get(side)
            cells += ["", ""] if value is None else [rate(value / unit), f"{part:.3f}"]
        lines.append(f"| {' | '.join(cells)} |")
    if document["left_out"]:
        lines += ["", "Not measured: " + "; ".join(f"{n} ({why})" for n, why in document["left_out"].items()) + "."]
    return lines


def section(title: str, name: str, body: list[str], document: dict[str, Any]) -> list[str]:
    """A titled table with its environment and its file."""
    return [f"**{title}** ([`{name}`](benchmarks/results/{name}): {environment(document)})", "", *body, ""]


def sampler_table(document: dict[str, Any]) -> list[str]:
    """Sampling steps: time over stock's time (below 1: faster than stock)."""
    lines = ["| case | rows | vocabulary | stock µs | deterministic µs | time ratio |", "|---|---|---|---|---|---|"]
    for r in document["results"]:
        lines.append(
            f"| {r['case']}, {r['logits']} | {r['rows']} | {r['vocab']:,} | {r['stock']['median_us']:.1f} "
            f"| {r['det']['median_us']:.1f} | {r['ratio']:.2f} |"
        )
    return lines


def first_start_table(document: dict[str, Any]) -> list[str]:
    """Start-up on a GPU without a tuning table, cold and warm, beside stock's."""
    lines = ["| start | stock s | deterministic s | products measured | measuring s |", "|---|---|---|---|---|"]
    for what, side, name in (
        ("first, every cache empty", "cold", "first start"),
        ("again, certificates required", "warm", "required"),
    ):
        ours, stock = document[side][name], document[side]["stock"]
        seconds = sum(m["seconds"] for m in ours["measured"])
        lines.append(
            f"| {what} | {stock['startup_s']:.1f} | {ours['startup_s']:.1f} | {len(ours['measured'])} | {seconds:.1f} |"
        )
    return [
        *lines,
        "",
        f"Answers of all deterministic servers, the one with the committed table among them: {document['comparisons']} "
        f"comparisons, {document['mismatches']} mismatches (stock, alone and together: "
        f"{document['negative_control_mismatches']} of {document['negative_control_comparisons']}).",
    ]


def step_table(document: dict[str, Any]) -> list[str]:
    """A decode step's wall time, and under a profiler the processor's share and the wait for the GPU."""
    lines = [
        "| requests | turn | stock ms | deterministic ms | ratio | host, waiting ms: stock | deterministic |",
        "|---|---|---|---|---|---|---|",
    ]
    for stock, ours in zip(document["stock"], document["deterministic"], strict=True):
        split = [f"{side['host_ms']:.2f}, {side['waiting_ms']:.2f}" for side in (stock, ours)]
        lines.append(
            f"| {stock['requests']} | {stock['turn'] + 1} | {stock['step_ms']:.2f} | {ours['step_ms']:.2f} "
            f"| {stock['step_ms'] / ours['step_ms']:.3f} | {split[0]} | {split[1]} |"
        )
    return lines


def render(short: bool) -> str:
    """The generated section: of the README (``short``), or all of ``docs/results.md``."""
    out: list[str] = []
    if document := load("cpu/speed.json"):
        out += section("Speed on a CPU", "cpu/speed.json", speed_table(document, short), document)
    if document := load("h200/speed.json"):
        body = [*speed_table(document, short), "", *geometric_means(document)]
        if (RESULTS / "h200" / "speed.png").exists():
            body += ["", "![speed relative to stock](benchmarks/results/h200/speed.png)"]
        if not short:
            body += ["", *startup_table(document)]
        out += section("Whole-engine speed on a GPU", "h200/speed.json", body, document)
    for name, what in (
        ("h200/engine_invariance.json", "random Qwen3-0.6B-shaped model"),
        ("h200/engine_invariance_quick.json", "the random model again, fewer requests, newer source"),
        ("h200/engine_invariance_smollm2.json", "SmolLM2-135M-Instruct"),
    ):
        if document := load(name):
            out += section(f"Whole engine on a GPU, {what}", name, engine_table(document, short), document)
    if document := load("h200/server_verification.json"):
        title = f"Servers of {document['model']} on a GPU, every verification mode at temperatures 0 and 0.8"
        out += section(title, "h200/server_verification.json", server_table(document), document)
    if short:
        return "\n".join(out).strip()
    for name, title in (
        ("h200/attention_invariance.json", "Attention operators on a GPU"),
        ("h200/ops_invariance.json", "Linear, norm and softmax operators on a GPU"),
    ):
        if document := load(name):
            body = invariance_table(document)
            if document.get("failures"):
                body += ["", f"Failures it reports: {'; '.join(document['failures'])}."]
            out += section(title, name, body, document)
    if document := load("h200/attention_speed.json"):
        out += section(
            "Attention speed on a GPU, µs per layer", "h200/attention_speed.json", attention_table(document), document
        )
    if document := load("h200/ops_speed.json"):
        body = ["| cases | number | geometric mean of stock / ours | lowest |", "|---|---|---|---|"]
        for label, graph in (("linear, CUDA graph", True), ("linear, outside CUDA graphs", False)):
            ratios = [
                c["ratio"]
                for c in document["cases"]
                if c["case"].startswith("linear")
                and ("CUDA graph" in c["case"] and "no CUDA" not in c["case"]) == graph
            ]
            if ratios:
                body.append(f"| {label} | {len(ratios)} | {geometric_mean(ratios):.3f} | {min(ratios):.3f} |")
        out += section("Linear speed on a GPU", "h200/ops_speed.json", body, document)
    if document := load("h200/first_start.json"):
        title = f"First start on a GPU without a tuning table, {document['model']}"
        out += section(title, "h200/first_start.json", first_start_table(document), document)
    if document := load("h200/kernels.json"):
        title = "Kernels on a GPU, under a CUDA graph"
        out += section(title, "h200/kernels.json", kernel_table(document), document)
    if document := load("h200/step_profile.json"):
        title = f"Processor time of a decode step of {document['model']} on a GPU machine, layers uncompiled"
        out += section(title, "h200/step_profile.json", step_table(document), document)
    if document := load("h200/sampler_speed.json"):
        out += section("One sampling step on a GPU", "h200/sampler_speed.json", sampler_table(document), document)
    return "\n".join(out).strip()


def main() -> int:
    """Write the generated sections, or check them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if not options.check:
        draw("h200/speed.json")
    stale = []
    for path, short in ((ROOT / "README.md", True), (ROOT / "docs" / "results.md", False)):
        text = path.read_text(encoding="utf-8")
        before, _, rest = text.partition(BEGIN)
        _, _, after = rest.partition(END)
        body = render(short)
        if not short:
            body = body.replace("](benchmarks/", "](../benchmarks/")
        wanted = f"{before}{BEGIN}\n{body}\n{END}{after}"
        if wanted == text:
            continue
        stale.append(path.name)
        if not options.check:
            path.write_text(wanted, encoding="utf-8")
    if options.check and stale:
        print(f"{', '.join(stale)}: out of date; run python benchmarks/tables.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
