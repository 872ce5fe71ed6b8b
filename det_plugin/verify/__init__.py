"""Verification against a running vLLM OpenAI server, stock or deterministic.

``run_verification(VerifyOptions(...))`` returns a :class:`VerificationResult`.
"""

from det_plugin.evidence.results import GroupResult, ModeResult, VerificationResult
from det_plugin.verify.options import ALL_MODES, QUICK, VerifyOptions
from det_plugin.verify.runner import run_verification

__all__ = [
    "ALL_MODES",
    "QUICK",
    "GroupResult",
    "ModeResult",
    "VerificationResult",
    "VerifyOptions",
    "run_verification",
]
