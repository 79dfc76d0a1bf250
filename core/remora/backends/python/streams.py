"""The answers of a decoupled Python model to one request [Y09]; the law: whatever the model does, the stream ends
once: by its final response, by a failure of its execution, or because it has let go of the sender.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import Lock

from remora.backends import Execution
from remora.backends.python.messages import COMPLETE_FINAL, InferenceResponse, ResponseSender
from remora.backends.python.requests import ReceivedRequest
from remora.backends.python.tensor import TritonModelException
from remora.errors import CancelledError, InternalError, RemoraError
from remora.messages import Request, Response, Streamed

Answer = Response | RemoraError

CLOSED_TEXT = "Unable to send response. Response sender has been closed."


class StreamedReply:
    """Where the responses to one request of a decoupled model go: through its execution. Any thread may send.

    Only the request and its sender hold it; when the model has let go of both, the stream ends with an error.

    Args:
        execution: is sent through, at ``index``.
        convert: a response as an outcome, its outputs copied where the model may still write into them.
        model: the instance's name, for errors.

    ``closed`` when nothing more may be sent.
    """

    __slots__ = ("_convert", "_execution", "_index", "_lock", "_model", "_request", "closed")

    def __init__(
        self, execution: Execution, index: int, convert: Callable[[InferenceResponse], Answer], model: str
    ) -> None:
        self._execution = execution
        self._index = index
        self._request: Request = execution.requests[index]
        self._convert = convert
        self._model = model
        self.closed = False
        self._lock = Lock()

    def send(self, response: InferenceResponse | None, flags: int) -> None:
        """Send a response, or the mark of the end alone. Raises TritonModelException after the end."""
        outcome = None if response is None else self._convert(response)
        final = flags == COMPLETE_FINAL
        with self._lock:
            if self.closed:
                raise TritonModelException(CLOSED_TEXT)
            self.closed = final
        self._execution.send(self._index, Streamed(outcome, final))

    def close(self) -> None:
        """Take nothing more: somebody else ends the stream."""
        self.closed = True

    def fail(self, error: RemoraError) -> None:
        """End the stream with an error, unless it has ended."""
        with self._lock:
            closed, self.closed = self.closed, True
        if not closed:
            self._execution.send(self._index, Streamed(error, True))

    def is_cancelled(self) -> bool:
        return self._request.cancelled

    def __del__(self) -> None:
        # May run inside any code of any thread, hence no lock; nobody else can be sending here any more.
        if self.closed:
            return
        self.closed = True
        error: RemoraError = (
            CancelledError("request was cancelled")
            if self._request.cancelled
            else InternalError(
                f"model '{self._model}' let go of a request's response sender without a final response: finish each "
                "request with sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)",
                from_model=True,
            )
        )
        self._execution.send_soon(self._index, Streamed(error, True))


class LateReply:
    """The answer to one request of a model that has returned without it, and that is not decoupled.

    Args:
        execution, index, convert, model: as for `StreamedReply`.
    """

    __slots__ = ("_convert", "_execution", "_index", "_model")

    def __init__(
        self, execution: Execution, index: int, convert: Callable[[InferenceResponse], Answer], model: str
    ) -> None:
        self._execution = execution
        self._index = index
        self._convert = convert
        self._model = model

    def send(self, response: InferenceResponse) -> None:
        """Answer."""
        self._execution.send(self._index, Streamed(self._convert(response), True))

    def lost(self) -> None:
        """No answer will come. Takes no lock: it is called from destructors."""
        error = InternalError(
            f"model '{self._model}' gave no response to a request: execute returned None for it and nothing was sent "
            "through its response sender, which the model has let go of; return one InferenceResponse for each "
            "request, or keep the sender until it has sent one",
            from_model=True,
        )
        self._execution.send_soon(self._index, Streamed(error, True))


class StreamedRequest(ReceivedRequest):
    """A request that a decoupled model answers through its sender."""

    __slots__ = ("_stream",)

    def __init__(
        self,
        request: Request,
        datatypes: Mapping[str, str],
        model_name: str,
        model_version: int,
        stream: StreamedReply,
    ) -> None:
        super().__init__(request, datatypes, model_name, model_version)
        self._stream = stream

    def get_response_sender(self) -> ResponseSender:
        """The sender, always the same one."""
        if self._sender is None:
            self._sender = ResponseSender(self._stream)
        return self._sender
