"""Binary encoding of responses for caches outside this process.

Version 1, numbers little-endian: magic, u32 number of outputs, u32 number of parameters; for each output its name,
datatype, u8 number of dims, i64 dims, u64 bytes of values, values; for each parameter its name, a tag, its text. Texts
are a u32 length and UTF-8. Elements of BYTES are a tag, a u32 length and bytes.

Invariant: every length is checked before it is used.
"""

from __future__ import annotations

import math
import struct

import numpy as np

from remora.messages import DTYPES, Array, Parameter, Response, Tensor

MAGIC = b"rmra\x01"
MAX_BYTES = 64 << 20
"""Longer responses are not stored, because fetching them would take longer than most models do."""

_MAX_DIMS = 32
_TAGS: dict[type[Parameter], bytes] = {bool: b"b", int: b"i", float: b"f", str: b"s"}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


def encode(response: Response) -> bytes | None:
    """Return the encoding of a response, or None if it cannot be stored.

    Device arrays, unknown types and responses above MAX_BYTES cannot be stored.
    """
    size = sum(getattr(tensor.data, "nbytes", MAX_BYTES + 1) for tensor in response.outputs)
    if size > MAX_BYTES:
        return None
    parts = [MAGIC, _U32.pack(len(response.outputs)), _U32.pack(len(response.parameters))]
    for tensor in response.outputs:
        values = _values(tensor)
        if values is None:
            return None
        shape = tensor.data.shape
        parts += [
            _text(tensor.name),
            _text(tensor.datatype),
            bytes([len(shape)]),
            struct.pack(f"<{len(shape)}q", *shape),
        ]
        parts += [_U64.pack(len(values)), values]
    for name, value in response.parameters.items():
        tag = _TAGS.get(type(value))
        if tag is None:
            return None
        parts += [_text(name), tag, _text(repr(value) if tag == b"f" else str(value))]
    encoded = b"".join(parts)
    return encoded if len(encoded) <= MAX_BYTES else None


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return _U32.pack(len(data)) + data


def _values(tensor: Tensor) -> bytes | None:
    array = tensor.data
    if not isinstance(array, np.ndarray) or array.dtype != DTYPES.get(tensor.datatype):
        return None
    if not array.dtype.hasobject:
        return array.tobytes()
    parts: list[bytes] = []
    for element in array.flat:
        if type(element) is bytes:
            parts += [b"b", _U32.pack(len(element)), element]
        elif type(element) is str:
            parts += [b"s", _text(element)]
        else:
            return None
    return b"".join(parts)


def decode(data: bytes) -> Response:
    """Return the response of an encoding, with read-only views over the bytes as arrays.

    Raises ValueError for anything else.
    """
    try:
        return _Reader(data).response()
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise ValueError(f"not a cached response: {error}") from error


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def response(self) -> Response:
        if self._take(len(MAGIC)) != MAGIC:
            raise ValueError("not a cached response, or one of another version")
        outputs, parameters = self._u32(), self._u32()
        if outputs + parameters > len(self._data):  # because each takes at least a byte
            raise ValueError("a cached response declares more parts than it has bytes")
        tensors = [self._tensor() for _ in range(outputs)]
        values = dict(self._parameter() for _ in range(parameters))
        if self._at != len(self._data):
            raise ValueError("a cached response has trailing bytes")
        return Response(tensors, values)

    def _take(self, count: int) -> bytes:
        part = self._data[self._at : self._at + count]
        if len(part) != count:
            raise ValueError("a cached response is truncated")
        self._at += count
        return part

    def _u32(self) -> int:
        return int(_U32.unpack(self._take(4))[0])

    def _text(self) -> str:
        return self._take(self._u32()).decode("utf-8", "surrogatepass")

    def _tensor(self) -> Tensor:
        name, datatype = self._text(), self._text()
        dtype = DTYPES.get(datatype)
        dims = self._take(1)[0]
        if dtype is None or dims > _MAX_DIMS:
            raise ValueError(f"a cached response has a tensor of datatype '{datatype}' with {dims} dims")
        shape = struct.unpack(f"<{dims}q", self._take(8 * dims))
        size = int(_U64.unpack(self._take(8))[0])
        count = math.prod(shape)
        if min(shape, default=0) < 0 or size > len(self._data) - self._at:
            raise ValueError("a cached response has a tensor that exceeds its bytes")
        if dtype.hasobject:
            return Tensor(name, datatype, self._elements(count, self._at + size).reshape(shape))
        if size != count * dtype.itemsize:
            raise ValueError("a cached response has a tensor whose bytes do not match its shape")
        array = np.frombuffer(self._data, dtype, count, self._at) if count else np.empty(0, dtype)
        self._at += size
        array = array.reshape(shape)
        array.flags.writeable = False
        return Tensor(name, datatype, array)

    def _elements(self, count: int, end: int) -> Array:
        if count * 5 > end - self._at:
            raise ValueError("a cached response declares more elements than it has bytes")
        array = np.empty(count, object)
        for place in range(count):
            tag, element = self._take(1), self._take(self._u32())
            array[place] = element.decode("utf-8", "surrogatepass") if tag == b"s" else element
        if self._at != end:
            raise ValueError("a cached response has elements that do not match their tensor")
        array.flags.writeable = False
        return array

    def _parameter(self) -> tuple[str, Parameter]:
        name, tag, text = self._text(), self._take(1), self._text()
        match tag:
            case b"b":
                return name, text == "True"
            case b"i":
                return name, int(text)
            case b"f":
                return name, float(text)
            case b"s":
                return name, text
        raise ValueError(f"a cached response has a parameter of unknown type {tag!r}")
