"""The compiled path of norms and qk_norm_rope, built for the CPU key with stand-ins for the foreign functions."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from det_plugin.ops import qk_norm_rope, rms_norm, rows_fast

SCRIPT = r"""
import ctypes, sys
from pathlib import Path
import torch
from det_plugin.ops import _custom_ops, rows_fast
from det_plugin.ops.qk_norm_rope import CONTRACTIONS

library = rows_fast.build("CPU", Path(sys.argv[1]))
slow_calls = []
def python(name, reference):
    _custom_ops.library.impl(f"{name}_python", lambda *a: slow_calls.append(name) or reference(*a), "CPU")
for name in ("rms_norm", "fused_add_rms_norm", "qk_norm_rope"):
    python(name, _custom_ops._IMPLEMENTATIONS["CPU"][name])
torch.ops.load_library(str(library))
ops = torch.ops.det_plugin
seen, state = [], {"fail": 0, "stream": 0}

class Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60)]

class Config(ctypes.Structure):
    _fields_ = [("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
                ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(Attribute)), ("count", ctypes.c_uint)]

P = ctypes.POINTER
@ctypes.CFUNCTYPE(ctypes.c_int, P(Config), ctypes.c_void_p, P(P(ctypes.c_uint64)), ctypes.c_void_p)
def launch(config, function, parameters, extra):
    c = config.contents
    pdl = [(c.attributes[i].id, c.attributes[i].value) for i in range(c.count)]
    seen.append((list(c.grid), list(c.block), c.shared, c.stream, pdl, function,
                 [parameters[i][0] for i in range(state["parameters"])]))
    return state["fail"]

@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int32, P(ctypes.c_void_p))
def current_stream(device, out):
    out[0] = 0x55
    return state["stream"]

address = lambda f: ctypes.cast(f, ctypes.c_void_p).value

def is_slow(operator, *arguments):
    before = len(slow_calls)
    operator(*arguments)
    return len(slow_calls) == before + 1

def shifted(t):
    room = torch.empty(t.numel() + 16, dtype=t.dtype)
    return room[1 : 1 + t.numel()].view(t.shape).copy_(t)

x, r, w = torch.randn(2, 3, 32), torch.randn(2, 3, 32), torch.randn(32)
norm, fused, rope = ops.rms_norm, ops.fused_add_rms_norm, ops.qk_norm_rope
assert is_slow(norm, x, w, 1e-6) and is_slow(fused, x, r, w, 1e-6), "not configured"
ops._rows_configure([address(launch), address(current_stream)], list(CONTRACTIONS))
assert is_slow(norm, x, w, 1e-6) and is_slow(fused, x, r, w, 1e-6), "nothing kept yet"

def keep(key, launching, sources, values):
    state["parameters"] = len(sources)
    ops._rows_keep([rows_fast._number(part) for part in key], launching, sources, values)

F32, B16, CPU = torch.float32, torch.bfloat16, x.device.index if x.device.index is not None else -1
R, C = rows_fast.ROWS, rows_fast.CONSTANT
keep((0, 32, F32, F32, CPU, 1e-6, 0.0), [0x77, 128, 64, 1, 4], [0, 1, 2, 3, 4, R, C, C, C], [0] * 6 + [32, 5, -1])
y = norm(x, w, 1e-6)
grid, block, shared, stream, pdl, function, values = seen[-1]
assert (grid, block, shared, stream, pdl, function) == ([2, 1, 1], [128, 1, 1], 64, 0x55, [(6, 1)], 0x77), seen[-1]
assert values == [x.data_ptr(), x.data_ptr(), w.data_ptr(), y.data_ptr(), y.data_ptr(), 6, 32, 5, 2**64 - 1], values
assert y.shape == x.shape and y.is_contiguous() and not slow_calls[4:]
assert ops._rows_launches() == len(seen) == 1
assert not is_slow(norm, x[:1], w, 1e-6) and seen[-1][0] == [1, 1, 1] and seen[-1][6][5] == 3
assert not is_slow(norm, x.view(6, 32), w, 1e-6)
for why, call in {
    "another eps": (x, w, 1e-5),
    "another offset": (x, w, 1e-6, 1.0),
    "no weight": (x, None, 1e-6),
    "weight of another dtype": (x, w.bfloat16(), 1e-6),
    "another dtype": (x.bfloat16(), w, 1e-6),
    "another width": (x[..., :16].contiguous(), w[:16], 1e-6),
    "strided": (x.transpose(0, 1), w, 1e-6),
    "strided weight": (x, torch.randn(64)[::2], 1e-6),
    "not aligned": (shifted(x), w, 1e-6),
    "weight not aligned": (x, shifted(w), 1e-6),
    "empty": (x[:0], w, 1e-6),
}.items():
    assert is_slow(norm, *call), why
