"""Kernels launched by their compiled form: a key must tell apart all that Triton compiles differently."""

from __future__ import annotations

import itertools

import pytest
import torch

from det_plugin.ops import _triton, linear_schedules, qk_norm_rope, rms_norm
from det_plugin.sampling import gpu

UNSPECIALIZED = {"M", "rows"}
"""Integers that the kernels declare as ``do_not_specialize``."""


def specialization(kernel, arguments, constants):
    """What Triton compiles a kernel for: dtypes, alignment of addresses, integers that are 1 or multiples of 16."""
    found = []
    for name, value in zip(kernel.arg_names, (*arguments, *constants), strict=True):
        if isinstance(value, torch.Tensor):
            found.append((name, value.dtype, value.data_ptr() % 16 == 0))
        elif hasattr(value, "block_shape"):
            found.append((name, value.base.dtype, tuple(value.block_shape)))
        elif name in UNSPECIALIZED:
            found.append((name, value >= 2**31))
        elif isinstance(value, bool) or value is None or name.isupper():
            found.append((name, value))
        elif isinstance(value, int):
            found.append((name, value >= 2**31, value == 1, value % 16 == 0))
    return tuple(found)


@pytest.fixture
def launches(monkeypatch):
    """``(kernel's name, key, specialization)`` of every launch."""
    seen = []

    def launch(kernel, key, grid, arguments, constants, **options):
        seen.append(
            (
                kernel.fn.__name__,
                (constants, *key),
                specialization(kernel, arguments, constants),
                tuple(options.items()),
            )
        )
        return _triton.launch(kernel, key, grid, arguments, constants, **options)

    for module in (rms_norm, qk_norm_rope, linear_schedules, gpu):
        monkeypatch.setattr(module, "launch", launch)
    return seen


def conflicts(seen, cut=lambda key: key):
    """Keys under which two different forms of a kernel were launched."""
    forms = {}
    for name, key, *form in seen:
        forms.setdefault((name, cut(key)), set()).add(tuple(form))
    return [key for key, different in forms.items() if len(different) > 1]


def shifted(x, by):
    """``x`` at an address ``by`` elements past a multiple of 16 bytes."""
    room = torch.empty(x.numel() + 16, dtype=x.dtype)
    return room[by : by + x.numel()].view(x.shape).copy_(x)


def norms():
    for n, rows, dtype, by in itertools.product((1, 24, 64), (1, 5, 16), (torch.bfloat16, torch.float32), (0, 1)):
        x, w = shifted(torch.randn(rows, n).to(dtype), by), shifted(torch.randn(n), 1 - by)
        rms_norm.rms_norm_kernel(x, w, 1e-6)
        rms_norm.rms_norm_kernel(x, None, 1e-6, 1.0)
        rms_norm.rms_norm_kernel(torch.randn(rows, 3, n).to(dtype)[:, 1:], w.to(dtype), 1e-5)
        rms_norm.fused_add_rms_norm_kernel(x, shifted(x, 1), w, 1e-6, 1.0)


def rotations():
    for size, tokens, by in itertools.product((8, 16), (1, 4), (0, 1)):
        for heads, kv_heads in ((2, 1), (4, 4)):
            qkv = shifted(torch.randn(tokens, (heads + 2 * kv_heads) * size).bfloat16(), by)
            w = shifted(torch.randn(size).bfloat16(), by)
            for table in (torch.randn(32, size), torch.randn(32, size).bfloat16()):
                positions = torch.arange(tokens)
                qk_norm_rope.qk_norm_rope_kernel(qkv, positions, w, w, table, heads, kv_heads, 1e-6)


def products():
    for m, n, k, by in itertools.product((1, 7, 16), (16, 33), (32, 40), (0, 1)):
        x, w = shifted(torch.randn(m, k).bfloat16(), by), torch.randn(n, k).bfloat16()
        bias = shifted(torch.randn(n).bfloat16(), by)
        for b in (None, bias):
            y = torch.empty(m, n, dtype=torch.bfloat16)
            linear_schedules.run_tile(linear_schedules.Tile.parse("pointer-16x16x32-w4-s2"), x, w, b, y)
            if not by and not k % 8:
                linear_schedules.run_tile(linear_schedules.Tile.parse("swap-16x16x32-w4-s2"), x, w, b, y)


def samples():
    for rows, vocab, dtype, index in itertools.product(
        (1, 3), (40, 4100), (torch.float32, torch.bfloat16), (torch.int32, torch.int64)
    ):
        logits = torch.randn(rows, vocab).to(dtype)
        requests, positions = torch.arange(rows, dtype=index), torch.arange(rows)
        for filtered, top_k in ((False, 0), (True, 0), (True, 5)):
            state = (
                torch.ones(rows), torch.arange(rows), torch.full((rows,), top_k, dtype=torch.int32),
                torch.full((rows,), 0.9 if filtered else 1.0), torch.full((rows,), float("-inf")),
            )  # fmt: skip
            gpu.sample(logits, requests, positions, *state, filtered=filtered, with_top_k=top_k > 0)


@pytest.mark.parametrize("run", [norms, rotations, products, samples])
def test_equal_keys_are_equal_kernels(launches, run):
    run()
    assert len(launches) > 20
    assert not conflicts(launches)


def without(key, number):
    """``key`` with each tensor's form cut to the other of (dtype, alignment)."""
    cut = lambda part: tuple(form[number] for form in part)
    return tuple(cut(p) if isinstance(p, tuple) and p and isinstance(p[0], tuple) else p for p in key)


@pytest.mark.parametrize("run", [norms, rotations, products])
def test_control_a_key_without_addresses_is_found(launches, run):
    run()
    assert conflicts(launches, lambda key: without(key, 0))


@pytest.mark.parametrize("run", [norms, rotations, samples])
def test_control_a_key_without_dtypes_is_found(launches, run):
    run()
    assert conflicts(launches, lambda key: without(key, 1))
