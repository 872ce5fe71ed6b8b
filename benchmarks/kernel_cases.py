"""The kernel benchmarks' cases.

``python benchmarks/kernel_cases.py GROUP`` runs one group's calls once, which leaves its compiled kernels in Triton's
cache.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
from kernel_prepare import (
    STOCK_ATTENTION,
    VOCAB,
    Prepared,
    UnavailableError,
    attention_check,
    prepare_attention,
    prepare_fused_add_rms_norm,
    prepare_linear,
    prepare_log_softmax,
    prepare_qk_norm_rope,
    prepare_rms_norm,
    prepare_sampling,
)
from ops_check import SHAPES

from det_plugin.ops import linear_cuda

MODELS = {"Qwen3-8B": (4096, 32, 8, 128), "Qwen3-1.7B": (2048, 16, 8, 128)}
"""Hidden size, query heads, key heads, head size."""
LINEAR_ROWS = (1, 8, 64, 256, 4096)
ROWS = (1, 64, 256, 4096)
VOCAB_ROWS = (1, 8, 64, 256)
SAMPLING = {
    "greedy": {"temperature": 0.0},
    "temperature 0.8": {"temperature": 0.8},
    "top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "top-k 20, top-p 0.95": {"temperature": 0.8, "top_k": 20, "top_p": 0.95},
}


@dataclass(frozen=True)
class KernelCase:
    """A case by name; ``prepare`` allocates what it needs on the GPU.

    Attributes:
        group: cases that share compiled kernels, compiled together in one process; "" when there are none.
    """

    operator: str
    model: str
    backend: str
    name: str
    group: str
    prepare: Callable[[], Prepared]


def _cases() -> list[KernelCase]:
    found = []
    for model in MODELS:
        for n, k in SHAPES[model]:
            for m in LINEAR_ROWS:
                prepare = partial(prepare_linear, n, k, m)
                found.append(KernelCase("linear", model, "", f"N={n} K={k}, {m} rows", f"linear {model}", prepare))
    for operator, function in (("rms_norm", prepare_rms_norm), ("fused_add_rms_norm", prepare_fused_add_rms_norm)):
        for model, (hidden, *_) in MODELS.items():
            for rows in ROWS:
                prepare = partial(function, hidden, rows)
                found.append(KernelCase(operator, model, "", f"{rows} x {hidden}", "norms", prepare))
    for model, (_, heads, kv_heads, size) in MODELS.items():
        for rows in ROWS:
            name = f"{rows} tokens, heads {heads}, {kv_heads}, {size}"
            prepare = partial(prepare_qk_norm_rope, heads, kv_heads, size, rows)
            found.append(KernelCase("qk_norm_rope", model, "", name, "norms", prepare))
    for rows in VOCAB_ROWS:
        found.append(
            KernelCase("log_softmax", "", "", f"{rows} x {VOCAB}", "norms", partial(prepare_log_softmax, VOCAB, rows))
        )
    for label, parameters in SAMPLING.items():
        for rows in VOCAB_ROWS:
            prepare = partial(prepare_sampling, rows, parameters)
            name = f"{label}, {rows} x {VOCAB}"
            found.append(KernelCase("sampling", "", "", name, f"sampling {label}", prepare))
    for backend in STOCK_ATTENTION:
        for kind, count, context in attention_check.CASES:
            heads = MODELS["Qwen3-8B"][1:]
            prepare = partial(prepare_attention, backend, heads, kind, count, context)
            group = f"attention {kind}" if backend == "triton" else ""
            name = f"{kind} {count} x {context}, heads {heads[0]}, {heads[1]}, {heads[2]}"
            found.append(KernelCase("attention", "", backend, name, group, prepare))
    return found


CASES: dict[str, KernelCase] = {
    " ".join(part for part in (c.operator, c.model, c.backend, c.name) if part): c for c in _cases()
}
"""Every case by its full name, in the order they run: FlashInfer last."""


def configure() -> None:
    """Certify linear anew in this process, without the compiled path, which CUDA graphs have no use for."""
    linear_cuda.configure(None, measure=False, fast=False)


def run_once(group: str) -> int:
    """Run every call of a group's cases once; returns how many cases there were."""
    configure()
    chosen = [case for case in CASES.values() if case.group == group]
    for case in chosen:
        with suppress(UnavailableError):
            prepared = case.prepare()
            prepared.deterministic[0]()
            prepared.stock()[0]()
    torch.cuda.synchronize()
    return len(chosen)


if __name__ == "__main__":
    sys.exit(0 if run_once(sys.argv[1]) else f"GROUP: got {sys.argv[1]!r}, no case is in it")
