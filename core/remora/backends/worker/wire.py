"""Binary format of the messages between the server and a worker. Pure.

    message   kind u8, layout u8, reserved u16, items u32, number u64, begin_ns u64, end_ns u64
    item      head length u32, id length u32, arrays u32, flags u32, then the head, the id, padding to 8 bytes
    array     place u32 (0 inline, 1 arena), reserved u32, offset u64, length u64
    inline    the bytes of the arrays that lie in the message itself, each at a multiple of 16

That is the layout ITEMS. Small tensors of similar requests, above all of batches, travel as a STACK: one item without
id and flags stands for all, and after its head come the bytes of the first array of each item, end to end at a multiple
of 16, then those of the second, and so on. They are written and read in one operation, without building items.

A head is JSON: the tensors' names, datatypes and shapes under ``tensors``, and the fields of the message kind. The same
heads recur, so both ends cache them. BYTES tensors have Triton's form, each element with a length prefix. All numbers
are little-endian. Clients choose ids, heads and numbers of tensors, so their lengths have 32 bits: a field that
overflows would fail all requests of the message.

Invariant: nothing is unpickled, and any bytes decode to a message or raise a WireError.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from remora.messages import DTYPES, Array
from remora.tensors import elements

ITEMS, STACK = 1, 2
INLINE_BYTES = 2048
"""Smallest tensor that is placed in the arena (if there is one); smaller ones may be stacked."""
FINAL = 1
"""Item flag of the last answer to a request."""
AGAIN = 2
"""Item flag of a request that the model wants to be scheduled again."""


class MessageKind(IntEnum):
    """Purpose of a message.

    The numbers are part of the wire format and never change their meaning.
    """

    # requests of the server; the worker answers with DONE or FAILED of the same number
    OPEN = 1
    COMPLETE = 2
    START = 3
    CLOSE = 4
    EXECUTE = 5
    READY = 6
    # answers
    DONE = 10
    FAILED = 11
    STREAMED = 12
    # notifications of the server
    CANCEL = 20
    RELEASE = 21
    STREAM_READ = 22
    # notifications of the worker
    LOG = 30
    METRIC = 31
    # callbacks of the worker; the server answers with ANSWER or REFUSED of the same number
    METRIC_CALL = 40
    CALL = 41
    MODEL_CALL = 42
    ANSWER = 43
    REFUSED = 44
    CALL_STREAMED = 45
    CALL_CANCEL = 46
    # a message too long for the ring, stored in the arena
    SPILLED = 50


class WireError(Exception):
    """Bytes that are not a valid message."""


class TensorHead(NamedTuple):
    """Name, type and shape of a tensor in a message.

    ``nbytes`` is -1 for BYTES, whose length does not follow from the shape.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    nbytes: int
    dtype: np.dtype[Any]


class MessageHeader(NamedTuple):
    """Decoded head with its tensors, and the other fields as plain JSON values.

    ``remembered`` heads are the same object whenever their bytes recur.
    """

    tensors: tuple[TensorHead, ...]
    fields: dict[str, Any]
    remembered: bool = False


class Item(NamedTuple):
    """One decoded request or answer of a message.

    ``arrays`` are parallel to ``head.tensors``.
    """

    head: MessageHeader
    id: str
    flags: int
    arrays: list[Array]


class Stacked(Sequence[Item]):
    """Items of a decoded stack, each built on access.

    ``columns`` hold, for each of the head's tensors, the arrays of all items; there is at least one column.
    """

    def __init__(self, head: MessageHeader, columns: list[list[Array]]) -> None:
        self.head = head
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns[0])

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[index] for index in range(len(self))[at]]
        return Item(self.head, "", 0, [column[at] for column in self.columns])


class Message(NamedTuple):
    """A decoded message."""

    kind: MessageKind
    number: int
    begin_ns: int
    end_ns: int
    items: Sequence[Item]


