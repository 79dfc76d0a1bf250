"""Codec of the predict protocol of TensorFlow Serving, KServe V1 and Vertex AI.

A list of instances becomes a list of as many predictions. Invariant: prediction i belongs to instance i, however the
server batched them. An instance is the value of the only input, or an object with a value for each input; ``{"inputs":
{...}}`` has whole columns instead. Instances beyond one model batch are split into several requests. Values keep their
kind: they are never rounded, wrapped or truncated.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson

from remora.calls import TensorInfo
from remora.errors import InternalError, InvalidArgumentError
from remora.messages import DTYPES, Array, Buffer, Data, InferForm, InputSpec, Response, Tensor
from remora.protocols.json.long_lists import release
from remora.protocols.json.printer import dumps
from remora.protocols.json.reader import LONG_BYTES, MAX_DEPTH, loads
from remora.protocols.json.tensors import flatten, out_of_range
from remora.protocols.rest.plain_words import check_shape, check_type, shown
from remora.protocols.rest.request import RequestLimits, check_values

_ONE_BY_ONE = 1
_MAX_ROWS = 1 << 20
_MAX_RANK = 32
"""Dimensions that an array has at most in every release of numpy."""
_STEP = 65_536
"""Values that one call converts, because it keeps other threads waiting."""
_MAX_PARTS = 1 << 16
"""Largest number of requests made of one body, because making them blocks the server's event loop."""
_KINDS: Mapping[str, set[type]] = {"b": {bool}, "i": {int}, "u": {int}, "f": {int, float}}
"""JSON types by kind of array."""


class Rows(NamedTuple):
    """Batching rule for the instances of a model.

    ``most`` is the largest number in one request, 0 for any; ``stacked`` is True if they are stacked along a first
    dimension.
    """

    most: int
    stacked: bool

    @classmethod
    def of(cls, inputs: Sequence[TensorInfo], max_batch_size: int) -> Rows:
        """Return the rule for a model's inputs.

        Inputs of a batching model are stacked, and so are inputs of variable length.
        """
        if max_batch_size > 0:
            return cls(max_batch_size, True)
        varying = bool(inputs) and all(row.shape and row.shape[0] < 0 for row in inputs)
        return cls(0, True) if varying else cls(_ONE_BY_ONE, False)


class Part(NamedTuple):
    """V2 request for some of the instances, with their number."""

    form: InferForm
    data: list[Data]
    instances: int


def decode_predict(
    body: Buffer, inputs: Sequence[TensorInfo], optional: frozenset[str], rows: Rows, limit: int = 64 << 20
) -> list[Part]:
    """Return the requests for a body, in the order of its instances.

    Raises InvalidArgumentError for a body in another format, and for values that do not fit. The model checks shapes.
    """
    if len(body) > limit:
        raise InvalidArgumentError(f"the request is {len(body)} bytes long, {limit} are accepted")
    check_values(memoryview(body), RequestLimits(limit))
    message = _message(body)
    try:
        return _parts(message, inputs, optional, rows)
    finally:
        if len(body) > LONG_BYTES:
            release(message)


def _parts(message: Any, inputs: Sequence[TensorInfo], optional: frozenset[str], rows: Rows) -> list[Part]:
    content = _instances(message)
    if isinstance(content, Mapping):
        return cut(_columns(content, inputs, optional), rows)
    if not content:
        raise InvalidArgumentError("'instances' is empty: send at least one")
    if len(content) > _MAX_ROWS:
        raise InvalidArgumentError(f"there are {len(content)} instances, {_MAX_ROWS} are accepted in one request")
    if not rows.stacked:
        check_parts(len(content))
        return [Part(*request_of(_single(one, inputs, optional)), 1) for one in content]
    return cut(_stacked(content, inputs, optional), rows)


