"""``FLASHINFER``: :mod:`det_plugin.attention.flashinfer` behind the host's backend interface.

Replaces ``vllm.v1.attention.backends.flashinfer.FlashInferBackend`` (read in 0.32.0); nothing of that module
is imported, so a missing FlashInfer refuses this backend only.  Layers with a sliding window run
:mod:`det_plugin.attention.triton_paged`, because FlashInfer aligns the blocks of a window to the query tile.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch
from vllm import envs
from vllm.config import get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl
from vllm.v1.attention.backends.utils import get_num_attention_heads_from_layers

from det_plugin.attention import flashinfer, triton_paged
from det_plugin.errors import HostError, UnsupportedError
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
class FlashInferPlan:
    """Launches of the pinned kernel (None in a group of sliding windows) and both kernels' scratch memory."""

    launches: list[flashinfer.Launch] | None
    partials: torch.Tensor | None
    workspace: triton_paged.Workspace | None


class InvariantFlashInferMetadataBuilder(AttentionMetadataBuilder[BatchMetadata]):
    """Plans each batch: single rows on the device, all others from the host's exact lengths."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    reorder_batch_threshold = 1

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        model = vllm_config.model_config
        heads = get_num_attention_heads_from_layers(vllm_config, layer_names)
        heads = heads or model.get_num_attention_heads(vllm_config.parallel_config)
        self.layout = flashinfer.Layout(
            heads, kv_cache_spec.num_kv_heads, kv_cache_spec.head_size, kv_cache_spec.block_size, kv_cache_spec.dtype
        )
        self.max_context = model.max_model_len
        self.windows = getattr(kv_cache_spec, "sliding_window", None) is not None
        self.workspace = shared_workspace(heads, kv_cache_spec.head_size, self.max_context, str(device))
        compilation = vllm_config.compilation_config
        self.graph_rows = 0
        if compilation.cudagraph_mode.has_full_cudagraphs():
            self.graph_rows = compilation.max_cudagraph_capture_size or 0
        most = max(vllm_config.scheduler_config.max_num_seqs, self.graph_rows)
        self.partials = None
        if not self.windows:
            size = envs.VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE  # as the user set it
            flashinfer.check_workspace(self.layout, most, self.max_context, size)
            self.partials = torch.zeros(size, dtype=torch.uint8, device=device)
            self.buffers = flashinfer.make_buffers(most, self.max_context, device)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False) -> BatchMetadata:
        common = common_attn_metadata
        launches = None if self.windows else self._plan(common)
        return batch_metadata(common, FlashInferPlan(launches, self.partials, self.workspace))

    def _plan(self, common) -> list[flashinfer.Launch]:
        width = common.block_table_tensor.shape[1]
        if common.max_query_len == 1:
            graph = common.num_actual_tokens <= self.graph_rows
            context = self.max_context if graph else max(1, min(common.max_seq_len, self.max_context))
            return flashinfer.plan_decode(
                self.layout, common.query_start_loc, common.seq_lens, context, width, self.buffers if graph else None
            )
        if common.seq_lens_cpu_upper_bound is None:
            raise HostError("CommonAttentionMetadata.seq_lens_cpu_upper_bound: got None, expected exact lengths")
        return flashinfer.plan_rows(
            self.layout,
            common.query_start_loc_cpu.numpy(),
            common.seq_lens_cpu_upper_bound.numpy(),
            width,
            self.device,
            self.partials.numel(),
        )

    def build_for_cudagraph_capture(self, common_attn_metadata) -> BatchMetadata:
        common_attn_metadata.seq_lens.fill_(1)  # long contexts would only make capturing slow
        return self.build(0, common_attn_metadata)


class InvariantFlashInferImpl(TritonAttentionImpl):
    """One layer.  Writing the cache is the host's Triton kernel: it copies."""

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
            "flashinfer",
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
        refuse_speculation("flashinfer", get_current_vllm_config_or_none())
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
        if self.window:
            logger.info_once("Layers with a sliding window run the invariant Triton kernel")
        else:
            flashinfer.kernel(torch.get_default_dtype(), head_size, bool(self.logits_soft_cap))

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
        """``output[i] = attention(query[i])``; see the host's ``AttentionImpl``."""
        if attn_metadata is None:
            return output.fill_(0)  # profiling run
        tokens, plan = attn_metadata.num_actual_tokens, attn_metadata.extra
        keys, values = cache_views(kv_cache, self.head_size)
        if self.window:
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
                workspace=plan.workspace,
            )
            return output
        if plan.launches is None:
            raise HostError("a layer without a window shares its metadata with a group of sliding windows")
        flashinfer.run(
            query[:tokens],
            keys,
            values,
            output[:tokens],
            attn_metadata.block_table,
            plan.launches,
            plan.partials,
            scale=self.scale,
            softcap=self.logits_soft_cap,
        )
        return output


class InvariantFlashInferBackend(Refusals, TritonAttentionBackend):
    """``FLASHINFER``, batch-invariant."""

    det_backend = "flashinfer"

    @staticmethod
    def get_name() -> str:
        return "FLASHINFER"

    @classmethod
    def validate_configuration(cls, **asked) -> list[str]:
        """Refuse when FlashInfer is missing; otherwise as :class:`Refusals`."""
        if importlib.util.find_spec("flashinfer") is None:
            raise UnsupportedError(
                "the flashinfer attention backend",
                "FlashInfer is not installed",
                "pip install 'det-plugin[flashinfer]', or choose another backend",
            )
        return super().validate_configuration(**asked)

    @staticmethod
    def get_impl_cls():
        return InvariantFlashInferImpl

    @staticmethod
    def get_builder_cls():
        return InvariantFlashInferMetadataBuilder
