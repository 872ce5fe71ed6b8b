"""The compiled path of linear, built for the CPU key with stand-ins for the three foreign functions."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

SCRIPT = r"""
import ctypes, sys
from pathlib import Path
import torch
from det_plugin.ops import _custom_ops, linear_fast

library = linear_fast.build("CPU", Path(sys.argv[1]))
assert linear_fast.build("CPU", Path(sys.argv[1])) == library
torch.ops.load_library(str(library))
linear = torch.ops.det_plugin.linear
slow_calls = []
_custom_ops.library.impl(
    "linear_python", lambda x, w, b=None: slow_calls.append(1) or torch.full((*x.shape[:-1], len(w)), 7.0), "CPU"
)
x, w, b = torch.randn(2, 3, 8), torch.randn(4, 8), torch.randn(4)

def is_slow(*arguments):
    before = len(slow_calls)
    y = linear(*arguments)
    return len(slow_calls) == before + 1 and (y == 7).all().item()

assert is_slow(x, w), "unconfigured"
seen, state = [], {"capturing": 0, "fail": 0}
pointers = [ctypes.c_void_p] * 14 + [ctypes.c_size_t, ctypes.c_void_p]

@ctypes.CFUNCTYPE(ctypes.c_int, *pointers)
def matmul(*a):
    seen.append(a)
    out = (ctypes.c_float * 24).from_address(a[10])
    out[:] = [float(i) for i in range(24)]
    return state["fail"]

@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))
def current_stream(device, out):
    out[0] = 0x55
    return 0

@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))
def is_capturing(stream, out):
    out[0] = state["capturing"]
    return 0

address = lambda f: ctypes.cast(f, ctypes.c_void_p).value
torch.ops.det_plugin._linear_configure([address(f) for f in (matmul, current_stream, is_capturing)])
assert is_slow(x, w), "nothing kept yet"
words = [2**63 - 1, -1, 3, 4, 5, 6, 7, 8]
linear_fast.keep(4, 8, 6, torch.float32, -1, False, 0, [11, 12, 13, 14, 15, *words])
y = linear(x, w)
assert y.shape == (2, 3, 4) and y.flatten().tolist() == list(map(float, range(24)))
a = seen[-1]
assert (a[0], a[1], a[3], a[4], a[5], a[6]) == (11, 12, w.data_ptr(), 13, x.data_ptr(), 14)
assert (a[9], a[11], a[10], a[13], a[14], a[15]) == (15, 15, y.data_ptr(), None, 0, 0x55)
assert a[8] == a[10]
assert (ctypes.c_float.from_address(a[2]).value, ctypes.c_float.from_address(a[7]).value) == (1.0, 0.0)
assert list((ctypes.c_int64 * 8).from_address(a[12])) == words
assert not is_slow(x.view(6, 8), w)

assert is_slow(x, w, b), "a bias is another problem"
assert is_slow(x[:1], w), "other rows"
assert is_slow(x.double(), w.double()), "other dtype"
assert is_slow(x.transpose(0, 1), w), "strided"
assert is_slow(x, torch.randn(8, 4).T), "strided weight"
assert is_slow(torch.randn(49)[1:].view(2, 3, 8), w), "not aligned"
state["capturing"] = 1
assert is_slow(x, w), "decisions for capture are separate"
linear_fast.keep(4, 8, 6, torch.float32, -1, True, 0, [1, 2, 3, 4, 5, *words])
assert not is_slow(x, w) and seen[-1][0] == 1
state["capturing"] = 0
linear_fast.keep(4, 8, 6, torch.float32, -1, False, b.data_ptr(), [21, 2, 3, 4, 5, *words])
assert not is_slow(x, w, b) and seen[-1][0] == 21
assert is_slow(x, w, b.clone()), "another bias"
state["fail"] = 15
try:
    linear(x, w)
    raise SystemExit("a failed call passed")
except RuntimeError as error:
    assert "status 15 for N=4, K=8" in str(error), error
torch.ops.det_plugin._linear_forget()
assert is_slow(x, w)
linear_fast.keep(4, 8, 6, torch.float32, -1, False, 0, [1, 2, 3, 4, 5, *words])
linear_fast._active = True
linear_fast.deactivate()
assert not linear_fast.active() and is_slow(x, w), "switched off"
print("ok")
"""


@pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "c++", "clang++"))), reason="needs a C++ compiler to build the fast path"
)
def test_replays_what_was_kept_and_leaves_the_rest_to_python(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip().endswith("ok")


def test_no_compiler_is_said(monkeypatch, tmp_path):
    from det_plugin.ops import linear_fast

    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"no C\+\+ compiler"):
        linear_fast.build("CPU", tmp_path)
    monkeypatch.setenv("CXX", "/bin/false")
    with pytest.raises(RuntimeError, match="/bin/false failed"):
        linear_fast.build("CPU", tmp_path)
    assert list(tmp_path.iterdir()) == []
