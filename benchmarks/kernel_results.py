"""Turn pytest-benchmark's file of ``benchmarks/test_kernels.py`` into ``kernels.json``.

``python benchmarks/kernel_results.py FILE --out benchmarks/results/h200/kernels.json``; then
``python benchmarks/tables.py`` rewrites the tables.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

SIDES = ("stock", "deterministic")
RATES = ("bytes_per_s", "flop_per_s", "fraction_of_copy", "fraction_of_matmul")


def figures(value: float, digits: int) -> float:
    """``value`` with so many significant digits."""
    return float(f"{value:.{digits}g}")


def rows(benchmarks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per case: medians in microseconds, stock time over deterministic time, rates of both sides."""
    cases: dict[str, dict[str, dict[str, Any]]] = {}
    for benchmark in benchmarks:
        info = benchmark["extra_info"]
        cases.setdefault(info["case"], {})[info["side"]] = benchmark
    found = []
    for sides in cases.values():
        info = next(iter(sides.values()))["extra_info"]
        row: dict[str, Any] = {key: info[key] for key in ("operator", "model", "backend")}
        row |= {"case": info["shape"], "unit": "us"}
        stats = {side: sides[side]["stats"] if side in sides else None for side in SIDES}
        for side, values in stats.items():
            row[side] = None if values is None else figures(values["median"] * 1e6, 5)
        both = [values["median"] for values in stats.values() if values is not None]
        row["ratio"] = figures(both[0] / both[1], 4) if len(both) == 2 else None
        row["runs"] = max(values["rounds"] for values in stats.values() if values is not None)
        row["spread"] = {
            side: figures((values["max"] - values["min"]) / values["median"], 3)
            for side, values in stats.items()
            if values is not None
        }
        row |= {key: info[key] for key in ("bytes", "flop", "stock_runs", "schedule")}
        for name in RATES:
            row[name] = {
                side: figures(sides[side]["extra_info"][name], 4)
                for side in SIDES
                if side in sides and name in sides[side]["extra_info"]
            }
        found.append(row)
    return found


def convert(document: dict[str, Any], commit: str | None = None) -> dict[str, Any]:
    """The contents of ``kernels.json``.

    Args:
        document: what ``--benchmark-json`` wrote.
        commit: of the source; None takes what pytest-benchmark found.

    Raises:
        ValueError: it is no file of the kernel benchmarks.
    """
    try:
        own = document["det_plugin"]
        known = document["commit_info"].get("id")
        return {
            "environment": {
                **own["environment"],
                "commit": commit or (known if known not in ("unknown", "unversioned") else None),
            },
            "method": "microseconds per call under a CUDA graph, both sides in turn, cold L2 cache; medians",
            "peaks": own["peaks"],
            "seconds": own["seconds"],
            "cases": rows(document["benchmarks"]),
            "left_out": own["left_out"],
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a file of benchmarks/test_kernels.py ({type(error).__name__}: {error})") from None


def main() -> int:
    """Convert one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="what pytest --benchmark-json wrote")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument("--commit", help="commit of the source, for machines without the checkout's history")
    options = parser.parse_args()
    try:
        document = convert(json.loads(options.file.read_text(encoding="utf-8")), options.commit)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except (OSError, ValueError) as error:
        print(f"kernel_results: {options.file}: {error}", file=sys.stderr)
        return 2
    print(f"{options.out}: {len(document['cases'])} cases, {len(document['left_out'])} left out")
    return 0


if __name__ == "__main__":
    sys.exit(main())
