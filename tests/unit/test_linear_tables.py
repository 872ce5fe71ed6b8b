"""Tuning tables and the choice of a schedule by row count: no GPU."""

from __future__ import annotations

import json

import pytest
import torch

from det_plugin.errors import CertificateError
from det_plugin.evidence.certificates import Certificate, CertificateStore, Difference, Schedule
from det_plugin.ops import linear_cuda, linear_tuning
from det_plugin.ops._cublaslt import Algorithm
from det_plugin.ops.blocked_sum import SUM_BLOCK
from det_plugin.ops.linear_cuda import TABLES, LinearDispatcher, check_linear_arguments
from det_plugin.ops.linear_plan import (
    DEFAULT_TABLES,
    Plan,
    asked_rows,
    certification_data,
    certified_rows,
    cublaslt_ranges,
    named_algorithms,
)
from det_plugin.ops.linear_schedules import (
    CANONICAL,
    Tile,
    aligned,
    check_table,
    load_tables,
    table_key,
    table_path,
)

SMALL, LARGE = "swap-16x64x128-w4-s6", "tma-128x128x64-w8-s4"
CANON = CANONICAL[torch.bfloat16].name


class FakeProblem:
    """cuBLASLt that offers one algorithm up to 100 rows and another above; nothing from 5000 on."""

    k = 64

    def algorithms(self, m, count=8):
        if m >= 5000:
            return []
        first = "cublaslt-few" if m <= 100 else "cublaslt-many"
        return [Algorithm(first, b""), Algorithm("cublaslt-second", b"")][:count]


def plan(table, accepted, problem=None):
    certificate = Certificate("linear", "key", CANON, (CANON, *accepted), {}, (1, 8192))
    return Plan(4096, 4096, torch.bfloat16, False, check_table(table, "test"), certificate, problem)


def test_names_round_trip():
    for name in (SMALL, LARGE, CANON, "persistent-128x256x64-w8-s3"):
        assert Tile.parse(name).name == name
    with pytest.raises(ValueError, match="got 'nonsense', expected like"):
        Tile.parse("nonsense")


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [[16, SMALL]],
        [[32, SMALL], [16, LARGE], [None, "cublaslt"]],
        [[16, SMALL], [16, LARGE], [None, "cublaslt"]],
        [[None, SMALL], [None, "cublaslt"]],
        [[None, "splitk-8"]],
    ],
)
def test_malformed_tables_are_refused(rows):
    with pytest.raises(ValueError, match="expected"):
        check_table(rows, "test")


def test_the_tables_choice_runs_when_certified():
    made = plan([[16, SMALL], [None, LARGE]], [SMALL, LARGE])
    assert [made.schedule(m) for m in (1, 16, 17, 8192)] == [SMALL, SMALL, LARGE, LARGE]


def test_a_struck_out_choice_never_runs():
    table = [[16, SMALL], [None, LARGE]]
    assert plan(table, [LARGE]).schedule(1) == CANON
    vendor = plan(table, [LARGE, "cublaslt-few@1-100"], FakeProblem())
    assert vendor.schedule(1) == "cublaslt-few"
    assert vendor.schedule(17) == LARGE


def test_cublaslt_runs_only_where_it_was_certified():
    made = plan([[None, "cublaslt"]], ["cublaslt-few@1-64", "cublaslt-many@101-4096"], FakeProblem())
    chosen = {m: made.schedule(m) for m in (1, 64, 65, 100, 101, 4096, 4097, 8000)}
    assert chosen == {
        1: "cublaslt-few", 64: "cublaslt-few", 65: CANON, 100: CANON, 101: "cublaslt-many",
        4096: "cublaslt-many", 4097: CANON, 8000: CANON,
    }  # fmt: skip


