"""Every Triton kernel of the operators compiles to machine code for compute capability 9.0, without a GPU."""

from __future__ import annotations

import os
import re

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from det_plugin.ops import linear_schedules, mean, qk_norm_rope, rms_norm, softmax
from det_plugin.ops.linear_plan import DEFAULT_TABLES
from det_plugin.ops.linear_schedules import CANONICAL

if os.environ.get("TRITON_INTERPRET") == "1":
    raise RuntimeError("these tests compile kernels: run them without TRITON_INTERPRET")

TARGET = GPUTarget("cuda", 90, 32)


def compile_kernel(kernel, types, constants, **options):
    """Compile with argument types by name; ":16" marks divisibility by 16."""
    names = [p.name for p in kernel.params]
    signature, attributes = {}, {}
    for index, name in enumerate(names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        kind = types[name]
        if kind.endswith(":16"):
            kind = kind[:-3]
            attributes[(index,)] = [["tt.divisibility", 16]]
        signature[name] = kind
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=TARGET, options=options)


def pointer_arguments(dtype):
    types = dict.fromkeys(("x_ptr", "w_ptr", "bias_ptr", "y_ptr"), f"*{dtype}:16")
    strides = ("x_batch_stride", "x_row_stride", "w_batch_stride", "w_row_stride", "y_batch_stride")
    types |= dict.fromkeys(("N", "K", *strides), "i32:16")
    return types | {"M": "i32", "zero": "fp32"}


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("even_k", [False, True])
def test_canonical_tile(dtype, has_bias, even_k):
    block_k = 32 if dtype == "fp32" else 64
    constants = {
        "x_k_stride": 1, "w_k_stride": 1, "BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": block_k, "GROUP_M": 8,
        "EVEN_K": even_k, "HAS_BIAS": has_bias, "PRECISION": "ieee" if dtype == "fp32" else "tf32",
        "BLOCKED": dtype == "fp32", "WIDEN": False,
    }  # fmt: skip
    types = pointer_arguments(dtype)
    if dtype != "fp32":
        constants["zero"] = None
    compiled = compile_kernel(linear_schedules._linear_pointer_kernel, types, constants, num_warps=4, num_stages=3)
    if dtype == "fp32":
        assert "tf32" not in compiled.asm["ptx"]
        assert "fma.rn.f32" in compiled.asm["ptx"]
    else:
        assert "wgmma" in compiled.asm["ptx"]
    assert "cp.async" in compiled.asm["ptx"]  # loads are pipelined
    assert "atom" not in compiled.asm["ptx"]


