"""Joining the files of the GPU checks: newer checks replace older ones and say which commit they ran on."""

from __future__ import annotations

import json

import report


def check(backend, name="neighbours", comparisons=5, **more):
    counts = {"comparisons": comparisons, "mismatches": 0, "negative_control_mismatches": 2}
    return {"name": name, "model": "m", "backend": backend, **counts, **more}


def write(folder, commit, checks):
    folder.mkdir(exist_ok=True)
    path = folder / "attention_invariance.json"
    path.write_text(json.dumps({"environment": {"commit": commit}, "checks": checks}))
    return path


def test_newer_checks_replace_older_ones(tmp_path):
    write(tmp_path, "old", [check("triton"), check("fa3")])
    newer = write(tmp_path / "new", "new", [check("triton", comparisons=7), check("triton", name="graph")])
    report.take(tmp_path, newer)
    merged = report.merge(tmp_path)
    assert merged["environment"]["commit"] == "old"
    rows = [(c["name"], c["backend"], c["comparisons"], c.get("commit")) for c in merged["checks"]]
    assert rows == [("neighbours", "triton", 7, "new"), ("neighbours", "fa3", 5, None), ("graph", "triton", 5, "new")]


def test_a_mismatch_in_a_newer_check_is_kept(tmp_path):
    write(tmp_path, "old", [check("triton")])
    report.take(tmp_path, write(tmp_path / "new", "new", [check("triton") | {"mismatches": 3}]))
    assert [c["mismatches"] for c in report.merge(tmp_path)["checks"]] == [3]
