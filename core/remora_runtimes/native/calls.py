"""Python bindings of a native library's functions.

Every struct here repeats ``remora_backend.h``. The library allocates output arrays through a callback and writes into
them, so only BYTES, which have a separate wire form, are copied.
"""

from __future__ import annotations

import ctypes
import struct
from ctypes import POINTER, c_char, c_char_p, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from remora.backends.arrays import input_types, output_types
from remora.config import Placement, data_type_of
from remora.errors import (
    ConfigError,
    InternalError,
    InvalidArgumentError,
    RemoraError,
    UnavailableError,
    UnsupportedError,
)
from remora.messages import DTYPES, Array, Tensor
from remora.proto.model_config_pb2 import ModelConfig

ABI_VERSION = 1
MAX_RANK = 32
MAX_OUTPUT_BYTES = 8 << 30
"""Largest output."""

_ERROR_BYTES = 1024
_ERRORS: dict[int, type[RemoraError]] = {2: InvalidArgumentError, 3: UnavailableError, 4: UnsupportedError}
_REQUIRED = ("remora_abi_version", "remora_create", "remora_run", "remora_destroy")
_LENGTH = struct.Struct("<I")


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("name", c_char_p),
        ("datatype", c_int32),
        ("rank", c_uint32),
        ("shape", POINTER(c_int64)),
        ("data", c_void_p),
        ("byte_size", c_uint64),
    )


class _Output(ctypes.Structure):
    _fields_ = (("name", c_char_p), ("datatype", c_int32))


_Allocate = ctypes.CFUNCTYPE(c_void_p, c_void_p, c_uint64, c_uint32, POINTER(c_int64), c_uint64)


class _Request(ctypes.Structure):
    _fields_ = (
        ("inputs", POINTER(_Tensor)),
        ("input_count", c_uint64),
        ("outputs", POINTER(_Output)),
        ("output_count", c_uint64),
        ("allocate", _Allocate),
        ("context", c_void_p),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        ("model_name", c_char_p),
        ("model_version", c_int64),
        ("version_directory", c_char_p),
        ("config", c_char_p),
        ("instance_name", c_char_p),
        ("device_kind", c_char_p),
        ("device_id", c_int32),
        ("threads", c_uint32),
    )


class NativeLibrary:
    """Loaded library.

    Raises OSError if it cannot be loaded, ConfigError if its version differs.
    """

    def __init__(self, path: Path) -> None:
        self._inner: Any = ctypes.CDLL(str(path))  # CDLL releases the GIL during calls
        try:
            self._check()
        except ConfigError:
            self.close()
            raise

    def _check(self) -> None:
        missing = [name for name in _REQUIRED if not hasattr(self._inner, name)]
        if missing:
            raise ConfigError(f"it does not export {', '.join(missing)}: build it with remora_backend.h")
        self._inner.remora_abi_version.restype = c_uint32
        version = self._inner.remora_abi_version()
        if version != ABI_VERSION:
            raise ConfigError(f"it is built for version {version} of remora_backend.h, this engine has {ABI_VERSION}")
        self._inner.remora_create.argtypes = (POINTER(_Model), POINTER(c_void_p), POINTER(c_char), c_size_t)
        self._inner.remora_run.argtypes = (c_void_p, POINTER(_Request), POINTER(c_char), c_size_t)
        self._inner.remora_destroy.argtypes = (c_void_p,)
        self._inner.remora_destroy.restype = None

    def describe(self) -> str | None:
        """Return the library's default configuration as JSON, or None."""
        if not hasattr(self._inner, "remora_describe"):
            return None
        self._inner.remora_describe.restype = c_char_p
        text: bytes | None = self._inner.remora_describe()
        return None if text is None else text.decode()

    def create(self, model: _Model) -> c_void_p:
        """Return a new instance. Raises RemoraError with the library's reason."""
        instance = c_void_p()
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        self._raise(
            self._inner.remora_create(model, ctypes.byref(instance), error, _ERROR_BYTES), error, "remora_create"
        )
        return instance

    def run(self, instance: c_void_p, request: _Request) -> None:
        """Run one batch. Raises RemoraError with the library's reason."""
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        self._raise(self._inner.remora_run(instance, request, error, _ERROR_BYTES), error, "remora_run")

    def destroy(self, instance: c_void_p) -> None:
        """Destroy an instance."""
        self._inner.remora_destroy(instance)

    def close(self) -> None:
        """Unload the library, so that a changed file of the same name can be loaded."""
        if self._inner is not None:
            from _ctypes import dlclose

            handle, self._inner = self._inner._handle, None
            dlclose(handle)

    def _raise(self, status: int, error: Any, function: str) -> None:
        if status:
            text = error.value.decode(errors="replace") or f"{function} returned {status} and no reason"
            raise _ERRORS.get(status, InternalError)(text, from_model=function == "remora_run")


