"""The log of this process; the law: what it shows is set here and nowhere else.

`set_up` is for a server's process: all records then go to standard error. In a program that embeds the engine the log
stays the program's own. Either way a change of the level reaches the logger ``remora`` and those below it. Libraries
never log below INFO, because their debug output may hold secrets: hpack logs each header with its value.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from threading import Lock
from typing import TextIO

from remora.system.log_settings import LogSettings

_LINE = "%(asctime)s %(levelname).1s %(name)s: %(message)s"


class Log:
    """What is set, and where it takes effect. Thread-safe."""

    def __init__(self, logger: logging.Logger) -> None:
        self._settings = LogSettings()
        self._logger = logger
        self._root: logging.Logger | None = None  # in a server's process
        self._handler: logging.Handler | None = None
        self._lock = Lock()

    def set_up(self, settings: LogSettings, root: logging.Logger | None = None, stream: TextIO | None = None) -> None:
        """Write one line for each record to standard error, unless something else was set up before."""
        with self._lock:
            self._root = root or logging.getLogger()
            if not self._root.handlers:
                self._handler = logging.StreamHandler(stream or sys.stderr)
                self._handler.addFilter(lambda record: self._settings.shows(record.levelno))
                self._root.addHandler(self._handler)
            self._apply(settings)

    def change(self, changes: Mapping[str, bool | int | str]) -> LogSettings:
        """Change what is logged from now on; returns all settings. Raises RemoraError as `LogSettings.changed`."""
        with self._lock:
            if changes:
                self._apply(self._settings.changed(changes))
            return self._settings

    def _apply(self, settings: LogSettings) -> None:
        self._settings = settings
        set_levels(settings.level(), self._logger, self._root)
        if self._handler is not None:
            self._handler.setFormatter(_formatter(settings.log_format))


def set_levels(level: int, ours: logging.Logger, root: logging.Logger | None) -> None:
    """Set the least severity of our loggers, and below ``root`` that of all others, which log nothing for debugging."""
    ours.setLevel(level)
    if root is not None:
        root.setLevel(max(level, logging.INFO))


OURS = Log(logging.getLogger("remora"))
"""The log of this process."""


def _formatter(form: str) -> logging.Formatter:
    if form != "ISO8601":
        return logging.Formatter(_LINE)
    formatter = logging.Formatter(_LINE, "%Y-%m-%dT%H:%M:%SZ")
    formatter.converter = time.gmtime
    return formatter
