"""``FLASH_ATTN``: :mod:`det_plugin.attention.fa3` behind the host's backend interface.

Replaces ``vllm.v1.attention.backends.flash_attn.FlashAttentionBackend`` (read in 0.32.0).  Layers with a
sliding window or sinks, which the pinned kernel does not offer, run :mod:`det_plugin.attention.triton_paged`;
which kernel a layer runs is decided when the model is built, and logged.
"""

from __future__ import annotations

import torch
from vllm.logger import init_logger
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl

from det_plugin.attention import fa3
from det_plugin.host.vllm.attention_cuda.common import PlannedImpl, PlanningBuilder, Refusals

logger = init_logger(__name__)


class InvariantFlashAttentionMetadataBuilder(PlanningBuilder):
    """Plans each batch for the pinned kernel."""

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        spec, page = kv_cache_spec, kv_cache_spec.block_size
        self.layout = fa3.Layout(self.num_heads, spec.num_kv_heads, spec.head_size, page, spec.dtype)
        self.max_context = -(-vllm_config.model_config.max_model_len // page) * page
        self.limit = self.max_context
        self.buffers = [
            torch.zeros(4 * fa3.MAX_SEQUENCES + 4, dtype=torch.int32, device=device)
            for _ in range(-(-self.max_rows // fa3.MAX_SEQUENCES))
        ]

    def _plan_decode(self, common, context, buffers) -> list[fa3.Launch]:
        return fa3.plan_decode(self.layout, common.query_start_loc, common.seq_lens, context, buffers)

    def _plan_batch(self, common, query_start, seq_lens) -> list[fa3.Launch]:
        return fa3.plan_batch(
            self.layout, common.query_start_loc, common.seq_lens, query_start, seq_lens, self.max_context
        )


class InvariantFlashAttentionImpl(PlannedImpl, FlashAttentionImpl):
    """One layer."""

    det_backend = "fa3"

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.on_triton = bool(self.window) or self.sinks is not None
        if self.on_triton:
            logger.info_once("Layers with a sliding window or sinks run the invariant Triton kernel")

    def _check_host(self) -> None:
        super()._check_host()
        fa3.load()

    def _run_plan(self, query, keys, values, output, block_table, plan) -> None:
        fa3.run(
            query,
            canonicalize_singleton_dim_strides(keys),
            canonicalize_singleton_dim_strides(values),
            output,
            block_table,
            plan.launches,
            plan.limit,
            scale=self.scale,
            softcap=self.logits_soft_cap,
        )


class InvariantFlashAttentionBackend(Refusals, FlashAttentionBackend):
    """``FLASH_ATTN``, batch-invariant."""

    det_backend = "fa3"

    @staticmethod
    def get_impl_cls():
        return InvariantFlashAttentionImpl

    @staticmethod
    def get_builder_cls():
        return InvariantFlashAttentionMetadataBuilder