class Draft(NamedTuple):
    """One item to encode.

    Consists of a head built by ``head``, and arrays in the order of its tensors.
    """

    head: bytes = b'{"tensors":[]}'
    arrays: Sequence[Array] = ()
    id: str = ""
    flags: int = 0


class Stack(NamedTuple):
    """Items to encode as one.

    ``columns`` hold, for each tensor of the head, the arrays of all items. The arrays have the tensor's shape with at
    least one dimension, and no elements of varying length.
    """

    head: bytes
    columns: Sequence[Sequence[Array]]


Drafts = Sequence[Draft] | Stack
"""Content of a message."""


def nbytes_of(items: Drafts) -> int:
    """Return the number of bytes in the arrays of the items."""
    if isinstance(items, Stack):
        return sum([len(column) * column[0].nbytes for column in items.columns])
    return sum([array.nbytes for item in items for array in item.arrays])


Place = Callable[[Array], int | None]
"""Puts an array into the arena and returns its offset, or returns None to include it in the message."""

Fetch = Callable[[int, int], Array]
"""Returns the bytes at (offset, length) of the arena as an array of uint8, whose owner is notified when the last view
of it is released. Raises WireError for an invalid range."""

_MESSAGE = struct.Struct("<BB2xIQQQ")
_ITEM = struct.Struct("<IIII")
_ARRAY = struct.Struct("<IIQQ")
_unpack_item = _ITEM.unpack_from
_unpack_array = _ARRAY.unpack_from
_NO_HEAD = MessageHeader((), {})
_ZEROS = bytes(16)
_IN_ARENA = 1
_REMEMBERED_HEADS = 512
LONGEST_REMEMBERED = 4096
"""Size limit of a cached head, in bytes."""


# -- heads ----------------------------------------------------------------------------------------------------------


def head(tensors: Sequence[tuple[str, str, Sequence[int]]] = (), **fields: Any) -> bytes:
    """Encode a head from tensors as (name, datatype, shape), and JSON values.

    Raises TypeError for other values.
    """
    return json.dumps({**fields, "tensors": [[n, d, list(s)] for n, d, s in tensors]}, separators=(",", ":")).encode()


