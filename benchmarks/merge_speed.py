"""Join files of ``det-plugin bench`` (other models, backends or cases) into one.

``python benchmarks/merge_speed.py benchmarks/results/h200/speed.json RUN.json ...`` takes up what the first file holds
already.  A row (model, case, backend) of a later file replaces the earlier one, except that a row without a
deterministic value only adds the host's batch-invariant mode, with its ratio to the stock server of its own run.
Every row names its run; a ratio never mixes runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

HOST_FIELDS = ("host_batch_invariant", "host_ratio")
RUN_FIELDS = (
    *("environment", "suite", "interleaved", "checks", "server_args", "servers", "failed", "idle", "kv_cache"),
    *("gpu_memory_used_bytes", "poisson_requests_per_second", "limit_reached", "answers_in_one_piece"),
    "passes",
)


def key(row: dict[str, Any]) -> tuple[str, str, str]:
    """What identifies a row."""
    return row["model"], row["case"], row.get("backend") or "default"


def add_host(old: dict[str, Any], new: dict[str, Any], run: int) -> None:
    """Put the host's mode of another run into a row that has a deterministic value."""
    for name in HOST_FIELDS:
        old[name] = new[name]
    old["host_run"] = run
    if "host_ratio" in new["spread"]:
        old["spread"]["host_ratio"] = new["spread"]["host_ratio"]


def merge(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """One document with the rows of all; the latest environment stands at the top, each run's own under ``sessions``.

    Raises:
        ValueError: no documents, or files of different GPUs.
    """
    if not documents:
        raise ValueError("files: got none, expected at least one")
    devices = {json.dumps(sorted({g.split(",")[0] for g in d["environment"].get("gpus") or ()})) for d in documents}
    if len(devices) > 1:
        raise ValueError(f"files: got results of different devices ({'; '.join(sorted(devices))}), expected one kind")
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    sessions: list[dict[str, Any]] = []
    for document in documents:
        first = len(sessions)
        known = document.get("sessions")
        sessions += known or [{name: document[name] for name in RUN_FIELDS if name in document}]
        for case in document["cases"]:
            row = {**case, "spread": dict(case["spread"]), "run": first + case.get("run", 0)}
            if "host_run" in row:
                row["host_run"] += first
            old = rows.get(key(row))
            if old and row.get("deterministic") is None and old.get("deterministic") is not None:
                if row.get("host_batch_invariant") is not None:
                    add_host(old, row, row["run"])
                continue
            if old and row.get("host_batch_invariant") is None and old.get("host_batch_invariant") is not None:
                add_host(row, old, old.get("host_run", old["run"]))
            rows[key(row)] = row
    used = sorted({run for row in rows.values() for run in (row["run"], row.get("host_run", row["run"]))})
    for row in rows.values():
        row["run"] = used.index(row["run"])
        if "host_run" in row:
            row["host_run"] = used.index(row["host_run"])
    return {
        "environment": documents[-1]["environment"],
        "method": documents[-1]["method"],
        "cases": list(rows.values()),
        "sessions": [sessions[run] for run in used],
    }


def main() -> int:
    """Merge files into the first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path, help="file to write; taken up first when it exists")
    parser.add_argument("runs", nargs="+", type=Path)
    options = parser.parse_args()
    files = [*([options.target] if options.target.exists() else []), *options.runs]
    try:
        merged = merge([json.loads(path.read_text(encoding="utf-8")) for path in files])
    except (OSError, ValueError) as error:
        print(f"merge_speed: {error}", file=sys.stderr)
        return 2
    options.target.parent.mkdir(parents=True, exist_ok=True)
    options.target.write_text(json.dumps(merged, indent=1) + "\n", encoding="utf-8")
    print(f"{options.target}: {len(merged['cases'])} rows of {len(merged['sessions'])} runs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
