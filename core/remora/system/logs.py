"""Logging of this process and Triton's log settings.

`Log.set_up` is for a server process, whose records all go to standard error. A program that embeds the engine keeps its
own logging. In both cases a change of level applies to the logger ``remora`` and those below it. Third-party loggers
never log below INFO, because their debug output may hold secrets: hpack logs each header with its value.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from threading import Lock
from typing import Any, Final, NamedTuple, TextIO

from remora.errors import UnavailableError, UnsupportedError
from remora.system.environment import variables
from remora.system.log_lines import JsonLines, Line, TextLines

JSON: Final = "json"
FORMATS: Final = ("default", "ISO8601", JSON)
"""Triton's formats, and JSON."""

_NOTHING: Final[Mapping[str, bool | int | str]] = {}


class LogSetting(NamedTuple):
    """Call that changes the log settings, or only reads them without changes (-> LogSettings)."""

    changes: Mapping[str, bool | int | str] = _NOTHING


class LogSettings(NamedTuple):
    """Triton's log settings [T09], in the order in which clients see them.

    Each severity has a separate switch, so a log may show errors without warnings. ``log_verbose_level`` above 0 adds
    debug records. ``log_file`` is always empty, for standard error, because clients must not choose a file.
    """

    log_file: str = ""
    log_info: bool = True
    log_warning: bool = True
    log_error: bool = True
    log_verbose_level: int = 0
    log_format: str = "default"

    def changed(self, changes: Mapping[str, bool | int | str]) -> LogSettings:
        """Return these settings with some changed. Unknown keys change nothing, as in Triton.

        Raises UnsupportedError for a file, UnavailableError (Triton's code) for a format that does not exist.
        """
        if "log_file" in changes:
            raise UnsupportedError("log file location can not be updated through network protocol")
        form = changes.get("log_format", self.log_format)
        if form not in FORMATS:
            raise UnavailableError(f"invalid argument for --log_format, got: {form}")
        known: dict[str, Any] = {key: value for key, value in changes.items() if key in self._fields}
        if "log_verbose_level" in known:  # Triton parses a signed 32-bit number; a negative level equals 0
            known["log_verbose_level"] = max((known["log_verbose_level"] + 2**31) % 2**32 - 2**31, 0)
        return self._replace(**known)

    def shows(self, severity: int) -> bool:
        """Return True if a record of this severity, a level of the module ``logging``, is written."""
        if severity >= logging.ERROR:
            return self.log_error
        if severity >= logging.WARNING:
            return self.log_warning
        return self.log_info if severity >= logging.INFO else self.log_verbose_level > 0

    def level(self) -> int:
        """Return the lowest severity that is written."""
        for severity in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
            if self.shows(severity):
                return severity
        return logging.CRITICAL + 1


class _Export(logging.Handler):
    """Handler that passes records on as data."""

    def __init__(self, put: Callable[[Line], None]) -> None:
        super().__init__()
        self._put = put
        self._lines = JsonLines()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._put(self._lines.line(record))
        except Exception:  # the convention of handlers: a record that cannot be formatted must not end its caller
            self.handleError(record)


class Log:
    """The log settings and the loggers they apply to. Thread-safe."""

    def __init__(self, logger: logging.Logger) -> None:
        self._settings = LogSettings()
        self._logger = logger
        self._root: logging.Logger | None = None  # set in a server process only
        self._handler: logging.Handler | None = None
        self._coloured = False
        self._lock = Lock()
        self.export: Callable[[Line], None] | None = None
        """Takes each line in addition, also those that other code formats."""
        self._end_export: Callable[[float], None] | None = None

    def export_to(self, put: Callable[[Line], None], close: Callable[[float], None]) -> None:
        """Pass each record that is written to ``put``, too. Call it after `set_up`.

        ``put`` must not block. ``close`` sends what waits within a timeout in seconds.
        """
        with self._lock:
            handler = _Export(put)
            handler.addFilter(lambda record: self._settings.shows(record.levelno))
            (self._root or self._logger).addHandler(handler)
            self.export, self._end_export = put, close

    def end_export(self, timeout_s: float) -> None:
        """Send the last records within the timeout. Idempotent."""
        end, self._end_export = self._end_export, None
        if end is not None:
            end(timeout_s)

    def set_up(self, settings: LogSettings, root: logging.Logger | None = None, stream: TextIO | None = None) -> None:
        """Write one line per record to standard error, unless the root logger already has a handler."""
        with self._lock:
            self._root = root or logging.getLogger()
            if not self._root.handlers:
                stream = stream or sys.stderr
                self._coloured = stream.isatty() and not variables().get("NO_COLOR")
                self._handler = logging.StreamHandler(stream)
                self._handler.addFilter(lambda record: self._settings.shows(record.levelno))
                self._root.addHandler(self._handler)
            self._apply(settings)

    @property
    def is_json(self) -> bool:
        """True if records become JSON objects."""
        return self._handler is not None and self._settings.log_format == JSON

    def write(self, lines: str) -> None:
        """Write lines that are already formatted where records go, between two records.

        It may block.
        """
        handler = self._handler
        if not isinstance(handler, logging.StreamHandler):
            sys.stderr.write(lines)
            return
        with handler.lock or Lock():
            handler.stream.write(lines)
            handler.flush()

    def change(self, changes: Mapping[str, bool | int | str]) -> LogSettings:
        """Change the log settings and return all of them.

        Raises RemoraError as `LogSettings.changed` does.
        """
        with self._lock:
            if changes:
                self._apply(self._settings.changed(changes))
            return self._settings

    def _apply(self, settings: LogSettings) -> None:
        self._settings = settings
        set_levels(settings.level(), self._logger, self._root)
        if self._handler is not None:
            form, coloured = settings.log_format, self._coloured
            self._handler.setFormatter(
                JsonLines() if form == JSON else TextLines(iso8601=form == "ISO8601", coloured=coloured)
            )


def set_levels(level: int, ours: logging.Logger, root: logging.Logger | None) -> None:
    """Set the level of our loggers, and that of ``root``, at least INFO, for all others."""
    ours.setLevel(level)
    if root is not None:
        root.setLevel(max(level, logging.INFO))


OURS = Log(logging.getLogger("remora"))
"""The log of this process."""
