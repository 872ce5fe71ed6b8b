"""``FLASH_ATTN``: :mod:`det_plugin.attention.fa3` behind the host's backend interface.

Replaces ``vllm.v1.attention.backends.flash_attn.FlashAttentionBackend`` (read in 0.32.0).  Layers with a
sliding window or sinks, which the pinned kernel does not offer, run :mod:`det_plugin.attention.triton_paged`;
which kernel a layer runs is decided when the model is built, and logged.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl
from vllm.v1.attention.backends.utils import get_num_attention_heads_from_layers

from det_plugin.attention import fa3, triton_paged
from det_plugin.errors import HostError
from det_plugin.host.vllm.attention_cuda.common import (
    BatchMetadata,
    Refusals,
    batch_metadata,
    cache_views,
    check_layer,
    refuse_speculation,
)
from det_plugin.host.vllm.attention_cuda.triton import shared_workspace

logger = init_logger(__name__)


@dataclass
class Fa3Plan:
    """Launches for the pinned kernel, and scratch memory for layers that run the Triton one."""

    launches: list[fa3.Launch] | None
    max_context: int
    workspace: triton_paged.Workspace | None


class InvariantFlashAttentionMetadataBuilder(AttentionMetadataBuilder[BatchMetadata]):
    """Plans each batch: single rows on the device, chunks of prompts from the host's exact lengths."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    reorder_batch_threshold = 1  # requests with one new token come first

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        model = vllm_config.model_config
        heads = get_num_attention_heads_from_layers(vllm_config, layer_names)
        heads = heads or model.get_num_attention_heads(vllm_config.parallel_config)
        page = kv_cache_spec.block_size
        self.layout = fa3.Layout(heads, kv_cache_spec.num_kv_heads, kv_cache_spec.head_size, page, kv_cache_spec.dtype)
        self.max_context = -(-model.max_model_len // page) * page
        self.uses_fa3 = getattr(kv_cache_spec, "sliding_window", None) is None
        self.workspace = shared_workspace(heads, kv_cache_spec.head_size, model.max_model_len, str(device))
        compilation = vllm_config.compilation_config
        self.graph_rows = 0
        if compilation.cudagraph_mode.has_full_cudagraphs():
            self.graph_rows = compilation.max_cudagraph_capture_size or 0
        most = max(vllm_config.scheduler_config.max_num_seqs, self.graph_rows)
        self.buffers = [
            torch.zeros(4 * fa3.MAX_SEQUENCES + 4, dtype=torch.int32, device=device)
            for _ in range(-(-most // fa3.MAX_SEQUENCES))
        ]

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False) -> BatchMetadata:
        common = common_attn_metadata
        launches = self._plan(common) if self.uses_fa3 else None
        return batch_metadata(common, Fa3Plan(launches, self.max_context, self.workspace))

    def _plan(self, common) -> list[fa3.Launch]:
        layout = self.layout
        if common.max_query_len == 1:
            graph = common.num_actual_tokens <= self.graph_rows
            context = self.max_context if graph else max(1, min(common.max_seq_len, self.max_context))
            return fa3.plan_decode(
                layout, common.query_start_loc, common.seq_lens, context, self.buffers if graph else None
            )
        if common.seq_lens_cpu_upper_bound is None:
            raise HostError("CommonAttentionMetadata.seq_lens_cpu_upper_bound: got None, expected exact lengths")
        return fa3.plan_batch(
            layout,
            common.query_start_loc,
            common.seq_lens,
            common.query_start_loc_cpu.numpy(),
            common.seq_lens_cpu_upper_bound.numpy(),
            self.max_context,
        )

    def build_for_cudagraph_capture(self, common_attn_metadata) -> BatchMetadata:
        common_attn_metadata.seq_lens.fill_(1)  # long contexts would only make capturing slow
        return self.build(0, common_attn_metadata)


class InvariantFlashAttentionImpl(FlashAttentionImpl):
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
    ):
        check_layer(
            "fa3",
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
        refuse_speculation("fa3", get_current_vllm_config_or_none())
        fa3.load()
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
        )
        self.supports_quant_query_input = False
        self.window = sliding_window or 0
        self.on_triton = bool(self.window) or sinks is not None
        if self.on_triton:
            logger.info_once("Layers with a sliding window or sinks run the invariant Triton kernel")

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
        """``output[i] = attention(query[i])``; see the host's ``AttentionImpl``."""
        if attn_metadata is None:
            return output.fill_(0)  # profiling run
        tokens, plan = attn_metadata.num_actual_tokens, attn_metadata.extra
        keys, values = cache_views(kv_cache, self.head_size)
        if self.on_triton:
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
                workspace=plan.workspace,
            )
            return output
        if plan.launches is None:
            raise HostError("a layer without a window shares its metadata with a group of sliding windows")
        keys, values = canonicalize_singleton_dim_strides(keys), canonicalize_singleton_dim_strides(values)
        fa3.run(
            query[:tokens],
            keys,
            values,
            output[:tokens],
            attn_metadata.block_table,
            plan.launches,
            plan.max_context,
            scale=self.scale,
            softcap=self.logits_soft_cap,
        )
        return output


class InvariantFlashAttentionBackend(Refusals, FlashAttentionBackend):
    """``FLASH_ATTN``, batch-invariant."""

    det_backend = "fa3"

    @staticmethod
    def get_impl_cls():
        return InvariantFlashAttentionImpl

    @staticmethod
    def get_builder_cls():
        return InvariantFlashAttentionMetadataBuilder
