"""Which requests are to be traced, as data; the law: decided here, kept by `remora.live_settings`.

Nothing is traced yet: clients find the settings as they left them, and that is all.
A model has the server's settings but for those that were set for it alone (spec T04).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from remora.errors import InvalidArgumentError, UnsupportedError

Changes = Mapping[str, tuple[str, ...] | None]
"""Settings by name, all of them texts; None takes back what was set before."""

LEVELS: Final = ("TIMESTAMPS", "TENSORS")
_LEAST: Final = {"trace_rate": 0, "trace_count": -1, "log_frequency": 0}
_MOST = 2**31 - 1


_NOTHING: Final[Changes] = {}


class TraceSetting(NamedTuple):
    """The call: change which requests are to be traced, of one model or of all (""); without changes, ask.

    -> TraceSettings
    """

    model: str = ""
    changes: Changes = _NOTHING


class TraceSettings(NamedTuple):
    """Triton's settings of traces, in the order in which clients see them; numbers are texts on every wire."""

    trace_level: tuple[str, ...] = ("OFF",)
    trace_rate: str = "1000"
    trace_count: str = "-1"
    log_frequency: str = "0"
    trace_file: str = ""
    trace_mode: str = "triton"

    def over(self, own: Changes) -> TraceSettings:
        """These settings with a model's own in place of some."""
        level = own.get("trace_level") or self.trace_level
        numbers = {name: value[0] for name in _LEAST if (value := own.get(name))}
        return self._replace(trace_level=level, **numbers)


def checked(changes: Changes) -> Changes:
    """The changes that mean something; keys that nobody knows mean nothing, as in Triton.

    Raises UnsupportedError for the file, InvalidArgumentError for values that cannot be.
    """
    if "trace_file" in changes:
        raise UnsupportedError("trace file location can not be updated through network protocol")
    kept: dict[str, tuple[str, ...] | None] = {}
    if "trace_level" in changes:
        levels = changes["trace_level"]
        kept["trace_level"] = levels and _levels(levels)
    for name in _LEAST:
        if name in changes:
            value = changes[name]
            kept[name] = value and (_number(name, value),)
    return kept


def merged(before: Changes, changes: Changes) -> Changes:
    """What is set after a change: settings that it takes back are gone."""
    return {name: value for name, value in {**before, **changes}.items() if value}


def _levels(levels: tuple[str, ...]) -> tuple[str, ...]:
    """The levels that exist: Triton passes over others."""
    if "OFF" in levels and len(levels) > 1:
        raise InvalidArgumentError("Expect only one trace level 'OFF' is specified")
    return tuple(level for level in LEVELS if level in levels) or ("OFF",)


def _number(name: str, values: tuple[str, ...]) -> str:
    if len(values) != 1:
        raise InvalidArgumentError(f"expect only 1 value for '{name}'")
    text = values[0]
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()):
        raise InvalidArgumentError(f"Unable to parse '{name}', got: {text}")
    if len(digits.lstrip("0")) > 10 or not _LEAST[name] <= int(text) <= _MOST:
        raise InvalidArgumentError(
            f"Unable to parse '{name}', value is out of range [ {_LEAST[name]}, {_MOST} ], got: {text}"
        )
    return str(int(text))
