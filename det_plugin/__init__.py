"""det_plugin: the same request gets the same token ids and logprobs, bit for bit.

Importing this package needs neither torch, triton, vLLM nor a GPU.  The heavy parts live in
``det_plugin.ops``, ``det_plugin.attention``, ``det_plugin.sampling`` (torch and triton) and in
``det_plugin.host.vllm`` (the only package that imports vLLM).
"""

from det_plugin.config import DetConfig
from det_plugin.errors import (
    CertificateError,
    ConfigError,
    DetPluginError,
    HostError,
    RequestError,
    UnsupportedError,
)

__version__ = "0.1.0"

__all__ = [
    "CertificateError",
    "ConfigError",
    "DetConfig",
    "DetPluginError",
    "HostError",
    "RequestError",
    "UnsupportedError",
    "__version__",
]