class Heads:
    """Decoder of heads with a cache.

    Not thread-safe; each reader has a separate one.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, MessageHeader] = {}

    def read(self, data: bytes) -> MessageHeader:
        """Return the head in these bytes. Raises WireError."""
        known = self._known.get(data)
        if known is None:
            known = _read_head(data)
            if len(data) <= LONGEST_REMEMBERED:
                known = known._replace(remembered=True)
                if len(self._known) >= _REMEMBERED_HEADS:
                    self._known.clear()
                self._known[data] = known
        return known


def _read_head(data: bytes) -> MessageHeader:
    try:
        fields = json.loads(data)
        tensors = tuple(_tensor_head(*row) for row in fields.pop("tensors"))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise WireError(f"a head that cannot be read: {error}") from None
    return MessageHeader(tensors, fields)


def _tensor_head(name: str, datatype: str, shape: Sequence[int]) -> TensorHead:
    dims = tuple(shape)
    dtype = DTYPES.get(datatype) if isinstance(datatype, str) else None
    if dtype is None or not isinstance(name, str) or not all(type(dim) is int and dim >= 0 for dim in dims):
        raise WireError(f"no tensor is '{name}' of datatype {datatype!r} and shape {dims}")
    if len(dims) > 64:
        raise WireError(f"tensor '{name}' has {len(dims)} dimensions")
    return TensorHead(name, datatype, dims, -1 if dtype.hasobject else math.prod(dims) * dtype.itemsize, dtype)


# -- messages -------------------------------------------------------------------------------------------------------


def encode(
    kind: MessageKind,
    number: int = 0,
    items: Drafts = (),
    place: Place | None = None,
    *,
    begin_ns: int = 0,
    end_ns: int = 0,
) -> bytes:
    """Encode a message.

    Arrays that ``place`` accepts are referenced; other arrays, and those of a stack, are copied into the message.
    Arrays have a wire dtype; BYTES are object arrays of ``bytes``.
    """
    if isinstance(items, Stack):
        return _encode_stack(_MESSAGE.pack(kind, STACK, len(items.columns[0]), number, begin_ns, end_ns), items)
    pieces = [_MESSAGE.pack(kind, ITEMS, len(items), number, begin_ns, end_ns)]
    arrays: list[Array] = []
    size = _MESSAGE.size
    for item in items:
        name = item.id.encode("utf-8", "surrogatepass") if item.id else b""
        pad = -(_ITEM.size + len(item.head) + len(name)) % 8
        pieces += (_ITEM.pack(len(item.head), len(name), len(item.arrays), item.flags), item.head, name, _ZEROS[:pad])
        size += _ITEM.size + len(item.head) + len(name) + pad
        arrays += item.arrays
    if not arrays:
        return b"".join(pieces)
    offset = size + _ARRAY.size * len(arrays)
    inline: list[bytes] = []
    for array in arrays:
        if array.dtype.hasobject:
            array = np.frombuffer(elements.packed(elements.array_steps(array)), np.uint8)
        placed = place(array) if place is not None else None
        nbytes = array.nbytes
        if placed is not None:
            pieces.append(_ARRAY.pack(_IN_ARENA, 0, placed, nbytes))
            continue
        pad = -offset % 16
        pieces.append(_ARRAY.pack(0, 0, offset + pad, nbytes))
        inline += (_ZEROS[:pad], array.tobytes())
        offset += pad + nbytes
    return b"".join((*pieces, *inline))


def _encode_stack(prefix: bytes, stack: Stack) -> bytes:
    head, columns = stack
    pieces = [prefix, _ITEM.pack(len(head), 0, len(columns), 0), head]
    offset = len(prefix) + _ITEM.size + len(head)
    for column in columns:
        pad = -offset % 16
        pieces.append(_ZEROS[:pad])
        try:
            data = b"".join(column)  # type: ignore[arg-type]  # arrays are buffers
        except TypeError:  # an array has gaps
            data = b"".join([array.tobytes() for array in column])
        pieces.append(data)
        offset += pad + len(data)
    return b"".join(pieces)


def decode(data: bytearray, heads: Heads, fetch: Fetch | None = None) -> Message:
    """Decode the message in ``data``.

    Arrays are writable views over ``data`` or over the memory that ``fetch`` returns.

    Raises:
        WireError: the bytes are not a valid message.
    """
    try:
        kind, layout, count, number, begin_ns, end_ns = _MESSAGE.unpack_from(data)
        if layout == STACK:
            return Message(MessageKind(kind), number, begin_ns, end_ns, _read_stack(data, count, heads))
        if layout != ITEMS:
            raise WireError(f"a message of layout {layout}; this end knows {ITEMS} and {STACK}")
        read, offset = _read_items(data, count, heads)
        size = len(data)
        items: list[Item] = []
        for found, name, flags in read:
            views = []
            for tensor in found.tensors:
                place, _, start, length = _unpack_array(data, offset)
                offset += _ARRAY.size
                if place == 0 and tensor.nbytes == length and start + length <= size:
                    views.append(np.ndarray(tensor.shape, tensor.dtype, data, start))
                else:
                    views.append(_array(data, place, start, length, tensor, fetch))
            items.append(Item(found, name, flags, views))
        return Message(MessageKind(kind), number, begin_ns, end_ns, items)
    except (struct.error, ValueError) as error:
        raise WireError(f"a message that cannot be read: {error}") from None


def _read_items(data: bytearray, count: int, heads: Heads) -> tuple[list[tuple[MessageHeader, str, int]], int]:
    """Return the heads, ids and flags of a message's items, and the offset of its arrays."""
    offset = _MESSAGE.size
    read: list[tuple[MessageHeader, str, int]] = []
    last, found = b"", _NO_HEAD
    for _ in range(count):
        head_length, id_length, arrays, flags = _unpack_item(data, offset)
        offset += _ITEM.size
        middle = offset + head_length
        end = middle + id_length
        if end > len(data):
            raise WireError("a message ends in the middle of a head")
        if head_length != len(last) or not data.startswith(last, offset):  # batch items mostly share a head
            last = bytes(data[offset:middle])
            found = heads.read(last)
        if len(found.tensors) != arrays:
            raise WireError(f"{arrays} arrays for {len(found.tensors)} tensors")
        read.append((found, data[middle:end].decode("utf-8", "surrogatepass") if id_length else "", flags))
        offset = end + -(_ITEM.size + head_length + id_length) % 8
    return read, offset


