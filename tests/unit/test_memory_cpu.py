"""A worker on the CPU keeps what it frees: page faults of repeated large allocations, counted by the kernel."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = """
import ctypes, resource
from det_plugin.host.vllm.memory_cpu import keep_freed_memory
kept = keep_freed_memory() if {keep} else False
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
SIZE = 4 << 20
def work():
    blocks = [libc.malloc(SIZE) for _ in range(12)]
    for block in blocks:
        libc.memset(block, 1, SIZE)
    for block in blocks:
        libc.free(block)
for _ in range(3):
    work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    work()
print(int(kept), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
"""Tensors won't do here: a small block of a tensor's own may come to lie above its data, and while that is in use,
or in one of malloc's caches, glibc has nothing at the heap's end to give back."""


def run(keep: bool, **environment: str) -> tuple[int, int]:
    inherited = {name: v for name, v in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    command = [sys.executable, "-c", CODE.format(keep=keep)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=inherited | environment)
    kept, faults = map(int, done.stdout.split())
    return kept, faults


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's settings")
def test_freed_memory_is_kept():
    kept, faults = run(True)
    _, control = run(False)
    assert kept == 1
    assert control > 20 * 1000, "glibc keeps freed memory by itself here: this test cannot fail"
    assert faults < control / 50


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's settings")
def test_the_users_settings_stand():
    kept, faults = run(True, MALLOC_TRIM_THRESHOLD_="131072")
    assert kept == 0
    assert faults > 20 * 1000
