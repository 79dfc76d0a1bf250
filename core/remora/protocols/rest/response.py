"""Printer of V2 inference answers, with Triton's keys in Triton's order [H15, B07].

JSON tensors are flat. Binary tensors follow the JSON in the order of the outputs, little-endian and row-major. The JSON
of an all-binary answer depends on names, types and shapes alone, so it is printed once and cached.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from remora.errors import InternalError, InvalidArgumentError
from remora.messages import Array, Buffer, InferForm, Response, Tensor
from remora.protocols.json import printer as json_print
from remora.protocols.rest.answer import JSON, Headers, HttpAnswer, Wire, encode_error, new_answer
from remora.tensors import shared_memory as regions
from remora.tensors.elements import array_steps, packed

_OCTETS = (b"Content-Type", b"application/octet-stream")
_JSON_HEADERS: Headers = (JSON,)
_COPY_BELOW = 16 * 1024
_MAX_TEMPLATES = 1024
_LONG_JSON = 1 << 20
"""Bytes of JSON beyond which its pieces are sent without being joined, because a copy keeps other threads waiting."""

_NOWHERE: Mapping[str, regions.Target] = {}
BinaryHeaders = Callable[[int], Headers]
"""Makes the headers of an answer with raw tensors from the length of its JSON in bytes."""


def v2_binary_headers(json_length: int) -> Headers:
    """Return V2's headers of an answer with raw tensors [H15]."""
    return (_OCTETS, (b"Inference-Header-Content-Length", b"%d" % json_length))


class ReplyFormat(NamedTuple):
    """Choice of binary or JSON for each output of an answer [B06].

    ``listed`` decides for the outputs it names, ``default`` for all others. ``all_binary`` is True if every output of
    this request must be binary.
    """

    default: bool
    listed: Mapping[str, bool]
    all_binary: bool
    places: Mapping[str, regions.Target] = _NOWHERE
    """Outputs that are written to shared memory instead, and where."""

    @classmethod
    def of(
        cls, default: bool, listed: Mapping[str, bool], places: Mapping[str, regions.Target] = _NOWHERE
    ) -> ReplyFormat:
        """Return a format with ``all_binary`` computed.

        Once outputs are listed, no others are in the answer.
        """
        return cls(default, listed, not places and (all(listed.values()) if listed else default), places)

    def binary(self, name: str) -> bool:
        """Return True if the output of that name is sent as raw bytes."""
        return self.listed.get(name, self.default)


class ReplyPrinter:
    """Printer of answers with a cache of their JSON parts, for one thread.

    The first piece of an answer's body is its JSON; ``binary_headers`` gives the JSON's length if tensors follow.
    """

    def __init__(self, binary_headers: BinaryHeaders = v2_binary_headers) -> None:
        self._binary_headers = binary_headers
        self._templates: dict[tuple[object, ...], tuple[Headers, bytes, Wire]] = {}

    def answer(self, name: str, version: str, form: InferForm, response: Response, reply: ReplyFormat) -> HttpAnswer:
        """Return the answer of a version of the model ``name`` to the request ``form`` [H15, B07].

        Never raises for a response of the model: outputs that JSON cannot carry become Triton's error [H17].
        """
        if not reply.all_binary or form.id or response.parameters:
            return self._print(name, version, form, response, reply)
        outputs = response.outputs
        if len(outputs) == 1:
            (output, datatype, data) = outputs[0]
            key: tuple[object, ...] = (name, version, output, datatype, data.shape)
            template = self._templates.get(key)
            if template is not None and data.nbytes < _COPY_BELOW:  # the usual case
                return new_answer((200, template[0], [template[1], data.tobytes()], template[2]))
        else:
            key = (name, version, *[(output, datatype, data.shape) for output, datatype, data in outputs])
        template = self._templates.get(key)
        if template is None:
            return self._learn(key, self._print(name, version, form, response, reply), outputs)
        headers, header, wire = template
        body: list[Buffer] = [header]
        for _, _, data in outputs:
            # A small copy is cheaper than a view, and lets the transport join it with the rest.
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
        text: list[bytes] = [b"{", b",".join(members), b',"outputs":[']
        pieces: list[Buffer] = []
        for index, output in enumerate(response.outputs):
            if index:
                text.append(b",")
            if output.name in reply.places:
                try:
                    regions.write(output.name, reply.places[output.name], serialized(output))
                except InternalError as error:
                    return encode_error(error, plain=True)
                text += _described(output)
            elif reply.binary(output.name):
                piece = serialized(output)
                text += _described(output, [b'"parameters":{"binary_data_size":%d}' % len(piece)])
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
                text += _described(output, [b'"data":', *_values(output)])
        text.append(b"]}")
        if not pieces and sum(map(len, text)) > _LONG_JSON:
            return HttpAnswer(200, _JSON_HEADERS, list(text))
        header = b"".join(text)
        if not pieces:
            return HttpAnswer(200, _JSON_HEADERS, [header])
        return HttpAnswer(200, self._binary_headers(len(header)), [header, *pieces])


def _described(output: Tensor, last: Sequence[bytes] = ()) -> list[bytes]:
    shape = b",".join([b"%d" % dim for dim in output.data.shape])
    head = b'{"name":%b,"datatype":%b,"shape":[%b]' % (
        json_print.quoted(output.name),
        json_print.quoted(output.datatype),
        shape,
    )
    return [head, b",", *last, b"}"] if last else [head, b"}"]


def _values(output: Tensor) -> list[bytes]:
    if output.datatype == "BYTES":
        return json_print.string_pieces(elements(output.data))
    return json_print.number_pieces(output.data)


def elements(data: Array) -> list[bytes]:
    """Return the elements of a BYTES array of any shape, in row-major order."""
    return _as_bytes(data.reshape(-1).tolist())


def _as_bytes(values: list[Any]) -> list[bytes]:
    return [item if isinstance(item, bytes) else json_print.raw(str(item)) for item in values]


def serialized(output: Tensor) -> bytes | memoryview:
    """Return a tensor's bytes on the wire [B01, B02].

    Copies only an array that is not in row-major order in memory.
    """
    if output.datatype == "BYTES":
        return packed(map(_as_bytes, array_steps(output.data)))
    return _octets(output.data)


def _octets(data: Array) -> memoryview:
    flat = np.ascontiguousarray(data).reshape(-1)
    return flat.view(np.uint8).data
