"""``TRITON_ATTN``: :mod:`det_plugin.attention.triton_paged` behind the host's backend interface.

Replaces ``vllm.v1.attention.backends.triton_attn.TritonAttentionBackend`` (read in 0.32.0).
"""

from __future__ import annotations

import functools

import torch
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl
from vllm.v1.attention.backends.utils import get_num_attention_heads_from_layers

from det_plugin.attention import triton_paged
from det_plugin.host.vllm.attention_cuda.common import (
    BatchMetadata,
    Refusals,
    batch_metadata,
    cache_views,
    check_layer,
)


@functools.cache
def shared_workspace(num_heads: int, head_dim: int, max_context: int, device: str) -> triton_paged.Workspace:
    """One workspace per shape and device: layers run one after another."""
    return triton_paged.make_workspace(num_heads, head_dim, max_context, device)


class InvariantTritonMetadataBuilder(AttentionMetadataBuilder[BatchMetadata]):
    """Batch metadata plus the scratch memory of shared tiles."""

    _cudagraph_support = AttentionCGSupport.ALWAYS
    supports_update_block_table = True
    supports_draft_decode_metadata_update = True

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        heads = get_num_attention_heads_from_layers(vllm_config, layer_names)
        if not heads:
            heads = vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config)
        context = vllm_config.model_config.max_model_len
        self.workspace = shared_workspace(heads, kv_cache_spec.head_size, context, str(device))

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False) -> BatchMetadata:
        return batch_metadata(common_attn_metadata, self.workspace)

    def build_for_cudagraph_capture(self, common_attn_metadata) -> BatchMetadata:
        metadata = self.build(0, common_attn_metadata)
        metadata.seq_lens.fill_(1)  # long contexts would only make capturing slow; launches do not depend on it
        return metadata

    def update_block_table(self, metadata, blk_table, slot_mapping) -> BatchMetadata:
        return BatchMetadata(
            metadata.num_actual_tokens,
            metadata.max_query_len,
            metadata.max_seq_len,
            metadata.query_start_loc,
            metadata.seq_lens,
            blk_table,
            slot_mapping,
            True,
            metadata.extra,
        )

    def update_draft_decode_metadata(self, metadata) -> None:
        """Nothing: every tensor is one of the host's persistent buffers."""


class InvariantTritonImpl(TritonAttentionImpl):
    """One layer.  Writing the cache is the host's own kernel: it copies."""

    def __init__(
        self,
        num_heads,
        head_size,
        scale,
        num_kv_heads,
        alibi_slopes,
        sliding_window,
        kv_cache_dtype,
        logits_soft_cap=None,
        attn_type="decoder",
        kv_sharing_target_layer_name=None,
        sinks=None,
        **kwargs,
    ):
        check_layer(
            "triton",
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
        )
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            sinks,
            **kwargs,
        )
        self.supports_quant_query_input = False
        self.window = sliding_window or 0

    def fused_output_quant_supported(self, quant_key) -> bool:
        return False

    def forward(
        self,
        layer,
        query,
        key,
        value,
        kv_cache,
        attn_metadata,
        output,
        output_scale=None,
        output_block_scale=None,
    ) -> torch.Tensor:
        """``output[i] = attention(query[i])`` in the canonical order; see the host's ``AttentionImpl``."""
        if attn_metadata is None:
            return output.fill_(0)  # profiling run
        tokens = attn_metadata.num_actual_tokens
        keys, values = cache_views(kv_cache, self.head_size)
        triton_paged.paged_attention(
            query[:tokens],
            keys,
            values,
            output[:tokens],
            attn_metadata.block_table,
            attn_metadata.query_start_loc,
            attn_metadata.seq_lens,
            max_query_len=attn_metadata.max_query_len,
            scale=self.scale,
            window=self.window,
            softcap=self.logits_soft_cap,
            sinks=self.sinks,
            workspace=attn_metadata.extra,
        )
        return output


class InvariantTritonBackend(Refusals, TritonAttentionBackend):
    """``TRITON_ATTN``, batch-invariant."""

    det_backend = "triton"

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """64 where the user names none: a key block then lies in one page, a fifth faster in prefill."""
        return max(default_block_size, 64)

    @staticmethod
    def get_impl_cls():
        return InvariantTritonImpl

    @staticmethod
    def get_builder_cls():
        return InvariantTritonMetadataBuilder