def test_an_algorithm_named_by_the_table_runs_where_it_was_certified():
    table = [[64, "cublaslt-second"], [128, "cublaslt-absent"], [None, "cublaslt"]]
    accepted = ["cublaslt-few@1-100", "cublaslt-many@101-4992"]
    assert plan(table, accepted, FakeProblem()).schedule(64) == "cublaslt-few"
    made = plan(table, [*accepted, "cublaslt-second@1-64"], FakeProblem())
    assert [made.schedule(m) for m in (1, 64, 65, 128)] == [
        "cublaslt-second", "cublaslt-second", "cublaslt-few", "cublaslt-many",
    ]  # fmt: skip
    assert named_algorithms(FakeProblem(), made.table, 8192) == [(Algorithm("cublaslt-second", b""), 1, 64)]


def test_ranking_asks_for_a_margin_and_keeps_large_rows_exact():
    times = {
        8: {"cublaslt": 10.0, SMALL: 9.9, "cublaslt-second": 9.9},
        64: {"cublaslt": 10.0, SMALL: 9.0, "cublaslt-second": 9.5},
        128: {"cublaslt": 10.0, "cublaslt-second": 9.0},
        256: {"cublaslt": 10.0, "cublaslt-second": 9.0},
        512: {"cublaslt": 10.0, "cublaslt-second": 11.0},
    }
    assert linear_tuning.rank(times) == (
        (8, "cublaslt"), (64, SMALL), (128, "cublaslt-second"), (255, "cublaslt"), (256, "cublaslt-second"),
        (None, "cublaslt"),
    )  # fmt: skip
    assert linear_tuning.rank({8: {SMALL: 1.0, CANON: 2.0}, 512: {SMALL: 3.0, CANON: 2.0}}) == (
        (8, SMALL), (None, CANON),
    )  # fmt: skip


def test_a_small_tile_does_not_serve_more_rows_than_certified():
    made = plan([[None, SMALL]], [SMALL])
    limit = Tile.parse(SMALL).max_rows(8192)
    assert made.schedule(limit) == SMALL
    assert made.schedule(limit + 1) == CANON


def test_float32_runs_tiles_of_its_order_and_never_asks_cublaslt(monkeypatch):
    asked = []

    def certified(self, n, k, dtype, has_bias, device, names, named, problem):
        canonical = CANONICAL[dtype].name
        return Certificate("linear", "key", canonical, (canonical, *names), {}, (1, 8192))

    monkeypatch.setattr(LinearDispatcher, "_certify", certified)
    monkeypatch.setattr(LinearDispatcher, "handle", lambda self, device: asked.append(device))
    made = LinearDispatcher(tables={})._make(4096, 1536, torch.float32, False, 0)
    assert not asked
    assert made.problem is None
    names = {made.schedule(m) for m in (1, 32, 33, 256, 257, 1024, 1025, 8192)}
    assert names == {name for _, name in DEFAULT_TABLES[torch.float32]}
    assert CANONICAL[torch.float32].name in names
    for name in names | linear_tuning.candidates(torch.float32, 4096, 1536):
        tile = Tile.parse(name)
        assert (tile.kind, tile.block_k) == ("pointer", SUM_BLOCK)
    assert all(made.chosen(m) is None and made.eager(m) is None for m in (1, 64, 8192))
    LinearDispatcher(tables={})._make(4096, 1536, torch.bfloat16, False, 0)
    assert asked == [0]  # control: other dtypes ask


def test_ranges_cover_every_row_count_that_may_be_asked():
    ranges = cublaslt_ranges(FakeProblem(), 8192)
    assert {name: (low, high) for name, (_, low, high) in ranges.items()} == {
        "cublaslt-few": (1, 100),
        "cublaslt-many": (101, 4992),
    }
    assert cublaslt_ranges(None, 64) == {}
    for m in range(1, 3000):
        assert m <= asked_rows(m) < m + 64


def test_certified_rows_bound_memory():
    assert certified_rows(4096, 4096) == 8192
    assert certified_rows(151936, 4096) == 1024
    assert certified_rows(10**9, 64) == 64


