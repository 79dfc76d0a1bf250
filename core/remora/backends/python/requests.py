"""Requests as Python models see them [Y07, L02].

They are plain objects whose tensors are built on first use.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from threading import Lock
from typing import Any

from remora.backends.calling import ModelCall
from remora.backends.python.arguments import MISSING, instance, integer, sequence, text
from remora.backends.python.host import Caller, Host, current_host
from remora.backends.python.messages import (
    COMPLETE_FINAL,
    INT64_MAX,
    InferenceResponse,
    InferenceTrace,
    MemoryType,
    PreferredMemory,
    ResponseSender,
    checked_parameters,
    parameters_text,
)
from remora.backends.python.tensor import Tensor, TritonModelException
from remora.messages import InferForm, InputSpec, OutputSpec, Parameter, Request, datatype_of
from remora.tensors.device import HOST, DeviceArray

UINT64_MAX = (1 << 64) - 1
SEQUENCE_START = 1
SEQUENCE_END = 2
RELEASE_ALL = 1
RELEASE_RESCHEDULE = 2


class InferenceRequest:
    """A request to another model, and the common interface of all requests [L02, Y07].

    Raises:
        TypeError: the inputs are not Tensor objects.
        TritonModelException: a parameter has an unsupported type.
    """

    def __init__(
        self,
        request_id: str | bytes = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] = MISSING,
        requested_output_names: Sequence[str | bytes] = MISSING,
        model_name: str | bytes = MISSING,
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory = PreferredMemory(MemoryType.TRITONSERVER_MEMORY_CPU),  # noqa: B008 - frozen
        trace: InferenceTrace = InferenceTrace(),  # noqa: B008 - frozen
        parameters: Mapping[str, Parameter] | None = None,
    ) -> None:
        # Triton's binding converts all arguments before its code looks at any value: of two faults a type is first.
        self._inputs = sequence(inputs, "InferenceRequest: inputs")
        for tensor in self._inputs:
            if tensor is not None:
                instance(tensor, Tensor, "InferenceRequest: an input")
        self._request_id = text(request_id, "InferenceRequest: request_id")
        names = sequence(requested_output_names, "InferenceRequest: requested_output_names")
        self._outputs = [text(name, "InferenceRequest: a requested output name") for name in names]
        self._model_name = text(model_name, "InferenceRequest: model_name")
        self._model_version = integer(model_version, "InferenceRequest: model_version", -(1 << 63), INT64_MAX)
        self._flags = _flags(flags)
        self._timeout = integer(timeout, "InferenceRequest: timeout", 0, UINT64_MAX)
        self._preferred_memory = instance(preferred_memory, PreferredMemory, "InferenceRequest: preferred_memory")
        self._trace = instance(trace, InferenceTrace, "InferenceRequest: trace")
        self._parameters = checked_parameters(parameters)
        self._correlation_id = _correlation_id(correlation_id)
        if None in self._inputs:
            raise TritonModelException("Input tensor for request with id '' should not be empty.")
        if "" in self._outputs:
            raise TritonModelException("Requested output name for request should not be empty.")
        self._maker = current_host()  # because a thread without a host may run the request

    def inputs(self) -> list[Tensor]:
        """Return all input tensors."""
        return self._inputs

    def input_tensor(self, name: str) -> Tensor | None:
        """Return the input of that name, or None."""
        return next((tensor for tensor in self.inputs() if tensor.name() == name), None)

    def requested_output_names(self) -> set[str]:
        """Return the names of the requested outputs (a set, as in Triton)."""
        return set(self._outputs)

    def request_id(self) -> str:
        """Return the client's id, "" for none."""
        return self._request_id

    def correlation_id(self) -> int | str:
        """Return the id of the request's sequence, 0 for none."""
        return self._correlation_id

    def flags(self) -> int:
        """Return the flag bits (1 starts the sequence, 2 ends it)."""
        return self._flags

    def set_flags(self, flags: int) -> None:
        """Replace the flag bits."""
        self._flags = _flags(flags)

    def timeout(self) -> int:
        """Return the timeout in microseconds, 0 for none."""
        return self._timeout

    def parameters(self) -> str:
        """Return the request's parameters as JSON text."""
        # Triton's binding writes those of a model's own request with Python's JSON.
        return json.dumps(self._parameters)

    def parameter_values(self) -> Mapping[str, Parameter]:
        """Return the request's parameters."""
        return self._parameters

    def preferred_memory(self) -> PreferredMemory:
        """Return the preferred location of the outputs."""
        return self._preferred_memory

    def trace(self) -> InferenceTrace:
        """Return the trace of the request."""
        return self._trace

    def model_name(self) -> str:
        """Return the name of the target model."""
        return self._model_name

    def model_version(self) -> int:
        """Return the target version, -1 for the newest."""
        return self._model_version

    def exec(self, decoupled: bool = False) -> Any:
        """Run the request and return its response, or an iterator if ``decoupled`` [L01, L03].

        Raises:
            TritonModelException: calls of other models are not available.
        """
        return self._caller().infer(self, decoupled=decoupled)

    async def async_exec(self, decoupled: bool = False) -> Any:
        """Run the request as ``exec`` does, in a coroutine."""
        return await self._caller().infer_async(self, decoupled=decoupled)

    def _caller(self) -> Caller:
        host = current_host() or self._maker
        if host is None or host.caller is None:
            raise TritonModelException(
                f"cannot call model '{self.model_name()}': calls between models are not offered here; serve the models "
                "as an ensemble, or call it through the server's endpoint"
            )
        return host.caller

    def call(self, decoupled: bool) -> ModelCall:
        """Return the request for the engine.

        The call shares the tensors' memory.
        """
        tensors = [tensor.lent() for tensor in self.inputs()]
        flags = self.flags()
        form = InferForm(
            tuple(InputSpec(tensor.name, tensor.datatype, tensor.data.shape) for tensor in tensors),
            tuple(map(OutputSpec, self._outputs)),
            self.request_id(),
            self.parameter_values(),
            timeout_us=self.timeout(),
            sequence_id=self.correlation_id(),
            sequence_start=bool(flags & SEQUENCE_START),
            sequence_end=bool(flags & SEQUENCE_END),
        )
        data = [tensor.data for tensor in tensors]
        return ModelCall(self.model_name(), self.model_version(), form, data, decoupled, self._trace.id)

    def get_response_sender(self) -> ResponseSender:
        """Raise, because only received requests can be answered."""
        raise TritonModelException("get_response_sender: this request was made by the model, which does not answer it")

    def is_cancelled(self) -> bool:
        """Return False, because only received requests can be cancelled."""
        return False

    def set_release_flags(self, flags: int) -> None:
        """Raise, because only received requests can be released."""
        raise TritonModelException("set_release_flags: this request was made by the model, which does not release it")


