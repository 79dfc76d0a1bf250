"""Validation of requests against a model, in Triton's order and with Triton's texts.

A signature is created once from a complete configuration. `check` turns a form into a `Layout` (shape and dtype of each
input, rows, outputs), and binding turns a layout and the request's bytes into a Request whose arrays are views over
those bytes. The layout of a form that is received again, as the same object, comes from a bounded memo. Pure.

Of two faulty inputs Triton names the last one, of two unknown outputs the first by name, because of the order of its
containers. Clients compare texts, so the checks here use the same order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from remora.calls import TensorInfo
from remora.config import dtype_name
from remora.errors import InvalidArgumentError, about, given_twice
from remora.messages import DTYPES, Array, Data, InferForm, Request, Tensor
from remora.proto.model_config_pb2 import ModelConfig, ModelInput
from remora.tensors import elements
from remora.tensors.device import DeviceArray

_MEMO_LIMIT = 1024
_ELEMENT_LIMIT = 2**63 - 1
_SIZED = (memoryview, np.ndarray, DeviceArray)
_BATCH_NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each "
    "input shape. If you want to specify the full shape including the batch dim in your input dims config, try "
    "setting max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)


class UnreadableError(InvalidArgumentError):
    """A string longer than the remaining bytes.

    Triton leaves the check to the model, so it is reported only if the rest of the request is valid.
    """

    def __init__(self, name: str, length: int, left: int) -> None:
        super().__init__(
            f"incomplete string data for inference input '{name}', expecting string of length {length} but only "
            f"{left} bytes available",
            from_model=True,
        )
        self.input = name
        self._lengths = length, left

    def of(self, name: str) -> UnreadableError:
        """Return the error for another name of the input, as a composing model reports it."""
        return UnreadableError(name, *self._lengths)


class _Input(NamedTuple):
    name: str
    datatype: str
    dims: tuple[int, ...]
    reshape: tuple[int, ...] | None
    optional: bool
    ragged: bool


class _Part(NamedTuple):
    """One input of a layout: its size in bytes (-1 for BYTES) and the array to create."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    nbytes: int


class Layout(NamedTuple):
    """A valid form: its inputs in the order of the data, and what batching needs to know."""

    parts: tuple[_Part, ...]
    requested: tuple[str, ...]
    rows: int
    shape_key: object