def test_certification_data_nearly_cancels_in_every_other_row():
    x, w, b = certification_data(64, 32, 256, torch.float32, True, torch.device("cpu"))
    again = certification_data(64, 32, 256, torch.float32, True, torch.device("cpu"))
    assert all(torch.equal(p, q) for p, q in zip((x, w, b), again, strict=True))
    y = x @ w.T
    assert y[1::2].abs().mean() < 0.05 * y[::2].abs().mean()


def test_tables_are_saved_merged_and_read(tmp_path):
    path = table_path(tmp_path, "NVIDIA H200")
    assert path.name == "NVIDIA_H200.json"
    assert load_tables(path) == {}
    key = table_key(torch.bfloat16, 4096, 1024)
    table = linear_tuning.merge_intervals([(1, SMALL), (8, SMALL), (64, "cublaslt"), (128, "cublaslt")])
    assert table == ((8, SMALL), (None, "cublaslt"))
    linear_tuning.save_table(path, "NVIDIA H200", key, table)
    linear_tuning.save_table(path, "NVIDIA H200", "float16,N=1,K=1", ((None, "cublaslt"),))
    assert load_tables(path) == {key: table, "float16,N=1,K=1": ((None, "cublaslt"),)}
    path.write_text(json.dumps({"format": 0}))
    with pytest.raises(ValueError, match="expected 1"):
        load_tables(path)


def test_committed_tables_are_valid():
    for path in TABLES.glob("*.json"):
        assert load_tables(path)


def test_alignment():
    x, w = torch.zeros(4, 64, dtype=torch.bfloat16), torch.zeros(8, 64, dtype=torch.bfloat16)
    assert aligned(x, w)
    assert not aligned(x[:, 1:], w[:, 1:])
    assert not aligned(x.T.contiguous().T, w)


def test_arguments_are_refused_by_name():
    x, w = torch.zeros(4, 64), torch.zeros(8, 64)
    check_linear_arguments(x, w, torch.zeros(8))
    for arguments, words in [
        ((x, torch.zeros(8, 63), None), r"x: got shape \[4, 64\], expected \[\.\.\., 63\]"),
        ((x, torch.zeros(8), None), r"weight: got shape \[8\], expected two dimensions"),
        ((x.half(), w, None), "weight: got torch.float32"),
        ((x, w, torch.zeros(9)), r"bias: got shape \[9\], expected \[8\]"),
        ((x.long(), w, None), "x: got dtype torch.int64, accepts"),
        ((torch.tensor(1.0), w, None), r"x: got shape \[\]"),
    ]:
        with pytest.raises(ValueError, match=words):
            check_linear_arguments(*arguments)


def test_difference_reads_well():
    assert "first difference at [3, 5]: canonical 0x3f80, got 0x3f81" in str(Difference(17, 2, (3, 5), "3f80", "3f81"))


def choice(table, m):
    return next(name for bound, name in table if bound is None or m <= bound)


@pytest.mark.parametrize(
    "table",
    [
        None,
        ((None, "cublaslt"),),
        ((16, "swap-16x64x256-w4-s4"), (64, "cublaslt"), (255, LARGE), (256, CANON), (None, "cublaslt")),
        ((5, SMALL), (20, LARGE), (None, CANON)),
    ],
)
@pytest.mark.parametrize(
    "measured",
    [{}, {1: "A"}, {8: "A"}, {1: "A", 8: "B", 16: "A", 32: "A"}, {256: "A"}, {128: "A", 512: "B"}, {8192: "A"}],
)
def test_spliced_tables_change_what_was_measured_and_nothing_else(table, measured):
    spliced = linear_tuning.splice(table, measured)
    bounds = [bound for bound, _ in spliced]
    assert bounds[-1] is None
    assert bounds[:-1] == sorted(set(bounds[:-1]))
    intervals = [0, *linear_tuning.INTERVALS]
    for m in (*range(1, 600), 2047, 2048, 8191, 8192, 8193, 100000):
        point = m if m in linear_tuning.POINTS else next((i for i in intervals if i >= m), None)
        expected = measured.get(point, choice(table or ((None, "cublaslt"),), m))
        assert choice(spliced, m) == expected, m


