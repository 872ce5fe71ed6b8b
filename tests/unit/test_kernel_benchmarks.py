"""The kernel benchmarks on a machine without a GPU: cases, counting, skipping, and a whole run with invented times."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "gpu"))
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import kernel_cases
import kernel_prepare
import kernel_results
import kernel_runs
import timing
from kernel_prepare import UnavailableError

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("benchmark_tables_kernels", ROOT / "benchmarks" / "tables.py")
tables = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tables)


def run_pytest(*args: object, **environment: str):
    command = [sys.executable, "-m", "pytest", str(ROOT / "benchmarks" / "test_kernels.py"), "-p", "no:cacheprovider"]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "unit"), os.environ.get("PYTHONPATH", "")])
    # a run of its own: a worker's name of pytest-xdist would switch pytest-benchmark off
    outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    env = {**outer, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths, **environment}
    return subprocess.run([*command, *map(str, args)], capture_output=True, text=True, env=env, cwd=ROOT, check=False)


# --- cases ------------------------------------------------------------------------------------------------


def test_the_cases_are_the_agreed_ones():
    cases = list(kernel_cases.CASES.values())
    linear = [c for c in cases if c.operator == "linear"]
    assert {(c.model, c.prepare.args) for c in linear} == {
        (model, (n, k, m))
        for model in ("Qwen3-8B", "Qwen3-1.7B")
        for n, k in kernel_cases.SHAPES[model]
        for m in (1, 8, 64, 256, 4096)
    }
    assert (24576, 4096) in kernel_cases.SHAPES["Qwen3-8B"]
    operators = dict.fromkeys(c.operator for c in cases)
    assert list(operators) == [
        "linear", "rms_norm", "fused_add_rms_norm", "qk_norm_rope", "log_softmax", "sampling", "attention",
    ]  # fmt: skip
    assert {c.backend for c in cases if c.operator == "attention"} == {"triton", "fa3", "flashinfer"}
    kinds = {c.prepare.args[2] for c in cases if c.operator == "attention"}
    assert kinds == {"decode", "prefill"}
    assert cases[-1].backend == "flashinfer"


def test_only_what_is_compiled_by_triton_is_compiled_ahead():
    groups = {c.group for c in kernel_cases.CASES.values()} - {""}
    assert 4 <= len(groups) <= 16
    assert not any(c.group for c in kernel_cases.CASES.values() if c.backend in ("fa3", "flashinfer"))


# --- counting and checking --------------------------------------------------------------------------------


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(kernel_prepare, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(kernel_prepare, "ROTATION_BYTES", 1 << 14)


def test_bytes_and_operations(on_cpu):
    norm = kernel_prepare.prepare_rms_norm(64, 5)
    assert (norm.bytes, norm.flop) == (2 * (5 * 64 * 2 + 64), 4 * 5 * 64)
    fused = kernel_prepare.prepare_fused_add_rms_norm(64, 5)
    assert (fused.bytes, fused.flop) == (2 * (5 * 64 * 4 + 64), 5 * 5 * 64)
    softmax = kernel_prepare.prepare_log_softmax(100, 4)
    assert (softmax.bytes, softmax.flop) == (400 * (2 + 4), 4 * 400)
    qk = kernel_prepare.prepare_qk_norm_rope(4, 2, 64, 7)
    assert (qk.bytes, qk.flop) == (2 * 7 * 6 * 64 * 2 + 7 * (8 + 64 * 2), 7 * 7 * 6 * 64)
    for prepared in (norm, fused, softmax, qk):
        prepared.check()
        assert len(prepared.deterministic) >= 2


@pytest.mark.parametrize(
    ("kind", "rows", "visible"), [("decode", 1, 100), ("prefill", 100, 100 * 101 // 2)], ids=["decode", "prefill"]
)
def test_bytes_and_operations_of_attention(kind, rows, visible, on_cpu, monkeypatch):
    class Batch:
        q = torch.zeros(1)

    monkeypatch.setattr(kernel_prepare, "pool", lambda *args: args)
    monkeypatch.setattr(kernel_prepare, "require_backend", lambda *_: None)
    monkeypatch.setattr(kernel_prepare.attention_check, "rotated_batches", lambda *_: [Batch()])
    calls = lambda name, heads, pool, batches, out: [(name, pool)]
    monkeypatch.setattr(kernel_prepare.attention_check, "layer_calls", calls)
    prepared = kernel_prepare.prepare_attention("triton", (4, 2, 64), kind, 3, 100)
    assert prepared.bytes == 3 * (2 * 100 * 2 * 64 + 2 * rows * 4 * 64) * 2
    assert prepared.flop == 3 * 4 * visible * 4 * 64
    assert prepared.deterministic == [("triton", (64, 2, 64))]
    assert prepared.stock() == [("stock_triton", (16, 2, 64))]


def test_a_wrong_result_is_noticed():
    kernel_prepare.close(torch.ones(3), torch.full((3,), 1.009), "x")
    for got in (torch.full((3,), 1.02), torch.full((3,), float("nan"))):
        with pytest.raises(AssertionError, match="x: relative error"):
            kernel_prepare.close(got, torch.ones(3), "x")
    kernel_prepare.same_bytes(torch.tensor([0.0]), torch.tensor([0.0]), "x")
    with pytest.raises(AssertionError, match="x: first difference at"):
        kernel_prepare.same_bytes(torch.tensor([-0.0]), torch.tensor([0.0]), "x")


def test_rates_are_fractions_of_the_peaks():
    peaks = kernel_runs.Peaks(4e12, 8e14)
    found = kernel_runs.rates(2_000_000, 80_000_000, 1e-6, peaks)
    assert found == pytest.approx(
        {"bytes_per_s": 2e12, "fraction_of_copy": 0.5, "flop_per_s": 8e13, "fraction_of_matmul": 0.1}
    )
    assert set(kernel_runs.rates(1, None, 1.0, peaks)) == {"bytes_per_s", "fraction_of_copy"}


# --- timing -----------------------------------------------------------------------------------------------


class Graph:
    def __init__(self, log, name):
        self.log, self.name = log, name

    def replay(self):
        self.log.append(self.name)


def test_sides_are_replayed_in_turn(monkeypatch):
    log: list[str] = []
    clock = iter(range(1, 100))
    monkeypatch.setattr(timing, "capture", lambda calls: Graph(log, calls[0]))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("|"))

    def replay_time(graph, flush):
        assert flush is None
        graph.replay()
        return float(next(clock))

    monkeypatch.setattr(timing, "replay_time", replay_time)
    times = timing.interleaved({"stock": ["a"], "ours": ["b", "b"]}, 3)
    assert log == ["a", "b", "|", "a", "b", "a", "b", "a", "b"]
    assert times == {"stock": [1, 3, 5], "ours": [1, 2, 3]}  # per call: the second graph holds two
    assert timing.graph_pairs(["a"], ["b"], 2, replays=3) == [(9, 10), (15, 16)]


# --- a session --------------------------------------------------------------------------------------------


@pytest.fixture
def session(monkeypatch):
    monkeypatch.setattr(kernel_runs, "measure_peaks", lambda: kernel_runs.Peaks(1.0, 1.0))
    monkeypatch.setattr(kernel_runs.kernel_cases, "configure", lambda: None)
    monkeypatch.setattr(kernel_runs, "compile_groups", lambda groups: pytest.fail(f"compiled {groups}"))
    return kernel_runs.KernelSession([next(iter(kernel_cases.CASES))], 100.0)


def test_a_case_is_measured_once_for_both_sides(session, monkeypatch):
    asked: list[str] = []
    found = kernel_runs.Measured({"deterministic": [1.0]}, {}, "no host")
    monkeypatch.setattr(kernel_runs, "measure", lambda name: asked.append(name) or found)
    assert session.get("x") is session.get("x") is found
    assert asked == ["x"]
    assert session.left_out == {"x, stock": "no host"}


def test_a_failure_is_raised_for_both_sides(session, monkeypatch):
    def fail(name):
        raise AssertionError("wrong bits")

    monkeypatch.setattr(kernel_runs, "measure", fail)
    for _ in range(2):
        with pytest.raises(AssertionError, match="wrong bits"):
            session.get("x")
    assert session.left_out == {"x": "wrong bits"}


def test_nothing_is_measured_after_the_limit(session, monkeypatch):
    monkeypatch.setattr(kernel_runs, "measure", lambda name: pytest.fail(f"measured {name}"))
    session.started -= 101
    with pytest.raises(UnavailableError, match="limit of 100 s"):
        session.get("x")
    assert session.left_out == {"x": "the limit of 100 s was reached"}
    session.limit = 0
    with pytest.raises(pytest.fail.Exception, match="measured y"):
        session.get("y")


def test_compiling_ahead_tells_what_failed(monkeypatch, tmp_path):
    script = tmp_path / "kernel_cases.py"
    script.write_text(
        "import sys, time\nsys.exit(3) if sys.argv[1] == 'bad' else time.sleep(9 * (sys.argv[1] == 'slow'))"
    )
    monkeypatch.setattr(kernel_runs.kernel_cases, "__file__", str(script))
    monkeypatch.setattr(kernel_runs, "COMPILE_SECONDS", 1.5)
    with pytest.warns(UserWarning, match="exit status") as caught:
        kernel_runs.compile_groups(["good", "bad", "slow"])
    assert [str(w.message) for w in caught] == [
        "compiling the kernels of 'bad' ahead: exit status 3",
        "compiling the kernels of 'slow' ahead: exit status none within 1.5 s",
    ]


# --- whole runs -------------------------------------------------------------------------------------------


def test_without_a_gpu_everything_is_skipped_with_the_reason():
    done = run_pytest("-q", "-k", "rms_norm or attention")
    assert done.returncode == 0, done.stdout
    assert "kernel benchmarks need a CUDA GPU" in done.stdout
    assert "92 skipped" in done.stdout
    assert "passed" not in done.stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A whole run with invented durations: (finished process, its JSON, kernels.json)."""
    folder = tmp_path_factory.mktemp("kernels")
    done = run_pytest("-rA", "-p", "fake_gpu", "--benchmark-json", folder / "run.json")
    document = json.loads((folder / "run.json").read_text())
    command = [sys.executable, str(ROOT / "benchmarks" / "kernel_results.py"), str(folder / "run.json")]
    command += ["--out", str(folder / "new" / "kernels.json"), "--commit", "abc"]
    subprocess.run(command, check=True, capture_output=True)
    return done, document, json.loads((folder / "new" / "kernels.json").read_text())


