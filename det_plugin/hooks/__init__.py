"""Extension points (pluggy).  The built-ins register through the same hooks as anybody else's.

A package offers an extension by an entry point in the group ``det_plugin``::

    [project.entry-points.det_plugin]
    my_extension = "my_package.det_hooks"

and functions marked with :data:`hookimpl` in that module.
"""

from det_plugin.hooks.manager import hookimpl, plugin_manager
from det_plugin.hooks.specs import hookspec

__all__ = ["hookimpl", "hookspec", "plugin_manager"]