def test_control_joining_rows_alone_would_change_others():
    """What a plain concatenation does: rows 1 to 255 get the choice that was measured for 256."""
    table = ((8, SMALL), (None, "cublaslt"))
    joined = linear_tuning.merge_intervals([(256, "A"), *(row for row in table if row[0] is None or row[0] > 256)])
    assert choice(joined, 4) == "A"
    assert choice(linear_tuning.splice(table, {256: "A"}), 4) == SMALL


@pytest.fixture
def unknown_gpu(monkeypatch):
    """A GPU without a tuning table on which every schedule is certified; what was measured, and how."""
    seen = {"free": 2**40, "measured": [], "certified": []}

    def certified(self, n, k, dtype, has_bias, device, names, named, problem):
        seen["certified"].append(set(names))
        return Certificate("linear", "key", CANONICAL[dtype].name, (CANONICAL[dtype].name, *names), {}, (1, 8192))

    def measured(plan, named, device, deadline):
        seen["measured"].append((plan.n, plan.k, deadline))
        if "error" in seen:
            raise seen["error"]
        return ((16, SMALL), (None, "cublaslt")), seen.get("whole", True)

    monkeypatch.setattr(LinearDispatcher, "_certify", certified)
    monkeypatch.setattr(LinearDispatcher, "handle", lambda self, device: None)
    monkeypatch.setattr(linear_tuning, "measure_table", measured)
    monkeypatch.setattr(linear_tuning, "candidates", lambda dtype, n, k: {SMALL, LARGE})
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (seen["free"], 2**40))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    return seen


def make(store, n=4096, **options):
    dispatcher = LinearDispatcher(store, measure=True, **options)
    return dispatcher, dispatcher._make(n, 1536, torch.bfloat16, False, 0)


def test_an_unknown_gpu_is_measured_once(unknown_gpu, tmp_path, caplog):
    caplog.set_level("INFO")
    store = CertificateStore("cuda", tmp_path)
    dispatcher, first = make(store)
    assert first.table == ((16, SMALL), (None, "cublaslt"))
    assert first.schedule(8) == SMALL
    assert dispatcher.seconds_left < linear_cuda.MEASURE_SECONDS
    assert "measuring schedules" in caplog.text
    _, again = make(store)
    assert again.table == first.table
    assert len(unknown_gpu["measured"]) == 1
    assert unknown_gpu["certified"][-1] == {SMALL}, "the second start certifies what its table names"
    assert len(make(None)[1].table) == 2, "no store: measured, not kept"
    assert len(unknown_gpu["measured"]) == 2


def test_a_table_that_was_cut_short_is_used_and_measured_again(unknown_gpu, tmp_path):
    unknown_gpu["whole"] = False
    store = CertificateStore("cuda", tmp_path)
    assert make(store)[1].schedule(8) == SMALL
    assert make(store)[1].schedule(8) == SMALL
    assert len(unknown_gpu["measured"]) == 2


def test_measuring_stays_within_its_time_and_memory(unknown_gpu, tmp_path, caplog):
    caplog.set_level("INFO")
    dispatcher, _ = make(CertificateStore("cuda", tmp_path))
    dispatcher.seconds_left = linear_cuda.LEAST_SECONDS - 0.1
    assert dispatcher._make(8192, 1536, torch.bfloat16, False, 0).table == DEFAULT_TABLES[torch.bfloat16]
    assert "no time to measure" in caplog.text
    unknown_gpu["free"] = 2 * linear_tuning.memory(2048, 1536, torch.bfloat16) - 1
    assert make(None, 2048)[1].table == DEFAULT_TABLES[torch.bfloat16]
    assert "no memory to measure" in caplog.text
    assert [n for n, _, _ in unknown_gpu["measured"]] == [4096]


