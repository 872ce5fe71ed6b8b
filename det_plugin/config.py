"""The one configuration object.

It travels inside the host's own configuration (``additional_config["det_plugin"]``), so that it reaches
every process of the engine and takes part in the compile cache's key.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, ValidationError, field_validator

from det_plugin.errors import ConfigError

SECTION = "det_plugin"
"""Key of the plugin's section in the host's ``additional_config``."""

ENABLE_ENV = "DET_PLUGIN_ENABLE"
"""Environment variable that switches the plugin on (``1``, ``true``, ``yes``, ``on``) or off."""

INT64_MAX = 2**63 - 1
_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off", ""}


class DetConfig(BaseModel):
    """Settings of deterministic inference.

    Attributes:
        enable: whether the plugin acts at all.
        default_seed: seed of a request that gives none, 0 to 2**63 - 1; ``"random"`` draws a fresh one per
            request and returns it with the answer (offline: writes it to the log), so that it can be repeated.
        noise_scope: ``"seed"``: requests with equal seeds share sampling noise, so that a partial answer sent
            again as a prompt continues identically; ``"prompt"``: a hash of the prompt's token ids is mixed in.
        tp_invariant: make results independent of the tensor-parallel size as well.
        certificates: ``"auto"`` makes missing certificates at start-up; ``"require"`` refuses to start
            without them (``det-plugin certify MODEL`` makes them ahead of time).
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    enable: StrictBool = True
    default_seed: int | Literal["random"] = Field(default=42)
    noise_scope: Literal["seed", "prompt"] = "seed"
    tp_invariant: StrictBool = False
    certificates: Literal["auto", "require"] = "auto"

    @field_validator("default_seed", mode="before")
    @classmethod
    def _check_default_seed(cls, value: Any) -> Any:
        whole = isinstance(value, int) and not isinstance(value, bool)
        if value == "random" or (whole and 0 <= value <= INT64_MAX):
            return value
        raise ValueError(f"accepts an integer from 0 to {INT64_MAX} or 'random'")

    def as_section(self) -> dict[str, Any]:
        """The JSON-able dictionary stored under :data:`SECTION`."""
        return self.model_dump(mode="json")

    @classmethod
    def from_section(cls, value: Any) -> DetConfig:
        """Read the value found under :data:`SECTION`: a mapping, or a plain boolean.

        Raises:
            ConfigError: naming the field, what it got and what it accepts.
        """
        if isinstance(value, DetConfig):
            return value
        if isinstance(value, bool):
            return cls(enable=value)
        if not isinstance(value, Mapping):
            raise ConfigError(
                f"additional_config[{SECTION!r}]: got {type(value).__name__} {value!r}, "
                'accepts an object such as {"default_seed": 42}, or true or false'
            )
        try:
            return cls(**value)
        except ValidationError as error:
            fields = ", ".join(cls.model_fields)
            raise ConfigError(
                "; ".join(
                    f"additional_config[{SECTION!r}].{'.'.join(str(p) for p in e['loc']) or '?'}: "
                    f"got {e['input']!r}, {e['msg'].removeprefix('Value error, ')}"
                    for e in error.errors()
                )
                + f" (known fields: {fields})"
            ) from None
        except TypeError as error:
            raise ConfigError(f"additional_config[{SECTION!r}]: {error}") from None


def env_switch() -> bool | None:
    """Value of :data:`ENABLE_ENV`: True, False, or None when unset.

    Raises:
        ConfigError: the variable holds something that is neither true nor false.
    """
    raw = os.environ.get(ENABLE_ENV)
    if raw is None:
        return None
    if raw.strip().lower() in _TRUE:
        return True
    if raw.strip().lower() in _FALSE:
        return False
    raise ConfigError(f"{ENABLE_ENV}: got {raw!r}, accepts {sorted(_TRUE)} or {sorted(_FALSE - {''})}")


def resolve(flag: bool | None, additional_config: Any) -> DetConfig | None:
    """Combine the flag, the ``additional_config`` section and the environment.

    Args:
        flag: ``--enable-deterministic-inference`` / ``enable_deterministic_inference=``; None when absent.
        additional_config: the host's ``additional_config`` (mapping, JSON string or None).

    Returns:
        The enabled configuration, or None when the plugin stays off.

    Raises:
        ConfigError: malformed values, or an explicit switch that contradicts another explicit one.
    """
    if isinstance(additional_config, str):
        try:
            additional_config = json.loads(additional_config)
        except json.JSONDecodeError as error:
            raise ConfigError(f"additional_config: not JSON ({error})") from None
    is_mapping = isinstance(additional_config, Mapping)
    has_section = is_mapping and SECTION in additional_config
    section = DetConfig.from_section(additional_config[SECTION]) if has_section else None
    env = env_switch()
    if flag is not None and section is not None and flag != section.enable:
        raise ConfigError(
            f"conflicting switches: enable_deterministic_inference is {flag} but "
            f"additional_config[{SECTION!r}].enable is {section.enable}; drop one of them"
        )
    explicit = flag if flag is not None else (section.enable if section is not None else None)
    if explicit is not None and env is not None and explicit != env:
        raise ConfigError(
            f"conflicting switches: {ENABLE_ENV} says {env} but the flag or additional_config says {explicit}; "
            "drop one of them"
        )
    enabled = explicit if explicit is not None else bool(env)
    if not enabled:
        return None
    if additional_config is not None and not is_mapping:
        raise ConfigError(
            f"additional_config: got {type(additional_config).__name__} {additional_config!r}, accepts an object "
            f'such as {{"{SECTION}": {{"default_seed": 42}}}}'
        )
    return section or DetConfig(enable=True)
