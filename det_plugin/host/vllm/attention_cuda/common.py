"""What the three backends share: refusals, cache views, batch metadata."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from det_plugin.attention.contract import check_config
from det_plugin.errors import UnsupportedError


def dtype_name(dtype: Any) -> str:
    """``torch.bfloat16`` -> ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


class Refusals:
    """Mixin of a backend class: refuse a layer before weights load, with the package's own error.

    Replaces ``AttentionBackend.validate_configuration``, which the host calls while the model is built.
    """

    det_backend: str

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def validate_configuration(
        cls,
        *,
        head_size,
        dtype,
        kv_cache_dtype=None,
        block_size=None,
        use_mla=False,
        has_sink=False,
        use_sparse=False,
        use_mm_prefix=False,
        use_per_head_quant_scales=False,
        device_capability=None,
        attn_type="decoder",
        has_sliding_window=False,
        use_non_causal=False,
        use_pcp=False,
        use_dcp=False,
        use_rswa=False,
        **_other,
    ) -> list[str]:
        """Raises UnsupportedError when the layer is not proven; otherwise there is nothing to object."""
        capability = None
        if device_capability is not None:
            capability = (device_capability.major, device_capability.minor)
        check_config(
            cls.det_backend,
            head_dim=head_size,
            dtype=dtype_name(dtype),
            kv_cache_dtype=kv_cache_dtype,
            page_size=block_size,
            sinks=has_sink,
            mla=use_mla or use_sparse,
            attn_type=getattr(attn_type, "value", str(attn_type)),
            window=1 if has_sliding_window else 0,
            compute_capability=capability,
        )
        refused = {
            "bidirectional attention over image tokens": use_mm_prefix,
            "quantised KV caches with per-head scales": use_per_head_quant_scales,
            "non-causal attention": use_non_causal,
            "prefill context parallelism": use_pcp,
            "decode context parallelism": use_dcp,
            "reference sliding-window attention": use_rswa,
        }
        for feature, asked in refused.items():
            if asked:
                raise UnsupportedError(
                    f"{feature} with the {cls.det_backend} attention backend",
                    "no order is defined for it",
                    "serve without it",
                )
        return []


def check_layer(
    backend: str,
    num_heads,
    head_size,
    scale,
    num_kv_heads,
    alibi_slopes,
    sliding_window,
    kv_cache_dtype,
    logits_soft_cap,
    attn_type,
    sinks,
) -> None:
    """Refuse one layer's arguments; called by each ``AttentionImpl`` while the model is built."""
    dtype = dtype_name(torch.get_default_dtype())
    check_config(
        backend,
        head_dim=head_size,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        scale=scale,
        softcap=logits_soft_cap or 0.0,
        window=sliding_window or 0,
        sinks=sinks is not None,
        attn_type=getattr(attn_type, "value", str(attn_type)),
        alibi=alibi_slopes is not None,
    )


def refuse_speculation(backend: str, vllm_config) -> None:
    """Refuse speculative decoding where a plan needs the exact lengths of several rows on the host."""
    if vllm_config is not None and vllm_config.speculative_config is not None:
        raise UnsupportedError(
            f"speculative decoding with the {backend} attention backend",
            "its plan needs lengths that the host does not know in time",
            "choose --attention-backend TRITON_ATTN",
        )


@dataclass
class BatchMetadata:
    """One batch as the kernels see it; the tensors are the host's persistent buffers.

    Attributes:
        num_actual_tokens: query tokens, graph padding included.
        max_query_len, max_seq_len: upper bounds known on the host.
        query_start_loc: int32 ``[num_reqs + 1]``.
        seq_lens: int32 ``[num_reqs]``; 0 for padding.
        block_table: int32 ``[num_reqs, pages]``.
        slot_mapping: int64 ``[num_actual_tokens]``.
        extra: what the backend's own builder adds.
    """

    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool = True
    extra: Any = None


def batch_metadata(common, extra: Any = None) -> BatchMetadata:
    """From the host's ``CommonAttentionMetadata``.

    Raises:
        UnsupportedError: the batch is not plain causal attention.
    """
    if common.causal is not True:
        raise UnsupportedError("non-causal attention", "no order is defined for it", "serve without it")
    return BatchMetadata(
        common.num_actual_tokens,
        common.max_query_len,
        common.max_seq_len,
        common.query_start_loc,
        common.seq_lens,
        common.block_table_tensor,
        common.slot_mapping,
        True,
        extra,
    )


def cache_views(kv_cache: torch.Tensor, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, each ``[pages, page, kv heads, d]``, of the host's ``[pages, kv heads, page, 2 d]``."""
    keys, values = kv_cache.transpose(1, 2).split(head_size, dim=-1)
    return keys, values