@pytest.mark.parametrize(
    "error", [RuntimeError("out of memory"), OSError("disk full"), ValueError("compiler")], ids=str
)
def test_a_failure_while_measuring_leaves_the_default_schedules(unknown_gpu, tmp_path, caplog, error):
    unknown_gpu["error"] = error
    dispatcher, made = make(CertificateStore("cuda", tmp_path))
    assert made.table == DEFAULT_TABLES[torch.bfloat16]
    assert made.schedule(8) == CANON
    assert str(error) in caplog.text
    assert dispatcher.seconds_left < linear_cuda.MEASURE_SECONDS


def test_required_certificates_are_not_made_by_measuring(unknown_gpu, tmp_path):
    _, made = make(CertificateStore("cuda", tmp_path), mode="require")
    assert made.table == DEFAULT_TABLES[torch.bfloat16]
    assert not unknown_gpu["measured"]


def test_no_row_count_is_measured_past_the_deadline(monkeypatch):
    timed, clock = [], iter(range(100))
    monkeypatch.setattr(linear_tuning, "graph_time", lambda calls: timed.append(len(calls)) or 5.0)
    monkeypatch.setattr(linear_tuning.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(linear_tuning, "rotating_weights", lambda n, k, dtype, device: [torch.zeros(n, k)] * 3)
    monkeypatch.setattr(Plan, "bind", lambda self, name, m: lambda *_: None)
    small = plan(((None, CANON),), (SMALL,))
    table, whole = linear_tuning.measure_table(small, [], torch.device("cpu"), deadline=2.5)
    assert not whole
    assert len(timed) == 6, "three row counts of two tiles"
    assert table[-1][0] is None
    assert linear_tuning.measure_table(small, [], torch.device("cpu"), deadline=-1) == (small.table, False)
    clock = iter(range(100))
    assert linear_tuning.measure_table(small, [], torch.device("cpu"))[1]
    whole_rows = linear_tuning.splice(small.table, {1: SMALL})
    clock = iter([0, 9])
    monkeypatch.setattr(linear_tuning, "graph_time", lambda calls: 5.0 if calls[0].args[0] == CANON else 1.0)
    monkeypatch.setattr(Plan, "bind", lambda self, name, m: name)
    cut, _ = linear_tuning.measure_table(small, [], torch.device("cpu"), deadline=1)
    assert cut == whole_rows == ((1, SMALL), (None, CANON)), "what was not measured keeps its schedule"


class TwoAlgorithms:
    """A cuBLASLt whose second suggestion is fastest at 8 and 16 rows; with a bias it is another one."""

    def __init__(self, handle, n, k, dtype, has_bias):
        self.k, self.names = k, ("1", "3") if has_bias else ("1", "2")

    def algorithms(self, m, count=8):
        return [Algorithm(f"cublaslt-{name}", b"") for name in self.names][:count]


@pytest.fixture
def certifying_gpu(unknown_gpu, monkeypatch):
    """As ``unknown_gpu``, but certificates are really made, kept and read, and tables really ranked."""
    monkeypatch.undo()
    certify = linear_cuda.certify

    def stand_in(operator, key, canonical, schedules, make_inputs, counts, **options):
        replaced = lambda s: Schedule(s.name, lambda x, *_: x, s.min_rows, s.max_rows, s.row_counts)
        inputs = lambda start, rows: (torch.zeros(rows, 1),)
        return certify(operator, key, replaced(canonical), [replaced(s) for s in schedules], inputs, counts, **options)

    def graph_time(calls):
        name, x = calls[0].args[:2]
        return 1.0 if name in ("cublaslt-2", "cublaslt-3") and len(x) in (8, 16) else 2.0

    monkeypatch.setattr(linear_cuda, "certify", stand_in)
    monkeypatch.setattr(linear_cuda, "LinearProblem", TwoAlgorithms)
    monkeypatch.setattr(LinearDispatcher, "handle", lambda self, device: object())
    monkeypatch.setattr(linear_tuning, "graph_time", graph_time)
    monkeypatch.setattr(linear_tuning, "candidates", lambda dtype, n, k: {SMALL})
    monkeypatch.setattr(linear_tuning, "rotating_weights", lambda *_: [torch.zeros(1)])
    monkeypatch.setattr(linear_tuning, "_generator", lambda device: None)
    monkeypatch.setattr(Plan, "bind", lambda self, name, m: name)
    monkeypatch.setattr(Plan, "bind_algorithm", lambda self, algorithm, m: algorithm.name)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**40, 2**40))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    for name in ("randn", "empty"):
        function = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *shape, f=function, **_: f(shape[0], 1))
    return linear_cuda


