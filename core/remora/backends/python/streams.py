"""Answers of a decoupled or late Python model to one request [Y09].

Invariant: a stream ends exactly once, by its final response, by a failure of its execution, or because the model has
released the sender.
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
    """Response target of one request of a decoupled model. Any thread may send.

    Only the request and its sender refer to this object; if the model has released both, the stream ends with an error.
    ``closed`` is True if nothing more may be sent.

    Args:
        execution: delivers the responses, at ``index``.
        convert: converts a response to an outcome and copies outputs that the model may still change.
        model: the instance's name, for errors.
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
        """Send a response, or only the end mark. Raises TritonModelException after the end.

        Responses to a cancelled request are dropped here except for the last one, because a model that goes on would
        otherwise keep its instance busy with copies that have no reader.
        """
        final = flags == COMPLETE_FINAL
        dropped = self._request.cancelled and not final
        outcome = None if response is None or dropped else self._convert(response)
        with self._lock:
            if self.closed:
                raise TritonModelException(CLOSED_TEXT)
            self.closed = final
        if dropped:
            return
        self._execution.send(self._index, Streamed(outcome, final))

    def close(self) -> None:
        """Refuse further responses, because the caller ends the stream."""
        self.closed = True

    def fail(self, error: RemoraError) -> None:
        """End the stream with an error unless it has ended."""
        with self._lock:
            closed, self.closed = self.closed, True
        if not closed:
            self._execution.send(self._index, Streamed(error, True))

    def is_cancelled(self) -> bool:
        return self._request.cancelled

    def __del__(self) -> None:
        # Takes no lock, because a destructor may run anywhere; no other thread can send here at this point.
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
    """Answer to a request of a non-decoupled model that returned without it.

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
        """Send the answer."""
        self._execution.send(self._index, Streamed(self._convert(response), True))

    def lost(self) -> None:
        """Send an error, because no answer can follow.

        Takes no lock, because destructors call it.
        """
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
        """Return the sender, always the same object."""
        if self._sender is None:
            self._sender = ResponseSender(self._stream)
        return self._sender
