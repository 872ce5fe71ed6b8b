"""Query/key norm and rotary embedding in one kernel, on CUDA.

Replaces (vLLM 0.32.0) ``Qwen3Attention.forward``, which runs two norms and the rotary embedding one after the other:
three launches and two passes over queries and keys where the stock engine's compiler makes one.  The one kernel is
a schedule of the three: it runs only where its bytes equal theirs, which each process finds out when its first
attention layer of a kind is built; elsewhere the layer keeps the three.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from det_plugin.config import DetConfig
from det_plugin.host.vllm.patching import wrap

logger = logging.getLogger("vllm.det_plugin")

LAYER = "vllm.model_executor.models.qwen3:Qwen3Attention"
TOKENS = 512
"""Tokens that the certificate compares; with 16 heads or more they make thousands of rows."""

_FORWARDS = ("forward", "forward_native", "forward_cuda")

_found: dict[tuple[Any, ...], str | None] = {}


def install(config: DetConfig) -> None:
    """Let this process's Qwen3 layers use the fused kernel where it is certified; idempotent."""
    import det_plugin.ops._custom_ops  # noqa: F401  registers torch.ops.det_plugin.*

    wrap(f"{LAYER}.__init__", _with_certificate)
    wrap(f"{LAYER}.forward", _with_fused_kernel)


def _with_certificate(original: Any) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.det_plugin_contraction = contraction_of(self)

    return __init__


def _with_fused_kernel(original: Any) -> Any:
    def forward(self: Any, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.det_plugin_contraction is None:
            return original(self, positions, hidden_states)
        qkv, _ = self.qkv_proj(hidden_states)
        queries, keys = torch.ops.det_plugin.qk_norm_rope(
            qkv,
            positions,
            self.q_norm.weight.data,
            self.k_norm.weight.data,
            self.rotary_emb._match_cos_sin_cache_dtype(qkv),
            self.num_heads,
            self.num_kv_heads,
            self.q_norm.variance_epsilon,
            self.det_plugin_contraction,
        )
        output, _ = self.o_proj(self.attn(queries, keys, qkv[..., self.q_size + self.kv_size :]))
        return output

    return forward


def _plain(rotary: Any) -> bool:
    """Whether the layer rotates whole heads, half against half, by the host's own kernel."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    return (
        isinstance(rotary, RotaryEmbedding)
        and all(getattr(type(rotary), name) is getattr(RotaryEmbedding, name) for name in _FORWARDS)
        and rotary.is_neox_style
        and rotary.rotary_dim == rotary.head_size
        and not rotary.use_flashinfer
        and not rotary.use_aiter
    )


def contraction_of(layer: Any) -> str | None:
    """The contraction with which the fused kernel has the bytes of ``layer``'s own operators, or None.

    Args:
        layer: a ``Qwen3Attention``; its norms' weights need not be loaded yet.
    """
    weight = layer.q_norm.weight
    if not weight.is_cuda:
        return None
    eps = (layer.q_norm.variance_epsilon, layer.k_norm.variance_epsilon)
    key = (layer.num_heads, layer.num_kv_heads, layer.head_dim, weight.dtype, *eps, repr(layer.rotary_emb))
    if key not in _found:
        _found[key] = _find(layer)
    return _found[key]


def _find(layer: Any) -> str | None:
    from det_plugin.ops.qk_norm_rope import find_contraction
    from det_plugin.ops.rms_norm import DTYPES

    eps, dtype = layer.q_norm.variance_epsilon, layer.q_norm.weight.dtype
    covered = _plain(layer.rotary_emb) and layer.k_norm.variance_epsilon == eps and dtype in DTYPES
    if not covered or layer.head_dim % 2:
        logger.info(
            "det_plugin: query/key norms and rotary embedding stay apart: the fused kernel doesn't cover %s in %s",
            type(layer.rotary_emb).__name__,
            dtype,
        )
        return None
    contraction = find_contraction(_apart(layer), *certification_data(layer, eps))
    if contraction is None:
        logger.warning(
            "det_plugin: query/key norms and rotary embedding stay apart: fused, they would give other bits here"
        )
    else:
        logger.info("det_plugin: query/key norms and rotary embedding fused, certified (contraction %s)", contraction)
    return contraction


def certification_data(layer: Any, eps: float) -> tuple[Any, ...]:
    """Arguments of :func:`det_plugin.ops.qk_norm_rope.qk_norm_rope`, the same in every process."""
    device, dtype = layer.q_norm.weight.device, layer.q_norm.weight.dtype
    generator = torch.Generator("cpu").manual_seed(20)
    width = layer.q_size + 2 * layer.kv_size
    magnitude = torch.logspace(-2, 2, TOKENS, device="cpu").unsqueeze(1)
    qkv = torch.randn(TOKENS, width, generator=generator, device="cpu") * magnitude
    weights = [1 + 0.3 * torch.randn(layer.head_dim, generator=generator, device="cpu") for _ in range(2)]
    cos_sin = layer.rotary_emb._match_cos_sin_cache_dtype(layer.q_norm.weight)
    positions = torch.randint(cos_sin.shape[0], (TOKENS,), generator=generator, device="cpu")
    data = [x.to(device=device, dtype=dtype) for x in (qkv, *weights)]
    return data[0], positions.to(device), *data[1:], cos_sin, layer.num_heads, layer.num_kv_heads, eps


def _apart(layer: Any) -> Any:
    """The layer's own three operators, on given norm weights."""

    def run(qkv, positions, q_weight, k_weight, _cos_sin, num_heads, num_kv_heads, eps):
        size = layer.head_dim
        parts = []
        for first, heads, weight in ((0, num_heads, q_weight), (num_heads, num_kv_heads, k_weight)):
            by_head = qkv[:, first * size : (first + heads) * size].view(-1, heads, size)
            parts.append(torch.ops.det_plugin.rms_norm(by_head, weight, eps).view(-1, heads * size))
        return layer.rotary_emb(positions, *parts)

    return run
