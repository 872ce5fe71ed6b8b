"""What ``det-plugin bench`` makes of its rounds: rows of medians and ratios, a table, a plot."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from det_plugin.verify.bench_load import Case

Samples = Mapping[str, Mapping[str, Sequence[float | None]]]
"""server -> row -> one value per round; None where it could not be measured."""

METHOD = (
    "median over rounds of tokens per wall-clock second, or of the round's p50/p99 over requests in ms; ratio: median "
    "over rounds of the round's own deterministic / stock; spread: [smallest, largest] over rounds"
)
DEFAULT_BACKEND = "default"


def kind_of(name: str) -> str:
    """``stock``, ``deterministic``, ``host_batch_invariant`` or ``""`` from a server's name."""
    return next((k for k in ("stock", "deterministic", "host_batch_invariant") if name.startswith(k)), "")


def comparisons(names: Sequence[str]) -> list[dict[str, str | None]]:
    """Which servers share a row of the result.

    One row per deterministic server: with the stock and the host's batch-invariant server of the same ``@BACKEND``,
    or the first of its kind when there is none.  Without deterministic servers, one row per stock server.
    """

    def partner(kind: str, backend: str) -> str | None:
        same = [n for n in names if kind_of(n) == kind and n.partition("@")[2] == backend]
        return next(iter(same or [n for n in names if kind_of(n) == kind]), None)

    lead = "deterministic" if any(kind_of(n) == "deterministic" for n in names) else "stock"
    rows: list[dict[str, str | None]] = []
    for name in names:
        if kind_of(name) == lead:
            backend = name.partition("@")[2]
            row = {kind: partner(kind, backend) for kind in ("stock", "deterministic", "host_batch_invariant")}
            rows.append({**row, lead: name, "backend": backend or DEFAULT_BACKEND})
    return rows or [{"stock": None, "deterministic": None, "host_batch_invariant": None, "backend": DEFAULT_BACKEND}]


def _ratios(samples: Samples, row: str, base: str | None, name: str | None) -> list[float]:
    if base is None or name is None:
        return []
    # rounds that were cut off may hold a value of one server only
    pairs = zip(samples[base].get(row, ()), samples[name].get(row, ()), strict=False)
    return [b / a for a, b in pairs if a and b]


def summarize(model: str, cases: Sequence[Case], samples: Samples) -> list[dict[str, Any]]:
    """The ``cases`` of the JSON: medians, ratios and spreads of every row that has values."""
    result = []
    names = list(samples)
    for servers in comparisons(names):
        grouped = {k: servers[k] for k in ("stock", "deterministic", "host_batch_invariant")}
        for case in cases:
            for row, unit in case.rows.items():
                values = {n: [v for v in samples[n].get(row, ()) if v is not None] for n in names}
                if not any(values.values()):
                    continue
                median = {name: statistics.median(v) for name, v in values.items() if v}
                shown = [n for n in grouped.values() if n] + [n for n in names if not kind_of(n)]
                spread: dict[str, Any] = {n: [min(values[n]), max(values[n])] for n in shown if values[n]}
                ratios = _ratios(samples, row, grouped["stock"], grouped["deterministic"])
                host = _ratios(samples, row, grouped["stock"], grouped["host_batch_invariant"])
                for key, found in (("ratio", ratios), ("host_ratio", host)):
                    if found:
                        spread[key] = [min(found), max(found)]
                others = {}
                for name in names:
                    if not kind_of(name) and name in median:
                        other = _ratios(samples, row, grouped["stock"], name)
                        others[name] = {"value": median[name], "ratio": statistics.median(other) if other else None}
                result.append(
                    {
                        "model": Path(model).name,
                        "case": row,
                        "backend": servers["backend"],
                        "unit": unit,
                        **{k: median.get(n) if n else None for k, n in grouped.items()},
                        "ratio": statistics.median(ratios) if ratios else None,
                        "host_ratio": statistics.median(host) if host else None,
                        "runs": len(ratios) or max(map(len, values.values())),
                        "spread": spread,
                        "servers": grouped,
                        **({"others": others} if others else {}),
                    }
                )
    return result


