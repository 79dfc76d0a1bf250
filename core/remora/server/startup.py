"""Startup options of the server process and the thread that loads the models.

Loading starts while the rest of the server is still being imported, because the two use different resources.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, TypeVar

from remora.options import BOOLEANS, EngineOptions

T = TypeVar("T")

_HOOKS = {
    "TRITONSERVER_DELAY_SCHEDULER": "delay_scheduler",
    "TRITONSERVER_BACKLOG_DELAY_SCHEDULER": "backlog_delay_scheduler",
}

_REDIS_SECRETS = {"TRITONCACHE_REDIS_USERNAME": "redis,user", "TRITONCACHE_REDIS_PASSWORD": "redis,password"}


def with_workers(options: EngineOptions) -> EngineOptions:
    """Return options that run Python models in worker processes by default (decision 0007)."""
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


def begin(work: Callable[[], T], name: str = "remora start") -> Future[T]:
    """Run ``work``, such as the start of an engine, in a dedicated thread of this name.

    The thread does not keep the process alive.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # the future can no longer be cancelled, because the work continues

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # any error, because it belongs to the waiter of the future
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
