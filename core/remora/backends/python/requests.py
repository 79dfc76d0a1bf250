"""Requests as Python models see them [Y07, L02]; the law: plain objects, and nothing built before its use."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from threading import Lock
from typing import Any

from remora.backends.calling import ModelCall
from remora.backends.python.host import Caller, Host, current_host
from remora.backends.python.messages import (
    COMPLETE_FINAL,
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

SEQUENCE_START = 1
SEQUENCE_END = 2
RELEASE_ALL = 1
RELEASE_RESCHEDULE = 2


class InferenceRequest:
    """A request to another model [L02], and what all requests have in common [Y07].

    Raises:
        TypeError: inputs that are no Tensor objects.
        TritonModelException: parameters of other types.
    """

    def __init__(
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Iterable[Tensor] = (),
        requested_output_names: Iterable[str] = (),
        model_name: str = "",
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: InferenceTrace | None = None,
        parameters: Mapping[str, Parameter] | None = None,
    ) -> None:
        self._inputs = list(inputs)
        for tensor in self._inputs:
            if not isinstance(tensor, Tensor):
                raise TypeError(f"InferenceRequest: inputs must be Tensor objects, found {type(tensor).__name__}")
        self._request_id = request_id
        self._correlation_id = correlation_id
        self._outputs = list(requested_output_names)
        self._model_name = model_name
        self._model_version = model_version
        self._flags = flags
        self._timeout = timeout
        self._preferred_memory = preferred_memory or PreferredMemory(MemoryType.TRITONSERVER_MEMORY_CPU)
        self._trace = trace or InferenceTrace()
        self._parameters = checked_parameters(parameters)
        self._maker = current_host()  # it may be run by a thread that knows nothing of the model

    def inputs(self) -> list[Tensor]:
        """All input tensors."""
        return self._inputs

    def input_tensor(self, name: str) -> Tensor | None:
        """The input of that name, None when the request has none."""
        return next((tensor for tensor in self.inputs() if tensor.name() == name), None)

    def requested_output_names(self) -> set[str]:
        """The outputs that are wanted: a set, as in Triton."""
        return set(self._outputs)

    def request_id(self) -> str:
        """The client's id, "" for none."""
        return self._request_id

    def correlation_id(self) -> int | str:
        """The sequence the request belongs to, 0 for none."""
        return self._correlation_id

    def flags(self) -> int:
        """Bits: 1 starts its sequence, 2 ends it."""
        return self._flags

    def set_flags(self, flags: int) -> None:
        """From now on these are its flags."""
        self._flags = flags

    def timeout(self) -> int:
        """In microseconds, 0 for none."""
        return self._timeout

    def parameters(self) -> str:
        """The request's parameters as JSON text."""
        return parameters_text(self.parameter_values())

    def parameter_values(self) -> Mapping[str, Parameter]:
        """The request's parameters as they are."""
        return self._parameters

    def preferred_memory(self) -> PreferredMemory:
        """Where the outputs should lie."""
        return self._preferred_memory

    def trace(self) -> InferenceTrace:
        """The trace it belongs to."""
        return self._trace

    def model_name(self) -> str:
        """The model it is for."""
        return self._model_name

    def model_version(self) -> int:
        """The version it is for, -1 for the newest."""
        return self._model_version

    def exec(self, decoupled: bool = False) -> Any:
        """Run it: an InferenceResponse, or an iterator of them when ``decoupled`` [L01, L03].

        Raises:
            TritonModelException: where calls of other models are not offered.
        """
        return self._caller().infer(self, decoupled=decoupled)

    async def async_exec(self, decoupled: bool = False) -> Any:
        """The same for coroutines."""
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
        """The request as the engine takes it; the tensors' memory is lent, not copied."""
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
        """Only requests that a model has received are answered."""
        raise TritonModelException("get_response_sender: this request was made by the model, which does not answer it")

    def is_cancelled(self) -> bool:
        """Has the caller gone away?"""
        return False

    def set_release_flags(self, flags: int) -> None:
        """Only requests that a model has received are released."""
        raise TritonModelException("set_release_flags: this request was made by the model, which does not release it")


class Single:
    """The reply of a model that gives one response to each request. Thread-safe.

    What is sent first is the answer: nothing that happens later can take it back. ``response`` is what was sent while
    the model's ``execute`` ran; what is sent later goes on through ``go_on``. Only the request and its sender refer to
    this object, so that its end is the end of all ways to answer.
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
        if onward is not None and response is not None:  # the first thing that is sent is a response
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
        """``execute`` has returned: the response if it was sent by now. If not, ``onward`` takes it, or else ``lost``
        is called when nothing is left that could send it: in any thread and at any point, so it may take no lock."""
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
    """A request that a model has to answer.

    Args:
        request: checked; its arrays are in the model's shape.
        datatypes: of the inputs, by name; those that are not there (controls) have the datatype of their array.
        model_name, model_version: the model that has received it.
    """

    __slots__ = ("_complete", "_received", "_request", "_sender", "_tensors", "release_flags", "reply")

    def __init__(self, request: Request, datatypes: Mapping[str, str], model_name: str, model_version: int) -> None:
        # The parent's constructor is for requests that are made out of parts; all that it sets is read below.
        self._request = request
        self._received = (datatypes, model_name, model_version)
        self._tensors: dict[str, Tensor] = {}
        self._complete = False
        self._maker: Host | None = None
        form = request.form
        self._flags = SEQUENCE_START * form.sequence_start | SEQUENCE_END * form.sequence_end
        self._sender: ResponseSender | None = None
        self.release_flags = RELEASE_ALL
        self.reply: Single | None = None  # models that return their responses need none

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
        """Always the same object: what a model has written into an input stays written."""
        tensor = self._tensors.get(name)
        if tensor is None:
            array = self._request.inputs[name]
            if isinstance(array, DeviceArray) and array.device == HOST:
                array = array.view()
            tensor = Tensor.received(name, self._received[0].get(name) or datatype_of(array), array)
        return tensor

    def seen_inputs(self) -> Collection[Tensor]:
        """Those that the model has asked for."""
        return self._tensors.values()

    def wanted(self) -> tuple[str, ...]:
        """The outputs to answer with."""
        return self._request.requested

    def stays(self) -> bool:
        """Whether outputs may stay on a device."""
        return self._request.stays

    def requested_output_names(self) -> set[str]:
        return set(self._request.requested)

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
        followed = self._request.trace
        return InferenceTrace() if followed is None else InferenceTrace(followed.context, followed.id)

    def model_name(self) -> str:
        return self._received[1]

    def model_version(self) -> int:
        return self._received[2]

    def is_cancelled(self) -> bool:
        return self._request.cancelled

    def get_response_sender(self) -> ResponseSender:
        """The sender, always the same one."""
        if self._sender is None:
            self._sender = ResponseSender(self.replying())
        return self._sender

    def replying(self) -> Single:
        """Where what the sender sends goes, always the same."""
        if self.reply is None:
            self.reply = Single(self._request)
        return self.reply

    def set_release_flags(self, flags: int) -> None:
        """Say whether the request is done with or is to be scheduled again [S14]."""
        if flags not in (RELEASE_ALL, RELEASE_RESCHEDULE):
            raise TritonModelException(
                f"set_release_flags: {flags} is neither TRITONSERVER_REQUEST_RELEASE_ALL nor _RESCHEDULE"
            )
        self.release_flags = flags
