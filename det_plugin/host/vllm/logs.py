"""The host's log for the whole package.

vLLM configures the logger ``vllm`` and no other: what the operators and certificates say would lose its lines below
WARNING, and its time, process and format.
"""

from __future__ import annotations

import logging

HOST, OWN = "vllm", "det_plugin"


def share() -> None:
    """Send records of ``det_plugin.*`` to the host's handlers, at the host's level if it has none; idempotent.

    Leaves the logger alone where it has handlers of its own (``VLLM_LOGGING_CONFIG_PATH``), or where the host has
    none (``VLLM_CONFIGURE_LOGGING=0``: records reach the root logger).
    """
    host, own = logging.getLogger(HOST), logging.getLogger(OWN)
    if own.handlers or not host.handlers:
        return
    for handler in host.handlers:
        own.addHandler(handler)
    if own.level == logging.NOTSET:
        own.setLevel(host.level)
    own.propagate = host.propagate
