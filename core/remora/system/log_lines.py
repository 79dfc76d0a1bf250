"""Forms of log records: lines for people, and JSON objects for the log services of clouds.

Pure.

The names in an object are those that the services read. Cloud Logging takes ``severity``, ``message``, ``stack_trace``,
``httpRequest`` and its own names for the trace; Lambda filters by ``timestamp`` and ``level``; CloudWatch Logs Insights
and Azure's log tables index every member; ``trace_id`` and ``span_id`` are OpenTelemetry's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

LINE: Final = "%(asctime)s %(levelname).1s %(name)s: %(message)s"
_MODEL_LOGGER: Final = "remora.model."
_LEVELS: Final = {"WARNING": "WARN", "CRITICAL": "FATAL"}
"""Lambda's names of the severities that are not Python's."""
_COLOURS: Final = {logging.DEBUG: "2", logging.WARNING: "33", logging.ERROR: "31", logging.CRITICAL: "31;1"}
"""Codes of the colours and intensities of ECMA-48, by severity."""


_CONTROLS: Final = {
    code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
    for code in (*range(32), *range(127, 160), 0x2028, 0x2029)
    if chr(code) not in "\n\t"
}
"""Characters that move the cursor, colour a terminal or end a line, and what is written for them."""
_CONTINUED: Final = "\n    "
"""Beginning of the further lines of a record."""


def utc(seconds: float) -> str:
    """Return a time in seconds since 1970 as RFC 3339 with milliseconds."""
    whole, milliseconds = divmod(int(seconds * 1000), 1000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(whole))}.{milliseconds:03d}Z"


class Line(NamedTuple):
    """A log record as data.

    ``seconds`` is its time since 1970, ``severity`` a name of the module ``logging``.
    """

    seconds: float
    severity: str
    logger: str
    message: str
    members: Mapping[str, Any]


def json_line(seconds: float, severity: str, logger: str, message: str, members: Mapping[str, Any]) -> str:
    """Return a record as one JSON object on one line; see `Line`.

    Members that JSON has no form for become their text.
    """
    import json  # imported here, because most servers write lines of text

    line = {
        "timestamp": utc(seconds),
        "severity": severity,
        "level": _LEVELS.get(severity, severity),
        "logger": logger,
        "message": message,
        **members,
    }
    return json.dumps(line, separators=(",", ":"), default=str)


def trace_members(trace_id: str, span_id: str) -> dict[str, str]:
    """Return the members that connect a record with its trace.

    Ids are lower-case hexadecimal, "" for none.
    """
    if not trace_id:
        return {}
    members = {"trace_id": trace_id, "logging.googleapis.com/trace": trace_id}
    return members | {"span_id": span_id, "logging.googleapis.com/spanId": span_id} if span_id else members


class JsonLines(logging.Formatter):
    """Formatter of records as JSON objects."""

    def line(self, record: logging.LogRecord) -> Line:
        """Return a record as data.

        The attribute ``fields`` of a record, a dictionary, adds members.
        """
        members: dict[str, Any] = {}
        if record.name.startswith(_MODEL_LOGGER):
            members["model"] = record.name.removeprefix(_MODEL_LOGGER)
        members |= getattr(record, "fields", None) or {}
        if record.exc_info and record.exc_info[0] is not None:
            members["stack_trace"] = self.formatException(record.exc_info)
        return Line(record.created, record.levelname, record.name, record.getMessage(), members)

    def format(self, record: logging.LogRecord) -> str:
        return json_line(*self.line(record))


class TextLines(logging.Formatter):
    """Formatter of records as lines for people.

    Control characters are escaped and further lines of a record indented, because a client may choose parts of a text:
    it must forge neither records nor colours.

    Args:
        iso8601: print times in UTC, in the form of ISO 8601.
        coloured: colour all severities but INFO.
    """

    def __init__(self, *, iso8601: bool = False, coloured: bool = False) -> None:
        super().__init__(LINE, "%Y-%m-%dT%H:%M:%SZ" if iso8601 else None)
        if iso8601:
            self.converter = time.gmtime
        self._coloured = coloured

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the base class's name
        line = _one_record(super().formatMessage(record))
        colour = _COLOURS.get(record.levelno) if self._coloured else None
        return f"\x1b[{colour}m{line}\x1b[0m" if colour else line

    def formatException(self, ei: Any) -> str:  # noqa: N802 - the base class's name
        return _CONTINUED[1:] + _one_record(super().formatException(ei))


def _one_record(text: str) -> str:
    """Return a text without blank lines, of which only the first line begins like a record."""
    return _CONTINUED.join(line for line in text.translate(_CONTROLS).split("\n") if line.strip())
