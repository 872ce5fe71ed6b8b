"""Building and loading C++ sources: whatever fails, the Python path serves."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import subprocess
import sys
import time

import pytest

from det_plugin.ops import native

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "c++", "clang++"))), reason="needs a C++ compiler"
)
CODE = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "_source.cpp"
    path.write_text(CODE)
    return path


def compiler(tmp_path, monkeypatch, body):
    """A stand-in for g++; returns its path."""
    path = tmp_path / "compiler"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    return path


WRITE_OUTPUT = 'while [ "$1" != -o ]; do shift; done; echo built >"$2"'


def test_a_library_can_be_read_and_run_by_others(source, tmp_path, monkeypatch):
    compiler(tmp_path, monkeypatch, WRITE_OUTPUT)
    library = native.build(source, "CPU", tmp_path / "cache")
    assert stat.S_IMODE(library.stat().st_mode) == 0o755
    assert library.name.startswith("source-")


@pytest.mark.parametrize("what", ["machine", "libc_ver"])
def test_another_machine_or_c_library_is_another_library(source, tmp_path, monkeypatch, what):
    compiler(tmp_path, monkeypatch, WRITE_OUTPUT)
    first = native.build(source, "CPU", tmp_path / "cache")
    assert native.build(source, "CPU", tmp_path / "cache") == first
    monkeypatch.setattr(native.platform, what, lambda: "another")
    assert native.build(source, "CPU", tmp_path / "cache") != first


def test_a_compiler_with_arguments(source, tmp_path, monkeypatch):
    path = compiler(tmp_path, monkeypatch, f'[ "$1" = first ] || exit 1; {WRITE_OUTPUT}')
    monkeypatch.setenv("CXX", f"{path} first")
    assert native.build(source, "CPU", tmp_path / "cache").exists()


def test_any_bytes_in_a_compilers_message(source, tmp_path, monkeypatch):
    compiler(tmp_path, monkeypatch, r"printf 'Fehler: \374ber' >&2; exit 1")
    with pytest.raises(RuntimeError, match=r"Fehler: .ber"):
        native.build(source, "CPU", tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.tmp"))


def test_a_lock_that_is_never_released_delays_and_does_not_stop(source, tmp_path, monkeypatch):
    compiler(tmp_path, monkeypatch, WRITE_OUTPUT)
    monkeypatch.setattr(native, "LOCK_SECONDS", 0.5)
    folder = tmp_path / "cache"
    folder.mkdir()
    handle = os.open(folder, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    began = time.monotonic()
    assert native.build(source, "CPU", folder).exists()
    assert 0.5 <= time.monotonic() - began < 10
    os.close(handle)


def cut(data):
    return data[: len(data) // 2]


def zeroed(data):
    return data[:8192] + bytes(len(data) - 8192)


@needs_compiler
@pytest.mark.parametrize(
    "damage", [lambda data: b"", cut, zeroed, lambda data: data[:-1]], ids=["empty", "half", "zeroed", "a byte less"]
)
def test_a_damaged_library_is_built_anew(source, tmp_path, monkeypatch, damage):
    """Loading it could end the process, so its digest is looked at first."""
    folder = tmp_path / "cache"
    library = native.build(source, "CPU", folder)
    whole = library.read_bytes()
    library.write_bytes(damage(whole))  # not loaded yet
    build = native.build
    monkeypatch.setattr(native, "build", lambda path, key: build(path, key, folder))
    native.load(source, "CPU")
    assert len(library.read_bytes()) == len(whole)
    assert build(source, "CPU", folder) == library


def test_a_library_in_the_cache_needs_no_compiler(source, tmp_path, monkeypatch):
    compiler(tmp_path, monkeypatch, WRITE_OUTPUT)
    library = native.build(source, "CPU", tmp_path / "cache")
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert native.build(source, "CPU", tmp_path / "cache") == library
    library.write_bytes(b"")
    with pytest.raises(RuntimeError, match=r"no C\+\+ compiler"):
        native.build(source, "CPU", tmp_path / "cache")


def test_an_unbalanced_quote_in_the_compilers_name(source, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", 'g++ "-O2')
    with pytest.raises(RuntimeError, match="CXX: got"):
        native.build(source, "CPU", tmp_path / "cache")


def test_what_a_compiler_writes_need_not_load(source, tmp_path, monkeypatch):
    ran = tmp_path / "ran"
    compiler(tmp_path, monkeypatch, f"echo x >>{ran}; {WRITE_OUTPUT}")
    build = native.build
    monkeypatch.setattr(native, "build", lambda path, key: build(path, key, tmp_path / "cache"))
    with pytest.raises(OSError, match="Could not load this library"):
        native.load(source, "CPU")
    assert ran.read_text() == "x\nx\n", "built twice, not more"


RESTORED = r"""
import logging, sys
import torch
from det_plugin.ops import _custom_ops, linear_fast, native, rows_fast

