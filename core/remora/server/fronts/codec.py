"""Binary format of the messages between a front process and the engine process. Pure.

    message   kind u8, flags u8, parts u16, ref u32, number u64, extra u64, since u64
    part      form u16, place u16, offset u32 (in units of 64 bytes), length u64
    inline    the bytes of the parts that lie in the message itself, each padded to 16

A record of the ring holds one message after another, all multiples of 16 bytes long. Large parts lie in the shared
memory of the sender. Structured parts are JSON: what repeats (a route with its form, the head of an answer) crosses
once and is then named by a number. All numbers are little-endian.

Invariant: nothing is unpickled, and any bytes decode to messages or raise a CodecError.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from enum import IntEnum
from math import prod
from typing import Any, NamedTuple

import numpy as np

from remora.errors import MalformedError, RemoraError, error_of
from remora.messages import DTYPES, Array, Buffer, InferForm, InputSpec, OutputSpec, Parameter, Response, Tensor
from remora.options import ServerOptions
from remora.protocols.http1 import Head
from remora.protocols.rest.answer import Headers

ALIGNMENT = 64
INLINE_BYTES = 32_768
"""Smallest part that is placed in shared memory."""
STACKED_BYTES = 4096
"""Largest tensor that shares a part with those of other requests or answers."""
MAX_PARTS = 4096
"""Parts that one message may have."""
_MAX_INLINE_BYTES = 65_536
"""Inline bytes of a message after which smaller parts are placed in shared memory, too."""


class Kind(IntEnum):
    """Purpose of a message; the comment names its fields."""

    # from either side
    RELEASE = 1  # part: offsets that the receiver of large parts no longer reads
    # from a front
    ROUTE = 10  # ref: number of the route from now on; part: model, version and form
    INFER = 11  # ref: route; extra: timeout in ns; since: start of the receipt in ns; parts: extras if EXTRAS, tensors
    CANCEL = 12
    INFERS = 19  # as INFER for several requests; extra: their number; parts: numbers, then each input of all requests
    REQUEST = 13  # ref: port; since: start of the receipt in ns; parts: head, body; UNREAD
    CALL = 14  # ref: port; extra: connection; part: header fields and the address of the client
    DATA = 15  # part: bytes of the request's body; ENDED
    SENT = 16  # extra: bytes that the client has taken
    COUNTS = 17  # part: open connections
    LOAD = 18  # part: answers by status, held bytes
    # from the engine
    HEAD = 30  # ref: number of the head from now on; part: model, version and tensors
    ANSWER = 31  # ref: head; parts: parameters if EXTRAS, tensors
    ERROR = 32  # ref: Stage; part: error
    ANSWERS = 43  # as ANSWER for several requests; extra: their number; parts: numbers, then each output of all answers
    AGAIN = 33  # the engine needs the whole request
    RESPOND = 34  # ref: status; parts: headers, body in pieces
    BEGIN = 35  # ref: status; part: headers
    PIECE = 36  # part: bytes of the answer's body; ENDED
    GIVE_UP = 37  # part: reason
    CALL_RESPOND = 38  # parts: header block, data, trailers
    CALL_HEADERS = 39  # part: header block; ENDED
    CALL_DATA = 40  # part: bytes; ENDED
    TOOK = 41  # extra: bytes of the request's body that were consumed
    RESET = 42  # ref: error code of HTTP/2
    ANNOUNCE = 50  # answers carry "Connection: close" from now on
    DRAIN = 51  # close idle connections until none is open
    CLOSE = 52  # abort all connections and exit
    MAKE_ROOM = 53  # close the longest idle connections
    LOG = 54  # part: log settings that have changed


EXTRAS = 1
"""Flag: the first part is JSON that belongs to this request or answer alone."""
ENDED = 2
"""Flag: the last message of a body."""
GRPC = 4
"""Flag: an inference over gRPC."""
UNREAD = 8
"""Flag: the front has not read the body of the request, because its key does not permit it."""


class Stage(IntEnum):
    """Step of a request at which an error arose."""

    LOOK_UP = 0
    SUBMIT = 1
    OUTCOME = 2


class CodecError(Exception):
    """Bytes that are not a valid message."""


class TooLargeError(Exception):
    """A message that shared memory cannot hold."""


Part = Buffer | Array | list[bytes] | None
"""Content of a part to encode: bytes, an array of a fixed-size datatype, the elements of a BYTES tensor, or nothing."""
Received = memoryview | list[bytes] | None
"""Content of a decoded part."""
Place = Callable[[Buffer | Array, int], int]
"""Copies a buffer of this length into shared memory and returns its offset, a multiple of ALIGNMENT."""
Fetch = Callable[[int, int], memoryview]
"""Returns the bytes of shared memory at (offset, length). Raises CodecError for a range outside of it."""


class Message(NamedTuple):
    """A decoded message."""

    kind: int
    flags: int
    ref: int
    number: int
    extra: int
    since: int
    parts: list[Received]


_HEADER = struct.Struct("<BBHIQQQ")
_PART = struct.Struct("<HHIQ")
_LENGTH = struct.Struct("<I")
_unpack_header = _HEADER.unpack_from
_unpack_part = _PART.unpack_from
_RAW, _ELEMENTS, _NONE = 0, 1, 2
_INLINE, _SHARED = 0, 1
_ZEROS = bytes(16)
_PADS = [_ZEROS[:size] for size in range(16)]


# -- messages -------------------------------------------------------------------------------------------------------


def size_of(part: Part) -> int:
    """Return the bytes that a part takes in a message."""
    if part is None:
        return 0
    if isinstance(part, list):
        return sum(map(len, part)) + _LENGTH.size * len(part)
    return part.nbytes if isinstance(part, (memoryview, np.ndarray)) else len(part)


def encode(
    kind: int,
    number: int = 0,
    parts: Sequence[Part] = (),
    flags: int = 0,
    ref: int = 0,
    extra: int = 0,
    since: int = 0,
    place: Place | None = None,
) -> bytes:
    """Encode a message. Raises what ``place`` raises, and TooLargeError for too many parts."""
    if len(parts) > MAX_PARTS:
        raise TooLargeError(f"{len(parts)} tensors or pieces; at most {MAX_PARTS} cross to another process")
    pieces = [_HEADER.pack(kind, flags, len(parts), ref, number, extra, since)]
    inline: list[Any] = []
    total = 0
    for part in parts:
        if part is None:
            pieces.append(_PART.pack(_NONE, 0, 0, 0))
            continue
        form = _RAW
        if type(part) is list:
            part, form = pack_elements(part), _ELEMENTS
        elif type(part) is np.ndarray and not part.flags.c_contiguous:
            part = np.ascontiguousarray(part)
        length = len(part) if type(part) is bytes else size_of(part)
        if place is not None and (length >= INLINE_BYTES or (length and total > _MAX_INLINE_BYTES)):
            pieces.append(_PART.pack(form, _SHARED, place(part, length) // ALIGNMENT, length))  # type: ignore[arg-type]
            continue
        pieces.append(_PART.pack(form, _INLINE, 0, length))
        total += length
        inline += (part, _PADS[-length % 16])
    return b"".join(pieces + inline)


def decode(record: bytearray, fetch: Fetch | None = None) -> Iterator[Message]:
    """Yield the messages of a record. Inline parts are views of it.

    Raises:
        CodecError: the bytes are not valid messages.
    """
    view = memoryview(record)
    size, at = len(record), 0
    while at < size:
        try:
            kind, flags, count, ref, number, extra, since = _unpack_header(record, at)
            at += _HEADER.size
            inline = at + _PART.size * count
            parts: list[Received] = []
            for _ in range(count):
                form, place, units, length = _unpack_part(record, at)
                at += _PART.size
                if form == _NONE:
                    parts.append(None)
                    continue
                if place == _INLINE:
                    end = inline + length
                    if end > size:
                        raise CodecError("a part lies outside of its record")
                    part = view[inline:end]
                    inline = end + (-length % 16)
                elif place == _SHARED and fetch is not None:
                    part = fetch(units * ALIGNMENT, length)
                else:
                    raise CodecError(f"a part in an unknown place, {place}")
                if form == _RAW:
                    parts.append(part)
                elif form == _ELEMENTS:
                    parts.append(unpack_elements(part))
                else:
                    raise CodecError(f"a part of an unknown form, {form}")
        except struct.error as error:
            raise CodecError(f"a message that cannot be read: {error}") from None
        at = inline
        yield Message(kind, flags, ref, number, extra, since, parts)


def pack_elements(elements: list[bytes]) -> bytes:
    """Encode the elements of a BYTES tensor, each with a four-byte length prefix."""
    pieces: list[bytes] = []
    for element in elements:
        pieces += (_LENGTH.pack(len(element)), element)
    return b"".join(pieces)


def unpack_elements(data: memoryview) -> list[bytes]:
    """Decode the elements of a BYTES tensor. Raises CodecError."""
    elements: list[bytes] = []
    offset, size = 0, len(data)
    while offset < size:
        start = offset + _LENGTH.size
        offset = start + int.from_bytes(data[offset:start], "little")
        if start > size or offset > size:
            raise CodecError("the elements of a BYTES tensor end in the middle of one")
        elements.append(bytes(data[start:offset]))
    return elements


# -- structured parts -----------------------------------------------------------------------------------------------


def to_json(value: Any) -> bytes:
    """Encode plain values."""
    return json.dumps(value, separators=(",", ":")).encode()


def from_json(part: Received) -> Any:
    """Decode plain values. Raises CodecError."""
    try:
        return json.loads(bytes(part))  # type: ignore[arg-type]
    except (TypeError, ValueError, RecursionError) as error:
        raise CodecError(f"a part that is not JSON: {error}") from None


class Route(NamedTuple):
    """Target of inference requests and what their forms share."""

    model: str
    version: int
    form: InferForm


def encode_route(route: Route) -> bytes:
    """Encode a route without the fields of its form that `own_fields` returns."""
    form = route.form
    inputs = [[name, datatype, list(shape)] for name, datatype, shape in form.inputs]
    return to_json([route.model, route.version, inputs, form.outputs, form.priority, form.timeout_us, form.raw])


def decode_route(part: Received) -> Route:
    """Decode a route. Raises CodecError."""
    try:
        model, version, inputs, outputs, priority, timeout_us, raw = from_json(part)
        form = InferForm(
            tuple(InputSpec(name, datatype, tuple(shape)) for name, datatype, shape in inputs),
            tuple(OutputSpec(*output) for output in outputs),
            priority=priority,
            timeout_us=timeout_us,
            raw=raw,
        )
    except (TypeError, ValueError) as error:
        raise CodecError(f"not a route: {error}") from None
    return Route(model, version, form)


def own_fields(form: InferForm) -> dict[str, Any]:
    """Return the fields of a form that belong to one request, empty for most."""
    own: dict[str, Any] = {}
    if form.id:
        own["id"] = form.id
    if form.parameters:
        own["parameters"] = dict(form.parameters)
    if form.sequence_id or form.sequence_start or form.sequence_end:
        own["sequence"] = [form.sequence_id, form.sequence_start, form.sequence_end]
    return own


def with_own_fields(form: InferForm, own: Mapping[str, Any]) -> InferForm:
    """Return the form of a request from its route's form and `own_fields`. Raises CodecError."""
    try:
        sequence_id, start, end = own.get("sequence", (0, False, False))
        return InferForm(
            form.inputs,
            form.outputs,
            own.get("id", ""),
            own.get("parameters", {}),
            form.priority,
            form.timeout_us,
            sequence_id,
            start,
            end,
            form.raw,
        )
    except (TypeError, ValueError, AttributeError) as error:
        raise CodecError(f"not the fields of a request: {error}") from None


