"""A worker on the CPU keeps what it frees: page faults of repeated large allocations, counted by the kernel."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = """
import resource
from det_plugin.host.vllm.memory_cpu import keep_freed_memory
kept = keep_freed_memory() if {keep} else False
import torch
def work():
    x = torch.zeros(2048, 576)
    for _ in range(5):  # layers: results live until the next layer's take their names
        a, b, c, d = (x.new_zeros(2048, width) for width in (480, 1536, 768, 288))
        x = x.new_zeros(2048, 576)
for _ in range(3):
    work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    work()
print(int(kept), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


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
