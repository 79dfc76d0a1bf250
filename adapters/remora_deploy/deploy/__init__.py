"""Deployment to platforms, by one plan of checks and steps and a module for each platform.

A platform's module has five functions: ``add_place`` and ``add_flags`` add arguments, ``build`` returns the deployment
and ``find_service`` an existing service (both a `plan.Platform`), and ``connect`` the connection that makes the calls.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast

if TYPE_CHECKING:
    from remora_deploy.deploy.golden import Golden
    from remora_deploy.deploy.plan import Call, Platform

PLATFORMS = ("sagemaker", "lambda", "knative", "kserve", "helm", "compose", "cloud-run", "vertex", "azureml")
"""Supported platforms, each a module of this package (``_`` for ``-``)."""
ACTIONS = {
    "status": "show what serves",
    "logs": "show the last lines of the log",
    "invoke": "send an inference request and print the response",
    "rollback": "return to the version before",
    "undeploy": "remove the service with all that belongs to it",
}
"""Commands on an existing service."""
_MODULES = {"lambda": "aws_lambda"}
"""Modules with another name than their platform, because ``lambda`` is a keyword."""


class Connection(Protocol):
    """Connection to a control plane."""

    def __call__(self, call: Call) -> Any:
        """Make a call and return its answer. Raises CallError."""

    def login(self, host: str) -> tuple[str, str] | None:
        """Return user and password for a registry of the platform, or None."""

    def environ(self) -> Mapping[str, str]:
        """Return the variables with the credentials for uploads."""

    def close(self) -> None:
        """Close the connection."""


class PlatformModule(Protocol):
    """Functions of a platform's module."""

    def add_place(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags that identify where services are."""

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Add the flags of a deployment."""

    def build(self, options: argparse.Namespace, golden: Golden | None) -> Platform:
        """Return the deployment of parsed options. Raises ValueError."""

    def find_service(self, options: argparse.Namespace) -> Platform:
        """Return an existing service, without a desired state. Raises ValueError."""

    def connect(self, options: argparse.Namespace) -> Connection:
        """Return a connection. Raises RefusedError without the SDK or program."""


def find_platform(name: str) -> PlatformModule:
    """Return the module of a platform. Raises ValueError for an unknown name."""
    if name not in PLATFORMS:
        raise ValueError(f"unknown platform '{name}': expected one of {', '.join(PLATFORMS)}")
    return cast(PlatformModule, import_module(f"{__name__}.{_MODULES.get(name, name.replace('-', '_'))}"))