def float32_additions(name, even_k, **more):
    """(Fused multiply-adds, additions) in the code of a float32 tile, and that code."""
    tile = linear_schedules.Tile.parse(name)
    constants = {
        "x_k_stride": 1, "w_k_stride": 1, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k,
        "GROUP_M": 8, "EVEN_K": even_k, "HAS_BIAS": False, "PRECISION": "ieee", "BLOCKED": True, "WIDEN": False,
    }  # fmt: skip
    compiled = compile_kernel(
        linear_schedules._linear_pointer_kernel, pointer_arguments("fp32"), constants | more,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    ptx = compiled.asm["ptx"]
    return ptx.count("fma.rn.f32"), len(re.findall(r"\badd(?:\.rn)?\.f32", ptx)), ptx


@pytest.mark.parametrize("name", sorted({name for _, name in DEFAULT_TABLES[torch.float32]}))
@pytest.mark.parametrize("even_k", [False, True])
def test_float32_tiles_keep_the_sum_of_a_block_apart(name, even_k):
    """One addition to the total for every 32 fused multiply-adds, and nothing else rounds."""
    fused, added, ptx = float32_additions(name, even_k)
    assert fused == 32 * added > 0
    assert "mul.f32" not in ptx
    assert "mul.rn.f32" not in ptx
    assert "cp.async" in ptx


def test_control_a_zero_that_the_compiler_sees_joins_the_sums():
    fused, added, _ = float32_additions(CANONICAL[torch.float32].name, True, zero=0.0)
    assert fused > 0
    assert added == 0


@pytest.mark.parametrize(
    "name",
    [
        "tma-16x32x128-w4-s5",
        "tma-128x128x64-w8-s3",
        "swap-8x32x256-w2-s4",
        "swap-8x64x256-w4-s6",
        "swap-16x64x128-w4-s5",
        "swap-32x64x128-w4-s4",
        "persistent-128x256x64-w8-s3",
    ],
)
@pytest.mark.parametrize(("dtype", "overlap"), [("bf16", True), ("bf16", False), ("fp16", True)])
def test_bulk_copy_tiles(name, dtype, overlap):
    tile = linear_schedules.Tile.parse(name)
    types = {
        "x_desc": f"tensordesc<{dtype}[{tile.block_m}, {tile.block_k}]>",
        "w_desc": f"tensordesc<{dtype}[{tile.block_n}, {tile.block_k}]>",
        "bias_ptr": f"*{dtype}:16", "y_ptr": f"*{dtype}:16", "M": "i32", "N": "i32:16", "K": "i32:16",
    }  # fmt: skip
    constants = {
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "GROUP_M": 8,
        "HAS_BIAS": True, "SWAP": tile.kind == "swap", "PERSISTENT": tile.kind == "persistent",
        "WIDEN": False, "OVERLAP": overlap,
    }  # fmt: skip
    compiled = compile_kernel(
        linear_schedules._linear_tma_kernel, types, constants,
        num_warps=tile.warps, num_stages=tile.stages, launch_pdl=overlap,
    )  # fmt: skip
    ptx = compiled.asm["ptx"]
    assert "cp.async.bulk.tensor" in ptx
    assert ("wgmma" in ptx) == (tile.warps >= 4 and (tile.kind == "swap" or tile.block_m >= 64))
    check_overlap(ptx, overlap)


def check_overlap(ptx, overlap):
    """A kernel that may be launched early waits before it reads or writes memory; others do not wait."""
    assert ptx.count("griddepcontrol.wait") == ptx.count("griddepcontrol.launch_dependents") == int(overlap)
    if overlap:
        ahead = ptx[: ptx.index("griddepcontrol.wait")]
        assert not re.search(r"\b(ld\.global|st\.global|cp\.async)", ahead)


@pytest.mark.parametrize("width", [128, 576, 4096, 12288])
@pytest.mark.parametrize(("fused", "overlap"), [(False, True), (True, True), (True, False)])
def test_rms_norm(width, fused, overlap):
    lanes = min(triton.next_power_of_2(width), rms_norm.MAX_LANES)
    types = dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "y_ptr", "total_ptr"), "*bf16:16")
    types |= {"x_outer_stride": "i32:16", "rows": "i32", "x_inner_stride": "i32:16", "eps": "fp32"}
    constants = {
        "inner": 1, "N": width, "LANES": lanes, "LOG2_LANES": lanes.bit_length() - 1,
        "ROWS": max(1, 1024 // lanes), "HAS_RESIDUAL": fused, "HAS_WEIGHT": True, "WEIGHT_OFFSET": 0.0,
        "OVERLAP": overlap,
    }  # fmt: skip
    compiled = compile_kernel(
        rms_norm._rms_norm_kernel,
        types,
        constants,
        num_warps=max(4, min(16, lanes // 512)),
        enable_fp_fusion=False,
        launch_pdl=overlap,
    )
    assert "ld.global.v4" in compiled.asm["ptx"]
    check_overlap(compiled.asm["ptx"], overlap)


@pytest.mark.parametrize("log", [False, True])
def test_softmax(log):
    types = {"x_ptr": "*bf16:16", "y_ptr": "*fp32:16", "statistics_ptr": "*fp32:16", "rows": "i32"}
    types |= {"N": "i32:16", "x_row_stride": "i32:16"}
    size = {"SEGMENT_SIZE": 4096, "SEGMENT_LOG2": 12}
    row = {"SEGMENT_SIZE": 128, "SEGMENT_LOG2": 7, "ROWS": 8, "LOG": log}
    merge = {"SEGMENT_SIZE": 4096, "SEGMENTS": 38, "SEGMENTS_POWER_OF_2": 64, "SEGMENTS_LOG2": 6, "LOG": log}
    options = {"num_warps": 8, "enable_fp_fusion": False}
    compile_kernel(softmax._softmax_row_kernel, types, row, **options)
    compile_kernel(softmax._segment_kernel, types, size, **options)
    compile_kernel(softmax._merge_kernel, types, merge, **options)


def test_mean():
    types = {"x_ptr": "*bf16:16", "y_ptr": "*bf16:16", "rows": "i32", "N": "i32"}
    constants = {"LANES": 1024, "LOG2_LANES": 10, "ROWS": 1}
    compile_kernel(mean._mean_kernel, types, constants, num_warps=4, enable_fp_fusion=False)


@pytest.mark.parametrize("contraction", [0, 1, 2])
@pytest.mark.parametrize(("size", "overlap"), [(64, True), (96, True), (128, True), (128, False)])
def test_qk_norm_rope(size, overlap, contraction):
    lanes = 1 << (size - 1).bit_length()
    pointers = ("qkv_ptr", "q_weight_ptr", "k_weight_ptr", "cos_sin_ptr", "q_ptr", "k_ptr")
    types = dict.fromkeys(pointers, "*bf16:16") | {"position_ptr": "*i64:16", "rows": "i32", "eps": "fp32"}
    types |= dict.fromkeys(("qkv_stride", "cos_sin_stride"), "i32:16")
    constants = {
        "HEADS": 32, "KV_HEADS": 8, "N": size, "LANES": lanes, "LOG2_LANES": lanes.bit_length() - 1,
        "HALF": lanes // 2, "ROWS": 1024 // lanes, "CONTRACTION": contraction,
        "OVERLAP": overlap,
    }  # fmt: skip
    kernel = qk_norm_rope._qk_norm_rope_kernel
    options = {"num_warps": 4, "enable_fp_fusion": False, "launch_pdl": overlap}
    ptx = compile_kernel(kernel, types, constants, **options).asm["ptx"]
    check_overlap(ptx, overlap)
    squares = 1024 // 128  # per thread: the norm's own fused additions
    pairs = (1024 // 128) // 2
    assert ptx.count("fma.rn.f32") == squares + (0 if contraction == 2 else 2 * pairs)