class Signature:
    """The inputs and outputs of one model as requests must send and may request them.

    Args:
        config: complete and valid.
        name: the model's name for error texts.
    """

    def __init__(self, config: ModelConfig, name: str) -> None:
        self.name = name
        self.max_batch_size = config.max_batch_size
        self._inputs = {row.name: _input(row) for row in config.input}
        self._required = frozenset(row.name for row in config.input if not row.optional)
        # Triton only counts the inputs. A Python model may check which are present and the steps of an ensemble may
        # not need all; other frameworks would fail with different texts.
        self._counts_only = config.backend == "python" or config.HasField("ensemble_scheduling")
        self._outputs = tuple(row.name for row in config.output)
        self._reshaped = {row.name: row for row in config.output if row.HasField("reshape")}
        self.reshapes = bool(self._reshaped)
        """True if `to_wire` changes anything."""
        self.has_texts = any(row.datatype == "BYTES" for row in self._inputs.values())
        """True if an input is of BYTES."""
        self.answers_texts = any(dtype_name(row.data_type) == "BYTES" for row in config.output)
        """True if an output is of BYTES."""
        self._memo: dict[InferForm, Layout] = {}
        batch = (-1,) if config.max_batch_size > 0 else ()
        self.inputs = tuple(
            TensorInfo(row.name, dtype_name(row.data_type), batch + tuple(row.dims)) for row in config.input
        )
        self.outputs = tuple(
            TensorInfo(row.name, dtype_name(row.data_type), batch + tuple(row.dims)) for row in config.output
        )

    def request(self, form: InferForm, data: Sequence[Data]) -> Request:
        """Return the checked request.

        Raises InvalidArgumentError with Triton's text if it does not fit [H18-H22].
        """
        if form.raw:
            return self._raw_request(form, data)
        try:
            layout = self._memo.get(form)
            return self._bind(form, self._learn(form) if layout is None else layout, data)
        except InvalidArgumentError:
            self._find_fault(form, data)
            raise
        except (ValueError, OverflowError) as error:  # empty shapes that exceed numpy's limits, such as [2**62,0]
            raise self._refusal(form, f"the inputs for '{self.name}' cannot become arrays: {error}") from error

    def split(self, form: InferForm, data: Sequence[Data]) -> list[Data]:
        """Return the data of a form with the elements of BYTES split.

        It may take long, and any thread may call it. Raises what `request` raises for them.
        """
        if form.raw:
            return list(data)
        inputs = self.request(form, data).inputs
        return [
            inputs[spec.name] if spec.datatype == "BYTES" else source
            for spec, source in zip(form.inputs, data, strict=True)
        ]

    def requests(self, form: InferForm, columns: Sequence[memoryview], count: int) -> list[Request]:
        """Return the checked requests of one form without inputs of BYTES.

        Each column has an input's bytes of all ``count`` requests, one after the other. Raises what `request` raises
        for the first of them.
        """
        layout = self._memo.get(form)
        if layout is None and not form.raw:
            with suppress(InvalidArgumentError, ValueError, OverflowError):  # reported below
                layout = self._learn(form)
        stacks: list[Array] = []
        if layout is not None and layout.rows and len(layout.parts) == len(columns):
            for (_, dtype, shape, nbytes), column in zip(layout.parts, columns, strict=True):
                if shape and nbytes > 0 and len(column) == nbytes * count:
                    stacks.append(np.ndarray((count, *shape), dtype, column))
        if layout is None or len(stacks) != len(columns) or not stacks:
            sizes = [len(column) // count for column in columns]
            return [
                self.request(
                    form, [column[at * size : (at + 1) * size] for column, size in zip(columns, sizes, strict=True)]
                )
                for at in range(count)
            ]
        parts, requested, rows, shape_key = layout
        if len(parts) == 1:
            name = parts[0].name
            return [Request(form, {name: array}, requested, rows, shape_key) for array in stacks[0]]
        names = [part.name for part in parts]
        return [
            Request(form, dict(zip(names, arrays, strict=True)), requested, rows, shape_key)
            for arrays in zip(*stacks, strict=True)
        ]

    def _learn(self, form: InferForm) -> Layout:
        """Check a form and remember its layout. Raises what `check` raises."""
        layout = self.check(form)
        if not form.id and not form.parameters:  # because a form with either is not reused
            if len(self._memo) >= _MEMO_LIMIT:
                self._memo.clear()
            self._memo[form] = layout
        return layout

    def _find_fault(self, form: InferForm, data: Sequence[Data]) -> None:
        """Raise the error that Triton reports.

        Triton checks one input after the other, each with its bytes.
        """
        self._check_names(form)
        rows, _ = self._check_batch(form)
        unreadable: UnreadableError | None = None
        with suppress(ValueError, OverflowError):  # because such an input is not the fault that was found
            for spec, source in zip(reversed(form.inputs), reversed(data), strict=True):
                try:
                    self._array(form, self._check_input(form, *spec, rows), source)
                except UnreadableError as error:
                    unreadable = error  # the model reports the first one, so the last of this reversed loop counts
        if unreadable is not None:
            raise unreadable

    # -- the form ---------------------------------------------------------------------------------------------------

    def check(self, form: InferForm) -> Layout:
        """Return the layout of a form without its tensor bytes. Raises InvalidArgumentError."""
        self._check_names(form)
        rows, empty = self._check_batch(form)
        parts = tuple([self._check_input(form, *spec, rows) for spec in form.inputs])
        ragged = {name for name, row in self._inputs.items() if row.ragged}
        skip = 1 if self.max_batch_size > 0 else 0
        key = tuple(sorted((part.name, None if part.name in ragged else part.shape[skip:]) for part in parts))
        requested = tuple(output.name for output in form.outputs) or self._outputs
        return Layout(parts, requested, 0 if empty else rows, key)

    def _check_names(self, form: InferForm) -> None:
        seen: set[str] = set()
        for spec in form.inputs:
            if spec.name in seen:
                raise given_twice(form.id, spec.name)
            seen.add(spec.name)
        wanted: set[str] = set()
        for output in form.outputs:
            if output.name in wanted:
                raise self._refusal(form, f"output '{output.name}' already exists in request")
            wanted.add(output.name)
        if unknown := wanted.difference(self._outputs):
            raise InvalidArgumentError(f"unexpected inference output '{min(unknown)}' for model '{self.name}'")
        if not len(self._required) <= len(seen) <= len(self._inputs):
            raise self._refusal(form, self._wrong_count(form, seen))

    def _wrong_count(self, form: InferForm, seen: set[str]) -> str:
        missing = ",".join(f"'{name}'" for name in self._inputs if name in self._required and name not in seen)
        got = ",".join(f"'{spec.name}'" for spec in reversed(form.inputs))
        total, required = len(self._inputs), len(self._required)
        expected = (
            f"expected {total} inputs"
            if required == total
            else f"expected number of inputs between {required} and {total}"
        )
        # Triton's text has an unbalanced bracket if nothing is missing [H19].
        tail = f"[{missing}]" if missing else "]"
        return (
            f"{expected} but got {len(seen)} inputs for model '{self.name}'. Got input(s) [{got}], "
            f"but missing required input(s) {tail}. Please provide all required input(s)."
        )

    def _check_batch(self, form: InferForm) -> tuple[int, bool]:
        """Return the rows of the request, at least one, and True if an input has no rows.

        An empty batch is refused after its bytes were checked. Unknown inputs are reported in this loop, missing ones
        after it.
        """
        batches, rows = self.max_batch_size > 0, 0
        for spec in reversed(form.inputs):
            if spec.name not in self._inputs:
                raise InvalidArgumentError(f"unexpected inference input '{spec.name}' for model '{self.name}'")
            if not batches:
                continue
            if not spec.shape:
                raise self._refusal(
                    form, f"input '{spec.name}' has no shape but model requires batch dimension for '{self.name}'"
                )
            if not rows:  # none so far, or an empty batch
                rows = spec.shape[0]
            elif rows != spec.shape[0]:
                raise self._refusal(
                    form, f"input '{spec.name}' batch size does not match other inputs for '{self.name}'"
                )
        if not self._counts_only and not self._required <= (seen := {spec.name for spec in form.inputs}):
            raise self._refusal(form, self._wrong_count(form, seen))
        if not batches:
            return 1, False
        if rows > self.max_batch_size:
            raise self._refusal(
                form, f"inference request batch-size must be <= {self.max_batch_size} for '{self.name}'"
            )
        return max(rows, 1), any(spec.shape[0] == 0 for spec in form.inputs)

    def _check_input(self, form: InferForm, name: str, datatype: str, shape: tuple[int, ...], rows: int) -> _Part:
        expected = self._inputs[name]
        if datatype != expected.datatype:
            raise self._refusal(
                form,
                f"inference input '{name}' data-type is '{datatype}', but model '{self.name}' expects "
                f"'{expected.datatype}'",
            )
        batch = shape[:1] if self.max_batch_size > 0 else ()
        own = shape[len(batch) :]
        if not self._fits(form, name, expected.dims, own, shape) or any(size < 0 for size in shape):
            wire = (-1,) * len(batch) + expected.dims
            note = _BATCH_NOTE if batch else ""
            raise self._refusal(
                form,
                f"unexpected shape for input '{name}' for model '{self.name}'. Expected {_dims(wire)}, "
                f"got {_dims(shape)}. {note}",
            )
        elements = math.prod(own) * rows
        if elements > _ELEMENT_LIMIT:
            raise self._refusal(
                form, f"input '{name}' has a shape {_dims(shape)} of more elements than a signed 64-bit count can hold"
            )
        nbytes = -1 if datatype == "BYTES" else elements * DTYPES[datatype].itemsize
        model_shape = shape if expected.reshape is None else batch + _reshape(own, expected.dims, expected.reshape)
        return _Part(name, DTYPES[datatype], model_shape, nbytes)

    def _fits(
        self, form: InferForm, name: str, dims: tuple[int, ...], own: tuple[int, ...], shape: tuple[int, ...]
    ) -> bool:
        """Return True if a shape without its batch matches these dims.

        Raises InvalidArgumentError for a size of -1 before the first mismatch.
        """
        if len(own) != len(dims):
            return False
        for dim, size in zip(dims, own, strict=True):
            if size == -1:
                raise self._refusal(
                    form,
                    f"All input dimensions should be specified for input '{name}' for model '{self.name}', got "
                    f"{_dims(shape)}",
                )
            if dim not in (-1, size):
                return False
        return True

    # -- the bytes --------------------------------------------------------------------------------------------------

    def _bind(self, form: InferForm, layout: Layout, data: Sequence[Data]) -> Request:
        parts, requested, rows, shape_key = layout
        arrays: dict[str, Array] = {}
        for part, source in zip(parts, data, strict=True):
            name, dtype, shape, nbytes = part
            if type(source) is memoryview and source.nbytes == nbytes and nbytes:  # fast path
                arrays[name] = np.ndarray(shape, dtype, source)  # a view; costs half of frombuffer and reshape
            else:
                arrays[name] = self._array(form, part, source)
        if not rows:
            raise self._refusal(form, f"the batch for '{self.name}' has no rows: send at least one row")
        return Request(form, arrays, requested, rows, shape_key)

    def _array(self, form: InferForm, part: _Part, source: Data) -> Array:
        name, dtype, shape, nbytes = part
        if nbytes < 0:
            return self._bytes_array(form, name, shape, source)
        size = source.nbytes if isinstance(source, _SIZED) else len(source or b"")
        if size != nbytes:
            raise self._size_mismatch(form, name, nbytes, size)
        if not size:
            return np.empty(shape, dtype)
        if isinstance(source, np.ndarray):
            return source.reshape(shape)
        if isinstance(source, DeviceArray):  # left on the device by a step of an ensemble
            return source.reshape(shape).as_array()
        return np.ndarray(shape, dtype, source)  # type: ignore[arg-type]

    def _bytes_array(self, form: InferForm, name: str, shape: tuple[int, ...], source: Data) -> Array:
        count = math.prod(shape)
        if isinstance(source, np.ndarray):
            if source.size == count:
                return source.reshape(shape)
            found: Sequence[bytes] | Array = source.reshape(-1)
        elif isinstance(source, list):
            found = source
        else:
            view = memoryview(source or b"")
            # At most one more than expected, and no more memory than the bytes can have elements.
            most = min(count + 1, len(view) // elements.PREFIX_BYTES)
            found = elements.array_of(self._split_bytes(form, name, view, count), most)
        empty_batch = self.max_batch_size > 0 and not shape[0]
        least = math.prod(shape[1:]) if empty_batch else count  # at least one row, as for numeric inputs
        if len(found) < least:
            raise self._too_few(form, name, least, len(found))
        if len(found) > count:
            raise self._refusal(
                form,
                f"unexpected number of string elements {count + 1} for inference input '{name}' for model "
                f"'{self.name}', expecting {count}",
            )
        array = elements.array_of(elements.steps_of(found), count) if isinstance(found, list) else found
        return array.reshape(shape)  # type: ignore[union-attr]

    def _split_bytes(self, form: InferForm, name: str, view: memoryview, count: int) -> Iterator[list[bytes]]:
        """Yield the elements of a length-prefixed BYTES tensor in steps [B02].

        There is at most one more than expected. Raises InvalidArgumentError.
        """
        number = at = 0
        end = len(view)
        step: list[bytes] = []
        while at < end:
            if end - at < elements.PREFIX_BYTES:
                raise self._refusal(
                    form,
                    f"incomplete string length indicator for inference input '{name}' for model '{self.name}', "
                    f"expecting 4 bytes but only {end - at} bytes available. Please make sure the string length "
                    "indicator is in one buffer.",
                )
            (length,) = elements.read_length(view, at)
            at += elements.PREFIX_BYTES
            if number == count:
                yield [*step, b""]
                return
            number += 1
            if length > end - at:
                if number < count:
                    raise self._too_few(form, name, count, number)
                raise UnreadableError(name, length, end - at)
            step.append(view[at : at + length].tobytes())
            at += length
            if len(step) == elements.STEP:
                yield step
                step = []
        yield step

    def _too_few(self, form: InferForm, name: str, expected: int, got: int) -> InvalidArgumentError:
        return self._refusal(
            form, f"expected {expected} string elements for inference input '{name}' for model '{self.name}', got {got}"
        )

    def _raw_request(self, form: InferForm, data: Sequence[Data]) -> Request:
        """Return the request for a body that is the only input's bytes [B03]."""
        if len(self._inputs) != 1:
            raise self._refusal(
                form,
                f"Raw request must only have 1 input (found 1) to be deduced but got {len(self._inputs)} inputs in "
                f"'{self.name}' model configuration",
            )
        (row,) = self._inputs.values()
        body = memoryview(data[0]) if data and data[0] is not None else memoryview(b"")  # type: ignore[arg-type]
        variable = row.dims.count(-1)
        if variable > 1:
            raise self._refusal(
                form,
                f"The shape of the raw input '{row.name}' can not be deduced because there are more than one "
                "variable-sized dimension",
            )
        batch = (1,) if self.max_batch_size > 0 else ()
        if row.datatype == "BYTES":
            return self._raw_bytes_request(form, row, batch, body)
        fixed = math.prod(dim for dim in row.dims if dim != -1) * DTYPES[row.datatype].itemsize
        guess = len(body) // fixed if fixed else 0
        own = tuple(guess if dim == -1 else dim for dim in row.dims)
        if math.prod(own) * DTYPES[row.datatype].itemsize != len(body):
            raise self._size_mismatch(form, "raw_input", guess * fixed if variable else fixed, len(body))
        part = self._check_input(form, row.name, row.datatype, batch + own, 1)
        layout = Layout((part,), self._outputs, 1, ((row.name, None if row.ragged else part.shape[len(batch) :]),))
        return self._bind(form, layout, [body])

    def _raw_bytes_request(self, form: InferForm, row: _Input, batch: tuple[int, ...], body: memoryview) -> Request:
        """Return the request for a body that is one BYTES element.

        The input must be able to hold exactly one element.
        """
        if row.dims != (1,):
            raise self._refusal(form, f"For BYTE datatype raw input '{row.name}', the model must have input shape [1]")
        part = self._check_input(form, row.name, row.datatype, batch + row.dims, 1)
        layout = Layout((part,), self._outputs, 1, ((row.name, None if row.ragged else part.shape[len(batch) :]),))
        return self._bind(form, layout, [[bytes(body)]])

    # -- outputs ----------------------------------------------------------------------------------------------------

    def to_wire(self, outputs: list[Tensor]) -> list[Tensor]:
        """Return the outputs in their wire shapes, with reshapes reversed [C06]."""
        if not self._reshaped:
            return outputs
        return [self._wire_tensor(tensor) for tensor in outputs]

    def _wire_tensor(self, tensor: Tensor) -> Tensor:
        row = self._reshaped.get(tensor.name)
        if row is None:
            return tensor
        skip = 1 if self.max_batch_size > 0 else 0
        shape = tensor.data.shape
        own = _reshape(shape[skip:], tuple(row.reshape.shape), tuple(row.dims))
        return tensor._replace(data=tensor.data.reshape(shape[:skip] + own))

    def _size_mismatch(self, form: InferForm, name: str, expected: int, got: int) -> InvalidArgumentError:
        return self._refusal(
            form,
            f"input byte size mismatch for input '{name}' for model '{self.name}'. Expected {expected}, got {got}",
        )

    def _refusal(self, form: InferForm, text: str) -> InvalidArgumentError:
        return InvalidArgumentError(about(form.id, text))


def _input(row: ModelInput) -> _Input:
    reshape = tuple(row.reshape.shape) if row.HasField("reshape") else None
    return _Input(row.name, dtype_name(row.data_type), tuple(row.dims), reshape, row.optional, row.allow_ragged_batch)


def _reshape(shape: tuple[int, ...], dims: tuple[int, ...], target: tuple[int, ...]) -> tuple[int, ...]:
    """Return `target` with its variable dims filled from the variable `dims` of `shape`.

    The sizes are used in order.
    """
    variable = iter([size for size, dim in zip(shape, dims, strict=False) if dim == -1])
    return tuple(next(variable, -1) if dim == -1 else dim for dim in target)


def _dims(shape: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, shape))}]"


__all__ = ["Layout", "Signature", "UnreadableError"]
