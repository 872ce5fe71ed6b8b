"""Matrix products on CUDA.

Replaces (vLLM 0.32.0) ``UnquantizedLinearMethod.apply`` and ``UnquantizedEmbeddingMethod.apply`` by the plugin's
``linear`` operator, and certifies each layer's shape once its weight is loaded.  ``F.linear`` called in model
code outside those layers is caught by the model audit.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from det_plugin.config import DetConfig
from det_plugin.host.vllm.patching import wrap
from det_plugin.host.vllm.store import certificate_store

logger = logging.getLogger("vllm.det_plugin")

METHODS = (
    "vllm.model_executor.layers.linear:UnquantizedLinearMethod",
    "vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod",
)

_prepared: set[tuple[int, int, torch.dtype, bool]] = set()


def _prepare(layer: Any) -> None:
    """Certify the layer's product (and measure it on an unknown GPU), before any graph is captured."""
    from det_plugin.ops.linear_cuda import prepare_linear

    weight = layer.weight
    if weight.ndim != 2:
        from det_plugin.errors import UnsupportedError

        raise UnsupportedError(
            f"a {weight.ndim}-dimensional weight in {type(layer).__name__}",
            "only matrix products of [N, K] weights are certified",
            "use a model whose layers are linear layers",
        )
    has_bias = getattr(layer, "bias", None) is not None and not getattr(layer, "skip_bias_add", False)
    key = (*weight.shape, weight.dtype, has_bias)
    if key in _prepared:
        return
    _prepared.add(key)
    certificate = prepare_linear(weight.shape[0], weight.shape[1], weight.dtype, has_bias)
    logger.info(
        "det_plugin: linear N=%d K=%d %s certified: %d schedules, %d struck out",
        weight.shape[0], weight.shape[1], weight.dtype, len(certificate.accepted), len(certificate.struck_out),
    )  # fmt: skip


def install(config: DetConfig) -> None:
    """Route every unquantized product of this process through the plugin's operator; idempotent."""
    import det_plugin.ops._custom_ops  # noqa: F401  registers torch.ops.det_plugin.*
    from det_plugin.ops import linear_cuda

    linear_cuda.configure(certificate_store("cuda"), config.certificates, measure=True)
    for method in METHODS:
        wrap(f"{method}.apply", _with_invariant_product)
        wrap(f"{method}.process_weights_after_loading", _with_preparation)


def _with_invariant_product(original: Any) -> Any:
    def apply(self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.ops.det_plugin.linear(x, layer.weight, bias)

    return apply


def _with_preparation(original: Any) -> Any:
    def process_weights_after_loading(self: Any, layer: Any) -> None:
        original(self, layer)
        if layer.weight.is_cuda:
            _prepare(layer)

    return process_weights_after_loading