logging.basicConfig(level="WARNING")
kernel = torch._C._dispatch_has_kernel_for_dispatch_key
has = lambda: {n: kernel(f"det_plugin::{n}", "CUDA") for n in _custom_ops.COMPILED}
assert all(has().values())
def fail(*_):
    assert not all(has().values()), "control: the Python implementations are gone while the library loads"
    raise OSError("cannot load")
native.address, native.build, native.load = lambda *names: 1, lambda *names: None, fail
assert not linear_fast.activate() and not rows_fast.activate()
assert all(has().values()), has()
assert not linear_fast.active() and not rows_fast.active()
"""


def test_operators_stay_with_python_where_a_library_does_not_load():
    done = subprocess.run([sys.executable, "-c", RESTORED], capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stderr.count("cannot load") == 2


RACE = r"""
import ctypes, subprocess, sys, threading, time
from pathlib import Path
import torch
from det_plugin.ops import _custom_ops, rows_fast
from det_plugin.ops.qk_norm_rope import CONTRACTIONS

folder = Path(sys.argv[1])
(folder / "driver.c").write_text(
    "int launch(void*a, void*b, void*c, void*d) { return 0; } int stream(int d, void**o) { *o = 0; return 0; }"
)
subprocess.run([sys.argv[2], "-shared", "-fPIC", folder / "driver.c", "-o", folder / "driver.so"], check=True)
driver = ctypes.CDLL(str(folder / "driver.so"))
addresses = [ctypes.cast(f, ctypes.c_void_p).value for f in (driver.launch, driver.stream)]
for name in rows_fast.OPERATORS:
    _custom_ops.library.impl(f"{name}_python", _custom_ops._IMPLEMENTATIONS["CPU"][name], "CPU")
torch.ops.load_library(str(rows_fast.build("CPU", folder)))
torch.set_num_threads(1)
ops, x, w, stop = torch.ops.det_plugin, torch.randn(1, 32), torch.randn(32), []
key = [rows_fast._number(part) for part in (0, 32, torch.float32, torch.float32, -1, 1e-6, 0.0)]

def switch_on():
    ops._rows_configure(addresses, list(CONTRACTIONS))
    rows_fast._active = True
    ops._rows_keep(key, [0x77, 128, 0, 0, 4], [0, 2, 3], [0, 0, 0])

def call():
    while not stop:
        ops.rms_norm(x, w, 1e-6)

switch_on()
threads = [threading.Thread(target=call) for _ in range(3)]
[t.start() for t in threads]
until, switches = time.monotonic() + 4, 0
while time.monotonic() < until:
    rows_fast.deactivate()
    switch_on()
    switches += 1
stop.append(1)
[t.join() for t in threads]
assert switches > 100 and ops._rows_launches() > 100
"""


@needs_compiler
def test_switching_off_while_other_threads_are_inside(tmp_path):
    found = next(filter(None, map(shutil.which, ("gcc", "cc", "clang", "g++"))))
    done = subprocess.run(
        [sys.executable, "-c", RACE, str(tmp_path), found], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
