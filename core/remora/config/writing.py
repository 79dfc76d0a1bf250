"""Prints model configurations; the law: JSON comes out exactly as Triton's configuration endpoint gives it (spec H08).

Every field without presence is there, default or not; messages and members of a oneof only when they are set. Names
are the proto's, enums are names, 64-bit integers are numbers, map keys are text in order.
"""

from __future__ import annotations

import math
import struct
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from remora.config.misfit import is_map, is_repeated, map_fields, schema_of
from remora.proto.model_config_pb2 import ModelConfig

_EXACT_INTEGER = 1 << 53
"""Up to here every whole double is printed as an integer; above, digits would claim what a double does not hold."""


def to_dict(config: ModelConfig) -> dict[str, Any]:
    """The configuration as plain values, defaults written out."""
    return _message(config)


def to_json(config: ModelConfig) -> bytes:
    """The configuration as Triton prints it: compact JSON in UTF-8, defaults written out (spec H08)."""
    import json

    return json.dumps(_message(config), ensure_ascii=False, separators=(",", ":")).encode()


def to_text(config: ModelConfig) -> str:
    """The configuration in protobuf text format, as ``config.pbtxt`` has it; what is unset is left out."""
    from google.protobuf import text_format

    text: str = text_format.MessageToString(config, as_utf8=True)
    return text


def _message(message: Message) -> dict[str, Any]:
    return {
        field.name: _field(field, getattr(message, field.name))
        for field in schema_of(message).fields
        if not field.has_presence or message.HasField(field.name)
    }


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
        return _number(_shortest(value))
    return _number(value) if field.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE else value


def _number(value: float) -> float | int | str:
    """A float as JSON has it: whole ones without a point, and words for what JSON has no number for."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    whole = value.is_integer() and abs(value) < _EXACT_INTEGER and math.copysign(1.0, value) + value != -1.0
    return int(value) if whole else value


def _shortest(value: float) -> float:
    """The double with the fewest digits that is the same float32: 0.1, not 0.10000000149011612."""
    if not math.isfinite(value):
        return value
    for digits in range(6, 9):
        short = float(f"{value:.{digits}g}")
        try:
            if struct.unpack("<f", struct.pack("<f", short))[0] == value:
                return short
        except OverflowError:  # rounded up past the largest float32
            continue
    return value
