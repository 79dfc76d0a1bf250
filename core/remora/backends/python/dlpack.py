"""DLPack for what numpy cannot carry: bfloat16 in and out of 16-bit integers; the law: no bytes are copied.

A DLPack capsule names memory, its shape and its owner's destructor. The structures below are those of DLPack 0.x, the
version every framework reads and writes when it is not asked for a newer one.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from remora.messages import Array

CPU = (1, 0)
"""DLPack's (device type, device id) of main memory."""

_CUDA_HOST = 3
_BFLOAT = 4
_NAME = b"dltensor"
_USED = b"used_dltensor"


class DLPackError(ValueError):
    """Memory that cannot be exchanged, and why."""


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


# Deleters come and are called as plain addresses: the structure that holds one is not complete when it is declared.
_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_CAPSULE_DESTRUCTOR = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (("tensor", _DLTensor), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


def _python_api(name: str, result: Any, *arguments: Any) -> Any:
    """A private prototype: ``ctypes.pythonapi`` is shared with everybody else in the process."""
    return ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))


_new_capsule = _python_api("PyCapsule_New", ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_is_capsule = _python_api("PyCapsule_IsValid", ctypes.c_int, ctypes.py_object, ctypes.c_char_p)
_pointer = _python_api("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
_rename = _python_api("PyCapsule_SetName", ctypes.c_int, ctypes.py_object, ctypes.c_char_p)
# A destructor sees an object that is dying already: touching its reference count would free it twice.
_is_dying_capsule = _python_api("PyCapsule_IsValid", ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)
_dying_pointer = _python_api("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)

_exported: dict[int, tuple[object, ...]] = {}
"""What keeps exported memory alive, by the address of its managed tensor, until a consumer calls the deleter."""


def _forget(address: int) -> None:
    _exported.pop(address, None)


def _destroy(capsule: int) -> None:
    if _is_dying_capsule(capsule, _NAME):  # nobody took it: a taken capsule has another name
        _exported.pop(_dying_pointer(capsule, _NAME), None)


_forget_in_c = _DELETER(_forget)
_destroy_in_c = _CAPSULE_DESTRUCTOR(_destroy)


def export_bfloat16(bits: Array) -> object:
    """A capsule over the memory of C-ordered 16-bit integers that says it holds bfloat16."""
    managed = _DLManagedTensor()
    shape = (ctypes.c_int64 * max(bits.ndim, 1))(*bits.shape)
    tensor = managed.tensor
    tensor.data = bits.ctypes.data
    tensor.device = _Device(*CPU)
    tensor.ndim = bits.ndim
    tensor.dtype = _DataType(_BFLOAT, 16, 1)
    tensor.shape = ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64))
    managed.deleter = ctypes.cast(_forget_in_c, ctypes.c_void_p).value
    address = ctypes.addressof(managed)
    _exported[address] = (managed, shape, bits)
    return _new_capsule(address, _NAME, ctypes.cast(_destroy_in_c, ctypes.c_void_p))


def import_tensor(source: object) -> tuple[str, Array]:
    """A capsule, or an object with ``__dlpack__``, as ("BF16" or "", an array over the same memory).

    Raises:
        DLPackError: not DLPack, taken already, not C-ordered, not in main memory, or a type numpy does not have.
    """
    capsule = _capsule_of(source)
    if not _is_capsule(capsule, _NAME):
        raise DLPackError("this is no DLPack capsule, or one that somebody has taken already; a capsule serves once")
    managed = _DLManagedTensor.from_address(_pointer(capsule, _NAME))
    tensor = managed.tensor
    if tensor.device.type not in (CPU[0], _CUDA_HOST):
        raise DLPackError(f"the tensor lies on DLPack device type {tensor.device.type}: move it to the CPU first")
    shape = tuple(tensor.shape[: tensor.ndim])
    if tensor.strides and not _is_c_ordered(shape, tensor.strides[: tensor.ndim]):
        raise DLPackError(
            "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored in C-Order are supported."
        )
    if (tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes) == (_BFLOAT, 16, 1):
        return "BF16", _take_bits(capsule, managed, shape)
    try:
        return "", np.from_dlpack(_Once(capsule))
    except (BufferError, RuntimeError) as error:
        raise DLPackError(f"numpy cannot take the DLPack tensor: {error}") from error


def _capsule_of(source: object) -> object:
    export = getattr(source, "__dlpack__", None)
    if export is None:
        return source
    device_of = getattr(source, "__dlpack_device__", None)
    device = device_of()[0] if device_of is not None else CPU[0]
    if device in (CPU[0], _CUDA_HOST):
        return export()
    try:
        return export(dl_device=CPU, copy=True)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise DLPackError(f"the tensor lies on DLPack device type {int(device)}: move it to the CPU first") from error


def _is_c_ordered(shape: tuple[int, ...], strides: list[int]) -> bool:
    if 0 in shape:
        return True
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


class _Once:
    """A bare capsule in the shape that numpy wants it in."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: object) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU


class _Loan:
    """Foreign memory on loan; it goes back when the last array over it is gone."""

    def __init__(self, managed: _DLManagedTensor) -> None:
        self._address = ctypes.addressof(managed)
        self._deleter = managed.deleter

    def __del__(self) -> None:
        if self._deleter:
            _DELETER(self._deleter)(self._address)


def _take_bits(capsule: object, managed: _DLManagedTensor, shape: tuple[int, ...]) -> Array:
    tensor = managed.tensor
    count = int(np.prod(shape, dtype=np.int64))
    loan = _Loan(managed)
    _rename(capsule, _USED)
    if not count:
        return np.empty(shape, np.uint16)
    buffer: Any = (ctypes.c_uint16 * count).from_address(tensor.data + tensor.byte_offset)
    buffer.loan = loan  # the array keeps the buffer, and so the loan
    return np.frombuffer(buffer, np.uint16).reshape(shape)