assert is_slow(fused, x, r, w, 1e-6), "another operator"
keep((1, 32, F32, None, CPU, 1e-6, 1.0), [0x78, 32, 0, 0, 1], [0, 1, 2, 3, 4], [0] * 5)
y, total = fused(x, r, None, 1e-6, 1.0)
assert seen[-1][4] == [] and seen[-1][5] == 0x78 and seen[-1][0] == [6, 1, 1]
assert seen[-1][6] == [t.data_ptr() for t in (x, r, x, y, total)] and total.data_ptr() != y.data_ptr()
for why, residual in {"strided": r.transpose(0, 1).contiguous().transpose(0, 1), "not aligned": shifted(r)}.items():
    assert is_slow(fused, x, residual, None, 1e-6, 1.0), why
for bad in (r[:1], r.bfloat16()):
    try:
        fused(x, bad, None, 1e-6, 1.0)
        raise SystemExit("a bad residual passed")
    except ValueError as error:
        assert "residual" in str(error)

qkv, positions, table = torch.randn(5, 64, dtype=B16), torch.arange(5), torch.randn(9, 16)
qw = torch.randn(16).bfloat16()
arguments = (qkv, positions, qw, qw.clone(), table, 2, 1, 1e-6, "second")
key = (2, 16, B16, B16, F32, CONTRACTIONS.index("second"), 2, 1, CPU, 1e-6, 64, 16)
assert is_slow(rope, *arguments), "not kept"
keep(key, [0x79, 128, 0, 1, 8], [0, 1, 2, 3, 4, 5, 6, R], [0] * 8)
q, k = rope(*arguments)
assert q.shape == (5, 32) and k.shape == (5, 16) and seen[-1][5] == 0x79 and seen[-1][0] == [2, 1, 1]
assert seen[-1][6] == [t.data_ptr() for t in (*arguments[:5], q, k)] + [15]
change = lambda i, new: (*arguments[:i], new, *arguments[i + 1 :])
for why, call in {
    "contraction": change(8, "first"),
    "eps": change(7, 1e-5),
    "table's dtype": change(4, table.bfloat16()),
    "table's stride": change(4, torch.randn(9, 32)[:, :16]),
    "rows' stride": change(0, torch.randn(5, 96).bfloat16()[:, :64]),
    "strided positions": change(1, torch.arange(10)[::2]),
    "not aligned": change(0, shifted(qkv)),
    "key weight not aligned": change(3, shifted(qw)),
}.items():
    assert is_slow(rope, *call), why
assert not is_slow(rope, *arguments)

state["fail"] = 700
try:
    norm(x, w, 1e-6)
    raise SystemExit("a failed launch passed")
except RuntimeError as error:
    assert "status 700" in str(error), error
state["fail"] = 201
assert is_slow(norm, x, w, 1e-6), "a thread without a context: Python binds one"
state["fail"], state["stream"] = 0, 1
assert is_slow(norm, x, w, 1e-6), "no stream"
state["stream"] = 0
assert not is_slow(norm, x, w, 1e-6)
good = [[0, 1], [0, 1, 2, 3, 4], [0], [0]]
for i, part in ((0, [0] * 13), (1, [0, 1, 2, 3]), (1, [0, 1, 2, 3, 0]), (2, [5]), (2, [-1]), (3, [])):
    try:
        ops._rows_keep(*good[:i], part, *good[i + 1 :])
        raise SystemExit("a bad form passed")
    except RuntimeError:
        pass