def test_each_outcome_is_reported(run):
    done, document, _ = run
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-2000:]
    assert "COMPILED ['a', 'b']" in done.stdout
    counts = [line for line in done.stdout.splitlines() if " passed" in line][-1]
    # five whole cases less the stock side of qk_norm_rope, which the CPU host lacks; two without a stock side
    assert "3 failed, 11 passed, 4 skipped" in counts
    for line in ("wrong norm: relative error", "no host here", "absent: no such kernel here"):
        assert line in done.stdout
    left_out = document["det_plugin"]["left_out"]
    assert set(left_out) == {"wrong", "absent", "qk, stock", "broken, stock", "lonely, stock"}
    assert left_out["broken, stock"].startswith("RuntimeError: ")
    assert document["det_plugin"]["environment"]["gpu"] == "NVIDIA Fake"


def test_durations_are_the_events(run):
    _, document, _ = run
    entry = next(b for b in document["benchmarks"] if b["name"] == "test_kernel[rms_norm-stock]")
    assert entry["stats"]["median"] == pytest.approx(30e-6, rel=1e-12)
    assert entry["stats"]["rounds"] == kernel_runs.ROUNDS
    assert entry["stats"]["data"] == pytest.approx([(25 + i) * 1e-6 for i in range(kernel_runs.ROUNDS)], rel=1e-12)
    assert entry["group"] == "rms_norm"
    info = entry["extra_info"]
    assert (info["side"], info["bytes"], info["flop"]) == ("stock", 2 * (5 * 64 * 2 + 64), 4 * 5 * 64)
    assert info["bytes_per_s"] == pytest.approx(info["bytes"] / 30e-6)
    # the copy of 1 KiB took 1 microsecond, the product of two 16 x 16 matrices 2
    assert document["det_plugin"]["peaks"] == pytest.approx(
        {"copy_bytes_per_s": 2048 / 1e-6, "matmul_flop_per_s": 2 * 16**3 / 2e-6}
    )
    assert info["fraction_of_copy"] == pytest.approx(info["bytes"] / 30e-6 / 2.048e9)


