"""Loading begins while the rest of the server is still being imported: the two take different resources."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from remora.engine import Engine
from remora.options import EngineOptions
from remora.repository.sent import remove_left_behind

_HOOKS = {
    "TRITONSERVER_DELAY_SCHEDULER": "delay_scheduler",
    "TRITONSERVER_BACKLOG_DELAY_SCHEDULER": "backlog_delay_scheduler",
}

_REDIS_SECRETS = {"TRITONCACHE_REDIS_USERNAME": "redis,user", "TRITONCACHE_REDIS_PASSWORD": "redis,password"}


def with_workers(options: EngineOptions) -> EngineOptions:
    """A server keeps models' code out of its process unless it is told otherwise (decision 0007)."""
    return replace(options, backend_config=("python,isolation=process", *options.backend_config))


def with_hooks(options: EngineOptions, environ: Mapping[str, str]) -> EngineOptions:
    """With what the variables of Triton's own scheduler tests ask for [D16, S15]. Raises ValueError."""
    asked: dict[str, Any] = {}
    for variable, option in _HOOKS.items():
        value = environ.get(variable)
        if value is None:
            continue
        if not value.isdecimal():
            raise ValueError(f"{variable} must be a whole number of requests, got '{value}'")
        asked[option] = int(value)
    return replace(options, **asked)


def with_secrets(options: EngineOptions, environ: Mapping[str, str]) -> EngineOptions:
    """With the credentials that Triton reads from the environment, where the command line gives none [K04]."""
    given = {entry.partition("=")[0] for entry in options.cache_config}
    if not any(entry.startswith("redis,") for entry in given):
        return options
    found = [
        f"{entry}={environ[variable]}"
        for variable, entry in _REDIS_SECRETS.items()
        if environ.get(variable) and entry not in given
    ]
    return replace(options, cache_config=(*options.cache_config, *found))


def begin(engine: Engine) -> Future[Engine]:
    """Start an engine in a thread of its own; the future has it when its models are loaded, or what was wrong."""
    loading: Future[Engine] = Future()
    loading.set_running_or_notify_cancel()  # whoever waits for it may leave; the load goes on

    def load() -> None:
        try:
            loading.set_result(engine.start())
        except BaseException as error:  # whoever waits for the future gets it
            loading.set_exception(error)
        remove_left_behind()  # in this thread, which keeps nobody waiting any more

    threading.Thread(target=load, name="remora start", daemon=True).start()
    return loading
