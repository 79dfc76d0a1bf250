"""Configuration datatypes and their wire names, in one table for both directions [C07]."""

from __future__ import annotations

from typing import cast

from remora.errors import ConfigError
from remora.messages import DTYPES
from remora.proto.model_config_pb2 import DataType

_NAME_OF: dict[int, str] = {
    value: "BYTES" if name == "TYPE_STRING" else name.removeprefix("TYPE_")
    for name, value in DataType.items()
    if name != "TYPE_INVALID"
}
_TYPE_OF: dict[str, DataType] = {name: cast(DataType, value) for value, name in _NAME_OF.items()}

DATATYPE_BY_NAME: dict[str, str] = {
    "bfloat16" if name == "BF16" else dtype.name: name for name, dtype in DTYPES.items() if name != "BYTES"
}
"""Wire datatypes by numpy's names, which most frameworks share, except for text."""


def dtype_name(data_type: int) -> str:
    """Return the wire datatype, e.g. ``"FP32"``, of a DataType value.

    TYPE_STRING is ``"BYTES"``.

    Raises:
        ConfigError: TYPE_INVALID, or a number outside of DataType.
    """
    try:
        return _NAME_OF[data_type]
    except KeyError:
        raise ConfigError(f"data type {data_type} has no wire datatype; use one of TYPE_BOOL to TYPE_BF16") from None


def data_type_of(name: str) -> DataType:
    """Return the DataType value of a wire datatype such as ``"FP32"`` or ``"BYTES"``.

    Raises:
        ConfigError: an unknown datatype.
    """
    try:
        return _TYPE_OF[name]
    except KeyError:
        raise ConfigError(f"'{name}' is not a datatype; use one of {', '.join(_TYPE_OF)}") from None
