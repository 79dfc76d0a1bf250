"""Tensors of PyTorch out of arrays and back; the law: no copy on a CPU but where the memory is not the answer's own.

BYTES are lists of text, which is all that TorchScript has for them. BF16 travels as its bits.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from remora.backends.arrays import texts
from remora.config.datatypes import DATATYPE_BY_NAME
from remora.errors import InternalError
from remora.messages import DTYPES, Array
from remora.tensors.device import DeviceArray


def datatype_name(dtype: object) -> str:
    """The wire's name of a ``torch.dtype``, "" when it has none."""
    return DATATYPE_BY_NAME.get(str(dtype).removeprefix("torch."), "")


def to_value(torch: Any, name: str, datatype: str, array: Array) -> Any:
    """What a program takes for an array. It must not be written to: it may be the bytes of a request.

    Raises:
        InvalidArgumentError: an element of a BYTES input is not UTF-8.
    """
    if datatype == "BYTES":
        return texts(f"input '{name}'", array)
    if isinstance(array, DeviceArray):  # of its own: the law that nobody writes to it is the taker's to keep
        return torch.from_dlpack(array)
    if not array.flags.c_contiguous or not array.size:  # without elements it may still have strange strides
        array = array.copy()
    if datatype == "BF16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_array(
    torch: Any, name: str, datatype: str, value: Any, kept: Collection[int], *, cast: bool, stays: bool = False
) -> Array:
    """The array of a result, of the type that the configuration gives it; a `DeviceArray` where it ``stays``.

    Args:
        torch: the module.
        name: the output's, for errors.
        datatype: the wire's name of its type.
        value: a tensor, or a list of text for BYTES.
        kept: the addresses of memory that the program writes to again; tensors in there are copied.
        cast: convert another floating type to this one, as mixed precision needs it.

    Raises:
        InternalError: the result is of another type, with Triton's text.
    """
    if datatype == "BYTES":
        return _texts(name, value)
    if not isinstance(value, torch.Tensor):
        raise InternalError(f"output '{name}' is a {type(value).__name__}, not a tensor", from_model=True)
    found = datatype_name(value.dtype)
    if found != datatype and cast and value.is_floating_point() and datatype in ("FP16", "FP32", "FP64"):
        value, found = value.to(getattr(torch, f"float{datatype[2:]}")), datatype
    if found != datatype:
        raise InternalError(
            f"configuration unexpected datatype TYPE_{datatype} for output '{name}', model provides "
            f"{'TYPE_' + found if found else value.dtype}",
            from_model=True,
        )
    value = value.detach()
    if value.device.type != "cpu" and not stays:
        value = value.cpu()
    elif kept and value.numel() and value.untyped_storage().data_ptr() in kept:
        value = value.clone()
    value = value.contiguous().resolve_neg()
    if stays:
        return DeviceArray.of(value).as_array()
    if datatype == "BF16":
        bits: Array = value.view(torch.int16).numpy().view(DTYPES["BF16"])
        return bits
    array: Array = value.numpy()
    return array


def _texts(name: str, value: Any) -> Array:
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list | tuple) or not all(isinstance(text, str) for text in value):
        raise InternalError(f"output '{name}' is a {type(value).__name__}, not a list of strings", from_model=True)
    array = np.empty(len(value), object)
    array[:] = [text.encode() for text in value]
    return array