def test_kernels_json_and_its_table(run):
    _, _, kernels = run
    assert kernels["environment"]["commit"] == "abc"
    rows = {row["case"] + row["operator"]: row for row in kernels["cases"]}
    norm = rows["5 x 64rms_norm"]
    assert (norm["stock"], norm["deterministic"], norm["ratio"], norm["runs"]) == (30.0, 20.0, 1.5, kernel_runs.ROUNDS)
    assert norm["spread"] == {"stock": 0.333, "deterministic": 0.5}
    assert rows["N=8linear"]["schedule"] == "tile-4"
    assert (rows["lonelyrms_norm"]["stock"], rows["lonelyrms_norm"]["ratio"]) == (None, None)
    assert set(rows["lonelyrms_norm"]["bytes_per_s"]) == {"deterministic"}
    lines = tables.kernel_table(kernels)
    tables_of = [line for line in lines if line.startswith("|")]
    assert {line.count("|") for line in tables_of} == {7, 11}
    assert "| rms_norm |  | the host's CUDA kernel | 1 | 1.500 | 1.500 |" in lines
    row = next(line for line in lines if line.startswith("| rms_norm | M 5 x 64 |"))
    assert row.startswith("| rms_norm | M 5 x 64 |  | 30 | 20 | 1.500 | 0.0704 | 0.034 |")
    assert "lonely, stock (no host here)" in lines[-1]
    assert "NVIDIA Fake, driver 1.0" in tables.environment(kernels)


def test_a_file_of_something_else_is_refused(tmp_path, monkeypatch, capsys):
    (tmp_path / "x.json").write_text('{"benchmarks": []}')
    monkeypatch.setattr(sys, "argv", ["kernel_results", str(tmp_path / "x.json"), "--out", str(tmp_path / "y.json")])
    assert kernel_results.main() == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not (tmp_path / "y.json").exists()


@pytest.mark.parametrize(("found", "commit"), [("unknown", None), ("unversioned", None), ("f" * 40, "f" * 40)])
def test_commit_is_what_the_checkout_says_where_it_has_a_history(found, commit):
    own = {"environment": {}, "peaks": {}, "seconds": 1, "left_out": {}}
    document = {"det_plugin": own, "commit_info": {"id": found}, "benchmarks": []}
    assert kernel_results.convert(document)["environment"]["commit"] == commit
