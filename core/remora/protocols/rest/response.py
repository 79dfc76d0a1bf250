"""Printing V2 inference answers; the law: Triton's keys in Triton's order, tensors leave as they are [H15, B07].

JSON tensors are flat. Binary tensors follow the JSON in the order of the outputs, little-endian and row-major. The
JSON of an all-binary answer depends on names, types and shapes alone; it is printed once and remembered.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from remora.errors import InternalError, InvalidArgumentError
from remora.messages import Array, Buffer, InferForm, Response, Tensor
from remora.protocols.json import printer as json_print
from remora.protocols.rest.answer import JSON, Headers, HttpAnswer, Wire, encode_error
from remora.tensors import shared_memory as regions

_OCTETS = (b"Content-Type", b"application/octet-stream")
_JSON_HEADERS: Headers = (JSON,)
_COPY_BELOW = 16 * 1024
_LENGTH = struct.Struct("<I")
_MAX_TEMPLATES = 1024


_NOWHERE: Mapping[str, regions.Target] = {}
BinaryHeaders = Callable[[int], Headers]
"""The headers of an answer with raw tensors, from the length of its JSON in bytes."""


def v2_binary_headers(json_length: int) -> Headers:
    """As V2 says it [H15]."""
    return (_OCTETS, (b"Inference-Header-Content-Length", b"%d" % json_length))


class ReplyFormat(NamedTuple):
    """Which outputs of an answer are binary: those in ``listed`` as it says, all others as ``default`` [B06].

    ``all_binary`` is True when no output of this request can be anything else.
    """

    default: bool
    listed: Mapping[str, bool]
    all_binary: bool
    places: Mapping[str, regions.Target] = _NOWHERE
    """The outputs that go into shared memory instead, and where."""

    @classmethod
    def of(
        cls, default: bool, listed: Mapping[str, bool], places: Mapping[str, regions.Target] = _NOWHERE
    ) -> ReplyFormat:
        """A format with ``all_binary`` worked out. Once outputs are listed, no others are in the answer."""
        return cls(default, listed, not places and (all(listed.values()) if listed else default), places)

    def binary(self, name: str) -> bool:
        """Whether the output of that name goes out as raw bytes."""
        return self.listed.get(name, self.default)


class ReplyPrinter:
    """Prints answers; holds the remembered JSON parts. To be used by one thread.

    The first piece of an answer's body is its JSON; ``binary_headers`` says how long that is where tensors follow.
    """

    def __init__(self, binary_headers: BinaryHeaders = v2_binary_headers) -> None:
        self._binary_headers = binary_headers
        self._templates: dict[tuple[object, ...], tuple[Headers, bytes, Wire]] = {}

    def answer(self, name: str, version: str, form: InferForm, response: Response, reply: ReplyFormat) -> HttpAnswer:
        """The answer of the model ``name``. One that JSON cannot carry [H17] is Triton's error instead."""
        if not reply.all_binary or form.id or response.parameters:
            return self._print(name, version, form, response, reply)
        outputs = response.outputs
        if len(outputs) == 1:
            (output, datatype, data) = outputs[0]
            key: tuple[object, ...] = (name, version, output, datatype, data.shape)
        else:
            key = (name, version, *[(output, datatype, data.shape) for output, datatype, data in outputs])
        known = self._templates.get(key)
        if known is None:
            return self._learn(key, self._print(name, version, form, response, reply), outputs)
        headers, header, wire = known
        body: list[Buffer] = [header]
        for _, _, data in outputs:
            # Below some size a copy is cheaper than a view, and lets the transport join it to the rest.
            body.append(data.tobytes() if data.nbytes < _COPY_BELOW else _octets(data))
        return HttpAnswer(200, headers, body, wire)

    def _learn(self, key: tuple[object, ...], answer: HttpAnswer, outputs: list[Tensor]) -> HttpAnswer:
        # The size of a BYTES tensor is in the JSON but not in the key, and an empty tensor has no piece in the body.
        if len(answer.body) == len(outputs) + 1 and all(output.datatype != "BYTES" for output in outputs):
            if len(self._templates) >= _MAX_TEMPLATES:
                del self._templates[next(iter(self._templates))]
            self._templates[key] = (answer.headers, bytes(answer.body[0]), Wire())
        return answer

    def _print(self, name: str, version: str, form: InferForm, response: Response, reply: ReplyFormat) -> HttpAnswer:
        members = []
        if form.id:
            members.append(b'"id":' + json_print.quoted(form.id))
        members.append(b'"model_name":%b,"model_version":%b' % (json_print.quoted(name), json_print.quoted(version)))
        if response.parameters:
            members.append(b'"parameters":' + json_print.parameters(response.parameters))
        outputs: list[bytes] = []
        pieces: list[Buffer] = []
        for output in response.outputs:
            if output.name in reply.places:
                try:
                    regions.write(output.name, reply.places[output.name], serialized(output))
                except InternalError as error:
                    return encode_error(error, plain=True)
                outputs.append(_described(output))
            elif reply.binary(output.name):
                piece = serialized(output)
                outputs.append(_described(output, b'"parameters":{"binary_data_size":%d}' % len(piece)))
                if len(piece):
                    pieces.append(piece)
            elif output.datatype in ("FP16", "BF16"):
                return encode_error(
                    InvalidArgumentError(
                        f"sending {output.datatype} data via JSON is not supported. "
                        "Please use the binary data format for output"
                    ),
                    plain=True,
                )
            else:
                outputs.append(_described(output, b'"data":' + _values(output)))
        members.append(b'"outputs":[%b]' % b",".join(outputs))
        header = b"{%b}" % b",".join(members)
        if not pieces:
            return HttpAnswer(200, _JSON_HEADERS, [header])
        return HttpAnswer(200, self._binary_headers(len(header)), [header, *pieces])


def _described(output: Tensor, last: bytes = b"") -> bytes:
    shape = b",".join([b"%d" % dim for dim in output.data.shape])
    return b'{"name":%b,"datatype":%b,"shape":[%b]%b}' % (
        json_print.quoted(output.name),
        json_print.quoted(output.datatype),
        shape,
        last and b"," + last,
    )


def _values(output: Tensor) -> bytes:
    if output.datatype == "BYTES":
        return json_print.strings(elements(output.data))
    return json_print.numbers(output.data)


def elements(data: Array) -> list[bytes]:
    """The elements of a BYTES array of any shape, in row-major order."""
    return [item if isinstance(item, bytes) else json_print.raw(str(item)) for item in data.reshape(-1).tolist()]


def serialized(output: Tensor) -> bytes | memoryview:
    """A tensor's bytes on the wire [B01, B02], without a copy where its array lies in memory that way."""
    if output.datatype == "BYTES":
        return b"".join([_LENGTH.pack(len(item)) + item for item in elements(output.data)])
    return _octets(output.data)


def _octets(data: Array) -> memoryview:
    flat = np.ascontiguousarray(data).reshape(-1)
    return flat.view(np.uint8).data
