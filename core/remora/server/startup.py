"""Startup options of the server process, from its environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from remora.options import BOOLEANS, EngineOptions

_HOOKS = {
    "TRITONSERVER_DELAY_SCHEDULER": "delay_scheduler",
    "TRITONSERVER_BACKLOG_DELAY_SCHEDULER": "backlog_delay_scheduler",
}

_REDIS_SECRETS = {"TRITONCACHE_REDIS_USERNAME": "redis,user", "TRITONCACHE_REDIS_PASSWORD": "redis,password"}


def with_workers(options: EngineOptions) -> EngineOptions:
    """Return options that run Python models in worker processes by default (decision 0007).

    Commands that open models apply it too, because they must accept what the server serves.
    """
    return replace(options, backend_config=("python,isolation=process", *options.backend_config))


def with_hooks(options: EngineOptions, environ: Mapping[str, str]) -> EngineOptions:
    """Return options with the variables of Triton's scheduler tests applied [D16, S15].

    Raises ValueError.
    """
    overrides: dict[str, Any] = {}
    for variable, option in _HOOKS.items():
        value = environ.get(variable)
        if value is None:
            continue
        if not value.isdecimal():
            raise ValueError(f"{variable} must be a whole number of requests, got '{value}'")
        overrides[option] = int(value)
    return replace(options, **overrides)


def with_gpu_requirement(options: EngineOptions, environ: Mapping[str, str]) -> EngineOptions:
    """Return options with ``REMORA_REQUIRE_GPU`` applied, for hosts that pass no flags.

    Raises ValueError.
    """
    value = environ.get("REMORA_REQUIRE_GPU", "")
    if value and value.lower() not in BOOLEANS:
        raise ValueError(f"REMORA_REQUIRE_GPU must be true or false, got '{value}'")
    return replace(options, require_gpu=True) if BOOLEANS.get(value.lower()) else options


def with_secrets(options: EngineOptions, environ: Mapping[str, str]) -> EngineOptions:
    """Return options with Triton's cache credentials from the environment [K04].

    The command line has priority.
    """
    configured = {entry.partition("=")[0] for entry in options.cache_config}
    if not any(entry.startswith("redis,") for entry in configured):
        return options
    credentials = [
        f"{entry}={environ[variable]}"
        for variable, entry in _REDIS_SECRETS.items()
        if environ.get(variable) and entry not in configured
    ]
    return replace(options, cache_config=(*options.cache_config, *credentials))
