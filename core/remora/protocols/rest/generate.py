"""Codec of the generate extension, with flat JSON objects or events.

The model alone decides what a member of the request is [X09]: a member with an input's name holds that input's values,
``parameters`` is an object of more members, and all others are request parameters. The answer holds the outputs beside
the model's name and version, keys in alphabetical order. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from remora.calls import TensorInfo
from remora.errors import InvalidArgumentError, MalformedError, RemoraError, given_twice
from remora.messages import Array, Data, InferForm, InputSpec, Parameter, Response, Tensor
from remora.protocols.json import access
from remora.protocols.json import printer as json_print
from remora.protocols.json import tensors as json_tensors
from remora.protocols.json.long_lists import release
from remora.protocols.json.reader import LONG_BYTES, Members, has_more_members, parse_members
from remora.protocols.rest.answer import Refusal
from remora.protocols.rest.request import RequestLimits, as_parameter, check_values
from remora.protocols.rest.response import elements
from remora.tensors.float_text import number

EVENTS = b"text/event-stream; charset=utf-8"
"""Content type of a stream of events."""

NOT_ONE_RESPONSE = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various "
    "number of responses"
)
"""Error text when the model gives no response or several to a generate request; sent with HTTP 200 [X10]."""

MODEL_FAILED = 400
"""HTTP status if the first response is an error, whatever its code [X11]."""

_NESTED = "parameters"
_WORDS: frozenset[str] = frozenset(("FP16", "BF16"))


def check_encoding(encoding: bytes) -> None:
    """Raise Refusal (400) for a compressed body, which Triton does not accept here [H26]."""
    if encoding not in (b"", b"identity"):
        raise Refusal(400, "Unsupported content-encoding, only 'identity' is supported.", plain=False)


def decode_generate(
    body: bytes | bytearray | memoryview, inputs: Sequence[TensorInfo], limits: RequestLimits
) -> tuple[InferForm, list[Data]]:
    """Return the form and the tensors of the request in ``body``.

    The tensors are in the order of the form's inputs: numbers as flat arrays in the dtype of the model's input, text as
    lists of bytes. Requests that differ only in values share one form. Raises MalformedError and InvalidArgumentError
    with Triton's texts [X09], and SlowTextError (see `RequestLimits`).
    """
    check_values(memoryview(body), limits)
    request = _document(bytes(body), limits.slow_bytes)
    try:
        return _decoded(request, inputs, limits)
    finally:
        if len(body) > LONG_BYTES:
            release(request)


def _decoded(request: Any, inputs: Sequence[TensorInfo], limits: RequestLimits) -> tuple[InferForm, list[Data]]:
    has_id, request_id = access.find(request, "id")
    if has_id:
        access.as_text(request_id, "id")
    if not isinstance(request, dict):
        raise MalformedError(access.NOT_OBJECT)
    reading = _Reading({row.name: row for row in inputs}, request_id or "", limits)
    for key, value in _members(request):
        if key == _NESTED:
            reading.nested(value)
        else:
            reading.member(key, value)
    specs = tuple(reading.specs)
    if not reading.id and not reading.parameters:
        return _plain_form(specs), reading.data
    return InferForm(specs, id=reading.id, parameters=reading.parameters), reading.data


def _document(text: bytes, slow_bytes: int | None) -> Any:
    """Parse the request, with objects as Members if one of them repeats a name.

    The repetition is kept because an input that occurs twice is refused.
    """
    request = access.document(text, slow_bytes=slow_bytes)
    if isinstance(request, dict):
        nested = request.get(_NESTED)
        if has_more_members(text, len(request) + (len(nested) if isinstance(nested, dict) else 0)):
            return access.document(text, parse_members, slow_bytes)
    return request


def _members(members: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    """Return the members of an object in order.

    A repeated name has its first value each time.
    """
    if isinstance(members, Members):
        return [(name, members[name]) for name in members.names]
    return members.items()


@lru_cache(maxsize=512)
def _plain_form(specs: tuple[InputSpec, ...]) -> InferForm:
    # The engine caches its checks by the form object, so sharing it skips them.
    return InferForm(specs)


class _Reading:
    """Sorter of a request's members into tensors and parameters, in order."""

    __slots__ = ("_limits", "_rows", "data", "id", "parameters", "specs")

    def __init__(self, rows: Mapping[str, TensorInfo], request_id: str, limits: RequestLimits) -> None:
        self._rows = rows
        self._limits = limits
        self.id = request_id
        self.specs: list[InputSpec] = []
        self.data: list[Data] = []
        self.parameters: dict[str, Parameter] = {}

    def nested(self, value: Any) -> None:
        """Read the members of ``parameters``. Their errors begin with the keyword."""
        if _NESTED in self._rows:
            raise InvalidArgumentError(f"Keyword '{_NESTED}' for nested schema also given as input tensor name")
        if not isinstance(value, dict):
            raise MalformedError(
                f"Expected JSON object for keyword: '{_NESTED}': attempt to access JSON non-object as object"
            )
        for key, inner in _members(value):
            try:
                self.member(key, inner)
            except RemoraError as error:
                raise type(error)(f"Converting keyword: '{_NESTED}': {error.message}") from None

    def member(self, key: str, value: Any) -> None:
        """Read a member as values if the model has such an input, else as a parameter."""
        row = self._rows.get(key)
        if row is None:
            # Only here names that begin with "triton_" are accepted [X09].
            self.parameters[key] = as_parameter(key, value)
            return
        data, shape = _tensor(row, value if isinstance(value, list) else [value], self._limits)
        if any(spec.name == key for spec in self.specs):
            raise given_twice(self.id, key)
        self.specs.append(InputSpec(key, row.datatype, shape))
        self.data.append(data)


