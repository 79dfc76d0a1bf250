"""Parsing, validation and merging of trace settings, as pure functions.

A model inherits the server's settings except for those set for it alone [T04]; the server has the settings of the flags
except for those that clients have changed. `remora.management.settings` holds the state.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from remora.errors import InvalidArgumentError, UnsupportedError
from remora.options import EngineOptions
from remora.system.url_secrets import without_secrets

Changes = Mapping[str, tuple[str, ...] | None]
"""Settings by name, as texts; None resets a setting."""

LEVELS: Final = ("TIMESTAMPS", "TENSORS")
MODES: Final = ("triton", "opentelemetry")
_LEAST: Final = {"trace_rate": 0, "trace_count": -1, "log_frequency": 0}
_MOST = 2**31 - 1
_SHOWN_RANGE: Final = {"trace_rate": (0, 2**32 - 1), "trace_count": (-1, _MOST), "log_frequency": (0, 2**32 - 1)}
_C_INTEGER: Final = re.compile(r"[ \t\n\v\f\r]*+([+-]?)(?=[0-9])0*+([0-9]*+)")
_MOST_DIGITS = 11  # numbers with more digits are out of range
_NOTHING: Final[Changes] = {}


class TraceSetting(NamedTuple):
    """Call that changes the trace settings of a model, or of all ("").

    Without changes it reads them.

    -> TraceSettings
    """

    model: str = ""
    changes: Changes = _NOTHING


class SpanExport(NamedTuple):
    """Options of the span export in mode opentelemetry [T08], with Triton's names, as texts.

    ``resource`` holds the resource attributes. Empty texts fall back to OpenTelemetry's variables
    (``OTEL_EXPORTER_OTLP_ENDPOINT``, ``OTEL_BSP_MAX_QUEUE_SIZE`` ...) and then to its defaults.
    """

    url: str = ""
    resource: tuple[str, ...] = ()
    bsp_max_export_batch_size: str = ""
    bsp_schedule_delay: str = ""
    bsp_max_queue_size: str = ""


class TraceSettings(NamedTuple):
    """Triton's trace settings, in the order in which clients see them.

    Numbers are texts on every wire.
    """

    trace_level: tuple[str, ...] = ("OFF",)
    trace_rate: str = "1000"
    trace_count: str = "-1"
    log_frequency: str = "0"
    trace_file: str = ""
    trace_mode: str = "triton"
    export: SpanExport = SpanExport()

    @staticmethod
    def of(options: EngineOptions) -> TraceSettings:
        """Parse ``--trace-config`` and the older flags, which it overrides [T05].

        Raises ValueError for malformed entries, unknown settings and invalid values.
        """
        found: dict[tuple[str, str], list[str]] = {}
        for entry in options.trace_config:
            place, value = _entry(entry)
            found.setdefault(place, []).append(value)
        levels = _levels_of(found.pop(("", "level"), list(options.trace_level)))

        def last(mode: str, name: str, older: str = "") -> str:
            return found.pop((mode, name), [older])[-1]

        numbers = {
            "trace_rate": last("", "rate", str(options.trace_rate)),
            "trace_count": last("", "count", str(options.trace_count)),
            "log_frequency": last("triton", "log-frequency", str(options.trace_log_frequency)),
        }
        mode = last("", "mode", "triton")
        if mode not in MODES:
            raise ValueError(f"--trace-config=mode={mode}: the modes are {' and '.join(MODES)}")
        settings = TraceSettings(levels, trace_file=last("triton", "file", options.trace_file), trace_mode=mode)
        try:
            numbers = {name: _number(name, (text,)) for name, text in numbers.items()}
        except InvalidArgumentError as error:
            raise ValueError(f"--trace-config: {error}") from None
        settings = settings._replace(**numbers)  # type: ignore[arg-type]  # only fields of type str
        resource = tuple(found.pop(("opentelemetry", "resource"), ()))
        export = SpanExport(resource=resource, **{name: values[-1] for (_, name), values in found.items()})
        _check_export(export)
        return settings._replace(export=export)

    @property
    def off(self) -> bool:
        """True if no request is ever traced."""
        return self.trace_level == ("OFF",)

    @property
    def exports(self) -> bool:
        """True if traces are exported as OpenTelemetry spans."""
        return self.trace_mode == "opentelemetry"

    def shown(self) -> dict[str, str | tuple[str, ...]]:
        """Return the settings that clients see, which depend on the mode."""
        fields = {name: getattr(self, name) for name in self._fields if name != "export"}
        if not self.exports:
            return fields
        for name in ("log_frequency", "trace_file"):
            del fields[name]
        export = self.export
        return {
            **fields,
            "url": without_secrets(export.url) or "http://localhost:4318/v1/traces",
            "resource": ",".join(export.resource) or "service.name=triton-inference-server",
            "bsp_max_export_batch_size": export.bsp_max_export_batch_size or "512",
            "bsp_schedule_delay": export.bsp_schedule_delay or "5000",
            "bsp_max_queue_size": export.bsp_max_queue_size or "2048",
        }

    def over(self, own: Changes) -> TraceSettings:
        """Return these settings, overridden by a model's."""
        level = own.get("trace_level") or self.trace_level
        numbers = {name: value[0] for name in _LEAST if (value := own.get(name))}
        return self._replace(trace_level=level, **numbers)  # type: ignore[arg-type]  # only fields of type str


