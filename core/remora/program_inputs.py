"""What programs hand in, as a request declares it; the law: values are cast only where that loses nothing."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from remora.errors import InvalidArgumentError
from remora.messages import DTYPES, Array, Data, InputSpec, datatype_of
from remora.model import ServedModel


def as_request(model: ServedModel, inputs: Mapping[str, npt.ArrayLike]) -> tuple[tuple[InputSpec, ...], list[Data]]:
    """Inputs of a program as a request declares them; datatypes follow the model where the cast is safe."""
    wanted = {row.name: row.datatype for row in model.signature.inputs}
    specs: list[InputSpec] = []
    data: list[Data] = []
    for name, values in inputs.items():
        array = _as_array(np.asarray(values), wanted.get(name, ""), name)
        datatype = wanted[name] if name in wanted and array.dtype == DTYPES[wanted[name]] else datatype_of(array)
        if not datatype:
            raise InvalidArgumentError(
                f"input '{name}' has dtype {array.dtype}, which no tensor of the protocol can hold"
            )
        specs.append(InputSpec(name, datatype, array.shape))
        data.append(np.ascontiguousarray(array).reshape(array.shape))
    return tuple(specs), data


def _as_array(array: Array, datatype: str, name: str) -> Array:
    if array.dtype.kind in "SU" or array.dtype == object:
        flat = [_as_bytes(value, name) for value in array.reshape(-1).tolist()]
        out = np.empty(len(flat), object)
        out[:] = flat
        return out.reshape(array.shape)
    dtype = DTYPES.get(datatype)
    if dtype is None or dtype.hasobject or array.dtype == dtype:
        return array
    if array.dtype.kind in "iu" and dtype.kind in "iu":
        cast = array.astype(dtype)
        return cast if (array == cast).all() else array
    return array.astype(dtype) if np.can_cast(array.dtype, dtype, "same_kind") else array


def _as_bytes(value: object, name: str) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    raise InvalidArgumentError(f"input '{name}' holds {type(value).__name__} objects: expected text or bytes")
