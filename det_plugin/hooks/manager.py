"""The plugin manager."""

from __future__ import annotations

import functools

import pluggy

hookimpl = pluggy.HookimplMarker("det_plugin")

BUILTIN = ("det_plugin.capabilities", "det_plugin.ops.linear_cpu")
"""Modules whose hook implementations are always registered."""


@functools.cache
def plugin_manager() -> pluggy.PluginManager:
    """The process-wide manager: built-ins first, then installed extensions."""
    import importlib

    from det_plugin.hooks import specs

    manager = pluggy.PluginManager("det_plugin")
    manager.add_hookspecs(specs)
    for name in BUILTIN:
        try:
            manager.register(importlib.import_module(name), name=name)
        except ImportError:
            # an operator module that needs torch, on a machine without it
            continue
    manager.load_setuptools_entrypoints("det_plugin")
    return manager
