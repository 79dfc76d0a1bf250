"""Codec of V2 gRPC inference, from message bytes to calls and back.

Requests are read in two steps because Triton looks up the model before it checks the inputs: ``read_infer(bytes)``
returns the model and version, ``InferMessage.decode()`` the rest. The first step walks the message's top level by hand,
so that tensor bytes stay views of the received message, and caches the meaning of the other bytes: a repeated request
gets the same form object. A message with another layout than protobuf writers produce goes through the protobuf
library, which also reports malformed ones. No sockets, no gRPC library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from remora.errors import InternalError, InvalidArgumentError, given_twice
from remora.messages import Buffer, Data, InferForm, Parameter, Response
from remora.proto import inference_pb2 as pb
from remora.protocols.grpc.framing import PREFIX_BYTES, framed
from remora.protocols.grpc.request import InferHeader, again, parsed, read_head, version_of
from remora.protocols.grpc.status import (
    utf8,
)
from remora.protocols.rest.request import MAX_TENSORS, too_many
from remora.protocols.rest.response import serialized
from remora.tensors.shared_memory import DISABLED, Regions, Target, write

SERVICE = "inference.GRPCInferenceService"
"""Service name on the wire, whatever the package of our messages."""

MAX_MESSAGE_BYTES = 2**31 - 1
"""Longest message in either direction [R20]."""

_MEMO_ENTRIES = 512
_MEMO_BYTES = 4_096
_MEMO_TENSORS = 128
_MEMO_HEADS = 8
"""Heads of different lengths that are kept for messages of the same length."""
_UINT64 = 2**64 - 1
_COPY_BELOW = 16 * 1024
"""Size in bytes below which a copy of a tensor is cheaper than a view."""


# -- Inference requests ---------------------------------------------------------------------------------------------


NOWHERE: Mapping[str, Target] = {}
"""No outputs in shared memory."""


class InferCall(NamedTuple):
    """Decoded inference request.

    ``version`` is -1 for the newest; ``data`` has one entry per input of the form. ``empty_final`` is True if a stream
    must mark the end of a decoupled model's answers by an empty one [R12].
    """

    model: str
    version: int
    form: InferForm
    data: list[Data]
    empty_final: bool = False
    places: Mapping[str, Target] = NOWHERE
    """Outputs that are written to shared memory, and where."""


class RawField(NamedTuple):
    """Place of a raw tensor in its message: the field begins at ``start``, the tensor at ``value``."""

    start: int
    value: int
    stop: int


@dataclass(frozen=True, slots=True)
class InferMessage:
    """Inference request whose model is known and whose inputs are not decoded yet.

    The buffers belong to the caller. ``raw_fields`` are the places of the raw tensors, empty for a message that the
    protobuf library has read.
    """

    model: str
    version: int
    id: str
    _head: InferHeader
    _raw: list[Data]
    raw_fields: Sequence[RawField] = ()

    @property
    def is_plain(self) -> bool:
        """True if all inputs are in the raw tensors."""
        return self._head.plain

    def decode(self, forwarded: Mapping[str, str] | None = None, regions: Regions = DISABLED) -> InferCall:
        """Decode the request.

        ``forwarded`` joins its parameters, and ``regions`` has its tensors in shared memory. Raises
        InvalidArgumentError for invalid parameters, inputs and outputs [R05, R07, R08], and what ``regions`` raise for
        shared memory.
        """
        head = self._head
        if head.refused is not None:
            raise again(head.refused)
        data = self._raw[: len(head.sources)] if head.plain else []
        whole = len(data) == len(head.sources)
        if not whole or head.refused_outputs is not None or head.places:
            self._refuse_twice()  # reported before data and places are read; otherwise the engine finds it
        if not whole:
            data = self._gather(regions)
        if head.refused_outputs is not None:
            raise again(head.refused_outputs)
        places = self._targets(regions) if head.places else NOWHERE
        form = head.form
        if forwarded:
            form = replace(form, id=self.id, parameters={**form.parameters, **forwarded})
        elif self.id:
            form = replace(form, id=self.id)
        return InferCall(self.model, self.version, form, data, head.empty_final, places)

    def _targets(self, regions: Regions) -> dict[str, Target]:
        """Return where outputs are written. For a repeated output the first place counts."""
        places: dict[str, Target] = {}
        for name, place in self._head.places:
            target = regions.target(place)
            places.setdefault(name, target)
        return places

    def _refuse_twice(self) -> None:
        names: set[str] = set()
        for spec in self._head.form.inputs:
            if spec.name in names:
                raise given_twice(self.id, spec.name)
            names.add(spec.name)

    def _gather(self, regions: Regions) -> list[Data]:
        """Return the inputs' values in order, each from its source [R05]."""
        data: list[Data] = []
        raw = iter(self._raw)
        for spec, source in zip(self._head.form.inputs, self._head.sources, strict=True):
            if source.explicit and self._raw:
                raise InvalidArgumentError(
                    "contents field must not be specified when using raw_input_contents for "
                    f"'{spec.name}' for model '{self.model}'"
                )
            if source.refused is not None:
                raise again(source.refused)
            if source.place is not None:
                data.append(regions.view(source.place).toreadonly())
                continue
            if source.explicit:
                # The head may be shared between requests; its arrays are read-only, its lists are not.
                data.append(list(source.data) if isinstance(source.data, list) else source.data)
                continue
            entry = next(raw, None)
            if entry is None:
                raise InvalidArgumentError(
                    f"unable to find data for input tensor '{spec.name}' for model '{self.model}' in request."
                )
            data.append(entry)
        return data


