"""Activation functions on the CPU: an element's bits do not depend on the number of rows or threads."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from det_plugin.evidence.certificates import first_difference
from det_plugin.ops.pointwise_cpu import rowwise

F = torch.nn.functional


def silu_and_mul(x):
    d = x.shape[-1] // 2
    return F.silu(x[..., :d]) * x[..., d:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [1, 7, 64, 72, 1000, 1001, 1536])
@pytest.mark.parametrize(("function", "parts"), [(silu_and_mul, 2), (F.gelu, 1), (F.silu, 1)])
def test_rows_keep_their_bits(dtype, width, function, parts):
    x = torch.randn(301, width * parts, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = rowwise(function, x, parts)
    assert whole.shape == (301, width)
    for rows in (1, 2, 3, 7, 31, 43, 100, 300):
        assert first_difference(whole[-rows:], rowwise(function, x[-rows:], parts)) is None
    wide = function(x.double())
    assert torch.allclose(whole.double(), wide, rtol=4 * torch.finfo(dtype).eps, atol=1e-6)


THREADS = """
import torch
from det_plugin.ops.pointwise_cpu import rowwise
torch.set_num_threads({threads})
F = torch.nn.functional
def silu_and_mul(x):
    d = x.shape[-1] // 2
    return F.silu(x[..., :d]) * x[..., d:]
x = torch.randn(513, 2 * 1001, generator=torch.Generator().manual_seed(0))
whole, plain = rowwise(silu_and_mul, x, 2), silu_and_mul(x)
rows = (1, 2, 3, 5, 7, 31, 43, 100, 333)
print(sum(not torch.equal(rowwise(silu_and_mul, x[:n], 2), whole[:n]) for n in rows),
      sum(not torch.equal(silu_and_mul(x[:n]), plain[:n]) for n in rows))
"""


@pytest.mark.parametrize("threads", [3, 4, 7])
def test_several_threads(threads):
    """Threads cut a tensor in mid-row, or share whole rows; plain PyTorch is the control."""
    code = THREADS.format(threads=threads)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    ours, plain = map(int, done.stdout.split())
    assert ours == 0
    assert plain > 0, "plain PyTorch keeps every bit here: this test cannot fail"


def test_shapes():
    assert rowwise(silu_and_mul, torch.zeros(2, 3, 8), 2).shape == (2, 3, 4)
    assert rowwise(silu_and_mul, torch.zeros(0, 8), 2).shape == (0, 4)
    assert rowwise(F.silu, torch.zeros(5)).shape == (5,)
    with pytest.raises(ValueError, match="expected a multiple of 2"):
        rowwise(silu_and_mul, torch.zeros(2, 7), 2)
