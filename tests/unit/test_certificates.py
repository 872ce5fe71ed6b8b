"""The certificate loop and its store, with numpy schedules: no torch, no GPU."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest

from det_plugin.errors import CertificateError
from det_plugin.evidence import certificates
from det_plugin.evidence.certificates import (
    Certificate,
    CertificateStore,
    Schedule,
    certify,
    default_store_path,
    first_difference,
    row_ladder,
)
from det_plugin.evidence.fingerprint import fingerprint_digest, package_version, source_digest

DATA = np.random.default_rng(0).standard_normal((300, 40)).astype(np.float32)


def make_inputs(start, rows):
    return (DATA[start : start + rows],)


def sequential(x):
    total = np.zeros(len(x), np.float32)
    for k in range(x.shape[1]):
        total = total + x[:, k]
    return total


def rows_at_a_time(x):
    return np.concatenate([sequential(x[i : i + 16]) for i in range(0, len(x), 16)])


def reversed_order(x):
    return sequential(x[:, ::-1])


def wrong_above_64_rows(x):
    return sequential(x) if len(x) <= 64 else reversed_order(x)


def raises(x):
    raise RuntimeError("out of shared memory")


CANONICAL = Schedule("sequential", sequential)
OTHERS = [
    Schedule("tiles", rows_at_a_time),
    Schedule("reversed", reversed_order),
    Schedule("late", wrong_above_64_rows),
    Schedule("late_but_bounded", wrong_above_64_rows, max_rows=64),
    Schedule("raises", raises),
]


def run(store=None, **kwargs):
    rows = row_ladder([64], 300)
    return certify("sum", "K=40", CANONICAL, OTHERS, make_inputs, rows, store=store, **kwargs)


def test_equal_schedules_are_accepted_and_others_struck_out():
    certificate = run()
    assert certificate.accepted == ("sequential", "tiles", "late_but_bounded")
    assert set(certificate.struck_out) == {"reversed", "late", "raises"}
    assert certificate.struck_out["late"].rows == 65
    assert "out of shared memory" in certificate.struck_out["raises"].got
    difference = certificate.struck_out["reversed"]
    window = slice(difference.start, difference.start + difference.rows)
    (row,) = difference.coordinate
    assert int(difference.expected, 16) == int(sequential(DATA)[window][row].view(np.uint32))
    assert int(difference.got, 16) == int(reversed_order(DATA[window])[row].view(np.uint32))


def test_a_schedule_may_ask_for_row_counts_of_its_own():
    seen = []

    def run_and_note(x):
        seen.append(len(x))
        return sequential(x)

    own = Schedule("own", run_and_note, 5, 90, row_counts=(90, 7, 5))
    assert "own" in certify("sum", "K=40", CANONICAL, [own], make_inputs, [1, 300]).accepted
    assert set(seen) == {5, 7, 90}
    with pytest.raises(ValueError, match=r"own.row_counts: got 301, expected at most 300"):
        certify("sum", "K", CANONICAL, [Schedule("own", sequential, row_counts=(301,))], make_inputs, [300])


def test_a_canonical_schedule_that_depends_on_rows_is_refused():
    with pytest.raises(CertificateError, match=r"canonical schedule late depends on the row count.*rows 1 "):
        certify("sum", "K=40", Schedule("late", wrong_above_64_rows), [], make_inputs, [1, 64, 65, 300])


def test_certificates_are_stored_and_read_back(tmp_path):
    store = CertificateStore("abc", tmp_path, facts={"gpu": "none"})
    made = run(store)
    calls = []

    def counting(x):
        calls.append(len(x))
        return sequential(x)

    again = certify(
        "sum", "K=40", Schedule("sequential", counting), OTHERS, make_inputs, [1, 64, 300],
        store=CertificateStore("abc", tmp_path),
    )  # fmt: skip
    assert again == made
    assert calls == []
    assert store.all() == [made]
    assert json.loads((tmp_path / "abc" / "fingerprint.json").read_text()) == {"gpu": "none"}


def test_another_fingerprint_schedule_or_row_count_certifies_anew(tmp_path):
    made = run(CertificateStore("abc", tmp_path))
    assert CertificateStore("abd", tmp_path).load("sum", "K=40") is None
    more = certify(
        "sum", "K=40", CANONICAL, [*OTHERS, Schedule("new", sequential)], make_inputs, [1, 7],
        store=CertificateStore("abc", tmp_path),
    )  # fmt: skip
    assert "new" in more.accepted
    assert more.row_counts == (1, 7)
    assert made.row_counts != more.row_counts


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: "\x00" * len(text),
        lambda text: text.replace('"tiles"', '"reversed"', 1),
        lambda text: text.replace('"format": 1', '"format": 0'),
        lambda text: text.replace('"fingerprint": "abc"', '"fingerprint": "abd"'),
    ],
)
def test_a_damaged_file_is_said_and_rebuilt(tmp_path, caplog, damage):
    store = CertificateStore("abc", tmp_path)
    made = run(store)
    path = store.path("sum", "K=40")
    damaged = damage(path.read_text())
    assert damaged != path.read_text()
    path.write_text(damaged)
    with caplog.at_level(logging.WARNING):
        rebuilt = run(store)
    assert "will be rebuilt" in caplog.text
    assert rebuilt.accepted == made.accepted
    assert store.load("sum", "K=40") == rebuilt


def test_a_long_certification_says_how_far_it_is_and_a_stored_one_nothing(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(certificates, "PROGRESS_SECONDS", -1.0)
    caplog.set_level(logging.INFO)
    store = CertificateStore("abc", tmp_path)
    run(store)
    said = [record.getMessage() for record in caplog.records]
    assert said[0].startswith("sum K=40: certifying 6 schedules")
    assert str(store.folder) in said[0]
    assert [line.split()[2] for line in said[1:-1]] == list("012345")
    assert said[-1].startswith("sum K=40: 3 certified, 3 struck out, in 0 s")
    caplog.clear()
    run(store)
    assert not caplog.records


@pytest.mark.parametrize("error", [OSError(30, "Read-only file system"), OSError(28, "No space left on device")])
def test_certificates_that_can_not_be_kept_still_serve(tmp_path, caplog, monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(certificates, "_write_atomically", fail)
    store = CertificateStore("abc", tmp_path)
    made = run(store)
    assert made.accepted
    assert run(store) is made, "every layer of a shape would be certified"
    [said] = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "is not kept" in said
    assert "DET_PLUGIN_CERTIFICATES" in said
    assert error.strerror in said


def test_what_could_not_be_kept_is_told_and_kept_later(tmp_path, monkeypatch):
    told = []
    store = CertificateStore("abc", tmp_path, on_unkept=lambda c, error: told.append((c.operator, c.key, str(error))))

    def fail(*_):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(certificates, "_write_atomically", fail)
        made = run(store)
    assert told == [("sum", "K=40", "disk full")]
    again = store.keep(made)
    assert store.path("sum", "K=40").exists()
    assert store.load("sum", "K=40") == again
    store.path("sum", "K=40").unlink()
    assert store.load("sum", "K=40") is None, "the file counts from now on, not the memory of its absence"
    assert len(told) == 1


def test_all_leaves_damaged_files_out(tmp_path):
    store = CertificateStore("abc", tmp_path)
    run(store)
    path = store.path("sum", "K=40")
    good = json.loads(path.read_text())
    for number, change in enumerate(({"created": 5}, {"struck_out": []}, {"accepted": ["other"]})):
        body = good | {"certificate": good["certificate"] | change}
        path.with_name(f"{number}.json").write_text(json.dumps(body))
    path.with_name("x.json").write_text("[]")
    assert [c.key for c in store.all()] == ["K=40"]


def test_a_damaged_certificate_in_a_folder_that_can_not_be_written(tmp_path, caplog, monkeypatch):
    store = CertificateStore("abc", tmp_path)
    made = run(store)
    store.path("sum", "K=40").write_text("{")

    def fail(*_, **__):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(certificates, "_write_atomically", fail)
    monkeypatch.setattr(certificates.Path, "unlink", fail)
    assert run(store).accepted == made.accepted


def test_require_refuses_a_missing_certificate_and_takes_a_present_one(tmp_path):
    store = CertificateStore("abc", tmp_path)
    with pytest.raises(CertificateError, match="det-plugin certify MODEL"):
        run(store, mode="require")
    made = run(store)
    assert run(store, mode="require") == made


def test_an_interrupted_write_leaves_no_file(tmp_path, monkeypatch):
    store = CertificateStore("abc", tmp_path)
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    assert run(store).accepted
    assert list(tmp_path.rglob("*.json")) == []
    assert list(tmp_path.rglob("*.tmp")) == []


def test_json_round_trip_and_refusals():
    certificate = run()
    assert Certificate.from_json(json.loads(json.dumps(certificate.to_json()))) == certificate
    with pytest.raises(ValueError, match="distinct"):
        certify("sum", "K", CANONICAL, [Schedule("a", sequential)] * 2, make_inputs, [1])
    with pytest.raises(ValueError, match="row_counts"):
        certify("sum", "K", CANONICAL, [], make_inputs, [0])


def test_first_difference_sees_signed_zero_and_accepts_equal_nan():
    a = np.array([[1.0, 0.0], [np.nan, 2.0]], np.float32)
    b = a.copy()
    assert first_difference(a, b) is None
    b[0, 1] = -0.0
    assert first_difference(a, b) == ((0, 1), "00000000", "80000000")
    assert first_difference(a, b[:1])[0] is None


def test_ladder_crosses_thresholds():
    ladder = row_ladder([48, 64], 100)
    assert {47, 48, 49, 63, 64, 65, 1, 100} <= set(ladder)
    assert max(ladder) == 100


def test_store_path_can_be_moved(monkeypatch, tmp_path):
    monkeypatch.setenv("DET_PLUGIN_CERTIFICATES", str(tmp_path))
    assert default_store_path() == tmp_path


def test_fingerprint_digest_ignores_order_and_sees_values():
    assert fingerprint_digest({"a": 1, "b": 2}) == fingerprint_digest({"b": 2, "a": 1})
    assert fingerprint_digest({"a": 1}) != fingerprint_digest({"a": 2})
    assert package_version("a-distribution-nobody-has") is None
    assert len(source_digest()) == 16