_SETTINGS: Final = {
    "": ("level", "rate", "count", "mode"),
    "triton": ("file", "log-frequency"),
    "opentelemetry": SpanExport._fields,
}


def _entry(entry: str) -> tuple[tuple[str, str], str]:
    """Split an entry into (mode, setting) and value. Mode "" applies to both. Raises ValueError."""
    setting, equals, value = entry.partition("=")
    mode, comma, name = setting.rpartition(",")
    shown = without_secrets(entry)
    if not equals or not name or (comma and not mode):
        raise ValueError(
            f"--trace-config={shown}: expected [MODE,]SETTING=VALUE such as rate=100 or triton,file=/tmp/t"
        )
    if mode not in _SETTINGS:
        raise ValueError(f"--trace-config={shown}: there is no mode '{mode}'; there is {' and '.join(MODES)}")
    if name not in _SETTINGS[mode]:
        where = f"mode {mode}" if mode else "all modes"
        raise ValueError(
            f"--trace-config={shown}: no setting '{name}'; those of {where} are {', '.join(_SETTINGS[mode])}"
        )
    return (mode, name), value


_LEVEL_WORDS: Final = {
    **dict.fromkeys(("false", "off"), ""),
    **dict.fromkeys(("true", "on", "min", "max", "timestamps"), "TIMESTAMPS"),
    "tensors": "TENSORS",
}


def _levels_of(words: list[str]) -> tuple[str, ...]:
    """Parse the levels of the flags. OFF disables all others, as in Triton. Raises ValueError."""
    for word in words:
        if word.lower() not in _LEVEL_WORDS:
            raise ValueError(f"--trace-config=level={word}: the levels are OFF, {', '.join(LEVELS)}")
    chosen = {_LEVEL_WORDS[word.lower()] for word in words}
    if "" in chosen or not chosen:
        return ("OFF",)
    return tuple(level for level in LEVELS if level in chosen)


def _check_export(export: SpanExport) -> None:
    for pair in export.resource:
        key, equals, _ = pair.partition("=")
        if not key or not equals:
            raise ValueError(f"--trace-config=opentelemetry,resource={pair}: expected KEY=VALUE")
    for name in ("bsp_max_export_batch_size", "bsp_schedule_delay", "bsp_max_queue_size"):
        text = getattr(export, name)
        if text and not (text.isascii() and text.isdigit() and 0 < int(text) <= _MOST):
            raise ValueError(f"--trace-config=opentelemetry,{name}={text}: expected a whole number from 1")


def invalid(settings: TraceSettings) -> str:
    """Return, in Triton's words, why these settings cannot trace, or "" if they can or are off.

    A rate of 0 is valid in mode opentelemetry: only requests that carry a trace context are traced then.
    """
    if settings.off:
        return ""
    if settings.trace_rate == "0" and not settings.exports:
        return "sample rate must be non-zero"
    if not settings.trace_file and not settings.exports:
        return "trace file name is not given"
    return ""


def checked(changes: Changes) -> Changes:
    """Return the valid changes. Unknown keys are ignored, as in Triton.

    Raises UnsupportedError for the file, InvalidArgumentError for invalid values.
    """
    if "trace_file" in changes:
        raise UnsupportedError("trace file location can not be updated through network protocol")
    kept: dict[str, tuple[str, ...] | None] = {}
    if "trace_level" in changes:
        levels = changes["trace_level"]
        known = levels and _levels(levels)
        if known != ():  # Triton ignores a list that has only unknown levels
            kept["trace_level"] = known
    for name in _LEAST:
        if name in changes:
            value = changes[name]
            kept[name] = value and (_as_c_reads(name, value),)
    return kept


def merged(before: Changes, changes: Changes) -> Changes:
    """Return the settings after a change, without those that it resets."""
    return {name: value for name, value in {**before, **changes}.items() if value}


def _levels(levels: tuple[str, ...]) -> tuple[str, ...]:
    """Return the known levels. Triton ignores others."""
    if "OFF" in levels and len(levels) > 1:
        raise InvalidArgumentError("Expect only one trace level 'OFF' is specified")
    return levels if levels == ("OFF",) else tuple(level for level in LEVELS if level in levels)


def _as_c_reads(name: str, values: tuple[str, ...]) -> str:
    """Parse a client's number as Triton does.

    It uses C's ``stoi``, and all but the count are unsigned.
    """
    if len(values) != 1:
        raise InvalidArgumentError(f"expect only 1 value for '{name}'")
    text = values[0]
    found = _C_INTEGER.match(text)
    if found is None:
        raise InvalidArgumentError(f"Unable to parse '{name}', got: {text}")
    sign, digits = found.groups()
    number = int(sign + (digits[:_MOST_DIGITS] or "0"))
    if not -_MOST - 1 <= number <= _MOST:
        least, most = _SHOWN_RANGE[name]
        raise InvalidArgumentError(f"Unable to parse '{name}', value is out of range [ {least}, {most} ], got: {text}")
    if name != "trace_count":
        return str(number % 2**32)
    if number < -1:
        raise InvalidArgumentError(f"Unable to parse '{name}'. Expecting value >= -1, got:{text}")
    return str(number)


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