class AnswerHead(NamedTuple):
    """Model of an answer with its outputs.

    An output has a name, a datatype, a shape, a dtype and a size in bytes, which is -1 for BYTES.
    """

    model: str
    version: str
    tensors: list[tuple[str, str, tuple[int, ...], np.dtype[Any], int]]


def encode_head(model: str, version: str, outputs: Sequence[Tensor]) -> bytes:
    """Encode the head of an answer."""
    return to_json([model, version, [[name, datatype, list(data.shape)] for name, datatype, data in outputs]])


def decode_head(part: Received) -> AnswerHead:
    """Decode the head of an answer. Raises CodecError."""
    try:
        model, version, rows = from_json(part)
        if not isinstance(model, str) or not isinstance(version, str):
            raise TypeError("a model and a version are text")
        tensors = []
        for name, datatype, dims in rows:
            dtype, shape = DTYPES[datatype], tuple(dims)
            tensors.append((name, datatype, shape, dtype, -1 if dtype.hasobject else prod(shape) * dtype.itemsize))
        return AnswerHead(model, version, tensors)
    except (TypeError, ValueError, KeyError) as error:
        raise CodecError(f"not the head of an answer: {error}") from None


def decode_answer(head: AnswerHead, message: Message) -> Response:
    """Return the response in an ANSWER; its arrays are views of the message. Raises CodecError."""
    parameters: dict[str, Parameter] | None = None
    parts = message.parts
    if message.flags & EXTRAS:
        parameters, parts = from_json(parts[0]), parts[1:]
    if len(parts) != len(head.tensors):
        raise CodecError(f"{len(parts)} tensors for {len(head.tensors)} outputs")
    outputs = []
    for (name, datatype, shape, dtype, nbytes), part in zip(head.tensors, parts, strict=True):
        if type(part) is memoryview and part.nbytes == nbytes:
            array: Array = np.ndarray(shape, dtype, part) if nbytes else np.empty(shape, dtype)
        elif type(part) is list and nbytes < 0 and len(part) == prod(shape):
            array = np.empty(len(part), object)
            array[:] = part
            array = array.reshape(shape)
        else:
            raise CodecError(f"output '{name}' does not have the size of its shape")
        outputs.append(Tensor(name, datatype, array))
    return Response(outputs, parameters)