def certifications(monkeypatch):
    made = []
    certify = linear_cuda.certify
    monkeypatch.setattr(linear_cuda, "certify", lambda *a, **k: made.append(a[1]) or certify(*a, **k))
    return made


@pytest.mark.parametrize("biases", [(False,), (True,), (False, True), (True, False)])
def test_a_start_that_requires_certificates_follows_one_that_measured(certifying_gpu, tmp_path, monkeypatch, biases):
    """Neighbouring choices of one algorithm, and one shape with and without a bias, in one process."""
    store = CertificateStore("cuda", tmp_path)
    first = LinearDispatcher(store, measure=True)
    chosen = {bias: first._make(4096, 1024, torch.bfloat16, bias, 0).schedule(12) for bias in biases}
    assert chosen == {bias: "cublaslt-3" if bias else "cublaslt-2" for bias in biases}
    made = certifications(monkeypatch)
    for mode in ("require", "auto", "require"):
        again = LinearDispatcher(store, mode, measure=True)
        for bias in biases:
            plan = again._make(4096, 1024, torch.bfloat16, bias, 0)
            assert [plan.schedule(m) for m in (8, 12, 16)] == [chosen[bias]] * 3
    assert not made, "nothing is certified twice"


def test_required_certificates_outweigh_a_table_that_names_more(certifying_gpu, tmp_path):
    """A table of another version names what was never certified: it does not run, and nothing is refused."""
    store = CertificateStore("cuda", tmp_path)
    LinearDispatcher(store)._make(4096, 1024, torch.bfloat16, False, 0)
    key = table_key(torch.bfloat16, 4096, 1024)
    newer = {key: [[16, "cublaslt-2"], [64, SMALL], [None, "cublaslt"]]}
    plan = LinearDispatcher(store, "require", newer)._make(4096, 1024, torch.bfloat16, False, 0)
    assert [plan.schedule(m) for m in (8, 64, 65)] == ["cublaslt-1"] * 3
    with pytest.raises(CertificateError, match="missing"):  # control: no certificate at all
        LinearDispatcher(store, "require", newer)._make(4096, 2048, torch.bfloat16, False, 0)


@pytest.mark.parametrize(
    "text", ["", '{"format": 1}', "[]", '{"format": 1, "schedules": {"k": [[null, "old-tile"]]}}', "\x00"]
)
def test_a_damaged_measured_table_is_measured_again(unknown_gpu, tmp_path, caplog, text):
    store = CertificateStore("cuda", tmp_path)
    path = table_path(store.folder / "tuning", "Some GPU")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert make(store)[1].schedule(8) == SMALL
    assert "measured tables are not read" in caplog.text
    assert list(load_tables(path)) == [table_key(torch.bfloat16, 4096, 1536)]
    caplog.clear()
    assert make(store)[1].schedule(8) == SMALL
    assert not caplog.records
    assert len(unknown_gpu["measured"]) == 1


def test_a_table_that_can_not_be_kept_still_serves(unknown_gpu, tmp_path, caplog, monkeypatch):
    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(linear_tuning.os, "replace", full)
    assert make(CertificateStore("cuda", tmp_path))[1].schedule(8) == SMALL
    assert "no space left" in caplog.text
    assert not list(tmp_path.rglob("*.tmp"))
