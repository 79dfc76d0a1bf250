"""Inputs for a model out of what people type, keep in files or let be made up; the law: pure, and no value is bent.

A value that the model's datatype cannot hold is refused here; whether a shape fits is for the server to say. BF16 is
rounded from numbers to its 16 bits.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from remora.calls import ModelInfo, TensorInfo
from remora.errors import InvalidArgumentError
from remora.messages import DTYPES, Array, Parameter, Tensor

Shapes = Mapping[str, tuple[int, ...]]

MAX_RANDOM_BYTES = 1 << 30
"""How large one made-up input may be."""

_TRUTHS = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True, slots=True)
class InferRequest:
    """What is sent: inputs, the outputs wanted (none for all) and what a V2 request may say besides.

    ``classes`` > 0 asks for that many classes of each output instead of its values; ``outputs`` are then named.
    """

    inputs: tuple[Tensor, ...]
    outputs: tuple[str, ...] = ()
    classes: int = 0
    id: str = ""
    parameters: Mapping[str, Parameter] = field(default_factory=dict)


def random_inputs(tensors: Sequence[TensorInfo], shapes: Shapes) -> list[Tensor]:
    """Made-up values, the same at each call: floats from 0 to 1, and zeros and ones, which even an index may be.

    Dimensions that vary are 1 unless ``shapes`` names the input's shape.

    Raises InvalidArgumentError for more than MAX_RANDOM_BYTES.
    """
    source = np.random.default_rng(0)
    made = []
    for tensor in tensors:
        shape = shapes.get(tensor.name, tuple(1 if dim < 0 else dim for dim in tensor.shape))
        dtype = _dtype(tensor.name, tensor.datatype)
        if math.prod(shape) * dtype.itemsize > MAX_RANDOM_BYTES:
            raise InvalidArgumentError(f"input '{tensor.name}' of shape {list(shape)} is too large to be made up")
        if tensor.datatype == "BF16":
            values = _bfloat16(source.random(shape, np.float32))
        elif tensor.datatype == "BYTES":
            values = _objects([b"remora"] * math.prod(shape)).reshape(shape)
        elif dtype.kind == "f":
            values = np.asarray(source.random(shape)).astype(dtype)
        else:
            values = np.asarray(source.integers(0, 2, shape)).astype(dtype)
        made.append(Tensor(tensor.name, tensor.datatype, values))
    return made


def typed_inputs(info: ModelInfo, values: Mapping[str, str], shapes: Shapes) -> list[Tensor]:
    """Inputs from text such as ``"1,2,3"``; BYTES inputs take the text as one value, or a JSON array of strings.

    Without a shape of its own an input takes the model's, and a dimension that varies takes what the number of values
    leaves for it.

    Raises InvalidArgumentError for names, values and counts that do not fit.
    """
    made = []
    for name, text in values.items():
        tensor = find_input(info, name)
        words: Sequence[object]
        if tensor.datatype == "BYTES":
            words = _texts(text)
        else:
            words = [_word(tensor.datatype, word.strip()) for word in text.split(",")] if text else []
        array = as_typed(name, tensor.datatype, words)
        shape = shapes[name] if name in shapes else fitting_shape(tensor, len(words))
        made.append(Tensor(name, tensor.datatype, _reshaped(name, array, shape)))
    return made


def array_inputs(info: ModelInfo, arrays: Mapping[str, object], shapes: Shapes) -> list[Tensor]:
    """Inputs from arrays or nested lists, in the shape they have or the one in ``shapes``.

    Raises InvalidArgumentError for names and values that do not fit.
    """
    made = []
    for name, values in arrays.items():
        tensor = find_input(info, name)
        array = as_typed(name, tensor.datatype, values)
        made.append(Tensor(name, tensor.datatype, _reshaped(name, array, shapes.get(name, array.shape))))
    return made


def read_document(info: ModelInfo, document: object, shapes: Shapes) -> InferRequest:
    """The request in a JSON document: a V2 request, or an object of input names and values.

    Raises InvalidArgumentError for anything else, and for what does not fit the model.
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
            f"input '{tensor.name}' of the V2 request has the shape {shape}: expected whole numbers"
        )
    return Tensor(tensor.name, datatype, _reshaped(tensor.name, array, tuple(shape)))


def find_input(info: ModelInfo, name: str) -> TensorInfo:
    """The model's input of that name. Raises InvalidArgumentError with the nearest name when there is none."""
    for tensor in info.inputs:
        if tensor.name == name:
            return tensor
    names = [tensor.name for tensor in info.inputs]
    close = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean '{close[0]}'?" if close else f"its inputs are {', '.join(names) or 'none'}"
    raise InvalidArgumentError(f"model '{info.name}' has no input '{name}'; {hint}")


def fitting_shape(tensor: TensorInfo, count: int) -> tuple[int, ...]:
    """The model's shape with its last varying dimension chosen so that it holds ``count`` values, the others 1.

    Raises InvalidArgumentError when no choice does.
    """
    shape = [1 if dim < 0 else dim for dim in tensor.shape]
    varying = [place for place, dim in enumerate(tensor.shape) if dim < 0]
    known = math.prod(shape)
    if varying and known and count % known == 0:
        shape[varying[-1]] = count // known
    if math.prod(shape) != count:
        raise InvalidArgumentError(
            f"input '{tensor.name}' of shape {list(tensor.shape)} cannot hold {count} values; --shape gives it another"
        )
    return tuple(shape)


# -- values -----------------------------------------------------------------------------------------------------------


def as_typed(name: str, datatype: str, values: object) -> Array:
    """The values, an array or nested lists, in the dtype of ``datatype``; their shape stays.

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
    with np.errstate(over="ignore"):  # a number too big for a float is an infinity
        return np.array(checked, dtype).reshape(array.shape)


def _dtype(name: str, datatype: str) -> np.dtype[Any]:
    if datatype not in DTYPES:
        raise InvalidArgumentError(f"input '{name}' has the datatype '{datatype}'; expected one of {', '.join(DTYPES)}")
    return DTYPES[datatype]


def _nested(name: str, values: object) -> Array:
    try:
        array = np.asarray(values, dtype=object)  # object: whole numbers stay exact, whatever their size
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
    raise InvalidArgumentError(f"input '{name}' holds {item!r}, which is no {datatype}")


def _as_bytes(name: str, item: object) -> bytes:
    if isinstance(item, bytes):
        return item
    if isinstance(item, str):
        return item.encode("utf-8", "surrogateescape")
    raise InvalidArgumentError(f"input '{name}' holds {item!r}: expected text")


def _texts(text: str) -> list[str]:
    """The strings of a JSON array of strings; else the text itself, commas and all."""
    if text.startswith("["):
        with suppress(ValueError):
            found = json.loads(text)
            if all(isinstance(each, str) for each in found):
                return list(found)
    return [text]


def _word(datatype: str, word: str) -> object:
    """One value as it was typed; the checks of `as_typed` come after."""
    if datatype == "BOOL":
        return _TRUTHS.get(word.lower(), word)
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
    """The upper 16 bits of each float, rounded to the nearest, ties to even; NaN stays NaN."""
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
