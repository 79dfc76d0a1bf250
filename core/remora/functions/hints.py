"""Type hints as tensors: datatype, shape and conversion in both directions.

Without batching, a hint describes one request. With batching, it describes the whole batch: the first dimension of an
array, or the list, has one row for each item.

| Hint | Tensor of one row |
|---|---|
| ``int``, ``float``, ``bool`` | INT64, FP64, BOOL of shape [1] |
| ``str``, ``bytes`` | BYTES of shape [1] |
| ``Array[np.float32, 28, 28]``, ``Annotated[NDArray[np.float32], 28, 28]`` | FP32 of shape [28, 28] |
| ``NDArray[np.float32]``, ``list[float]`` | one dimension of any length |
| ``PIL.Image.Image`` | BYTES of shape [1] with an encoded image |
| ``dict``, a dataclass, a pydantic model, ``Any`` or no hint | BYTES of shape [1] with JSON |
"""

from __future__ import annotations

import dataclasses
import io
import types
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin

import numpy as np
import numpy.typing as npt

from remora.functions.errors import BadRequestError, HintError
from remora.functions.images import ImageError, decode_image
from remora.functions.json_values import json_text, reader_of

NDArray = npt.NDArray[Any]

DATATYPES: Mapping[str, str] = {
    "bool": "BOOL",
    **{f"uint{bits}": f"UINT{bits}" for bits in (8, 16, 32, 64)},
    **{f"int{bits}": f"INT{bits}" for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"FP{bits}" for bits in (16, 32, 64)},
}
"""V2 datatypes by numpy's name of the dtype."""

_SCALARS: Mapping[type, str] = {bool: "bool", int: "int64", float: "float64"}
ANY = -1
"""A dimension of any length."""


