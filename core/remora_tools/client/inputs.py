"""Input tensors of `remora infer` from text, files or generated values.

The functions are pure and refuse a value that the model's datatype cannot hold; the server checks shapes. Numbers are
rounded to the 16 bits of BF16.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from remora.api.models import NOT_DESCRIBED, Argument, FunctionArguments
from remora.calls import ModelInfo, TensorInfo
from remora.errors import InvalidArgumentError
from remora.messages import DTYPES, Array, Parameter, Tensor
from remora.system.json_text import read_json

Shapes = Mapping[str, tuple[int, ...]]

MAX_RANDOM_BYTES = 1 << 30
"""Size limit of a generated input."""

_BOOLEAN_WORDS = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True, slots=True)
class InferRequest:
    """Contents of a V2 request.

    No ``outputs`` means all. ``classes`` > 0 requests that many classes of each output instead of its values and
    requires named ``outputs``.
    """

    inputs: tuple[Tensor, ...]
    outputs: tuple[str, ...] = ()
    classes: int = 0
    id: str = ""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)


def random_inputs(
    tensors: Sequence[TensorInfo], shapes: Shapes, arguments: FunctionArguments = NOT_DESCRIBED
) -> list[Tensor]:
    """Return generated inputs, the same at each call.

    Floats are between 0 and 1, all other numbers 0 or 1 because those are also valid indices. A variable dimension is 1
    unless ``shapes`` has the input. Elements with JSON or an image are the examples of ``arguments``.

    Raises InvalidArgumentError for more than MAX_RANDOM_BYTES, and for JSON of which no example is known.
    """
    source = np.random.default_rng(0)
    inputs = []
    for tensor in tensors:
        shape = shapes.get(tensor.name, tuple(1 if dim < 0 else dim for dim in tensor.shape))
        dtype = _dtype(tensor.name, tensor.datatype)
        if math.prod(shape) * dtype.itemsize > MAX_RANDOM_BYTES:
            raise InvalidArgumentError(f"input '{tensor.name}' of shape {list(shape)} is too large to generate")
        if tensor.datatype == "BF16":
            values = _bfloat16(source.random(shape, np.float32))
        elif tensor.datatype == "BYTES":
            element, argument = arguments.element(tensor.name), arguments.inputs.get(tensor.name, Argument())
            if element is None and argument.default:
                continue  # the function has a value for it
            if element is None:
                hint = f" ({argument.hint})" if argument.hint else ""
                raise InvalidArgumentError(
                    f"input '{tensor.name}' takes JSON documents{hint}, of which no example can be made: "
                    f'give --json FILE with {{"{tensor.name}": [...]}}'
                )
            values = _objects([element] * math.prod(shape)).reshape(shape)
        elif dtype.kind == "f":
            values = np.asarray(source.random(shape)).astype(dtype)
        else:
            values = np.asarray(source.integers(0, 2, shape)).astype(dtype)
        inputs.append(Tensor(tensor.name, tensor.datatype, values))
    return inputs


def typed_inputs(info: ModelInfo, values: Mapping[str, str], shapes: Shapes) -> list[Tensor]:
    """Return inputs from text such as ``"1,2,3"``, or a JSON array for BYTES inputs.

    An input without an entry in ``shapes`` takes the model's shape, with its last variable dimension computed from the
    number of values.

    Raises InvalidArgumentError for unknown names and for values and counts that do not fit.
    """
    inputs = []
    for name, text in values.items():
        tensor = find_input(info, name)
        words: Sequence[object]
        if tensor.datatype == "BYTES":
            words = _texts(text)
        else:
            words = [_word(tensor.datatype, word.strip()) for word in text.split(",")] if text else []
        array = as_typed(name, tensor.datatype, words)
        shape = shapes[name] if name in shapes else fitting_shape(tensor, len(words))
        inputs.append(Tensor(name, tensor.datatype, _reshaped(name, array, shape)))
    return inputs


def array_inputs(info: ModelInfo, arrays: Mapping[str, object], shapes: Shapes) -> list[Tensor]:
    """Return inputs from arrays or nested lists, reshaped where ``shapes`` has an entry.

    Raises InvalidArgumentError for unknown names and values that do not fit.
    """
    inputs = []
    for name, values in arrays.items():
        tensor = find_input(info, name)
        array = as_typed(name, tensor.datatype, values)
        inputs.append(Tensor(name, tensor.datatype, _reshaped(name, array, shapes.get(name, array.shape))))
    return inputs


def read_document(info: ModelInfo, document: object, shapes: Shapes) -> InferRequest:
    """Parse a JSON document that is a V2 request or maps input names to values.

    Raises InvalidArgumentError for any other document, and for values that do not fit the model.
    """
    if not isinstance(document, dict):
        raise InvalidArgumentError('the JSON must be a V2 request or an object {"NAME": VALUES, ...}')
    rows = document.get("inputs")
    if not (isinstance(rows, list) and all(isinstance(row, dict) and "name" in row for row in rows)):
        return InferRequest(tuple(array_inputs(info, document, shapes)))
    inputs = tuple(_document_input(info, row, shapes) for row in rows)
    outputs, parameters = document.get("outputs") or [], document.get("parameters") or {}
    if not isinstance(outputs, list) or not all(isinstance(row, dict) and "name" in row for row in outputs):
        raise InvalidArgumentError("'outputs' of the V2 request must be a list of objects with a 'name'")
    if not isinstance(parameters, dict):
        raise InvalidArgumentError("'parameters' of the V2 request must be an object")
    names = tuple(str(row["name"]) for row in outputs)
    return InferRequest(inputs, names, id=str(document.get("id", "")), parameters=parameters)


def _document_input(info: ModelInfo, row: dict[str, Any], shapes: Shapes) -> Tensor:
    tensor = find_input(info, str(row["name"]))
    datatype = str(row.get("datatype", tensor.datatype))
    if "data" not in row:
        raise InvalidArgumentError(f"input '{tensor.name}' of the V2 request has no 'data'")
    array = as_typed(tensor.name, datatype, row["data"])
    shape = shapes[tensor.name] if tensor.name in shapes else row.get("shape", array.shape)
    if not isinstance(shape, list | tuple) or not all(isinstance(dim, int) and dim >= 0 for dim in shape):
        raise InvalidArgumentError(
            f"input '{tensor.name}' of the V2 request has the shape {shape}: expected non-negative integers"
        )
    return Tensor(tensor.name, datatype, _reshaped(tensor.name, array, tuple(shape)))


def find_input(info: ModelInfo, name: str) -> TensorInfo:
    """Return the model's input of that name.

    Raises InvalidArgumentError with the nearest name if it is missing.
    """
    for tensor in info.inputs:
        if tensor.name == name:
            return tensor
    names = [tensor.name for tensor in info.inputs]
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean '{close[0]}'?" if close else f"its inputs are {', '.join(names) or 'none'}"
    raise InvalidArgumentError(f"model '{info.name}' has no input '{name}'; {hint}")


def fitting_shape(tensor: TensorInfo, count: int) -> tuple[int, ...]:
    """Return the model's shape for ``count`` values.

    The last variable dimension is computed, the others are 1. Raises InvalidArgumentError if no shape fits.
    """
    shape = [1 if dim < 0 else dim for dim in tensor.shape]
    varying = [place for place, dim in enumerate(tensor.shape) if dim < 0]
    known = math.prod(shape)
    if varying and known and count % known == 0:
        shape[varying[-1]] = count // known
    if math.prod(shape) != count:
        raise InvalidArgumentError(
            f"input '{tensor.name}' of shape {list(tensor.shape)} cannot hold {count} values; pass another with --shape"
        )
    return tuple(shape)


# -- values -----------------------------------------------------------------------------------------------------------


def as_typed(name: str, datatype: str, values: object) -> Array:
    """Return an array or nested lists in the dtype of ``datatype`` and in the same shape.

    Raises InvalidArgumentError for ragged lists and for values that the datatype cannot hold.
    """
    dtype = _dtype(name, datatype)
    if isinstance(values, np.ndarray) and values.dtype == dtype and datatype not in ("BYTES", "BF16"):
        return values
    array: Array = values if isinstance(values, np.ndarray) else _nested(name, values)
    if datatype == "BYTES":
        return _objects([_as_bytes(name, item) for item in array.reshape(-1).tolist()]).reshape(array.shape)
    if array.dtype.kind in "iu" and dtype.kind in "iu":
        cast = array.astype(dtype)
        if not (cast == array).all():
            raise InvalidArgumentError(f"input '{name}' holds values beyond {datatype}")
        return cast
    if array.dtype.kind in "fiu" and dtype.kind == "f":
        return _floats(array, dtype)
    if datatype == "BF16" and array.dtype.kind in "fiu":
        return _bfloat16(_floats(array, np.dtype("<f4")))
    checked = [_checked(name, datatype, dtype, item) for item in array.reshape(-1).tolist()]
    if datatype == "BF16":
        return _bfloat16(np.array(checked, "<f4")).reshape(array.shape)
    with np.errstate(over="ignore"):  # an overflow becomes infinity
        return np.array(checked, dtype).reshape(array.shape)


def _dtype(name: str, datatype: str) -> np.dtype[Any]:
    if datatype not in DTYPES:
        raise InvalidArgumentError(f"input '{name}' has the datatype '{datatype}'; expected one of {', '.join(DTYPES)}")
    return DTYPES[datatype]


def _nested(name: str, values: object) -> Array:
    try:
        array = np.asarray(values, dtype=object)  # object keeps large integers exact
    except ValueError as error:
        raise InvalidArgumentError(f"the values of input '{name}' are ragged: rows must be equally long") from error
    if any(isinstance(item, list | tuple) for item in array.reshape(-1).tolist()):
        raise InvalidArgumentError(f"the values of input '{name}' are ragged: rows must be equally long")
    return array


def _checked(name: str, datatype: str, dtype: np.dtype[Any], item: object) -> bool | int | float:
    if datatype == "BOOL":
        if isinstance(item, bool) or item in (0, 1):
            return bool(item)
    elif isinstance(item, int | float):
        if dtype.kind == "f" or datatype == "BF16":
            return item
        limits = np.iinfo(dtype)
        if (isinstance(item, int) or item.is_integer()) and limits.min <= item <= limits.max:
            return int(item)
    raise InvalidArgumentError(f"input '{name}' holds {item!r}, which is not a valid {datatype}")


def _as_bytes(name: str, item: object) -> bytes:
    if isinstance(item, bytes):
        return item
    if isinstance(item, str):
        return item.encode("utf-8", "surrogateescape")
    raise InvalidArgumentError(f"input '{name}' holds {item!r}: expected text")


def _texts(text: str) -> list[str]:
    """Return the strings of a JSON array of strings, or else the whole text as one string."""
    if text.startswith("["):
        with suppress(ValueError):
            found = read_json(text)
            if all(isinstance(each, str) for each in found):
                return list(found)
    return [text]


def _word(datatype: str, word: str) -> object:
    """Convert one typed value, which `as_typed` checks later."""
    if datatype == "BOOL":
        return _BOOLEAN_WORDS.get(word.lower(), word)
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def _floats(array: Array, dtype: np.dtype[Any]) -> Array:
    with np.errstate(over="ignore"):
        return array.astype(dtype)


def _bfloat16(values: npt.NDArray[np.float32]) -> Array:
    """Return the upper 16 bits of each float, rounded to nearest even, with NaN kept."""
    bits = np.ascontiguousarray(values).reshape(-1).view("<u4").astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    nan = np.isnan(values).reshape(-1)
    return np.where(nan, 0x7FC0, rounded).astype("<u2").reshape(values.shape)


def _objects(items: list[bytes]) -> Array:
    array = np.empty(len(items), object)
    array[:] = items
    return array


def _reshaped(name: str, array: Array, shape: tuple[int, ...]) -> Array:
    if array.size != math.prod(shape):
        raise InvalidArgumentError(f"input '{name}' has {array.size} values, which shape {list(shape)} cannot hold")
    return array.reshape(shape)
