"""Matrix products on the CPU.

Replaces (vLLM 0.32.0) ``model_executor.layers.utils.dispatch_cpu_unquantized_gemm``, which packs each layer's
weight and binds ``layer.cpu_linear``.  Packed weights stay; what changes is at which row counts they run.
``UnquantizedLinearMethod.apply`` goes to the bound product at once: its own way there costs eager code as much
as a small norm.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch

from det_plugin.config import DetConfig
from det_plugin.hooks import hookimpl, plugin_manager
from det_plugin.host.vllm.patching import replace, resolve, wrap
from det_plugin.host.vllm.store import certificate_store
from det_plugin.ops import linear_cpu_fast
from det_plugin.ops.linear_cpu import InvariantLinear, LinearKernel, prepare_linear, register_handle

logger = logging.getLogger("vllm.det_plugin")

PRIMITIVE_CACHE = 128
"""Row counts whose vendor primitives are kept per weight shape."""

METHOD = "vllm.model_executor.layers.linear:UnquantizedLinearMethod"
TARGET = "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm"


class _Packed:
    """The host's packed oneDNN product of one weight."""

    def __init__(self, handler: Any) -> None:
        self._handler = handler  # frees the packed weight when it goes
        self.onednn_handler: torch.Tensor = handler.handler_tensor
        self._matmul = torch.ops._C.onednn_mm

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        self._matmul(out, x, bias, self.onednn_handler)


def _prepare_onednn(weight: torch.Tensor) -> _Packed | None:
    from vllm import _custom_ops as ops

    if not ops._supports_onednn:
        return None
    try:
        return _Packed(ops.create_onednn_mm(weight.t(), PRIMITIVE_CACHE))
    except RuntimeError as error:
        _say_unpacked(weight.dtype, str(error))
        return None


@functools.cache
def _say_unpacked(dtype: torch.dtype, reason: str) -> None:
    """Once for each dtype and reason, not for each layer."""
    logger.info(
        "det_plugin: oneDNN packs no %s weights here, products run PyTorch's kernels, slower and with certificates "
        "of their own (%s)", str(dtype).removeprefix("torch."), reason.partition(". ")[0],
    )  # fmt: skip


class _Kernels:
    """The host's packed oneDNN product, offered through the plugin's own hook."""

    @staticmethod
    @hookimpl
    def det_plugin_cpu_linear_kernels() -> list[LinearKernel]:
        return [LinearKernel("onednn_packed", _prepare_onednn)]


class BoundLinear:
    """What a layer's ``cpu_linear`` becomes: a plain call in eager code, one opaque operator under compile."""

    def __init__(self, linear: InvariantLinear) -> None:
        self.linear = linear
        self.kept = linear_cpu_fast.keep(linear)
        self.fast = linear_cpu_fast.fast
        self.handle = register_handle(linear, self.kept)
        self.n = linear.n

    def __call__(self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return torch.ops.det_plugin.cpu_linear(x, bias, self.handle, self.n)
        if self.kept is not None:
            out = self.fast(x, bias, self.kept)  # type: ignore[misc]
            if out is not None:
                return out
        return self.linear(x, bias)


def _straight(original: Any) -> Any:
    def apply(self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        linear = getattr(layer, "cpu_linear", None)
        if type(linear) is BoundLinear:
            # not the other way round: compiled layers would each be guarded by their own number
            if not torch.compiler.is_compiling() and linear.kept is not None:
                out = linear.fast(x, bias, linear.kept)  # type: ignore[misc]
                if out is not None:
                    return out
            return linear(x, None, bias)
        return original(self, layer, x, bias)

    return apply


def install(config: DetConfig) -> None:
    """Route every unquantized product of this process through certified row counts; idempotent."""
    resolve(TARGET)
    linear_cpu_fast.activate()  # a first build takes seconds: before the weights load, not among them
    manager = plugin_manager()
    if not manager.has_plugin("vllm.onednn"):
        manager.register(_Kernels(), name="vllm.onednn")

    def dispatch_cpu_unquantized_gemm(layer: Any, remove_weight: bool) -> None:
        weight = layer.weight
        if weight.is_meta:
            layer.cpu_linear = torch.nn.functional.linear
            return
        if weight.ndim != 2:
            from det_plugin.errors import UnsupportedError

            raise UnsupportedError(
                f"a {weight.ndim}-dimensional weight in {type(layer).__name__}",
                "only matrix products of [N, K] weights are certified",
                "use a model whose layers are linear layers",
            )
        linear = prepare_linear(
            weight.detach(),
            with_bias=getattr(layer, "bias", None) is not None,
            store=certificate_store("cpu"),
            mode=config.certificates,
        )
        layer.cpu_linear = BoundLinear(linear)
        if remove_weight:
            layer.weight = torch.nn.Parameter(torch.empty(0, dtype=weight.dtype), requires_grad=False)

    wrap(f"{METHOD}.apply", _straight)
    dispatch_cpu_unquantized_gemm.__det_plugin__ = TARGET  # type: ignore[attr-defined]
    _, _, current = resolve(TARGET)
    if getattr(current, "__det_plugin__", None) != TARGET:
        replace(TARGET, dispatch_cpu_unquantized_gemm)
