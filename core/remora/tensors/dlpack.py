"""DLPack exchange of tensors with other frameworks.

A DLPack capsule holds an address, its shape and its owner's destructor. The structures below are those of DLPack 0.x,
the version that every framework reads and writes unless a newer one is requested.

No tensor bytes are read or copied.
"""

from __future__ import annotations

import ctypes
from typing import Any, Final, NamedTuple

NAME: Final = b"dltensor"
_USED = b"used_dltensor"

TYPES: Final[dict[str, tuple[int, int]]] = {
    "INT8": (0, 8), "INT16": (0, 16), "INT32": (0, 32), "INT64": (0, 64),
    "UINT8": (1, 8), "UINT16": (1, 16), "UINT32": (1, 32), "UINT64": (1, 64),
    "FP16": (2, 16), "FP32": (2, 32), "FP64": (2, 64), "BF16": (4, 16), "BOOL": (6, 8),
}  # fmt: skip
"""The wire's datatypes as DLPack's code and bits."""

_DATATYPES = {pair: name for name, pair in TYPES.items()}


class DLPackError(ValueError):
    """Raised for memory that cannot be exchanged, with the reason."""


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


# Deleters are passed as plain addresses, because the structure that holds one is incomplete when it is declared.
_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_CAPSULE_DESTRUCTOR = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (("tensor", _DLTensor), ("manager", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


def _python_api(name: str, result: Any, *arguments: Any) -> Any:
    """Return a private prototype, because ``ctypes.pythonapi`` is shared by the whole process."""
    return ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))


_new_capsule = _python_api("PyCapsule_New", ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_is_capsule = _python_api("PyCapsule_IsValid", ctypes.c_int, ctypes.py_object, ctypes.c_char_p)
_pointer = _python_api("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
_rename = _python_api("PyCapsule_SetName", ctypes.c_int, ctypes.py_object, ctypes.c_char_p)
# A destructor gets an object with reference count zero: changing the count would free it twice.
_is_dying_capsule = _python_api("PyCapsule_IsValid", ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)
_dying_pointer = _python_api("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)

_exported: dict[int, tuple[object, ...]] = {}
"""The objects that keep exported memory alive, by managed tensor address, until a consumer calls the deleter."""


def _forget(address: int) -> None:
    _exported.pop(address, None)


def _destroy(capsule: int) -> None:
    if _is_dying_capsule(capsule, NAME):  # never consumed: a consumer renames the capsule
        _exported.pop(_dying_pointer(capsule, NAME), None)


_forget_in_c = _DELETER(_forget)
_destroy_in_c = _CAPSULE_DESTRUCTOR(_destroy)


class Memory(NamedTuple):
    """A contiguous tensor as DLPack describes it. ``owner`` keeps the memory alive.

    ``datatype`` is the wire's name, "" for a type that the wire does not have.
    """

    datatype: str
    shape: tuple[int, ...]
    device: tuple[int, int]
    address: int
    owner: object


def export(memory: Memory) -> object:
    """Return a capsule over memory, which one call of a framework's ``from_dlpack`` consumes."""
    managed = _DLManagedTensor()
    shape = (ctypes.c_int64 * max(len(memory.shape), 1))(*memory.shape)
    tensor = managed.tensor
    tensor.data = memory.address
    tensor.device = _Device(*memory.device)
    tensor.ndim = len(memory.shape)
    tensor.dtype = _DataType(*TYPES[memory.datatype], 1)
    tensor.shape = ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64))
    managed.deleter = ctypes.cast(_forget_in_c, ctypes.c_void_p).value
    address = ctypes.addressof(managed)
    _exported[address] = (managed, shape, memory.owner)
    return _new_capsule(address, NAME, ctypes.cast(_destroy_in_c, ctypes.c_void_p))


class Capsule:
    """An unconsumed capsule.

    Raises DLPackError if it is not a capsule, already consumed or not C-ordered.
    """

    def __init__(self, capsule: object) -> None:
        if not _is_capsule(capsule, NAME):
            raise DLPackError(  # the blanks are Triton's
                "Provided tensor is not supported. Tensor must be a DLPack capsule         or have `__dlpack__` and "
                "`__dlpack_device__` attributes; a capsule serves once"
            )
        self.capsule: Any = capsule
        self._managed = _DLManagedTensor.from_address(_pointer(capsule, NAME))
        tensor = self._managed.tensor
        self.device: tuple[int, int] = (tensor.device.type, tensor.device.id)
        self.shape: tuple[int, ...] = tuple(tensor.shape[: tensor.ndim])
        if tensor.strides and not _is_c_ordered(self.shape, tensor.strides[: tensor.ndim]):
            raise DLPackError(
                "DLPack tensor is not contiguous. Only contiguous DLPack tensors that are stored in C-Order are "
                "supported."
            )
        code = (tensor.dtype.code, tensor.dtype.bits)
        self.datatype: str = _DATATYPES.get(code, "") if tensor.dtype.lanes == 1 else ""

    def take(self) -> Memory:
        """Take ownership of the memory, which is released with the last reference to ``owner``."""
        tensor = self._managed.tensor
        loan = _Loan(self._managed)
        _rename(self.capsule, _USED)
        return Memory(self.datatype, self.shape, self.device, (tensor.data or 0) + tensor.byte_offset, loan)


def _is_c_ordered(shape: tuple[int, ...], strides: list[int]) -> bool:
    if 0 in shape:
        return True
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


class _Loan:
    """Owner of foreign memory. Calls the foreign deleter with its last reference."""

    def __init__(self, managed: _DLManagedTensor) -> None:
        self._address = ctypes.addressof(managed)
        self._deleter = managed.deleter

    def __del__(self) -> None:
        if self._deleter:
            _DELETER(self._deleter)(self._address)