def encode_predict(responses: Sequence[Response], counts: Sequence[int], rows: Rows) -> bytes:
    """Return ``{"predictions": [...]}`` for the answers to the parts.

    BYTES are printed as text, or as ``{"b64": ...}`` if they are not UTF-8. Raises InternalError if an output does not
    have one row per instance, because a client would match them wrongly.
    """
    if sum(output.data.nbytes for response in responses for output in response.outputs) <= LONG_BYTES:
        answer: list[Any] = []
        for response, count in zip(responses, counts, strict=True):
            answer.extend(_predictions(response, count, rows))
        return orjson.dumps({"predictions": answer}, option=orjson.OPT_SERIALIZE_NUMPY)
    parts: list[bytes] = []
    for response, count in zip(responses, counts, strict=True):
        predictions = _predictions(response, count, rows)
        parts.append(dumps(predictions)[1:-1])
        release(predictions)
    return b'{"predictions":[%b]}' % b",".join(parts)


def _predictions(response: Response, count: int, rows: Rows) -> Sequence[Any]:
    """Return a prediction for each instance as orjson prints it."""
    outputs = [(output.name, rows_of(output, count, rows)) for output in response.outputs]
    if len(outputs) == 1:
        return outputs[0][1]
    return [{name: values[index] for name, values in outputs} for index in range(count)]


def _message(body: Buffer) -> Any:
    try:
        return loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidArgumentError(f"Unrecognized request format: {error}") from error


def _instances(message: Any) -> list[Any] | Mapping[str, Any]:
    if not isinstance(message, dict):
        raise InvalidArgumentError("expected a JSON object with 'instances' or 'inputs'")
    values = message.get("inputs", message.get("instances"))
    if isinstance(values, dict) and "inputs" in message:
        return values
    if not isinstance(values, list):
        raise InvalidArgumentError('Expected "instances" to be a list')
    return values


def _names(values: Mapping[str, Any], inputs: Sequence[TensorInfo], optional: frozenset[str]) -> list[TensorInfo]:
    names = {row.name for row in inputs}
    unknown = sorted(str(name) for name in values if name not in names)
    missing = sorted(row.name for row in inputs if row.name not in values and row.name not in optional)
    if unknown or missing:
        what = f"unknown {', '.join(unknown[:5])}" if unknown else f"missing {', '.join(missing[:5])}"
        raise InvalidArgumentError(f"an instance's inputs do not fit: {what}; the model has {', '.join(sorted(names))}")
    return [row for row in inputs if row.name in values]


def _is_named(instance: Any, inputs: Sequence[TensorInfo]) -> bool:
    """Return True if an instance names its inputs.

    ``{"b64": ...}`` is a value, unless the model has an input of that name.
    """
    return isinstance(instance, dict) and (set(instance) != {"b64"} or any(row.name == "b64" for row in inputs))


def _stacked(
    instances: list[Any], inputs: Sequence[TensorInfo], optional: frozenset[str]
) -> list[tuple[TensorInfo, Array]]:
    if _is_named(instances[0], inputs):
        rows = _names(instances[0], inputs, optional)
        wanted = {row.name for row in rows}
        if not all(isinstance(one, dict) and set(one) == wanted for one in instances):
            raise InvalidArgumentError("all instances of a request must name the same inputs")
        return [(row, array_of([one[row.name] for one in instances], row)) for row in rows]
    return [(_only(inputs), array_of(instances, _only(inputs)))]


def _single(instance: Any, inputs: Sequence[TensorInfo], optional: frozenset[str]) -> list[tuple[TensorInfo, Array]]:
    if _is_named(instance, inputs):
        return [(row, array_of(instance[row.name], row)) for row in _names(instance, inputs, optional)]
    return [(_only(inputs), array_of(instance, _only(inputs)))]


def _columns(
    columns: Mapping[str, Any], inputs: Sequence[TensorInfo], optional: frozenset[str]
) -> list[tuple[TensorInfo, Array]]:
    return [(row, array_of(columns[row.name], row)) for row in _names(columns, inputs, optional)]


