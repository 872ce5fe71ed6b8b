"""Memory on the CPU: a worker keeps what it frees.

Uncompiled code allocates each operator's result and frees it a moment later.  glibc hands large freed blocks back to
the kernel, which gives them out again page by page, filled with zeros; prefill notices.
Compiled code, which the stock engine runs, plans its buffers once and pays it rarely.
"""

from __future__ import annotations

import ctypes
import logging
import os

from det_plugin.config import DetConfig

logger = logging.getLogger("vllm.det_plugin")

KEPT = 256 << 20
"""Bytes of freed memory at the end of the heap that stay with the process."""

LARGEST = 32 << 20
"""Blocks up to this come from the heap (glibc accepts no more); the model's weights and the KV cache are larger."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

_OWN_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_")


def install(config: DetConfig) -> None:
    """Keep freed memory, unless the user has set glibc's thresholds."""
    if not keep_freed_memory():
        logger.info("det_plugin: malloc is left as it is")


def keep_freed_memory() -> bool:
    """Set glibc's two thresholds in this process; False where there is no glibc, or the user has set them."""
    if any(name in os.environ for name in _OWN_SETTINGS) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, KEPT)) and bool(mallopt(_M_MMAP_THRESHOLD, LARGEST))
