"""Batch-invariant attention over a paged KV cache: one contract, three backends.

========== ==================================== ==========================================
backend    module                               order
========== ==================================== ==========================================
triton     :mod:`det_plugin.attention.triton_paged` :mod:`det_plugin.attention.contract`
fa3        :mod:`det_plugin.attention.fa3`          that of FlashAttention 3's widest tile
flashinfer :mod:`det_plugin.attention.flashinfer`   that of FlashInfer with a pinned plan
========== ==================================== ==========================================

Each backend is invariant by itself; answers of two backends differ.  Importing this package needs neither a
GPU nor torch, triton, FlashInfer or vLLM.
"""

from det_plugin.attention.contract import (
    BLOCK_KEYS,
    SEGMENT_KEYS,
    AttentionConfig,
    check_config,
)

BACKENDS = {"triton": "TRITON_ATTN", "fa3": "FLASH_ATTN", "flashinfer": "FLASHINFER"}
"""Short name of each backend and the name that the host knows it by."""

__all__ = ["BACKENDS", "BLOCK_KEYS", "SEGMENT_KEYS", "AttentionConfig", "check_config"]
