"""The Triton attention kernel on the CPU: indexing and order.  GPU bits are tests/gpu/attention_check.py's job."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("triton")
CASES = pathlib.Path(__file__).with_name("attention_cases.py")
FP16_EPS = 2.0**-10


@pytest.fixture(scope="module")
def found():
    done = subprocess.run([sys.executable, str(CASES)], capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["gqa", "mqa", "mha", "padded head", "wide head", "sinks"])
@pytest.mark.parametrize("how", ["", " shared"])
def test_accuracy_against_float64(found, name, how):
    assert 0 < found[f"error {name}{how}"] < FP16_EPS


@pytest.mark.parametrize(
    "name",
    [
        "tile height",
        "shared tiles",
        "page size",
        "decode",
        "chunks",
        "order",
        "window order",
        "neighbours",
        "freed pages",
        "padding rows written",
        "nan",
    ],
)
def test_no_bit_differs(found, name):
    assert found[name] == 0


@pytest.mark.parametrize("name", ["control: wrong segments", "control: one segment length", "control: wrong blocks"])
def test_another_order_is_noticed(found, name):
    assert found[name] > 0
