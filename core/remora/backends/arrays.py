"""Batching of whole arrays for backends, with one copy per input and none per output.

``gather`` and ``scatter`` are pure. ``ArrayInstance`` puts them around one callable, so a backend for such a framework
consists of a way to open a model and a function from arrays to arrays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate, repeat
from typing import Any, cast

import numpy as np

from remora.backends import Capabilities, Execution
from remora.config import dtype_name
from remora.errors import InternalError, InvalidArgumentError, RemoraError
from remora.messages import Array, Outcome, Request, Response, Tensor
from remora.proto.model_config_pb2 import ModelConfig
from remora.tensors.device import DeviceArray, DeviceId, concatenated

Run = Callable[[dict[str, Array], tuple[str, ...]], list[Tensor]]
"""Runs a model: inputs by name and the outputs wanted give those outputs, in that order.

Must not change its inputs.
"""

_new_tensor: Callable[[tuple[str, str, Array]], Tensor] = partial(tuple.__new__, Tensor)
"""Makes a tensor of its fields, without the Python frame of the class."""

JOIN_LIMIT_BYTES = 64 * 1024
"""Size up to which joining bytes is three times as fast as numpy's concatenation.

Above it the copying dominates, and numpy releases the GIL meanwhile.
"""


def gather(requests: Sequence[Request], names: Iterable[str]) -> dict[str, Array]:
    """Return the inputs of a batch, the requests' rows concatenated in order.

    For one request these are its own dictionary and arrays. For several, each of the ``names`` that the requests have
    is a new array; all requests have the same optional inputs and the same shapes but for the first dimension [D04].
    The arrays may be read-only.
    """
    first = requests[0].inputs
    if len(requests) == 1:
        return first
    return {name: _joined([request.inputs[name] for request in requests]) for name in names if name in first}


def _joined(arrays: list[Array]) -> Array:
    first = arrays[0]
    if first.nbytes * len(arrays) > JOIN_LIMIT_BYTES or first.dtype.hasobject:
        return cast("Array", concatenated(arrays))
    try:
        joined = b"".join(cast("list[bytes]", arrays))
    except TypeError:  # an array that is not contiguous in row-major order, or not in host memory
        return cast("Array", concatenated(arrays))
    if not joined:  # without elements the bytes do not give the number of rows
        return np.concatenate(arrays)
    return np.frombuffer(joined, first.dtype).reshape(-1, *first.shape[1:])


def scatter(outputs: Sequence[Tensor], requests: Sequence[Request], *, batches: bool) -> list[Response]:
    """Return one response for each request, with views of its rows of the requested outputs.

    They are in the order of ``outputs``. Without ``batches``, and in a batch of one request, the outputs belong to that
    request unchanged.

    Raises:
        InternalError: the first dimension of an output is not the number of rows of the batch.
    """
    rows = [request.rows for request in requests]
    total = sum(rows)
    if batches:
        for tensor in outputs:
            _check_rows(tensor, total)
    if len(requests) == 1:
        return [Response(_requested(outputs, requests[0]))]
    if not batches:
        raise InternalError(f"outputs of a model that does not batch cannot be split over {len(requests)} requests")
    shares = zip(*[_cut(tensor, rows) for tensor in outputs], strict=True)
    if [len(request.requested) for request in requests].count(len(outputs)) == len(requests):
        # the usual case, without Python calls per request: all requests want all outputs
        return list(map(Response, map(list, shares)))
    return [Response(_requested(share, request)) for share, request in zip(shares, requests, strict=True)]


def _check_rows(tensor: Tensor, total: int) -> None:
    shape = tensor.data.shape
    if not shape or shape[0] != total:
        raise InternalError(
            f"output '{tensor.name}' has shape {list(shape)} for a batch of {total}: expected {total} as its first "
            "dimension; set max_batch_size to 0 if the model does not batch",
            from_model=True,
        )


def _cut(tensor: Tensor, rows: list[int]) -> list[Tensor]:
    """Return the tensor's rows for each request, as views."""
    name, datatype, data = tensor
    if isinstance(data, DeviceArray):
        ends = accumulate(rows)
        return [Tensor(name, datatype, data.rows(end - n, end).as_array()) for n, end in zip(rows, ends, strict=True)]
    if rows.count(1) == len(rows):
        # Iteration over a leading axis makes views about twice as fast as slicing.
        return [*map(_new_tensor, zip(repeat(name), repeat(datatype), data[:, None], strict=False))]
    return [Tensor(name, datatype, data[end - count : end]) for count, end in zip(rows, accumulate(rows), strict=True)]


def _requested(tensors: Sequence[Tensor], request: Request) -> list[Tensor]:
    """Return the tensors that the request wants. Its ``requested`` has no name twice."""
    requested = request.requested
    if len(requested) == len(tensors):
        return list(tensors)
    return [tensor for tensor in tensors if tensor.name in requested]


