"""Names of the server for plug-ins, by subject (docs/plugins.md).

A name is imported from its module when it is first used, so that a plug-in imports no more than it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazily(module: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module that has the names of other modules.

    ``homes`` has the names, divided by spaces, by module. A name may be that of a module in a package.
    """
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def find(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module '{module}' has no attribute '{name}'")
        home = import_module(home_of[name])
        return getattr(home, name) if hasattr(home, name) else import_module(f"{home.__name__}.{name}")

    return find