ops._rows_drop([rows_fast._number(part) for part in (0, 32, F32, F32, CPU, 1e-6, 0.0)])
assert is_slow(norm, x, w, 1e-6) and not is_slow(rope, *arguments), "one form is dropped"
ops._rows_forget()
assert is_slow(rope, *arguments)
keep((0, 32, F32, F32, CPU, 1e-6, 0.0), [0x77, 128, 64, 1, 4], [0], [0])
assert not is_slow(norm, x, w, 1e-6)
rows_fast._active = True
rows_fast.deactivate()
assert not rows_fast.active() and is_slow(norm, x, w, 1e-6), "switched off"
print("ok")
"""

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "c++", "clang++"))), reason="needs a C++ compiler to build the compiled path"
)


@needs_compiler
def test_launches_what_was_kept_and_leaves_the_rest_to_python(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip().endswith("ok")


def ptx_sizes(ptx):
    """Bytes of the parameters of a kernel's entry point."""
    entry = ptx[ptx.index(".entry") : ptx.index("{", ptx.index(".entry"))]
    return [int(bits) // 8 for bits in re.findall(r"\.param \.[a-z](\d+)", entry)]


NORM = (torch.empty(0),) * 5 + (7, 1, 4096, 0, 1e-6)
ROPE = (torch.empty(0),) * 7 + (7, 6144, 128, 1e-5)


@pytest.mark.parametrize("which", ["norm", "rope"])
def test_sources_are_the_compiled_kernels_parameters(which, monkeypatch):
    """The order and sizes that Triton's compiler gives them, with what it folded into the code left out."""
    from test_kernel_compile import compile_kernel

    pointers = 5 if which == "norm" else 7
    if which == "norm":
        kernel, arguments, folded = rms_norm._rms_norm_kernel, NORM, {"inner": 1}
        constants = {
            "N": 4096, "LANES": 4096, "LOG2_LANES": 12, "ROWS": 1, "HAS_RESIDUAL": True, "HAS_WEIGHT": True,
            "WEIGHT_OFFSET": 0.0, "OVERLAP": True,
        }  # fmt: skip
    else:
        kernel, arguments, folded = qk_norm_rope._qk_norm_rope_kernel, ROPE, {}
        constants = {
            "HEADS": 32, "KV_HEADS": 8, "N": 128, "LANES": 128, "LOG2_LANES": 7, "HALF": 64, "ROWS": 8,
            "CONTRACTION": 0, "OVERLAP": True,
        }  # fmt: skip
    names = kernel.arg_names
    types = dict.fromkeys(names[:pointers], "*bf16:16") | dict.fromkeys(names[pointers:], "i32:16") | {"eps": "fp32"}
    if which == "rope":
        types["position_ptr"] = "*i64:16"
    compiled = compile_kernel(kernel, types | {"rows": "i32"}, constants | folded, launch_pdl=True)
    stand_in = SimpleNamespace(metadata=compiled.metadata, src=compiled.src, function=0)
    monkeypatch.setattr(rows_fast, "parameter_sizes", lambda function: ptx_sizes(compiled.asm["ptx"]))
    sources, values = rows_fast.parameters(stand_in, names, arguments)
    integers = [value for name, value in zip(names, arguments, strict=False) if isinstance(value, int)][1:]
    integers = integers[1:] if which == "norm" else integers  # inner is folded
    eps = struct.unpack("<I", struct.pack("<f", arguments[-1]))[0]
    assert sources == [*range(pointers), rows_fast.ROWS, *[rows_fast.CONSTANT] * (len(integers) + 3)]
    assert values == [*[0] * pointers, 0, *integers, eps, 0, 0]
    assert compiled.metadata.launch_pdl
    monkeypatch.setattr(rows_fast, "parameter_sizes", lambda function: ptx_sizes(compiled.asm["ptx"])[1:])
    with pytest.raises(ValueError, match="its parameters have"):
        rows_fast.parameters(stand_in, names, arguments)


def form(**metadata):
    facts = {"num_ctas": 1, "global_scratch_size": 0, "num_warps": 4, "shared": 0, "launch_pdl": False} | metadata
    signature = {"x_ptr": "*fp32", "rows": "i32", "N": "constexpr"}
    return SimpleNamespace(metadata=SimpleNamespace(**facts), src=SimpleNamespace(signature=signature), function=9)


@pytest.mark.parametrize(
    "metadata", [{"num_ctas": 2}, {"global_scratch_size": 8}, {"launch_cooperative_grid": True}], ids=str
)
def test_kernels_that_need_more_stay_with_python(metadata, monkeypatch):
    monkeypatch.setattr(rows_fast, "parameter_sizes", lambda function: [8, 4, 8, 8])
    names = ["x_ptr", "rows", "N"]
    x = torch.zeros(4)
    assert rows_fast.parameters(form(), names, (x, 3)) == ([0, rows_fast.ROWS, 101, 101], [0, 0, 0, 0])
    with pytest.raises(ValueError, match="it needs"):
        rows_fast.parameters(form(**metadata), names, (x, 3))


OFFER = r"""
import sys, logging
from pathlib import Path
import torch
from det_plugin.ops import _custom_ops, rows_fast

logging.basicConfig(level="WARNING")
torch.ops.load_library(str(rows_fast.build("CPU", Path(sys.argv[1]))))
from types import SimpleNamespace
from test_rows_fast import form

rows_fast._active = True
rows_fast.parameter_sizes = lambda function: [8, 4, 8, 8]
state = {"capturing": False}
torch.cuda.is_current_stream_capturing = lambda: state["capturing"]
x, y = torch.randn(3, 8), torch.randn(3, 8)
calls, dropped = [], []
def offer(name, got, x=x, hits=True):
    def operator(*arguments):
        calls.append(arguments)
        if isinstance(got, Exception):
            raise got
        return got
    launches = iter([0, int(hits)])
    class Ops:  # counts as if the compiled path had launched, or not
        def __getattr__(self, name):
            if name == "_rows_drop":
                return dropped.append
            return (lambda: next(launches)) if name == "_rows_launches" else getattr(torch.ops.det_plugin, name)
    shim = SimpleNamespace(**{**vars(torch), "ops": SimpleNamespace(det_plugin=Ops())})
    rows_fast.torch = shim
    rows_fast.offer((0, 8, x.dtype, None, name), form(), ["x_ptr", "rows", "N"], (x, 3), 1, operator, (x,), (y,))
    rows_fast.torch = torch

room = torch.empty(40)
offer(1, y, x=room[1:25].view(3, 8))
state["capturing"] = True
offer(1, y)
assert not calls, "not aligned, or capturing: not now"
state["capturing"] = False
offer(1, y.clone())
offer(1, y.clone())
assert len(calls) == 1 and rows_fast.active(), "proven once"
assert not dropped
offer(2, y.clone(), hits=False)
assert [key[-1] for key in dropped] == [2], "not proven, not used"
offer(4, RuntimeError("status 700"))
offer(5, KeyError("of Triton's"))
assert [key[-1] for key in dropped] == [2, 4, 5] and rows_fast.active()
wrong = y.clone(); wrong[2, 5] = torch.nextafter(wrong[2, 5], torch.tensor(9.0))
offer(3, wrong)
assert not rows_fast.active(), "a differing byte switches it off"
print("ok")
"""


@needs_compiler
def test_a_form_is_proven_when_it_is_handed_over(tmp_path):
    from pathlib import Path

    done = subprocess.run(
        [sys.executable, "-c", OFFER, str(tmp_path)],
        capture_output=True, text=True, check=False, timeout=300, cwd=Path(__file__).parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "differs at" in done.stderr
    assert "switched off" in done.stderr
    assert done.stderr.count("does not take a call") == 1
    assert done.stderr.count("Python launches this form") == 2


def test_no_compiler_is_said(monkeypatch, caplog):
    def fail(*_):
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(rows_fast.native, "address", lambda *names: 1)
    monkeypatch.setattr(rows_fast.native, "build", fail)
    monkeypatch.setattr(rows_fast, "_wanted", False)
    rows_fast.enable()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not rows_fast.active()
    assert not caplog.records, "a capture is no time to build"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert not rows_fast.active()
    assert not rows_fast.active()
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "no C++ compiler" in caplog.text
