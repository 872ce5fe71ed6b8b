"""A worker on the CPU keeps what it frees: page faults of repeated large allocations, counted by the kernel."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import importlib.util, resource, sys
sys.modules["det_plugin.config"] = type(sys)("config")
sys.modules["det_plugin.config"].DetConfig = object
spec = importlib.util.spec_from_file_location("memory_cpu", {path!r})
memory = importlib.util.module_from_spec(spec)
spec.loader.exec_module(memory)
kept = memory.keep_freed_memory() if {keep} else False
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
    from importlib.resources import files

    path = str(files("det_plugin") / "host" / "vllm" / "memory_cpu.py")
    code = CODE.format(path=path, keep=keep)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
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
