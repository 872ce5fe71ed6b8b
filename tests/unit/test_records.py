"""Records, divergence and the report: exact bits in, exact bits out."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from det_plugin.evidence.divergence import first_divergence, kl_divergence
from det_plugin.evidence.records import (
    Answer,
    RecordError,
    RecordFile,
    RequestRecord,
    read_records,
    write_records,
)
from det_plugin.evidence.report import render_html, split_picture
from det_plugin.evidence.results import GroupResult, ModeResult, Variant, VerificationResult
from det_plugin.verify.replay import compare_records, load_requests

LOGPROBS = st.floats(max_value=0.0, allow_nan=False, allow_infinity=True)


@st.composite
def answers(draw):
    size = draw(st.integers(1, 8))
    ids = draw(st.lists(st.integers(0, 2**20), min_size=size, max_size=size))
    logprobs = draw(st.lists(LOGPROBS, min_size=size, max_size=size))
    top = [{t: v, t + 1: -50.0} for t, v in zip(ids, logprobs, strict=True)]
    return Answer(
        prompt_token_ids=draw(st.lists(st.integers(0, 99), min_size=1, max_size=4)),
        token_ids=ids,
        logprobs=logprobs,
        top_logprobs=draw(st.sampled_from([None, top])),
        text=draw(st.text(max_size=9)),
    )


@given(st.lists(answers(), min_size=1, max_size=3))
def test_record_file_round_trip_is_exact(tmp_path_factory, found):
    path = tmp_path_factory.mktemp("records") / "run.jsonl"
    records = [RequestRecord(id=str(i), request={"prompt": [1, 2]}, answers=[a]) for i, a in enumerate(found)]
    write_records(path, records, fingerprint={"version": "0.32.0"}, created="2026-01-01")
    again = read_records(path)
    assert again.fingerprint == {"version": "0.32.0"}
    assert [r.answers[0].key(top=True) for r in again.records] == [a.key(top=True) for a in found]
    assert [r.answers[0].text for r in again.records] == [a.text for a in found]
    assert compare_records(RecordFile(records=records), again).identical == len(found)


@given(answers(), st.data())
def test_one_changed_bit_is_found_where_it_is(answer, data):
    index = data.draw(st.integers(0, len(answer.token_ids) - 1))
    other = answer.model_copy(deep=True)
    assert first_divergence(answer, other, top=True) is None
    assert answer.key() == other.key()
    other.logprobs[index] = math.nextafter(other.logprobs[index], 1.0)
    found = first_divergence(answer, other)
    assert (found.index, found.cause, found.token_index) == (index, "numerics", None)
    assert answer.key() != other.key()


def answer(ids, logprobs, top=None, prompt=(1, 2)):
    return Answer(prompt_token_ids=list(prompt), token_ids=ids, logprobs=logprobs, top_logprobs=top)


def test_minus_zero_is_not_zero():
    found = first_divergence(answer([5], [0.0]), answer([5], [-0.0]))
    assert found.cause == "numerics"
    assert "-0x0.0p+0" in "\n".join(found.lines())


def test_inputs_come_first():
    found = first_divergence(answer([5], [-1.0]), answer([6], [-2.0], prompt=(1, 3)))
    assert (found.cause, found.index, found.token_ids) == ("inputs", 1, (2, 3))


def test_sampling_and_numerics_are_told_apart_by_the_top_logprobs():
    a = answer([5, 6], [-1.0, -0.5], [{5: -1.0}, {6: -0.5, 7: -0.9}])
    b = answer([5, 7], [-1.0, -0.9], [{5: -1.0}, {6: -0.5, 7: -0.9}])
    assert first_divergence(a, b).cause == "sampling"
    b.top_logprobs[1][6] = -0.50001
    assert first_divergence(a, b).cause == "numerics"
    b.top_logprobs = None
    assert first_divergence(a, b).cause == "undetermined"


def test_length_and_top_only():
    a = answer([5, 6], [-1.0, -0.5], [{5: -1.0}, {6: -0.5, 8: -3.0}])
    assert first_divergence(a, answer([5], [-1.0])).cause == "length"
    b = a.model_copy(deep=True)
    b.top_logprobs[1][8] = -3.5
    assert first_divergence(a, b) is None
    found = first_divergence(a, b, top=True)
    assert found.top_only
    assert found.index == 1


@given(st.lists(st.floats(-20, 0), min_size=1, max_size=20))
def test_kl_is_zero_only_for_equal_logprobs(values):
    assert kl_divergence(values, values) == 0.0
    moved = [values[0] - 0.5, *values[1:]]
    assert kl_divergence(values, moved) > 0
    with pytest.raises(ValueError, match="expected"):
        kl_divergence(values, [])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("{}\n", "line 1 is malformed"),
        ('{"kind":"header","format":9,"created":"","fingerprint":{}}\n', "format"),
        ('{"kind":"header","format":1,"created":"","fingerprint":{}}\n{"kind":"request"}\n', "line 2"),
        (
            '{"kind":"header","format":1,"created":"","fingerprint":{}}\n'
            + '{"kind":"request","id":"1","request":{},"answers":[]}\n' * 2,
            "repeats",
        ),
    ],
)
def test_malformed_record_files_are_refused_by_line(tmp_path, text, message):
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(RecordError, match=message):
        read_records(path)


def test_diff_reports_changed_requests_missing_ones_and_fingerprints():
    def record(name, prompt, token):
        return RequestRecord(id=name, request={"prompt": prompt}, answers=[answer([token], [-1.0])])

    a = RecordFile(fingerprint={"version": "1"}, records=[record("a", "x", 5), record("b", "y", 5)])
    same = RecordFile(fingerprint={"version": "2"}, records=[record("a", "x", 5)])
    found = compare_records(a, same)
    assert (found.status, found.unpaired) == ("not_tested", ["b"])
    assert found.fingerprint_changes == {"version": ("1", "2")}
    changed = RecordFile(records=[record("a", "z", 5), record("b", "y", 6)])
    found = compare_records(a, changed)
    assert [d.divergence.cause for d in found.differing] == ["inputs", "undetermined"]
    assert "request fields differ: prompt" in "\n".join(found.lines())


def test_prompt_files(tmp_path):
    plain = tmp_path / "p.txt"
    plain.write_text("one\n\ntwo\n")
    assert load_requests(plain, {"max_tokens": 3}) == [
        ("1", {"logprobs": 2, "max_tokens": 3, "prompt": "one"}),
        ("3", {"logprobs": 2, "max_tokens": 3, "prompt": "two"}),
    ]
    lines = tmp_path / "p.jsonl"
    lines.write_text('{"prompt": [1, 2], "id": "q", "max_tokens": 9}\n')
    assert load_requests(lines, {"max_tokens": 3}) == [("q", {"logprobs": 2, "max_tokens": 9, "prompt": [1, 2]})]
    for text, message in (("", "no prompts"), ('{"a": 1}\n', "prompt"), ('{"prompt"\n', "not JSON")):
        lines.write_text(text)
        with pytest.raises(RecordError, match=message):
            load_requests(lines, {})


def group():
    a, b = answer([5, 6, 7], [-1.0, -0.5, -0.1]), answer([5, 6, 8], [-1.0, -0.25, -0.3])
    found = first_divergence(a, b, names=("alone", "batch of 3, slot 0"))
    variants = [
        Variant(count=3, where="alone", token_ids=a.token_ids, tokens=["<b>", "&", "c"], logprobs=a.logprobs, text="t"),
        Variant(
            count=1,
            where="batch of 3, slot 0",
            token_ids=b.token_ids,
            tokens=["<b>", "&", "d"],
            logprobs=b.logprobs,
            text="<script>",
            divergence=found,
        ),
    ]
    return GroupResult(
        label="one <prompt>",
        prompt_tokens=2,
        total=4,
        unique=2,
        unique_token_ids=2,
        tokens_compared=9,
        variants=variants,
        first_divergence=found,
    )


def test_report_is_self_contained_well_formed_and_escaped():
    mode = ModeResult(
        mode="single", temperature=0.0, status="different", groups=[group()], total=4, unique=2, differing=1
    )
    skipped = ModeResult(mode="prefix", temperature=0.0, status="not_tested", reason="no <cache>")
    stock = VerificationResult(base_url="http://a", modes=[mode, skipped])
    same = VerificationResult(base_url="http://b", modes=[], error="gone")
    page = render_html({"stock": stock, "deterministic": same}, bench={"cases": [{"case": "c", "stock": 1.5}]})
    assert "2 unique in 4 samples" in page
    assert "no &lt;cache&gt;" in page
    assert "not run" in page
    assert "<script>" not in page
    assert not re.search(r'(src|href)="|url\(|@import', page)
    svg = split_picture(group())
    rects = ET.fromstring(svg).findall(".//{http://www.w3.org/2000/svg}rect")
    assert [r.attrib["fill"] for r in rects] == ["#2e9e6b"] * 3 + ["#2e9e6b", "#e8a33d", "#d6455d"]
    assert VerificationResult.model_validate_json(stock.model_dump_json()) == stock
