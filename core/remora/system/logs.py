"""The log of this process; the law: what it shows is set here and nowhere else.

`set_up` is for a process that is ours: it then writes everybody's records to standard error. In a program that embeds
the engine the log stays the program's own, and a change only raises or lowers the level of the logger ``remora``.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from threading import Lock
from typing import TextIO

from remora.log_settings import LogSettings

_LINE = "%(asctime)s %(levelname).1s %(name)s: %(message)s"


class Log:
    """What is set, and where it takes effect. Thread-safe."""

    def __init__(self, logger: logging.Logger) -> None:
        self._settings = LogSettings()
        self._logger = logger
        self._handler: logging.Handler | None = None
        self._lock = Lock()

    def set_up(self, settings: LogSettings, root: logging.Logger | None = None, stream: TextIO | None = None) -> None:
        """Write one line for each record to standard error, unless something else was set up before."""
        with self._lock:
            self._logger = root or logging.getLogger()
            if not self._logger.handlers:
                self._handler = logging.StreamHandler(stream or sys.stderr)
                self._handler.addFilter(lambda record: self._settings.shows(record.levelno))
                self._logger.addHandler(self._handler)
            self._apply(settings)

    def change(self, changes: Mapping[str, bool | int | str]) -> LogSettings:
        """Change what is logged from now on; returns all settings. Raises RemoraError as `LogSettings.changed`."""
        with self._lock:
            if changes:
                self._apply(self._settings.changed(changes))
            return self._settings

    def _apply(self, settings: LogSettings) -> None:
        self._settings = settings
        self._logger.setLevel(settings.level())
        if self._handler is not None:
            self._handler.setFormatter(_formatter(settings.log_format))


OURS = Log(logging.getLogger("remora"))
"""The log of this process."""


def _formatter(form: str) -> logging.Formatter:
    if form != "ISO8601":
        return logging.Formatter(_LINE)
    formatter = logging.Formatter(_LINE, "%Y-%m-%dT%H:%M:%SZ")
    formatter.converter = time.gmtime
    return formatter