class ArraySpec(NamedTuple):
    """Dtype and shape in an annotation."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class Array:
    """Annotation of an array with its dtype and shape; -1 is a dimension of any length.

    ``Array[np.float32, 28, 28]`` equals ``Annotated[NDArray[np.float32], 28, 28]``, which type checkers understand.
    """

    def __class_getitem__(cls, parameters: Any) -> Any:
        dtype, *shape = parameters if isinstance(parameters, tuple) else (parameters,)
        return Annotated[np.ndarray, ArraySpec(np.dtype(dtype), _checked_shape(shape, dtype))]


def _checked_shape(shape: Any, dtype: Any) -> tuple[int, ...]:
    wrong = [size for size in shape if type(size) is not int or size < ANY]
    if wrong:
        raise HintError(f"Array[{dtype}, ...]: {wrong[0]!r} is not a dimension; expected sizes, or -1 for any length")
    return tuple(shape)


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """Conversion between one Python value and one tensor.

    Attributes:
        datatype: V2 datatype.
        dims: the shape of one row, without the batch dimension.
        decode: converts the tensor to the function's argument. BYTES tensors are object arrays of bytes. Raises
            BadRequestError.
        encode: converts the function's result to the tensor. Raises TypeError or ValueError.
        is_json: the tensor holds JSON documents.
    """

    datatype: str
    dims: tuple[int, ...]
    decode: Callable[[NDArray], Any]
    encode: Callable[[Any], NDArray]
    is_json: bool = False


def kind_of(hint: Any, *, batched: bool = False) -> Kind:
    """Return the tensor of a hint. Raises HintError for hints that no tensor can hold."""
    optional, hint = hint, _without_none(hint)
    spec = _array_spec(hint, rank=2 if batched else 1)
    if spec is not None:
        return _batched_array(spec) if batched else _array(spec.dtype, spec.shape)
    if batched:
        return _batched(hint)
    if get_origin(hint) is list or hint is list:
        nested = _nested_scalar(hint)
        return _list(*nested) if nested else _json(optional)
    kind = _single(hint)
    return _json(optional) if kind.is_json else kind  # a JSON document may be null


def row_hint(hint: Any, *, batched: bool) -> Any:
    """Return the hint of one row: with batching, that of an item of a list."""
    hint = _without_none(hint)
    if batched and (get_origin(hint) is list or hint in (list, Any)):
        return (get_args(hint) or (Any,))[0]
    return hint


def _without_none(hint: Any) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        rest = [each for each in get_args(hint) if each is not type(None)]
        if len(rest) == 1:
            return rest[0]
    return hint


def _array_spec(hint: Any, rank: int) -> ArraySpec | None:
    """Return dtype and shape of an array hint, or None for other hints."""
    metadata: tuple[Any, ...] = ()
    if get_origin(hint) is Annotated:
        hint, *rest = get_args(hint)
        metadata = tuple(rest)
    spec = next((each for each in metadata if isinstance(each, ArraySpec)), None)
    if spec is not None:
        return spec if spec.shape else ArraySpec(spec.dtype, (ANY,) * rank)
    if hint is np.ndarray:
        dtype: Any = np.float32
    elif get_origin(hint) is np.ndarray:
        (dtype,) = get_args(get_args(hint)[1]) or (Any,)
    else:
        return None
    if not (isinstance(dtype, type) and np.dtype(dtype).name in DATATYPES):
        raise HintError(
            f"an array of {dtype} has no datatype of the protocol; expected one of {', '.join(DATATYPES)}, such as "
            "Array[np.float32, 28, 28]"
        )
    shape = _checked_shape([each for each in metadata if isinstance(each, int)], np.dtype(dtype).name)
    return ArraySpec(np.dtype(dtype), shape or (ANY,) * rank)


# -- one request ----------------------------------------------------------------------------------------------------


def _array(dtype: np.dtype[Any], shape: tuple[int, ...]) -> Kind:
    if dtype.name not in DATATYPES:
        raise HintError(f"dtype {dtype} has no datatype of the protocol; expected one of {', '.join(DATATYPES)}")

    def encode(value: Any) -> NDArray:
        return _cast(value, dtype, len(shape))

    return Kind(DATATYPES[dtype.name], shape, lambda array: array, encode)


def _cast(value: Any, dtype: np.dtype[Any], rank: int) -> NDArray:
    array = np.asarray(value)
    if array.ndim != rank:
        raise ValueError(f"expected {rank} dimensions, got an array of shape {list(array.shape)}")
    if array.dtype == dtype:
        return array
    if not (array.size == 0 or np.can_cast(array.dtype, dtype, "same_kind")):
        raise TypeError(f"expected {dtype}, got {array.dtype}")
    return array.astype(dtype)


def _single(hint: Any) -> Kind:
    """Return the kind of a hint whose tensor has shape [1]."""
    if hint in _SCALARS:
        dtype = np.dtype(_SCALARS[hint])
        return Kind(DATATYPES[dtype.name], (1,), lambda array: array.item(), lambda value: _cast([value], dtype, 1))
    to_python, from_python, is_json = _element(hint)
    return Kind(
        "BYTES",
        (1,),
        lambda array: to_python(array.item()),
        lambda value: _objects([from_python(value)], (1,)),
        is_json,
    )


def _list(scalar: Any, rank: int) -> Kind:
    shape = (ANY,) * rank
    if scalar in _SCALARS:
        dtype = np.dtype(_SCALARS[scalar])
        return Kind(DATATYPES[dtype.name], shape, lambda array: array.tolist(), lambda value: _cast(value, dtype, rank))
    to_python, from_python, _ = _element(scalar)

    def decode(array: NDArray) -> Any:
        return _mapped(array, to_python).tolist()

    def encode(value: Any) -> NDArray:
        array = np.asarray(value, object)
        if array.ndim != rank:
            raise ValueError(f"expected a list of {rank} dimensions, got {array.ndim}")
        return _mapped(array, from_python)

    return Kind("BYTES", shape, decode, encode)


def _json(hint: Any) -> Kind:
    read = reader_of(hint)
    return Kind("BYTES", (1,), lambda array: read(array.item()), lambda value: _objects([json_text(value)], (1,)), True)


def _nested_scalar(hint: Any) -> tuple[Any, int] | None:
    """Return the scalar type and the rank of nested lists, or None for lists of other things."""
    rank = 0
    while get_origin(hint) is list:
        (hint,) = get_args(hint)
        rank += 1
    return (hint, rank) if hint in _SCALARS or hint in (str, bytes) else None


# -- a batch --------------------------------------------------------------------------------------------------------


def _batched_array(spec: ArraySpec) -> Kind:
    """Return the kind of an array whose first dimension is the batch."""
    rank, dtype = len(spec.shape), spec.dtype
    if rank > 1:
        return dataclasses.replace(_array(dtype, spec.shape), dims=spec.shape[1:])
    single = _array(dtype, spec.shape)
    return Kind(  # one number for each row: a tensor of shape [1] there
        single.datatype, (1,), lambda array: array.reshape(-1), lambda value: single.encode(value).reshape(-1, 1)
    )


def _batched(hint: Any) -> Kind:
    """Return the kind of a list with one item for each row."""
    if get_origin(hint) is not list and hint is not list:
        raise HintError(
            f"{_name(hint)} is not a batch: with batch=, annotate what the function takes, such as "
            f"list[{_name(hint)}], or Array[np.float32, -1, 3] for rows of three numbers"
        )
    (item,) = get_args(hint) or (Any,)
    if item in _SCALARS:
        dtype = np.dtype(_SCALARS[item])
        return Kind(
            DATATYPES[dtype.name],
            (1,),
            lambda array: array.reshape(-1).tolist(),
            lambda value: _cast(value, dtype, 1).reshape(-1, 1),
        )
    nested = _nested_scalar(item) if get_origin(item) is list else None
    if nested:
        kind = _list(nested[0], nested[1] + 1)
        return dataclasses.replace(kind, dims=kind.dims[1:])
    to_python, from_python, is_json = _element(item)
    return Kind(
        "BYTES",
        (1,),
        lambda array: [to_python(each) for each in array.reshape(-1)],
        lambda value: _objects([from_python(each) for each in value], (-1, 1)),
        is_json,
    )


# -- BYTES elements -------------------------------------------------------------------------------------------------

_Element = tuple[Callable[[bytes], Any], Callable[[Any], bytes], bool]


def _element(hint: Any) -> _Element:
    """Return the conversions of one BYTES element, and whether it is JSON."""
    if hint is str:
        return _text, _utf8, False
    if hint is bytes:
        return bytes, _as_bytes, False
    if is_image(hint):
        return open_image, _png, False
    return reader_of(hint), json_text, True


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise BadRequestError(f"the text is not UTF-8: byte {error.start} is {data[error.start]:#04x}") from None


def _utf8(value: Any) -> bytes:
    if not isinstance(value, str):
        raise TypeError(f"expected str, got {type(value).__name__}")
    return value.encode()


def _as_bytes(value: Any) -> bytes:
    if not isinstance(value, bytes | bytearray | memoryview):
        raise TypeError(f"expected bytes, got {type(value).__name__}")
    return bytes(value)


def is_image(hint: Any) -> bool:
    return isinstance(hint, type) and hint.__module__.partition(".")[0] == "PIL" and hint.__name__ == "Image"


def open_image(data: bytes) -> Any:
    """Return an encoded image as a loaded image of Pillow. Raises BadRequestError."""
    try:
        return decode_image(io.BytesIO(data), _loaded)
    except ImageError as error:
        raise BadRequestError(f"the image cannot be read: {error}") from None


def _loaded(image: Any) -> Any:
    image.load()
    return image


def _png(value: Any) -> bytes:
    file = io.BytesIO()
    value.save(file, "PNG")
    return file.getvalue()


def _mapped(array: NDArray, function: Callable[[Any], Any]) -> NDArray:
    return _objects([function(each) for each in array.reshape(-1)], array.shape)


def _objects(values: list[Any], shape: tuple[int, ...]) -> NDArray:
    array = np.empty(len(values), object)
    array[:] = values
    return array.reshape(shape if array.size or ANY not in shape else (0, *shape[1:]))


def _name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and get_origin(hint) is None else str(hint)
