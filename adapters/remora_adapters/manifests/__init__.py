"""Deployment files computed from models, for `remora manifests`; the law: every number says where it is from.

A platform is a module with a function ``render(facts) -> str``, pure, which raises ValueError for what the platform
would refuse. `facts` opens the models and measures.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import cast

from remora_adapters.manifests.facts import Facts

PLATFORMS = ("azureml", "knative", "kserve", "sagemaker")
"""What files can be made for: a module of this package each."""

FETCHING = ("knative", "kserve")
"""Platforms whose pods read the models from where the files say: a path of this machine means nothing there."""


def find_renderer(name: str) -> Callable[[Facts], str]:
    """The function that writes a platform's files. Raises ValueError when there is none."""
    if name not in PLATFORMS:
        raise ValueError(f"there are no manifests for '{name}': give one of {', '.join(PLATFORMS)}")
    return cast(Callable[[Facts], str], import_module(f"{__name__}.{name}").render)
