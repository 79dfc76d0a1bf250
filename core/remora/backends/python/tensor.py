"""Tensors as Python models see them, sharing memory where possible [Y06].

Arrays are copied in three cases only: an array with gaps or foreign byte order when a tensor is made of it; a read-only
input when a model accesses it, because models may write into their inputs; and an output whose memory the model still
references (``detached``).
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np

from remora.backends.python import dlpack
from remora.backends.python.arguments import text
from remora.messages import Array, datatype_of
from remora.messages import Tensor as Message
from remora.tensors.device import HOST, DeviceArray
from remora.tensors.dlpack import DLPackError

DATATYPES = (
    "INVALID", "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64",
    "FP16", "FP32", "FP64", "BYTES", "BF16",
)  # fmt: skip
"""Datatypes of the wire at their numbers in ``triton_dtype()`` and in the model configuration."""


class TritonModelException(Exception):  # noqa: N818 - Triton's name, which models catch by
    """Exception by which a model or this API fails all requests of an execution [Y04]."""

    def message(self) -> str:
        """Return the text."""
        return str(self)


class Tensor:
    """A named array.

    Args:
        name: the input's or output's name.
        numpy_array: any array with a Triton datatype; text, bytes and objects are BYTES.

    Raises:
        TypeError: the name is not text, or the value is not an array.
        TritonModelException: the array has a type that Triton does not support (complex numbers, dates, records).
    """

    __slots__ = ("_array", "_datatype", "_name")

    def __init__(self, name: str | bytes, numpy_array: Array) -> None:
        name = text(name, "Tensor: the name")
        if not isinstance(numpy_array, np.ndarray):
            raise TypeError(
                f"Tensor '{name}': expected a numpy array, got {type(numpy_array).__name__}; wrap it in "
                "numpy.array(...), or use Tensor.from_dlpack for a framework's tensor"
            )
        self._datatype = datatype_of(numpy_array)
        if not self._datatype:
            raise TritonModelException(
                f"NumPy dtype is not supported. Tensor '{name}' has {numpy_array.dtype}: convert the array first"
            )
        if not name:
            raise TritonModelException("Tensor name cannot be an empty string.")
        self._name = name
        self._array = _plain(numpy_array)

    @classmethod
    def received(cls, name: str, datatype: str, array: Array) -> Tensor:
        """Return a tensor over a C-ordered array of ``datatype``, without checks or copies."""
        tensor = cls.__new__(cls)
        tensor._name = name
        tensor._datatype = datatype
        tensor._array = array
        return tensor

    def name(self) -> str:
        """Return the input's or output's name."""
        return self._name

    def as_numpy(self) -> Array:
        """Return the values, writable. BYTES are an object array of ``bytes``.

        Raises:
            TritonModelException: the datatype is BF16, which numpy does not have, or the values lie on a GPU.
        """
        if isinstance(self._array, DeviceArray):
            raise TritonModelException(
                "Tensor is stored in GPU and cannot be converted to NumPy. Use to_dlpack() and a framework on the GPU."
            )
        if self._datatype == "BF16":
            raise TritonModelException(
                "Tensor dtype is BF16 and cannot be converted to NumPy. Use to_dlpack() and from_dlpack() instead."
            )
        if not self._array.flags.writeable:
            self._array = self._array.copy()
        return self._array

    def triton_dtype(self) -> int:
        """Return the datatype's number in the configuration, 1 (TYPE_BOOL) to 14 (TYPE_BF16)."""
        return DATATYPES.index(self._datatype)

    def shape(self) -> list[int]:
        """Return the shape, including the batch dimension if there is one."""
        return list(self._array.shape)

    def is_cpu(self) -> bool:
        """Return True if the values lie in main memory.

        Inputs always do, unless FORCE_CPU_ONLY_INPUT_TENSORS is "no".
        """
        return not isinstance(self._array, DeviceArray)

    @staticmethod
    def from_dlpack(name: str | bytes, tensor: object) -> Tensor:
        """Return a tensor over the memory of a DLPack capsule or of an object with ``__dlpack__``.

        Raises:
            TypeError: the name is not text.
            TritonModelException: the memory is not C-ordered, lies on another device, or has an unsupported type.
        """
        name = text(name, "Tensor: the name")
        try:
            datatype, array = dlpack.import_tensor(tensor)
        except DLPackError as error:
            raise TritonModelException(str(error)) from None
        if isinstance(array, DeviceArray):
            return Tensor.received(name, datatype, array.as_array())
        return Tensor.received(name, datatype, array) if datatype else Tensor(name, array)

    def to_dlpack(self) -> Any:
        """Return a capsule over the same memory for any framework's ``from_dlpack``, usable once."""
        return self.__dlpack__()

    def __dlpack__(
        self,
        *,
        stream: object = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        if self._datatype == "BYTES":
            raise TritonModelException("DLPack does not have support for string tensors.")
        if isinstance(self._array, DeviceArray):
            self._array = self._array.apart().as_array()  # because models may write to it
            return self._array.__dlpack__(stream=stream)
        if dl_device is not None and tuple(dl_device) != HOST:
            raise BufferError(f"Tensor '{self._name}' lies in main memory and does not move to device {dl_device}")
        if copy or not self._array.flags.writeable:
            copied = self._array.copy()
            if not copy:
                self._array = copied
        else:
            copied = self._array
        return dlpack.export_bfloat16(copied) if self._datatype == "BF16" else copied.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.device if isinstance(self._array, DeviceArray) else HOST

    def holds(self, array: Array) -> bool:
        """Return True if the tensor is made of this very array."""
        return self._array is array

    def message(self, inputs: Collection[Tensor] = (), *, keep_on_device: bool = False) -> Message:
        """Return the tensor for the engine, detached from the model's memory.

        Arrays of ``inputs`` are returned unchanged; for others see ``detached``. Memory on a device stays there if
        ``keep_on_device``; the model must then not write to it any more.
        """
        if isinstance(self._array, DeviceArray):
            return Message(self._name, self._datatype, self._array if keep_on_device else self._array.host())
        for tensor in inputs:
            if tensor.holds(self._array):
                return Message(self._name, self._datatype, self._array)
        array = _bytes_elements(self._array) if self._datatype == "BYTES" else detached(self._array)
        return Message(self._name, self._datatype, array)

    def as_it_is(self) -> Message:
        """Return the tensor for the engine, over the model's own memory."""
        array = self._array
        if isinstance(array, DeviceArray):
            array = array.host()
        elif self._datatype == "BYTES":
            array = _bytes_elements(array)
        return Message(self._name, self._datatype, array)

    def lent(self) -> Message:
        """Return the tensor for another model, over the same memory, read-only.

        BYTES elements become ``bytes``.
        """
        message = self.as_it_is()
        if message.data is not self._array:
            return message
        view = self._array.view()
        view.flags.writeable = False
        return Message(self._name, self._datatype, view)

    def __repr__(self) -> str:
        return f"<Tensor '{self._name}' {self._datatype} {list(self._array.shape)}>"


def _plain(array: Array) -> Array:
    """Return a C-ordered, little-endian, plain array, not a masked or memory-mapped subclass."""
    if not array.flags.c_contiguous:  # because ascontiguousarray gives a scalar a dimension
        array = np.ascontiguousarray(array)
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    return array if type(array) is np.ndarray else array.view(np.ndarray)


def _bytes_elements(array: Array) -> Array:
    """Return a new object array that holds only ``bytes``."""
    elements = [item if type(item) is bytes else _as_bytes(item) for item in array.reshape(-1).tolist()]
    made = np.empty(len(elements), object)
    made[:] = elements
    return made.reshape(array.shape)


def _as_bytes(item: object) -> bytes:
    if isinstance(item, bytes | bytearray | memoryview):
        return bytes(item)
    return str(item).encode()


def detached(array: Array) -> Array:
    """Return the array if only its tensor refers to its memory, else a copy.

    A model may keep an output and write into it while running the next batch; its answer must not change then.
    References are detected by reference counts of the array and of the array it is a view of. Any other owner (a
    framework's tensor) cannot be inspected, so its memory is copied.
    """
    owner = array.base
    if sys.getrefcount(array) > _ALONE.view:
        return array.copy()
    if owner is None:
        return array if array.flags.owndata else array.copy()
    if type(owner) is np.ndarray and owner.flags.owndata and sys.getrefcount(owner) <= _ALONE.owner:
        return array
    return array.copy()


class _Counts(NamedTuple):
    view: int
    owner: int


class _Probe:
    """Measurement of the reference counts of an array that only a tensor's attribute refers to.

    They differ between interpreters.
    """

    def __init__(self) -> None:
        self._array = np.empty(2)[:1]

    def counts(self) -> _Counts:
        return self._counted(self._array)

    @staticmethod
    def _counted(array: Array) -> _Counts:
        owner = array.base
        return _Counts(sys.getrefcount(array), sys.getrefcount(owner))


_ALONE = _Probe().counts()


def serialize_byte_tensor(input_tensor: Array) -> bytes | tuple[()] | None:
    """Return the wire form of BYTES elements, each with a four-byte length prefix [B02].

    As Triton's, it returns an empty tuple for an empty array and None for an array that holds neither objects nor
    bytes. Objects that are not bytes are written as the UTF-8 of their ``str``.
    """
    if input_tensor.size == 0:
        return ()
    if input_tensor.dtype.kind not in "OS":
        return None
    pieces: list[bytes] = []
    for element in _bytes_elements(input_tensor).reshape(-1).tolist():
        pieces += (struct.pack("<I", len(element)), element)
    return b"".join(pieces)


def deserialize_bytes_tensor(encoded_tensor: bytes) -> Array:
    """Return the elements of the wire form as a one-dimensional object array of ``bytes``.

    Raises:
        TritonModelException: the bytes end in the middle of an element.
    """
    elements: list[bytes] = []
    offset, end = 0, len(encoded_tensor)
    while offset < end:
        start = offset + 4
        length = int.from_bytes(encoded_tensor[offset:start], "little")
        offset = start + length
        if offset > end:
            raise TritonModelException(
                f"element {len(elements)} needs {length} bytes after its length, but only "
                f"{max(end - start, 0)} are there: the bytes do not come from serialize_byte_tensor"
            )
        elements.append(bytes(encoded_tensor[start:offset]))
    made = np.empty(len(elements), object)
    made[:] = elements
    return made