def _read_stack(data: bytearray, count: int, heads: Heads) -> Stacked:
    head_length, id_length, arrays, flags = _unpack_item(data, _MESSAGE.size)
    begin = _MESSAGE.size + _ITEM.size
    offset = begin + head_length
    if id_length or flags or offset > len(data):
        raise WireError("a stack whose item has an id or flags, or ends in the middle of its head")
    found = heads.read(bytes(data[begin:offset]))
    if len(found.tensors) != arrays or not arrays:
        raise WireError(f"a stack of {arrays} arrays for {len(found.tensors)} tensors")
    columns: list[list[Array]] = []
    for tensor in found.tensors:
        offset += -offset % 16
        length = count * tensor.nbytes
        if tensor.nbytes < 0 or not tensor.shape or offset + length > len(data):
            raise WireError(f"tensor '{tensor.name}' cannot be stacked, or lies outside of the message")
        columns.append(list(np.ndarray((count, *tensor.shape), tensor.dtype, data, offset)))
        offset += length
    return Stacked(found, columns)


def _array(data: bytearray, place: int, offset: int, length: int, tensor: TensorHead, fetch: Fetch | None) -> Array:
    if tensor.nbytes not in (length, -1):
        raise WireError(f"tensor '{tensor.name}' needs {tensor.nbytes} bytes and has {length}")
    if place == _IN_ARENA and fetch is not None:
        memory: Array | bytearray = fetch(offset, length)
        offset = 0
    elif place == 0 and offset + length <= len(data):
        memory = data
    else:
        raise WireError(f"tensor '{tensor.name}' lies outside of the message")
    if tensor.nbytes < 0:
        return unpack_elements(memoryview(memory)[offset : offset + length], tensor.shape)  # type: ignore[arg-type]
    return np.ndarray(tensor.shape, tensor.dtype, memory, offset)


# -- BYTES ----------------------------------------------------------------------------------------------------------


def unpack_elements(data: memoryview, shape: tuple[int, ...]) -> Array:
    """Decode an object array of ``bytes``.

    Raises WireError if the bytes are not exactly its elements.
    """
    count = math.prod(shape)
    if count * elements.PREFIX_BYTES > len(data):
        raise WireError(f"{count} elements do not fit into {len(data)} bytes")
    return elements.array_of(_split_elements(data, count), count).reshape(shape)


def _split_elements(data: memoryview, count: int) -> Iterator[list[bytes]]:
    offset, end = 0, len(data)
    for first in range(0, count, elements.STEP):
        step: list[bytes] = []
        for _ in range(min(elements.STEP, count - first)):
            start = offset + elements.PREFIX_BYTES
            if start > end:
                raise WireError("the elements of a BYTES tensor end in the middle of one")
            offset = start + elements.read_length(data, offset)[0]
            if offset > end:
                raise WireError("the elements of a BYTES tensor end in the middle of one")
            step.append(data[start:offset].tobytes())
        yield step
    if offset != end:
        raise WireError(f"{end - offset} bytes are left after the elements of a BYTES tensor")