def _tensor(row: TensorInfo, values: list[Any], limits: RequestLimits) -> tuple[Data, tuple[int, ...]]:
    """Return an input's values and their shape.

    Text is checked before the shape, numbers after it, as in Triton.
    """
    data: Data
    if row.datatype == "BYTES":
        data = json_tensors.strings(row.name, values, limits.json_depth, limits.input_bytes)
        return data, _shape(row, len(values))
    shape = _shape(row, len(values))
    data = json_tensors.array(row.name, row.datatype, values, len(values), limits.json_depth, limits.input_bytes)
    return data, shape


def _shape(row: TensorInfo, count: int) -> tuple[int, ...]:
    """Return the model's shape for ``count`` values.

    The last variable dim gets the values that the fixed dims leave, other variable dims get 1. ``count`` is the length
    of the outermost list, whatever the nesting.
    """
    left = count
    for dim in row.shape:
        if dim != -1:
            left, rest = divmod(left, dim) if dim else (0, left)
            if rest:
                raise _misfit(row)
    shape = list(row.shape)
    for index in reversed(range(len(shape))):
        if shape[index] == -1:
            shape[index], left = left, 1
    if left != 1:
        raise _misfit(row)
    return tuple(shape)


def _misfit(row: TensorInfo) -> InvalidArgumentError:
    return InvalidArgumentError(f"The schema can not convert input '{row.name}' to tensor with proper shape")


# -- answers --------------------------------------------------------------------------------------------------------


def encode_generate(name: str, version: str, form: InferForm, response: Response) -> list[bytes]:
    """Return one response of the model ``name`` as JSON, in pieces [X09].

    ``id`` (if the request had one), the model's name and version, response parameters and outputs share one object; of
    equal names the first in this order wins. An output of one element is that element, any other a flat list. Raises
    InvalidArgumentError for outputs that JSON cannot carry [H17].
    """
    members = {"id": [json_print.quoted(form.id)]} if form.id else {}
    members["model_name"] = [json_print.quoted(name)]
    members["model_version"] = [json_print.quoted(version)]
    for key, value in response.parameters.items():
        members.setdefault(key, [json_print.parameter(value)])
    for output in response.outputs:
        if output.name not in members:
            members[output.name] = _values(output)
    text: list[bytes] = []
    for member, pieces in sorted((json_print.raw(key), pieces) for key, pieces in members.items()):
        text += (b"," if text else b"{", json_print.quoted(member), b":", *pieces)
    return [*text, b"}"]


def _values(output: Tensor) -> list[bytes]:
    if output.datatype in _WORDS:
        raise InvalidArgumentError(
            f"sending {output.datatype} data via JSON is not supported. Please use the binary data format for output"
        )
    data: Array = output.data
    is_text = output.datatype == "BYTES"
    pieces = json_print.string_pieces(elements(data)) if is_text else json_print.number_pieces(data)
    return [pieces[0][1:-1]] if data.size == 1 else pieces


def error_object(message: str) -> bytes:
    """Return ``{"error": message}``, as a body or in an event."""
    return b'{"error":%b}' % json_print.quoted(message)


def event(payload: bytes) -> bytes:
    """Return one server-sent event.

    ``payload`` is JSON in one line, as everything here prints it.
    """
    return b"data: %b\n\n" % payload


REQUEST_HEADER = b"endpoint-load-metrics-format"
RESPONSE_HEADER = b"endpoint-load-metrics"

_GAUGE = r"(?m)^nv_trt_llm_kv_cache_block_metrics\{[^}\n]*?kv_cache_block_type=\"(used|max|tokens_per)\"[^}\n]*\} (\S+)"


def load_report(notation: bytes, metrics: str) -> bytes | None:
    """Return the value of the load header computed from Prometheus text.

    None for another notation, or if a gauge is missing or negative.
    """
    gauges = {kind: float(value) for kind, value in re.findall(_GAUGE, metrics)}
    used, most, tokens = (gauges.get(kind, -1.0) for kind in ("used", "max", "tokens_per"))
    if not all(0.0 <= value < 2.0**63 for value in (used, most, tokens)):  # refuses NaN too
        return None
    utilization = used / most if most > 0 else 0.0
    capacity = min(int(most * tokens), 2**64 - 1)
    if notation == b"text":
        return (
            f"TEXT named_metrics.kv_cache_utilization={utilization:.6f}, named_metrics.max_token_capacity={capacity}"
        ).encode()
    if notation == b"json":
        return b'JSON {"named_metrics":{"kv_cache_utilization":%b,"max_token_capacity":%d}}' % (
            number(utilization),
            capacity,
        )
    return None
