"""Printing of configurations as Triton's configuration endpoint does [H08].

Fields without presence are always printed; messages and members of a oneof only when set, scalar oneof members last.
Names are the proto's, enums are names, 64-bit integers are numbers except for three that Triton leaves as text, map
keys are sorted text.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from remora.config.schema_errors import is_map, is_repeated, map_fields, schema_of
from remora.proto.model_config_pb2 import ModelConfig
from remora.tensors.float_text import number

_TEXTS = frozenset(
    {
        "remora.v2.ModelInstanceGroup.SecondaryDevice.device_id",
        "remora.v2.ModelOptimizationPolicy.Cuda.GraphSpec.Shape.dim",
        "remora.v2.ModelSequenceBatching.InitialState.dims",
    }
)
"""The 64-bit integers that are printed in quotes, as in protobuf's own JSON."""

_ESCAPE = r"((?<!\\)(?:\\\\)*\\u)([0-9a-f]{4})"


def to_dict(config: ModelConfig) -> dict[str, Any]:
    """Return the configuration as plain values, including defaults."""
    return _message(config)


def to_json(config: ModelConfig) -> bytes:
    """Return the configuration as Triton prints it: compact UTF-8 JSON including defaults [H08]."""
    return _text(_message(config)).encode()


def to_text(config: ModelConfig) -> str:
    """Return the configuration in protobuf text format, as in ``config.pbtxt``.

    Unset fields are left out.
    """
    from google.protobuf import text_format

    text: str = text_format.MessageToString(config, as_utf8=True)
    return text


def _text(value: Any) -> str:
    """Format a value as RapidJSON does.

    It differs from `json` in floats and in upper-case escapes.
    """
    if isinstance(value, dict):
        return "{" + ",".join(f"{_quoted(key)}:{_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_text, value)) + "]"
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int) else number(value).decode()


def _quoted(text: str) -> str:
    import json

    return re.sub(_ESCAPE, lambda found: found[1] + found[2].upper(), json.dumps(text, ensure_ascii=False))


def _message(message: Message) -> dict[str, Any]:
    fields = schema_of(message).fields
    return {
        field.name: _field(field, getattr(message, field.name))
        for field in sorted(fields, key=_is_plain_choice)
        if not field.has_presence or message.HasField(field.name)
    }


def _is_plain_choice(field: FieldDescriptor) -> bool:
    return field.containing_oneof is not None and field.message_type is None


def _field(field: FieldDescriptor, value: Any) -> Any:
    if is_map(field):
        _, kind = map_fields(field)
        return {str(key): _value(kind, value[key]) for key in sorted(value)}
    if is_repeated(field):
        return [_value(field, item) for item in value]
    return _value(field, value)


def _value(field: FieldDescriptor, value: Any) -> Any:
    if field.message_type is not None:
        return _message(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return value if known is None else known.name
    if field.cpp_type == FieldDescriptor.CPPTYPE_FLOAT:
        return _number(value, _FLOAT)
    if field.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE:
        return _number(value, _DOUBLE)
    return str(value) if field.full_name in _TEXTS else value


def _number(value: float, kind: _Float) -> float | int | str:
    """Round a float to the digits that protobuf writes, or return its word."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    text = f"{value:.{kind.few}g}"
    if kind.kept(float(text)) != value:
        text = f"{value:.{kind.many}g}"
    return float(text) if "." in text or "e" in text else int(text)


def _single(value: float) -> float:
    """Round a double to single precision."""
    try:
        kept: float = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:  # rounded up past the largest
        return math.inf
    return kept


class _Float(NamedTuple):
    few: int
    many: int
    kept: Callable[[float], float]


_FLOAT, _DOUBLE = _Float(6, 9, _single), _Float(15, 17, float)