def table_rows(cases: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Header and rows of the printed table."""
    others = sorted({name for case in cases for name in case.get("others", {})})
    rows = [["case", "backend", "stock", "deterministic", "ratio", "spread", "host's mode", "runs", *others]]

    def number(value: float | None, form: str) -> str:
        return "-" if value is None else f"{value:{form}}"

    def with_ratio(value: float | None, ratio: float | None) -> str:
        return number(value, ".1f") + (f" ({ratio:.2f})" if ratio is not None else "")

    for case in cases:
        spread = case["spread"].get("ratio")
        row = [f"{case['case']} ({case['unit']})", case["backend"]]
        row += [number(case["stock"], ".1f"), number(case["deterministic"], ".1f"), number(case["ratio"], ".3f")]
        row += [f"{spread[0]:.2f} to {spread[1]:.2f}" if spread else "-"]
        row += [with_ratio(case["host_batch_invariant"], case["host_ratio"]), str(case["runs"])]
        for name in others:
            entry = case.get("others", {}).get(name, {"value": None, "ratio": None})
            row.append(with_ratio(entry["value"], entry["ratio"]))
        rows.append(row)
    return rows


def print_table(cases: Sequence[Mapping[str, Any]]) -> None:
    """Print medians and ratios; in plain columns where ``rich`` is not installed."""
    header, *rows = table_rows(cases)
    title = "median over rounds; ratio: deterministic / stock"
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
        print(title)
        for row in [header, *rows]:
            cells = zip(row, widths, strict=True)
            print("  ".join(f"{text:<{w}}" if i < 2 else f"{text:>{w}}" for i, (text, w) in enumerate(cells)))
        return
    table = Table(title=title)
    for i, column in enumerate(header):
        table.add_column(column, justify="left" if i < 2 else "right", no_wrap=i > 0)
    for row in rows:
        table.add_row(*row)
    # where nobody watches, rich assumes 80 columns and would cut the names
    Console(width=None if sys.stdout.isatty() else 180).print(table)


def is_latency(case: Mapping[str, Any]) -> bool:
    """Whether lower is better."""
    return str(case["unit"]) == "ms"


def is_headline(case: Mapping[str, Any]) -> bool:
    """Throughput, and the p99 latencies of the mixed load: what short tables and the plot show."""
    return not is_latency(case) or (case["case"].startswith("mixed") and case["case"].endswith("p99"))


def plot(report: Mapping[str, Any], path: Path) -> Path | None:
    """Bars of every server's speed relative to stock, with the rounds' spread; None without matplotlib.

    One panel per model.  Latencies stand as stock's time over the server's, so that above 1 is faster everywhere.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return None
    panels: dict[str, dict[str, dict[str, tuple[float, float, float]]]] = {}

    def add(row: Mapping[str, Any], label: str, ratio: float | None, spread: Sequence[float] | None) -> None:
        if ratio is not None:
            low, high = spread or (ratio, ratio)
            bar = (1 / ratio, 1 / high, 1 / low) if is_latency(row) else (ratio, low, high)
            panels.setdefault(row["model"], {}).setdefault(label, {})[row["case"]] = bar

    for row in filter(is_headline, report["cases"]):
        backend = row.get("backend") or DEFAULT_BACKEND
        suffix = "" if backend == DEFAULT_BACKEND else f" {backend}"
        add(row, f"deterministic{suffix}", row.get("ratio"), row["spread"].get("ratio"))
        add(row, f"host's batch-invariant mode{suffix}", row.get("host_ratio"), row["spread"].get("host_ratio"))
        for name, entry in row.get("others", {}).items():
            add(row, name, entry["ratio"], None)
    if not panels:
        return None
    order = list(dict.fromkeys(row["case"] for row in report["cases"]))
    widest = max(len({c for bars in series.values() for c in bars}) for series in panels.values())
    figure, all_axes = pyplot.subplots(
        len(panels), figsize=(2.2 + 1.35 * widest, 3.4 * len(panels) + 0.8), squeeze=False
    )
    for axes, (model, series) in zip(all_axes[:, 0], panels.items(), strict=True):
        names = [c for c in order if any(c in bars for bars in series.values())]
        width = 0.8 / len(series)
        for k, (label, bars) in enumerate(series.items()):
            have = [(i + (k - (len(series) - 1) / 2) * width, bars[c]) for i, c in enumerate(names) if c in bars]
            errors = [[max(0.0, m - low) for _, (m, low, _) in have], [max(0.0, high - m) for _, (m, _, high) in have]]
            axes.bar(
                [x for x, _ in have], [m for _, (m, _, _) in have], width * 0.92, yerr=errors, capsize=2, label=label
            )
        axes.axhline(1.0, color="grey", linewidth=0.8)
        axes.set_xticks(range(len(names)), [n.replace(", ", ",\n").replace(": ", ":\n") for n in names], fontsize=7)
        axes.set_ylabel("speed relative to stock")
        axes.set_title(f"{model}, {', '.join(report['environment'].get('gpus') or ()) or 'CPU'}", fontsize=10)
        axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path