def _flags(flags: int) -> int:
    return integer(flags, "InferenceRequest: flags", 0, (1 << 32) - 1)


def _correlation_id(value: object) -> int | str:
    """Return the id of a sequence, which takes no numpy integers and no bytes in Triton either."""
    if isinstance(value, str):
        return str(value)
    if value is None:
        raise TypeError("InferenceRequest: correlation_id must be int or str, not NoneType")
    if not isinstance(value, int):
        raise TritonModelException(f"Correlation ID must be integer or string, found {type(value).__name__}")
    if not 0 <= value <= UINT64_MAX:
        raise RuntimeError(f"InferenceRequest: correlation_id must be from 0 to {UINT64_MAX}, not {value}")
    return int(value)


class Single:
    """Response target of a model that sends one response per request. Thread-safe.

    The first response is the answer; later events cannot revoke it. ``response`` is the response sent while the model's
    ``execute`` ran; a later one is passed on through ``go_on``. Only the request and its sender refer to this object,
    so that its destruction means that no answer can be sent any more.
    """

    __slots__ = ("_closed", "_lock", "_lost", "_onward", "_request", "_sent", "response")

    def __init__(self, request: Request) -> None:
        self._request = request
        self.response: InferenceResponse | None = None
        self._sent = 0
        self._closed = False
        self._lock = Lock()
        self._onward: Callable[[InferenceResponse], None] | None = None
        self._lost: Callable[[], None] | None = None

    def send(self, response: InferenceResponse | None, flags: int) -> None:
        with self._lock:
            self._count(response, flags)
            self.response = self.response or response
            onward, self._onward, self._lost = self._onward, None, None
        if onward is not None and response is not None:  # the first message always has a response
            onward(response)

    def _count(self, response: InferenceResponse | None, flags: int) -> None:
        if response is not None and self._sent:
            raise TritonModelException(
                "Unable to send response. Non-decoupled model cannot send more than one response."
            )
        if response is None and not self._sent:
            raise TritonModelException(
                "Unable to send response. Non-decoupled model cannot send complete final before sending a response."
            )
        if self._closed:
            raise TritonModelException("Unable to send response. Response sender has been closed.")
        self._closed = flags == COMPLETE_FINAL
        self._sent += 1

    def go_on(self, onward: Callable[[InferenceResponse], None], lost: Callable[[], None]) -> InferenceResponse | None:
        """Return the response if it was sent already, else pass a later one to ``onward``.

        Called after ``execute`` has returned. ``lost`` is called when nothing is left that could send a response: in
        any thread and at any point, so it must not take a lock.
        """
        with self._lock:
            if self.response is None:
                self._onward, self._lost = onward, lost
            return self.response

    def is_cancelled(self) -> bool:
        return self._request.cancelled

    def __del__(self) -> None:
        if self._lost is not None:
            self._lost()


