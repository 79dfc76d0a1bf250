"""DLPack exchange for Python models, including bfloat16 and GPU memory.

bfloat16 travels as 16-bit integers. Memory on a device stays there, as a `DeviceArray`. No bytes are copied.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from remora.messages import Array
from remora.tensors import dlpack
from remora.tensors.device import CUDA, CUDA_HOST, HOST, DeviceArray, capsule_of
from remora.tensors.dlpack import Capsule, DLPackError


def export_bfloat16(bits: Array) -> object:
    """Return a capsule that marks C-ordered 16-bit integers as bfloat16."""
    return dlpack.export(dlpack.Memory("BF16", bits.shape, HOST, bits.ctypes.data, bits))


def import_tensor(source: object) -> tuple[str, Array | DeviceArray]:
    """Return (datatype, array over the same memory) for a capsule or object with ``__dlpack__``.

    The datatype is "" if the array's dtype determines it.

    Raises:
        DLPackError: not DLPack, already consumed, not C-ordered, on a device other than CUDA, or a type that numpy or
            the wire does not have.
    """
    found = Capsule(_capsule_of(source))
    if found.device[0] == CUDA:
        return found.datatype, DeviceArray.taken(found)
    if found.device[0] not in (HOST[0], CUDA_HOST):
        raise DLPackError(f"the tensor lies on DLPack device type {found.device[0]}: move it to the CPU first")
    if found.datatype == "BF16":
        return "BF16", _bits(found.take())
    try:
        return "", np.from_dlpack(_SingleUse(found.capsule))
    except (BufferError, RuntimeError) as error:
        raise DLPackError(f"numpy cannot take the DLPack tensor: {error}") from error


def _capsule_of(source: object) -> object:
    export = getattr(source, "__dlpack__", None)
    if export is None:
        return source
    device_of = getattr(source, "__dlpack_device__", None)
    device = device_of()[0] if device_of is not None else HOST[0]
    if device == CUDA:
        return capsule_of(source)
    if device in (HOST[0], CUDA_HOST):
        return export()
    try:
        return export(dl_device=HOST, copy=True)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise DLPackError(f"the tensor lies on DLPack device type {int(device)}: move it to the CPU first") from error


class _SingleUse:
    """Wrapper of a bare capsule for ``numpy.from_dlpack``."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: object) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return HOST


def _bits(memory: dlpack.Memory) -> Array:
    count = int(np.prod(memory.shape, dtype=np.int64))
    if not count:
        return np.empty(memory.shape, np.uint16)
    buffer: Any = (ctypes.c_uint16 * count).from_address(memory.address)
    buffer.loan = memory.owner  # the array keeps the buffer, and so its owner, alive
    return np.frombuffer(buffer, np.uint16).reshape(memory.shape)
