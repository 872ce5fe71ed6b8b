"""Every shape of the Triton attention kernel compiles for sm_90 without a GPU; tall tiles use wgmma."""

from __future__ import annotations

import os
import re

import pytest

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs the compiler, not the interpreter", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from det_plugin.attention import flashinfer_plan, triton_paged  # noqa: E402
from det_plugin.attention.contract import BLOCK_KEYS, FINE_KEYS, FINE_SEGMENT_KEYS, SEGMENT_KEYS  # noqa: E402
from det_plugin.attention.triton_schedules import default_schedules  # noqa: E402

FLOATS = ("c", "pre_scale", "softcap", "inv_sink_scale")


def compiled(group, kv_heads, dim, page, which, shared, window=0, softcap=False, sinks=False, dtype="*bf16"):
    kernel = triton_paged._paged_attention_kernel
    schedule = getattr(default_schedules(dim, group, page), which)
    constants = dict(
        GROUP=group,
        HK=kv_heads,
        D=dim,
        D_PAD=triton.next_power_of_2(dim),
        PAGE=page,
        WINDOW=window,
        SOFTCAP=softcap,
        SINKS=sinks,
        BLOCK_M=schedule.block_m,
        BLOCK_N=BLOCK_KEYS,
        SEGMENT=SEGMENT_KEYS,
        FINE=FINE_KEYS,
        FINE_SEGMENT=FINE_SEGMENT_KEYS,
        ONES=triton_paged._ONES,
        FEW=which != "many",
        SHARED=shared,
    )
    signature, attributes = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in ("out_ptr", "q_ptr", "k_ptr", "v_ptr"):
            signature[name] = dtype
        elif name in ("part_acc_ptr", "part_ml_ptr", "sink_ptr"):
            signature[name] = "*fp32"
        elif name.endswith("_ptr"):
            signature[name] = "*i32"
        else:
            signature[name] = "fp32" if name in FLOATS else "i32"
        if name.endswith("_ptr") or ("stride" in name and name != "table_stride"):
            attributes[(i,)] = [["tt.divisibility", 16]]
    return triton.compile(
        ASTSource(kernel, signature, constants, attributes),
        target=GPUTarget("cuda", 90, 32),
        options=dict(num_warps=schedule.num_warps, num_stages=schedule.num_stages, enable_fp_fusion=False),
    )


@pytest.mark.parametrize(
    ("group", "kv_heads", "dim", "page"),
    [
        (4, 8, 128, 16),
        (4, 8, 128, 64),
        (3, 3, 64, 16),
        (2, 4, 256, 16),
        (4, 4, 96, 32),
        (8, 1, 128, 16),
        (1, 12, 64, 48),
    ],
)
def test_every_schedule_compiles(group, kv_heads, dim, page):
    for which, shared in (("few", False), ("few", True), ("scarce", True), ("many", False), ("many", True)):
        kernel = compiled(group, kv_heads, dim, page, which, shared)
        assert kernel.metadata.shared <= 227 * 1024
        assert ("wgmma" in kernel.asm["ptx"]) == (which == "many")
        assert len(re.findall("cp.async.cg", kernel.asm["ptx"])) > 0


@pytest.mark.parametrize("options", [dict(window=4096), dict(softcap=True), dict(sinks=True), dict(dtype="*fp16")])
def test_options_compile(options):
    for which in ("few", "many"):
        assert compiled(2, 4, 128, 16, which, which == "few", **options).asm["cubin"]


def test_the_plan_of_a_decode_step_compiles():
    kernel = flashinfer_plan._decode_plan_kernel
    constants = dict(PAGE=16, CHUNK=2048, BLOCK=256)
    signature = {
        name: "constexpr"
        if name in constants
        else "*u8"
        if name == "bytes_ptr"
        else "*i32"
        if name.endswith("_ptr")
        else "i32"
        for name in kernel.arg_names
    }
    assert triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32)).asm["cubin"]