def read_infer(message: Buffer) -> InferMessage:
    """Read the model and version of a ModelInferRequest, the first step of decoding.

    Raises MalformedError for bytes that are not such a message and InvalidArgumentError for an invalid version.
    """
    parts = _split(message)
    fields: list[RawField] = []
    if parts is not None:
        (model_name, version_name, id_name), rest, fields, tensors = parts
        try:
            model, version, request_id = str(model_name, "utf-8"), str(version_name, "utf-8"), str(id_name, "utf-8")
        except UnicodeDecodeError:
            parts = None
        else:
            # Short heads only are cached: an empty tensor takes two bytes here and hundreds once decoded.
            short = len(model) + len(rest) <= _MEMO_BYTES and tensors <= _MEMO_TENSORS
            head = _head(model, rest) if short else _head.__wrapped__(model, rest)
            view = memoryview(message)
            raw: list[Data] = [view[each.value : each.stop] for each in fields]
    if parts is None:
        fields = []
        request = parsed(pb.ModelInferRequest, message)
        raw = list(request.raw_input_contents[:MAX_TENSORS])
        model, version, request_id = request.model_name, request.model_version, request.id
        head = read_head(request)
    return InferMessage(model, version_of(version), request_id, head, raw, fields)


def decode_infer(message: Buffer, forwarded: Mapping[str, str] | None = None) -> InferCall:
    """Run both steps. Raises what ``read_infer`` and ``InferMessage.decode`` raise."""
    return read_infer(message).decode(forwarded)


_NAME_TAGS = {0x0A: 0, 0x12: 1, 0x1A: 2}
_REST_TAGS = frozenset((0x22, 0x2A, 0x32))
_RAW_TAG = 0x3A


def _split(message: Buffer) -> tuple[list[memoryview | bytes], bytes, list[RawField], int] | None:
    """Split a message into names, other fields (joined and counted) and the places of raw entries.

    None for a layout that plain writers do not produce: unknown fields, long tags, lengths beyond the end, a name
    twice.
    """
    view = memoryview(message)
    end, at, run, kept = len(view), 0, 0, 0
    names: list[memoryview | bytes] = [b"", b"", b""]
    rest: list[memoryview] = []
    raw: list[RawField] = []
    while at < end:
        start, tag = at, view[at]
        size = shift = 0
        byte = 128
        while byte >= 128:
            at += 1
            if at >= end or shift > 28:
                return None
            byte = view[at]
            size |= (byte & 127) << shift
            shift += 7
        value, at = at + 1, at + 1 + size
        if at > end:
            return None
        if tag in _REST_TAGS:
            kept += 1
            if kept > MAX_TENSORS:  # refused here, because protobuf would first make an object of each
                raise too_many()
            continue
        # Another kind of field ends the run of adjacent kept fields.
        if run < start:
            rest.append(view[run:start])
        run = at
        if tag == _RAW_TAG:
            raw.append(RawField(start, value, at))
        elif tag in _NAME_TAGS and not names[_NAME_TAGS[tag]]:
            names[_NAME_TAGS[tag]] = view[value:at]
        else:
            return None
        if len(raw) + len(rest) > MAX_TENSORS:
            raise too_many()
    if run < end:
        rest.append(view[run:end])
    return names, b"".join(rest), raw, kept


@lru_cache(maxsize=_MEMO_ENTRIES)
def _head(model: str, rest: bytes) -> InferHeader:
    request = parsed(pb.ModelInferRequest, rest)
    request.model_name = model
    return read_head(request)


class KnownMessage:
    """Message in the memo.

    Attributes:
        call: the decoded call without data.
        form: of the call.
        length: of the message.
        slices: places of its raw tensors.
        between: bytes between them.
    """

    __slots__ = ("between", "call", "form", "length", "slices")

    def __init__(
        self, call: InferCall, length: int, slices: tuple[slice, ...], between: tuple[tuple[slice, bytes], ...]
    ) -> None:
        self.call = call
        self.form = call.form
        self.length = length
        self.slices = slices
        self.between = between

    def data(self, message: bytes) -> list[Data]:
        """Return the data of a message that is this one but for its tensors."""
        return [*map(memoryview(message).__getitem__, self.slices)]


