"""Deployment files computed from models, for `remora manifests`.

A platform is a module with a pure function ``render(facts) -> str``, which raises ValueError for values that the
platform refuses. Each computed number has a comment with its reason. `facts` opens and measures the models.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import cast

from remora_adapters.manifests.facts import Facts

PLATFORMS = ("azureml", "knative", "kserve", "sagemaker")
"""Supported platforms, one module of this package each."""

FETCHING = ("knative", "kserve")
"""Platforms whose pods download the models, so that a local path is useless to them."""


def find_renderer(name: str) -> Callable[[Facts], str]:
    """Return the function that renders a platform's files.

    Raises ValueError for an unknown platform.
    """
    if name not in PLATFORMS:
        raise ValueError(f"there are no manifests for '{name}': expected one of {', '.join(PLATFORMS)}")
    return cast(Callable[[Facts], str], import_module(f"{__name__}.{name}").render)