def split(message: Message, columns: int) -> tuple[list[int], list[memoryview]]:
    """Return the numbers of the requests in INFERS or ANSWERS, and each column of their tensors.

    Raises CodecError.
    """
    count, parts = message.extra, message.parts
    numbers = parts[0] if parts else None
    if type(numbers) is not memoryview or not 0 < count <= len(numbers) or len(numbers) != 8 * count:
        raise CodecError(f"not the numbers of {count} requests")
    found: list[memoryview] = []
    for part in parts[1:]:
        if type(part) is not memoryview or len(part) % count:
            raise CodecError(f"a part that is not that of {count} requests")
        found.append(part)
    if len(found) != columns:
        raise CodecError(f"{len(found)} columns, expected {columns}")
    return numbers.cast("Q").tolist(), found


def rows_of(columns: Sequence[memoryview], count: int) -> list[list[memoryview]]:
    """Return the tensor of each of ``count`` requests in these columns."""
    sizes = [len(column) // count for column in columns]
    return [
        [column[at : at + size] for at in range(0, len(column), size)] if size else [column] * count
        for column, size in zip(columns, sizes, strict=True)
    ]


def encode_error(error: RemoraError) -> bytes:
    """Encode an error."""
    malformed = isinstance(error, MalformedError)
    return to_json([error.code, error.message, error.from_model, error.answered, error.retry_after_s, malformed])


def decode_error(part: Received) -> RemoraError:
    """Decode an error. Raises CodecError."""
    try:
        code, message, from_model, answered, retry_after_s, malformed = from_json(part)
        if malformed:
            return MalformedError(message, from_model=from_model)
        error = error_of(code, message, from_model=from_model, answered=answered)
        error.retry_after_s = retry_after_s
    except (TypeError, ValueError) as fault:
        raise CodecError(f"not an error: {fault}") from None
    return error


def encode_request_head(head: Head, peer: str) -> bytes:
    """Encode the head of an HTTP request and the address of its client."""
    headers = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in head.headers]
    return to_json([head.method, head.path, head.query, headers, head.http10, peer])