class InferMemo:
    """Memo of decoded messages whose bytes repeat except for those of raw tensors.

    For one thread. A message is found by its length and by its bytes up to its first raw tensor. Together with the
    bytes between the tensors they determine how the message splits into fields.
    """

    def __init__(self) -> None:
        self._heads: dict[int, tuple[int, ...]] = {}  # by the length of a message: lengths up to the first tensor
        self._known: dict[bytes, KnownMessage] = {}

    def recall(self, message: bytes) -> KnownMessage | None:
        """Return the message in the memo that differs only in its tensors, else None."""
        for head in self._heads.get(len(message), ()):
            known = self._known.get(message[:head])
            if known is not None and known.length == len(message):
                for place, expected in known.between:
                    if message[place] != expected:
                        return None
                return known
        return None

    def learn(self, message: bytes, request: InferMessage, call: InferCall) -> None:
        """Remember a message that was decoded without forwarded metadata, if it may repeat."""
        # A message with an id or a sequence rarely repeats and would only evict those that do.
        if call.form.id or call.form.sequence_id or call.places or not 0 < len(call.data) <= _MEMO_TENSORS:
            return
        fields, length = request.raw_fields, len(message)
        if (
            not request.is_plain
            or len(fields) != len(call.data)
            or fields[-1].stop != length
            or fields[0].value > _MEMO_BYTES
        ):
            return
        if any(last.stop != field.start for last, field in pairwise(fields)):
            return
        between = tuple((slice(each.start, each.value), message[each.start : each.value]) for each in fields[1:])
        tensors = tuple(slice(each.value, each.stop) for each in fields)
        head = fields[0].value
        heads = self._heads.get(length, ())
        if len(self._known) >= _MEMO_ENTRIES or len(self._heads) >= _MEMO_ENTRIES or len(heads) >= _MEMO_HEADS:
            self._known.clear()
            self._heads.clear()
            heads = ()
        if head not in heads:
            self._heads[length] = (*heads, head)
        self._known[message[:head]] = KnownMessage(call._replace(data=[]), length, tensors, between)


# -- Inference responses --------------------------------------------------------------------------------------------


def encode_infer(
    name: str, version: str, form: InferForm, response: Response, places: Mapping[str, Target] = NOWHERE
) -> bytes:
    """Return a ModelInferResponse with all outputs in ``raw_output_contents`` [R06].

    It is assembled in one copy. Outputs with an entry in ``places`` are written there and are empty in the message
    [X04]. Raises InternalError if it would be longer than MAX_MESSAGE_BYTES, or an output longer than its place.
    """
    return b"".join(_infer_pieces(name, version, form, response, response.parameters, places))


def encode_streamed(
    name: str,
    version: str,
    form: InferForm,
    response: Response,
    final: bool,
    places: Mapping[str, Target] = NOWHERE,
) -> bytes:
    """Return the response as a ModelStreamInferResponse.

    ``final`` marks the last one of a request [R12]. Raises InternalError if it would be longer than MAX_MESSAGE_BYTES.
    """
    outputs = response.outputs
    if (
        len(outputs) == 1 and not response.parameters and not places and outputs[0].datatype != "BYTES"
    ):  # the usual case
        (output, datatype, data) = outputs[0]
        before, behind, size = _streamed_parts(name, version, output, datatype, data.shape, data.nbytes, final)
        request_id = _text(0x1A, form.id) if form.id else b""
        values = data.tobytes() if data.nbytes < _COPY_BELOW else serialized(outputs[0])
        return b"".join((b"\x12", _varint(size + len(request_id)), before, request_id, behind, values))
    pieces = _infer_pieces(name, version, form, response, {**response.parameters, FINAL_KEY: final}, places)
    return b"".join((b"\x12", _varint(sum(map(len, pieces))), *pieces))


@lru_cache(maxsize=_MEMO_ENTRIES)
def _streamed_parts(
    name: str, version: str, output: str, datatype: str, shape: tuple[int, ...], size: int, final: bool
) -> tuple[bytes, bytes, int]:
    """Return a streamed response with one output up to its id and from there to its values, and its total size.

    Raises InternalError if it would be longer than MAX_MESSAGE_BYTES.
    """
    before = _text(0x0A, name) + _text(0x12, version)
    outputs = _encode_output(output, datatype, shape)
    behind = _encode_parameters({FINAL_KEY: final}) + outputs + b"\x32" + _varint(size)
    total = len(before) + len(behind) + size
    _check_size(name, total)
    return before, behind, total


