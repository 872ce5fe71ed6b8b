"""Errors that users see.  Every message names the argument, what it got and what it accepts."""

from __future__ import annotations


class DetPluginError(Exception):
    """Base class of all errors raised by det_plugin."""


class ConfigError(DetPluginError, ValueError):
    """A switch or a configuration value is malformed, or two switches contradict each other."""


class UnsupportedError(DetPluginError, ValueError):
    """A combination whose determinism is not proven.

    Raised before the model's weights load.

    Args:
        feature: what was asked for, as the user spells it.
        reason: why it is not proven.
        instead: what to change.
    """

    def __init__(self, feature: str, reason: str, instead: str) -> None:
        self.feature, self.reason, self.instead = feature, reason, instead
        super().__init__(f"deterministic inference does not support {feature}: {reason}. Instead: {instead}.")

    def __reduce__(self):
        return type(self), (self.feature, self.reason, self.instead)


class HostError(DetPluginError, RuntimeError):
    """The host engine is not one that this release was read against, or a symbol to replace is gone."""


class RequestError(DetPluginError, ValueError):
    """One request is invalid; it becomes HTTP 400 and the engine goes on."""


class CertificateError(DetPluginError, RuntimeError):
    """No schedule of an operator could be certified, or a certificate is required and missing."""