def decode_request_head(part: Received) -> tuple[Head, str]:
    """Decode the head of an HTTP request and the address of its client. Raises CodecError."""
    try:
        method, path, query, headers, http10, peer = from_json(part)
        head = Head(method, "", encoded_headers(headers), http10=http10)
    except (TypeError, ValueError, AttributeError) as error:
        raise CodecError(f"not the head of a request: {error}") from None
    head.path, head.query = path, query
    return head, str(peer)


def decode_call(part: Received) -> tuple[Headers, str]:
    """Decode the header fields of a gRPC call and its client's address. Raises CodecError."""
    try:
        rows, peer = from_json(part)
    except (TypeError, ValueError) as error:
        raise CodecError(f"not the fields of a call: {error}") from None
    return encoded_headers(rows), str(peer)


def plain_headers(headers: Headers) -> list[list[str]]:
    """Return headers or header fields as JSON values."""
    return [[name.decode("latin-1"), value.decode("latin-1")] for name, value in headers]


def encoded_headers(rows: Any) -> Headers:
    """Return headers or header fields from JSON values. Raises CodecError."""
    try:
        return tuple((name.encode("latin-1"), value.encode("latin-1")) for name, value in rows)
    except (TypeError, ValueError, AttributeError) as error:
        raise CodecError(f"not headers: {error}") from None


def plain_options(options: ServerOptions) -> dict[str, Any]:
    """Return the server's options as JSON values."""
    return {field.name: getattr(options, field.name) for field in fields(options)}


def read_options(values: Mapping[str, Any]) -> ServerOptions:
    """Return the server's options from JSON values."""
    found: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in values.items()}
    return ServerOptions(**found)