class InferPrinter:
    """Printer of framed ModelInferResponses with a cache of the bytes beside the tensors, for one thread."""

    def __init__(self) -> None:
        self._templates: dict[tuple[object, ...], tuple[bytes, ...]] = {}

    def framed(self, name: str, version: str, form: InferForm, response: Response) -> bytes:
        """Return the message of `encode_infer` with the prefix of gRPC. Raises what that raises."""
        outputs = response.outputs
        if form.id or response.parameters:
            return framed(encode_infer(name, version, form, response))
        if len(outputs) == 1:
            (output, datatype, data) = outputs[0]
            template = self._templates.get((name, version, output, datatype, data.shape))
            if template is not None:
                small = data.nbytes < _COPY_BELOW
                return template[0] + data.tobytes() if small else b"".join((template[0], serialized(outputs[0])))
        key = (name, version, *[part for output, datatype, data in outputs for part in (output, datatype, data.shape)])
        template = self._templates.get(key)
        if template is None:
            return self._learn(key, name, version, form, response)
        pieces: list[bytes | memoryview] = []
        for before, each in zip(template, outputs, strict=True):
            pieces += before, serialized(each)
        return b"".join(pieces)

    def _learn(self, key: tuple[object, ...], name: str, version: str, form: InferForm, response: Response) -> bytes:
        """Print a response and keep the bytes before each of its tensors as a template for those of the same shapes."""
        pieces = _infer_pieces(name, version, form, response, response.parameters, NOWHERE)
        message = framed(b"".join(pieces))
        # The size of a BYTES tensor is in the template but not in the key.
        if response.outputs and all(output.datatype != "BYTES" for output in response.outputs):
            if len(self._templates) >= _MEMO_ENTRIES:
                del self._templates[next(iter(self._templates))]
            first_raw = len(pieces) - 2 * len(response.outputs) + 1  # a length and a tensor for each output
            before = b"".join((message[:PREFIX_BYTES], *pieces[:first_raw]))
            self._templates[key] = (before, *[bytes(piece) for piece in pieces[first_raw + 1 :: 2]])
        return message


FINAL_KEY = "triton_final_response"


def _infer_pieces(
    name: str,
    version: str,
    form: InferForm,
    response: Response,
    parameters: Mapping[str, Parameter],
    places: Mapping[str, Target],
) -> list[bytes | memoryview]:
    # Checked before copying, because an output may be a view that takes no memory yet.
    sent = (output for output in response.outputs if output.datatype != "BYTES" and output.name not in places)
    _check_size(name, sum(output.data.nbytes for output in sent))
    pieces: list[bytes | memoryview] = [_text(0x0A, name), _text(0x12, version), _text(0x1A, form.id)]
    if parameters:
        pieces.append(_encode_parameters(parameters))
    for output in response.outputs:
        pieces.append(_encode_output(output.name, output.datatype, output.data.shape))
    for output in response.outputs:
        raw = serialized(output)
        if output.name in places:
            write(output.name, places[output.name], raw)
            raw = b""
        pieces.append(b"\x32" + _varint(len(raw)))
        pieces.append(raw)
    _check_size(name, sum(map(len, pieces)))
    return pieces


def _check_size(model: str, size: int) -> None:
    if size > MAX_MESSAGE_BYTES:
        raise InternalError(
            f"the response of model '{model}' has {size} bytes and gRPC messages end at {MAX_MESSAGE_BYTES}: "
            "ask for fewer outputs or send smaller batches"
        )


@lru_cache(maxsize=_MEMO_ENTRIES)
def _encode_output(name: str, datatype: str, shape: tuple[int, ...]) -> bytes:
    tensor = pb.ModelInferResponse.InferOutputTensor(name=utf8(name), datatype=datatype, shape=shape)
    return pb.ModelInferResponse(outputs=[tensor]).SerializeToString()


def _encode_parameters(parameters: Mapping[str, Parameter]) -> bytes:
    message = pb.ModelInferResponse()
    for key, value in parameters.items():
        slot = message.parameters[utf8(key)]
        if isinstance(value, bool):
            slot.bool_param = value
        elif isinstance(value, str):
            slot.string_param = utf8(value)
        elif isinstance(value, float):
            slot.double_param = value
        elif -(2**63) <= value < 2**63:
            slot.int64_param = value
        elif 0 <= value <= _UINT64:
            slot.uint64_param = value
        else:
            raise InternalError(f"response parameter '{key}': {value} does not fit into 64 bits; send it as text")
    return message.SerializeToString()


def _text(tag: int, text: str) -> bytes:
    encoded = text.encode("utf-8", "replace")
    return bytes((tag,)) + _varint(len(encoded)) + encoded if encoded else b""


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
