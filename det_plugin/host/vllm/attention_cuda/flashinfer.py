"""``FLASHINFER``: :mod:`det_plugin.attention.flashinfer` behind the host's backend interface.

Replaces ``vllm.v1.attention.backends.flashinfer.FlashInferBackend`` (read in 0.32.0); nothing of that module
is imported, so a missing FlashInfer refuses this backend only.  Layers with a sliding window run
:mod:`det_plugin.attention.triton_paged`, because FlashInfer aligns the blocks of a window to the query tile.
"""

from __future__ import annotations

import importlib.util

import torch
from vllm import envs
from vllm.logger import init_logger
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl

from det_plugin.attention import flashinfer
from det_plugin.errors import UnsupportedError
from det_plugin.host.vllm.attention_cuda.common import PlannedImpl, PlanningBuilder, Refusals

logger = init_logger(__name__)


class InvariantFlashInferMetadataBuilder(PlanningBuilder):
    """Plans each batch for the pinned kernel, whose partial results lie in one buffer of the user's size."""

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        spec = kv_cache_spec
        keys = flashinfer.key_tile(spec.head_size)
        self.layout = flashinfer.Layout(
            self.num_heads, spec.num_kv_heads, spec.head_size, spec.block_size, spec.dtype, keys
        )
        self.max_context = vllm_config.model_config.max_model_len
        self.limit = None
        if not self.windows:
            size = envs.VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE  # as the user set it
            flashinfer.check_workspace(self.layout, self.max_rows, self.max_context, size)
            self.limit = torch.zeros(size, dtype=torch.uint8, device=device)
            self.buffers = flashinfer.make_buffers(self.max_rows, self.max_context, device)

    def _plan_decode(self, common, context, buffers) -> list[flashinfer.Launch]:
        width = common.block_table_tensor.shape[1]
        return flashinfer.plan_decode(self.layout, common.query_start_loc, common.seq_lens, context, width, buffers)

    def _plan_batch(self, common, query_start, seq_lens) -> list[flashinfer.Launch]:
        table = common.block_table_tensor
        return flashinfer.plan_rows(self.layout, query_start, seq_lens, table, self.limit.numel())


class InvariantFlashInferImpl(PlannedImpl, TritonAttentionImpl):
    """One layer."""

    det_backend = "flashinfer"

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.on_triton = bool(self.window)
        if self.on_triton:
            logger.info_once("Layers with a sliding window run the invariant Triton kernel")
        else:
            flashinfer.kernel(torch.get_default_dtype(), self.head_size, bool(self.logits_soft_cap))

    def _run_plan(self, query, keys, values, output, block_table, plan) -> None:
        flashinfer.run(
            query,
            keys,
            values,
            output,
            block_table,
            plan.launches,
            plan.limit,
            scale=self.scale,
            softcap=self.logits_soft_cap,
        )


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
