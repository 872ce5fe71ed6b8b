"""RMS norm on the CPU: the host's C++ kernel, one row at a time, in eager and compiled code alike.

Replaces (vLLM 0.32.0) ``RMSNorm`` through the host's own out-of-tree registry.  Left alone, eager code runs a
PyTorch reduction and compiled code one that the compiler wrote; with the opaque kernel both give the same bits.
"""

from __future__ import annotations

from typing import Any

import torch

from det_plugin.config import DetConfig
from det_plugin.host.vllm.patching import resolve


def install(config: DetConfig) -> None:
    """Register the norm; idempotent."""
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers.layernorm import RMSNorm

    resolve("vllm.model_executor.custom_op:CustomOp.register_oot")
    if "RMSNorm" in op_registry_oot:
        if getattr(op_registry_oot["RMSNorm"], "__det_plugin__", False):
            return
        from det_plugin.errors import HostError

        raise HostError(f"RMSNorm is already replaced by {op_registry_oot['RMSNorm']!r}; uninstall that plugin")

    @RMSNorm.register_oot(name="RMSNorm")
    class DetRMSNorm(RMSNorm):  # type: ignore[misc, valid-type]
        __det_plugin__ = True

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if self.variance_size_override is not None:
                from det_plugin.errors import UnsupportedError

                raise UnsupportedError(
                    "RMSNorm over part of the hidden size", "it is not certified", "use another model"
                )

        def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
            weight = self.weight.data if self.has_weight else None
            if residual is None:
                x = x.contiguous()
                out = torch.empty_like(x)
                torch.ops._C.rms_norm(out, x, weight, self.variance_epsilon)
                return out
            torch.ops._C.fused_add_rms_norm(x, residual, weight, self.variance_epsilon)
            return x, residual
