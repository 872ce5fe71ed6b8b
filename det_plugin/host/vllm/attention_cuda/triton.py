"""``TRITON_ATTN``: :mod:`det_plugin.attention.triton_paged` behind the host's backend interface.

Replaces ``vllm.v1.attention.backends.triton_attn.TritonAttentionBackend`` (read in 0.32.0).
"""

from __future__ import annotations

from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl

from det_plugin.host.vllm.attention_cuda.common import (
    BatchMetadata,
    InvariantBuilder,
    InvariantImpl,
    Refusals,
    batch_metadata,
)


class InvariantTritonMetadataBuilder(InvariantBuilder):
    """Batch metadata plus the scratch memory of shared tiles."""

    _cudagraph_support = AttentionCGSupport.ALWAYS
    supports_update_block_table = True
    supports_draft_decode_metadata_update = True

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False) -> BatchMetadata:
        return batch_metadata(common_attn_metadata, self.workspace)

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


class InvariantTritonImpl(InvariantImpl, TritonAttentionImpl):
    """One layer, in the canonical order."""

    det_backend = "triton"

    def _attend(self, query, keys, values, output, metadata) -> None:
        self._run_triton(query, keys, values, output, metadata, metadata.extra)


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
