"""RMS norms on CUDA, in eager and compiled code alike.

Replaces (vLLM 0.32.0) ``RMSNorm`` and ``GemmaRMSNorm`` through the host's own out-of-tree registry.  Their
``forward`` calls one opaque operator, so ``torch.compile`` can't put a reduction of its own in its place.
"""

from __future__ import annotations

from typing import Any

import torch

from det_plugin.config import DetConfig
from det_plugin.errors import HostError, UnsupportedError
from det_plugin.host.vllm.patching import resolve


def install(config: DetConfig) -> None:
    """Register both norms; idempotent."""
    import det_plugin.ops._custom_ops  # noqa: F401  registers torch.ops.det_plugin.*
    from det_plugin.ops import rows_fast

    rows_fast.enable()
    resolve("vllm.model_executor.custom_op:CustomOp.register_oot")
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm

    for base, offset in ((RMSNorm, 0.0), (GemmaRMSNorm, 1.0)):
        name = base.__name__
        known = op_registry_oot.get(name)
        if known is not None:
            if getattr(known, "__det_plugin__", False):
                continue
            raise HostError(f"{name} is already replaced by {known!r}; uninstall that plugin")
        base.register_oot(name=name)(_make(base, offset))


def _make(base: Any, offset: float) -> Any:
    rms_norm = torch.ops.det_plugin.rms_norm
    fused_add_rms_norm = torch.ops.det_plugin.fused_add_rms_norm

    class DetNorm(base):  # type: ignore[misc]
        __det_plugin__ = True

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if getattr(self, "variance_size_override", None) is not None:
                raise UnsupportedError(
                    f"{base.__name__} over part of the hidden size", "it is not certified", "use another model"
                )

        def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
            weight = self.weight.data if getattr(self, "has_weight", True) else None
            if residual is None:
                return rms_norm(x, weight, self.variance_epsilon, offset)
            return fused_add_rms_norm(x, residual, weight, self.variance_epsilon, offset)

    DetNorm.__name__ = DetNorm.__qualname__ = f"Det{base.__name__}"
    return DetNorm