class NativeRun:
    """Instance of a library as a function from arrays to arrays (``arrays.Run``).

    One thread at a time.
    """

    def __init__(
        self,
        library: NativeLibrary,
        config: ModelConfig,
        placement: Placement,
        *,
        version: int,
        directory: Path,
        text: str,
        threads: int,
    ) -> None:
        self._library = library
        self._inputs = input_types(config)
        self._outputs = output_types(config)
        self._wanted: tuple[str, ...] = ()
        self._arrays: dict[str, tuple[Array, tuple[int, ...]]] = {}
        self._refused = ""
        self._allocate = _Allocate(self._on_allocate)
        model = _Model(
            config.name.encode(), version, str(directory).encode(), text.encode(),
            placement.name.encode(), placement.kind.encode(), placement.device_id, threads,
        )  # fmt: skip
        self._instance: c_void_p | None = library.create(model)

    def __call__(self, inputs: dict[str, Array], wanted: tuple[str, ...]) -> list[Tensor]:
        """Return the outputs ``wanted``, in that order.

        Raises:
            RemoraError: the library's error.
            InternalError: the library omitted an output, or requested memory that does not fit the datatype.
        """
        kept: list[object] = []  # keeps the memory that the structs point to alive
        tensors = [self._tensor(name, array, kept) for name, array in inputs.items()]
        outputs = [_Output(name.encode(), data_type_of(self._outputs[name])) for name in wanted]
        request = _Request(
            (_Tensor * len(tensors))(*tensors), len(tensors), (_Output * len(outputs))(*outputs), len(outputs),
            self._allocate, None,
        )  # fmt: skip
        self._wanted, self._arrays, self._refused = wanted, {}, ""
        if self._instance is None:
            raise InternalError("the instance is closed")
        try:
            self._library.run(self._instance, request)
        except InternalError as error:
            raise InternalError(f"{error}{self._refused and ': '}{self._refused}", from_model=True) from error
        arrays, self._arrays = self._arrays, {}
        missing = [name for name in wanted if name not in arrays]
        if missing or self._refused:
            reason = self._refused or f"it omitted the output {', '.join(missing)}"
            raise InternalError(f"remora_run returned success, but {reason}", from_model=True)
        return [Tensor(name, self._outputs[name], self._finished(name, *arrays[name])) for name in wanted]

    def close(self) -> None:
        """Destroy the instance, once."""
        instance, self._instance = self._instance, None
        if instance is not None:
            self._library.destroy(instance)

    def _tensor(self, name: str, array: Array, kept: list[object]) -> _Tensor:
        datatype = self._inputs[name]
        shape = (c_int64 * max(array.ndim, 1))(*array.shape)
        if datatype == "BYTES":
            array_bytes = b"".join([_LENGTH.pack(len(element)) + element for element in array.ravel()])
            data: Array = np.frombuffer(array_bytes or b"\0", np.uint8)
            size = len(array_bytes)
        else:
            data = np.ascontiguousarray(array)
            size = data.nbytes
        kept += [shape, data]
        return _Tensor(
            name.encode(),
            data_type_of(datatype),
            array.ndim,
            ctypes.cast(shape, POINTER(c_int64)),
            data.ctypes.data,
            size,
        )

    def _on_allocate(self, _: int | None, index: int, rank: int, shape: Any, byte_size: int) -> int | None:
        """Return memory for one output, or None if the library's request does not fit.

        The library calls this.
        """
        try:
            return self._allocation(index, tuple(shape[:rank]) if rank <= MAX_RANK else None, byte_size)
        except MemoryError:
            self._refused = f"not enough memory for an output of {byte_size} bytes"
        return None

    def _allocation(self, index: int, shape: tuple[int, ...] | None, byte_size: int) -> int | None:
        if index >= len(self._wanted):
            self._refused = f"it requested memory for output {index} of {len(self._wanted)}"
            return None
        name = self._wanted[index]
        datatype = self._outputs[name]
        elements = -1
        if shape is not None and all(dim >= 0 for dim in shape):
            elements = 1
            for dim in shape:
                elements *= dim
        fits = byte_size >= 4 * elements if datatype == "BYTES" else byte_size == elements * DTYPES[datatype].itemsize
        if elements < 0 or not fits or byte_size > MAX_OUTPUT_BYTES or name in self._arrays or shape is None:
            self._refused = (
                f"it requested {byte_size} bytes for output '{name}' ({datatype}) of shape "
                f"{list(shape) if shape is not None else 'of too many dimensions'}"
            )
            return None
        memory = np.zeros(byte_size, np.uint8) if datatype == "BYTES" else np.empty(shape, DTYPES[datatype])
        self._arrays[name] = (memory, shape)
        return int(memory.ctypes.data)

    def _finished(self, name: str, memory: Array, shape: tuple[int, ...]) -> Array:
        return _elements(name, memory.tobytes(), shape) if self._outputs[name] == "BYTES" else memory


def _elements(name: str, data: bytes, shape: tuple[int, ...]) -> Array:
    """Return the elements of a BYTES output from its wire form."""
    at, elements = 0, []
    while at + 4 <= len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        at += 4 + length
        elements.append(data[at - length : at])
    count = int(np.prod(shape, dtype=np.int64))
    if at != len(data) or len(elements) != count:
        raise InternalError(f"output '{name}' does not contain {count} elements with length prefixes", from_model=True)
    array = np.empty(count, object)
    array[:] = elements
    return array.reshape(shape)