class ReceivedRequest(InferenceRequest):
    """A request that a model must answer.

    Args:
        request: validated; its arrays have the model's shape.
        datatypes: of the inputs, by name; an input that is missing here (a control) has the datatype of its array.
        model_name, model_version: the receiving model.
    """

    __slots__ = ("_complete", "_received", "_request", "_sender", "_tensors", "release_flags", "reply")

    def __init__(self, request: Request, datatypes: Mapping[str, str], model_name: str, model_version: int) -> None:
        # The parent's constructor is skipped: it is for requests built by a model, and the methods below replace it.
        self._request = request
        self._received = (datatypes, model_name, model_version)
        self._tensors: dict[str, Tensor] = {}
        self._complete = False
        self._maker: Host | None = None
        form = request.form
        self._flags = SEQUENCE_START * form.sequence_start | SEQUENCE_END * form.sequence_end
        self._sender: ResponseSender | None = None
        self.release_flags = RELEASE_ALL
        self.reply: Single | None = None  # None for models that return their responses

    def inputs(self) -> list[Tensor]:
        if not self._complete:
            self._tensors = {name: self._tensor(name) for name in self._request.inputs}
            self._complete = True
        return list(self._tensors.values())

    def input_tensor(self, name: str) -> Tensor | None:
        tensor = self._tensors.get(name)
        if tensor is None and name in self._request.inputs:
            tensor = self._tensors[name] = self._tensor(name)
        return tensor

    def _tensor(self, name: str) -> Tensor:
        """Return the tensor of an input, always the same object, so that a model's writes persist."""
        tensor = self._tensors.get(name)
        if tensor is None:
            array = self._request.inputs[name]
            if isinstance(array, DeviceArray) and array.device == HOST:
                array = array.view()
            tensor = Tensor.received(name, self._received[0].get(name) or datatype_of(array), array)
        return tensor

    def seen_inputs(self) -> Collection[Tensor]:
        """Return the inputs that the model has accessed."""
        return self._tensors.values()

    def wanted(self) -> tuple[str, ...]:
        """Return the names of the requested outputs."""
        return self._request.requested

    def keep_on_device(self) -> bool:
        """Return True if outputs may stay on a device."""
        return self._request.keep_on_device

    def requested_output_names(self) -> set[str]:
        return set(self._request.requested)

    def parameters(self) -> str:
        return parameters_text(self.parameter_values())

    def request_id(self) -> str:
        return self._request.form.id

    def correlation_id(self) -> int | str:
        return self._request.form.sequence_id

    def timeout(self) -> int:
        return self._request.form.timeout_us

    def parameter_values(self) -> Mapping[str, Parameter]:
        return self._request.form.parameters

    def preferred_memory(self) -> PreferredMemory:
        return PreferredMemory(MemoryType.TRITONSERVER_MEMORY_CPU)

    def trace(self) -> InferenceTrace:
        trace = self._request.trace
        return InferenceTrace() if trace is None else InferenceTrace(trace.context, trace.id)

    def model_name(self) -> str:
        return self._received[1]

    def model_version(self) -> int:
        return self._received[2]

    def is_cancelled(self) -> bool:
        return self._request.cancelled

    def get_response_sender(self) -> ResponseSender:
        """Return the sender, always the same object."""
        if self._sender is None:
            self._sender = ResponseSender(self.replying())
        return self._sender

    def replying(self) -> Single:
        """Return the response target of the sender, always the same object."""
        if self.reply is None:
            self.reply = Single(self._request)
        return self.reply

    def set_release_flags(self, flags: int) -> None:
        """Mark the request as finished or to be scheduled again [S14]."""
        if flags not in (RELEASE_ALL, RELEASE_RESCHEDULE):
            raise TritonModelException(
                f"set_release_flags: {flags} is neither TRITONSERVER_REQUEST_RELEASE_ALL nor _RESCHEDULE"
            )
        self.release_flags = flags