class ArrayInstance:
    """``Instance`` over a function from arrays to arrays.

    A model with ``max_batch_size`` > 0 gets its requests as one batch. If the batch fails, its requests run again one
    by one, so that an invalid value fails only its own request. A model without batching gets its requests one after
    the other, and each fails alone.

    Args:
        name: name of the instance [I03].
        config: complete; gives the names and the order of the inputs and outputs.
        run: as ``Run``; any exception is a failure of the model.
        quick: as in ``Instance``.
        clock: the engine's monotonic clock, in nanoseconds.
        staying: as ``run``, for outputs that may stay on a device.
        devices: as in ``Capabilities``.
        close: releases the resources that ``run`` holds for this instance alone.
    """

    __slots__ = (
        "_batches",
        "_clock",
        "_close",
        "_inputs",
        "_outputs",
        "_run",
        "_staying",
        "capabilities",
        "name",
        "quick",
    )

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        run: Run,
        *,
        quick: bool = False,
        clock: Callable[[], int] = time.monotonic_ns,
        staying: Run | None = None,
        devices: frozenset[DeviceId] = frozenset(),
        close: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self.quick = quick
        self.capabilities = Capabilities(devices=devices)
        self._run = run
        self._staying = staying or run
        self._close = close
        self._clock = clock
        self._batches = config.max_batch_size > 0
        self._inputs = tuple(dict.fromkeys(_input_names(config)))
        self._outputs = output_names(config)

    def execute(self, execution: Execution) -> list[Outcome]:
        requests = execution.requests
        if len(requests) == 1:
            return [self._answer(execution, requests[0])]
        if not self._batches:
            return [self._alone(execution, request) for request in requests]
        inputs = gather(requests, self._inputs)
        wanted = self._wanted(requests)
        execution.input_end_ns = self._clock()
        run = self._staying if all(request.keep_on_device for request in requests) else self._run
        try:
            outputs = run(inputs, wanted)
        except Exception:  # any failure: the single runs below show which requests cause it
            return [self._alone(execution, request) for request in requests]
        execution.output_start_ns = self._clock()
        return cast("list[Outcome]", scatter(outputs, requests, batches=True))

    def close(self) -> None:
        if self._close is not None:
            self._close()

    def _answer(self, execution: Execution, request: Request) -> Response:
        requests = (request,)
        wanted = self._wanted(requests)
        if not execution.input_end_ns:
            execution.input_end_ns = self._clock()
        outputs = (self._staying if request.keep_on_device else self._run)(request.inputs, wanted)
        execution.output_start_ns = self._clock()
        return scatter(outputs, requests, batches=self._batches)[0]

    def _alone(self, execution: Execution, request: Request) -> Outcome:
        try:
            return self._answer(execution, request)
        except RemoraError as error:
            return error
        except Exception as error:
            failure = InternalError(f"{type(error).__name__}: {error}", from_model=True)
            failure.__cause__ = error
            return failure

    def _wanted(self, requests: Sequence[Request]) -> tuple[str, ...]:
        """Return the outputs that any request wants, in the model's order."""
        for request in requests:
            if request.requested != self._outputs:
                break
        else:
            return self._outputs
        names = {name for request in requests for name in request.requested}
        return tuple(name for name in self._outputs if name in names)


def texts(where: str, array: Array) -> list[str]:
    """Return the elements of a BYTES array as text, for frameworks with text strings.

    ``where`` names the owner of the array in the error.

    Raises:
        InvalidArgumentError: an element is not UTF-8.
    """
    elements = array.ravel()
    try:
        return [element.decode() for element in elements]
    except UnicodeDecodeError as error:
        index = next(index for index, element in enumerate(elements) if element == error.object)
        raise InvalidArgumentError(
            f"{where} takes UTF-8 text, but element {index} has the byte 0x{error.object[error.start]:02x} at "
            f"{error.start}: {error.reason}; send binary values as text, in base64 for example"
        ) from error


def output_names(config: ModelConfig) -> tuple[str, ...]:
    """Return the configured outputs, then the states that are not among them."""
    states: Any = config.sequence_batching.state
    return tuple(dict.fromkeys([*(row.name for row in config.output), *(state.output_name for state in states)]))


def input_types(config: ModelConfig) -> dict[str, str]:
    """Return the wire datatypes of all tensors that a backend receives, by name.

    These are the configured inputs in order, tensors made of shapes, controls of sequences, and states.
    """
    types = {row.name: dtype_name(row.data_type) for row in config.input}
    types.update((name, dtype_name(row.data_type)) for row in config.batch_input for name in row.target_name)
    sequences: Any = config.sequence_batching
    for row in sequences.control_input:
        for control in row.control:
            flag = "INT32" if control.int32_false_true else "FP32" if control.fp32_false_true else "BOOL"
            types[row.name] = dtype_name(control.data_type) if control.data_type else flag
    types.update((state.input_name, dtype_name(state.data_type)) for state in sequences.state)
    return types


def output_types(config: ModelConfig) -> dict[str, str]:
    """Return the wire datatypes of all outputs of `output_names`, by name."""
    states: Any = config.sequence_batching.state
    types = {state.output_name: dtype_name(state.data_type) for state in states}
    types.update((row.name, dtype_name(row.data_type)) for row in config.output)
    return {name: types[name] for name in output_names(config)}


def _input_names(config: ModelConfig) -> Iterable[str]:
    """Yield the names of configured inputs, controls and states, which a request may contain."""
    yield from (tensor.name for tensor in config.input)
    sequences: Any = config.sequence_batching
    yield from (control.name for control in sequences.control_input)
    yield from (state.input_name for state in sequences.state)
