"""Settings of the log and of traces over V2 REST: bodies to calls, settings to answers; the law: pure (spec T04, T09).

Triton's checks: first a file, which nobody moves, then values of the wrong JSON type, which are INTERNAL, as everywhere
(spec H13). The engine judges the rest.
"""

from __future__ import annotations

from typing import Any

from remora.errors import MalformedError
from remora.protocols.json import access
from remora.protocols.json.printer import quoted
from remora.system.log_settings import LogSetting, LogSettings
from remora.tracing.settings import TraceSetting, TraceSettings

_SWITCHES = ("log_info", "log_warning", "log_error")
_NUMBERS = ("trace_rate", "trace_count", "log_frequency")


def read_log(body: bytes) -> LogSetting:
    """The changes in a body; ``null`` changes nothing, nor do keys that nobody knows."""
    request = access.document(body)
    changes: dict[str, bool | int | str] = {}
    for name in LogSettings._fields:
        _, value = access.find(request, name)
        if value is None:
            continue
        if name == "log_file":
            return LogSetting({name: value})  # refused, whatever else is said
        if name in _SWITCHES and not isinstance(value, bool):
            raise MalformedError(access.NOT_BOOL)
        if name == "log_verbose_level" and not access.is_uint(value):
            raise MalformedError(access.NOT_UINT)
        if name == "log_format" and not isinstance(value, str):
            raise MalformedError(access.NOT_TEXT)
        changes[name] = value
    return LogSetting(changes)


def read_trace(model: str, body: bytes) -> TraceSetting:
    """The changes in a body; ``null`` takes back what was set."""
    request = access.document(body)
    changes: dict[str, tuple[str, ...] | None] = {}
    present, _ = access.find(request, "trace_file")
    if present:
        return TraceSetting(model, {"trace_file": None})  # refused, whatever it is and whatever else is said
    present, levels = access.find(request, "trace_level")
    if present:
        if levels is not None and not isinstance(levels, list):
            raise MalformedError(access.NOT_ARRAY)
        changes["trace_level"] = None if levels is None else tuple(_text(level) for level in levels)
    for name in _NUMBERS:
        present, value = access.find(request, name)
        if present:
            changes[name] = None if value is None else (_text(value),)
    return TraceSetting(model, changes)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise MalformedError(access.NOT_TEXT)
    return value


def print_settings(settings: LogSettings | TraceSettings) -> bytes:
    """All settings as a JSON object, in Triton's order."""
    fields = settings.shown() if isinstance(settings, TraceSettings) else settings._asdict()
    members = [b"%b:%b" % (quoted(name), _printed(value)) for name, value in fields.items()]
    return b"{%b}" % b",".join(members)


def _printed(value: bool | int | str | tuple[str, ...]) -> bytes:
    if isinstance(value, tuple):
        return b"[%b]" % b",".join(quoted(each) for each in value)
    if isinstance(value, bool):
        return b"true" if value else b"false"
    return b"%d" % value if isinstance(value, int) else quoted(value)
