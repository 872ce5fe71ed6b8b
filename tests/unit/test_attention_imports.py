"""The attention package and its refusals work without torch, triton, vLLM or FlashInfer."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
for name in ("torch", "triton", "vllm", "flashinfer"):
    sys.modules[name] = None
import det_plugin.attention as attention
from det_plugin.host.vllm.attention_cuda import host_name
assert host_name("fa3") == "FLASH_ATTN" and host_name("TRITON_ATTN") == "TRITON_ATTN"
try:
    attention.check_config("triton", head_dim=128, dtype="float32")
except ValueError as error:
    print(error)
"""


def test_contract_needs_no_gpu_stack():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "float32" in done.stdout