def _only(inputs: Sequence[TensorInfo]) -> TensorInfo:
    if len(inputs) != 1:
        names = ", ".join(row.name for row in inputs)
        raise InvalidArgumentError(f"the model has inputs {names}: an instance is an object with a value for each")
    return inputs[0]


def cut(tensors: list[tuple[TensorInfo, Array]], rows: Rows) -> list[Part]:
    """Split tensors into requests with at most the model's number of rows."""
    counts = {array.shape[0] if array.ndim else 0 for _, array in tensors}
    if len(counts) != 1 or counts == {0}:
        raise InvalidArgumentError("the inputs have different numbers of instances, or none")
    (count,) = counts
    if not rows.stacked:
        return [Part(*request_of(tensors), 1)]
    step = rows.most or count
    check_parts(-(-count // step))
    return [
        Part(*request_of([(row, array[start : start + step]) for row, array in tensors]), min(step, count - start))
        for start in range(0, count, step)
    ]


def check_parts(count: int) -> None:
    if count > _MAX_PARTS:
        raise InvalidArgumentError(
            f"the instances make {count} requests to the model, at most {_MAX_PARTS} are accepted: "
            "send fewer, or give the model a greater max_batch_size"
        )


def request_of(tensors: list[tuple[TensorInfo, Array]]) -> tuple[InferForm, list[Data]]:
    """Return the V2 request with these inputs.

    Raises InvalidArgumentError for a shape that the model does not take.
    """
    for row, array in tensors:
        check_shape(row, array.shape)
    specs = tuple(InputSpec(row.name, row.datatype, array.shape) for row, array in tensors)
    return InferForm(specs), [np.ascontiguousarray(array).reshape(array.shape) for _, array in tensors]


def array_of(values: Any, row: TensorInfo) -> Array:
    """Return JSON values as an array of the input's datatype.

    Raises InvalidArgumentError if the conversion would change them.
    """
    if row.datatype == "BYTES":
        return _bytes_array(values, row)
    dtype = np.dtype("<f4") if row.datatype == "BF16" else DTYPES[row.datatype]
    # Checked before numpy makes an array, which would give each text the room of the longest.
    flat, kinds = flatten(values if isinstance(values, list) else [values], MAX_DEPTH)
    check_type(row, flat, kinds, _KINDS[dtype.kind])
    if len(flat) > _STEP:
        shape = _shape_of(values, row)
        if len(shape) > _MAX_RANK:
            raise _ragged(row)
        cast = _long_array(flat, kinds, dtype, row).reshape(shape)
        release(flat)
        return (cast.view("<u4") >> 16).astype("<u2") if row.datatype == "BF16" else cast
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError) as error:
        raise _ragged(row) from error
    if array.size == 0:
        return array.astype(DTYPES[row.datatype])
    if dtype.kind in "iu":
        return _integers(values, array, dtype, row)
    cast = _floats(array, dtype, row)
    return (cast.view("<u4") >> 16).astype("<u2") if row.datatype == "BF16" else cast


def _shape_of(values: list[Any], row: TensorInfo) -> list[int]:
    """Return the shape of nested lists.

    Raises InvalidArgumentError if they are not rectangular.
    """
    shape: list[int] = []
    level = [values]
    while True:
        size = len(level[0])
        if not all(type(one) is list and len(one) == size for one in level):
            break
        shape.append(size)
        if not size or type(level[0][0]) is not list:
            if any(type(one) is list for rows in level for one in rows):
                break
            return shape
        level = [one for rows in level for one in rows]
    raise _ragged(row)


def _ragged(row: TensorInfo) -> InvalidArgumentError:
    return InvalidArgumentError(f"the values of input '{row.name}' are not rectangular: rows differ in length")


def _long_array(flat: list[Any], kinds: set[type], dtype: np.dtype[Any], row: TensorInfo) -> Array:
    """Return many values as a flat array.

    Other threads may run between the steps.
    """
    array = np.empty(len(flat), dtype)
    for at in range(0, len(flat), _STEP):
        part = flat[at : at + _STEP]
        if dtype.kind in "iu":
            array[at : at + _STEP] = _integers(part, np.asarray(part), dtype, row)
        else:
            array[at : at + _STEP] = _floats(np.array(part, np.float64 if float in kinds else None), dtype, row)
    return array


def _floats(array: Array, dtype: np.dtype[Any], row: TensorInfo) -> Array:
    """Return numbers in a float type.

    Raises InvalidArgumentError for a finite number that would become infinite.
    """
    with np.errstate(over="ignore"):
        cast = array.astype(dtype)
    if dtype.kind == "f":
        misfits = np.isinf(cast) & np.isfinite(array)
        if misfits.any():
            raise out_of_range(row.name, array[misfits][0], row.datatype)
    return cast


def _integers(values: Any, array: Array, dtype: np.dtype[Any], row: TensorInfo) -> Array:
    """Return integers unchanged.

    numpy would make floats of integers beyond 63 bits beside others.
    """
    if array.dtype.kind not in "iu":
        array = np.asarray(values, object)
    limits = np.iinfo(dtype)
    if array.min() < limits.min or array.max() > limits.max:
        raise out_of_range(row.name, array[(array < limits.min) | (array > limits.max)][0], row.datatype)
    return array.astype(dtype)


def _bytes_array(values: Any, row: TensorInfo) -> Array:
    shape: list[int] = []
    level = values
    while isinstance(level, list):
        shape.append(len(level))
        level = level[0] if level else None
    flat = [values]
    for size in shape:
        if not all(isinstance(one, list) and len(one) == size for one in flat):
            raise _ragged(row)
        flat = [value for one in flat for value in one]
    array = np.empty(len(flat), object)
    for at in range(0, len(flat), _STEP):
        array[at : at + _STEP] = [_octets(value, row) for value in flat[at : at + _STEP]]
    try:
        return array.reshape(shape)
    except ValueError as error:
        raise InvalidArgumentError(f"the values of input '{row.name}' nest too deep: {error}") from error


def _octets(value: Any, row: TensorInfo) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, dict) and set(value) == {"b64"} and isinstance(value["b64"], str):
        try:
            return base64.b64decode(value["b64"], validate=True)
        except ValueError as error:  # binascii.Error, or the error for text beyond ASCII
            raise InvalidArgumentError(f"a b64 value of input '{row.name}' is not base64: {error}") from error
    raise InvalidArgumentError(f"the values of input '{row.name}' must be text or {{\"b64\": ...}}, got {shown(value)}")


def rows_of(output: Tensor, count: int, rows: Rows) -> Sequence[Any]:
    """Return the rows of an output as orjson prints them.

    Raises InternalError for another number of rows.
    """
    data = output.data
    if not rows.stacked:
        return [_printable(output.datatype, data)]
    if data.ndim == 0 or data.shape[0] != count:
        raise InternalError(
            f"output '{output.name}' has shape {list(data.shape)} for {count} instances: predictions cannot be matched "
            "with instances. Ask for this model through V2",
            from_model=True,
        )
    values: Sequence[Any] = _printable(output.datatype, data)
    return values


def _printable(datatype: str, data: Array) -> Any:
    """Return values that orjson can print."""
    if datatype == "BYTES":
        return _texts(data.tolist())
    if datatype == "BF16":
        return (data.astype("<u4") << 16).view("<f4").astype("<f8")
    # As doubles the values are exact for readers without other float types.
    return np.ascontiguousarray(data, "<f8" if data.dtype.kind == "f" else None)


def _texts(values: Any) -> Any:
    if isinstance(values, list):
        return [_texts(value) for value in values]
    try:
        return values.decode() if isinstance(values, bytes) else str(values)
    except UnicodeDecodeError:
        return {"b64": base64.b64encode(values).decode()}
