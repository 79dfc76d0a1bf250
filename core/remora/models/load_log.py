"""Log records of loads and unloads, with failures that polls log only once."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

_log = logging.getLogger("remora.models")

CLIENT = "a client asked for it"
REQUEST = "a request needs it"
ROOM = "other models need its memory"
CHANGE = "its files have changed"
GONE = "its folder is gone"

Failures = dict[str, dict[int, str]]
"""The logged failures by model and version."""


class Occasion(NamedTuple):
    """Reason for loads, "" at startup, which logs a table.

    ``known`` failures are not logged again.
    """

    reason: str = ""
    known: Failures | None = None


_OCCASION: ContextVar[Occasion] = ContextVar("remora load occasion")
_START = Occasion()


@contextmanager
def occasion(reason: str, known: Failures | None = None) -> Iterator[None]:
    """Set the reason for the loads and unloads in this context."""
    token = _OCCASION.set(Occasion(reason, known))
    try:
        yield
    finally:
        _OCCASION.reset(token)


def log_failure(key: str, error: object, version: int = 0) -> None:
    """Log why a model cannot be loaded. ``version`` is 0 if no version was opened."""
    known, text = _OCCASION.get(_START).known, str(error)
    is_known = known is not None and known.get(key, {}).get(version) == text
    if known is not None:
        known.setdefault(key, {})[version] = text
    level = logging.DEBUG if is_known else logging.ERROR
    words = f" version {version}" if version else ""
    _log.log(level, "cannot load '%s'%s: %s", key, words, text, extra=_about(key, (version,) if version else ()))


def log_load(key: str, loaded: Collection[int], retired: Collection[int], load_ns: int) -> None:
    """Log which versions were loaded and which were retired."""
    current = _OCCASION.get(_START)
    if current.known is not None:
        current.known.pop(key, None)
    if not current.reason or not (loaded or retired):
        return
    words = [f"{_versions(loaded)} loaded in {load_ns / 1e6:.0f} ms"] if loaded else []
    words += [f"{_versions(retired)} retired"] if retired else []
    _log.info("model '%s': %s (%s)", key, ", ".join(words), current.reason, extra=_about(key, loaded or retired))


def log_unload(key: str, versions: Collection[int]) -> None:
    """Log that versions were unloaded."""
    reason = _OCCASION.get(_START).reason
    if versions:
        words = f" ({reason})" if reason else ""
        _log.info("model '%s': %s unloaded%s", key, _versions(versions), words, extra=_about(key, versions))


def _versions(numbers: Collection[int]) -> str:
    return f"version{'s' * (len(numbers) > 1)} {', '.join(map(str, sorted(numbers)))}"


def _about(key: str, versions: Collection[int]) -> dict[str, dict[str, str]]:
    """Return a record's extra members: the model's name, and its version if there is one."""
    return {"fields": {"model": key, **({"version": str(*versions)} if len(versions) == 1 else {})}}
