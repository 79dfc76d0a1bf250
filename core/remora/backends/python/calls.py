"""Calls of other models by a Python model's code.

Failures of a request reach the model as error responses, never as exceptions; only misuse of this interface and failed
model control raise. The same class serves models in threads and in worker processes; only the underlying
``ModelCaller`` differs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from remora.backends.calling import ModelCaller, current_origin
from remora.backends.python.messages import ErrorCode, InferenceResponse, TritonError
from remora.backends.python.requests import InferenceRequest
from remora.backends.python.tensor import Tensor, TritonModelException
from remora.errors import InvalidArgumentError, RemoraError
from remora.messages import Outcome, split_outcome

if TYPE_CHECKING:
    import asyncio


class ModelCalls:
    """Implementation of ``host.Caller`` on the engine.

    Args:
        engine: receives the calls.
        instance_name: name of the calling instance, for error texts.
    """

    def __init__(self, engine: ModelCaller, instance_name: str) -> None:
        self._engine = engine
        self._instance_name = instance_name

    def infer(self, request: InferenceRequest, *, decoupled: bool) -> InferenceResponse | ResponseIterator:
        """Run a request and return its response, or an iterator of responses [L01, L03].

        The iterator is returned if ``decoupled``, before the first response arrives.
        """
        answers = _Answers()
        self._submit(request, answers, decoupled=decoupled)
        return ResponseIterator(answers) if decoupled else answers.wait_for(0)

    async def infer_async(self, request: InferenceRequest, *, decoupled: bool) -> InferenceResponse | ResponseIterator:
        """Run a request in a coroutine; return its response, or an iterator if ``decoupled``.

        The iterator is returned when the first response is there, so that a plain ``for`` over a short answer does not
        block the event loop. A cancelled coroutine cancels its request.
        """
        answers = _Answers()
        self._submit(request, answers, decoupled=decoupled)
        try:
            first = await answers.arrival_of(0)
        except BaseException:
            answers.cancel()
            raise
        return ResponseIterator(answers) if decoupled else first

    def _submit(self, request: InferenceRequest, answers: _Answers, *, decoupled: bool) -> None:
        try:
            cancel = self._engine.submit(request.call(decoupled), answers.take, current_origin())
        except RemoraError as error:
            answers.take(error)
        else:
            answers.cancelled_by(cancel)

    def load_model(self, name: str, config: str, files: Mapping[str, bytes] | None) -> None:
        """Load a model, optionally with another configuration or other files [L06].

        Raises:
            TypeError: a file name is not text, or its content is not bytes.
            TritonModelException: the model cannot be loaded, or the server does not load models on demand.
        """
        parameters: dict[str, str | bytes] = {}
        if config:
            parameters["config"] = config
        for path, content in (files or {}).items():
            if not isinstance(path, str) or not isinstance(content, bytes | bytearray | memoryview):
                raise TypeError(f"load_model: files must map str to bytes, found {path!r}: {type(content).__name__}")
            parameters[path] = bytes(content)
        try:
            self._engine.load(name, parameters, current_origin())
        except RemoraError as error:
            raise self._failure("load model", error) from None

    def unload_model(self, name: str, *, unload_dependents: bool) -> None:
        """Take a model out of service [L06].

        Raises TritonModelException if the server does not allow it.
        """
        try:
            self._engine.unload(name, unload_dependents=unload_dependents)
        except RemoraError as error:
            raise self._failure("unload model", error) from None

    def is_model_ready(self, name: str, version: str) -> bool:
        """Return True if a request would be accepted [L06].

        Raises TritonModelException if the version is not a number.
        """
        try:
            return self._engine.is_ready(name, _version_of(version))
        except RemoraError as error:
            raise self._failure("check model readiness", error) from None

    def _failure(self, what: str, error: RemoraError) -> TritonModelException:
        return TritonModelException(
            f"Failed to {what}: Failed to process the request for model '{self._instance_name}', message: {error}"
        )


def _version_of(text: str) -> int:
    """Return the version number in a text, or -1 (any version) for an empty text."""
    if not text:
        return -1
    try:
        return int(text)
    except ValueError:
        raise InvalidArgumentError(
            f"failed to get model version from specified version string '{text}' (details: stol), version should be "
            "an integral value > 0"
        ) from None


class _Answers:
    """Responses to one call as they arrive.

    Thread-safe; any thread or coroutine may wait for any of them.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._arrived: list[InferenceResponse] = []
        self._ended = False
        self._cancel: Callable[[], None] | None = None
        self._waiting: list[Callable[[], None]] = []

    def take(self, outcome: Outcome) -> None:
        """Receive an answer from the engine.

        A final answer without content becomes an empty response, as in Triton.
        """
        final, content = split_outcome(outcome)
        response = _response_of(content)
        with self._changed:
            if self._ended:
                return
            self._arrived.append(response)
            self._ended = final
            waiting, self._waiting = self._waiting, []
            self._changed.notify_all()
        for wake in waiting:
            wake()

    def cancelled_by(self, cancel: Callable[[], None]) -> None:
        """Set the function that cancels the call, known only after submission."""
        self._cancel = cancel

    def cancel(self) -> None:
        """Cancel the call unless all answers have arrived."""
        if self._cancel is not None and not self._ended:
            self._cancel()

    def wait_for(self, index: int) -> InferenceResponse:
        """Return the response at ``index``. Raises IndexError if there are fewer."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or len(self._arrived) > index)
        return self._arrived[index]

    async def arrival_of(self, index: int) -> InferenceResponse:
        """Wait for the response at ``index`` in a coroutine. Raises IndexError as ``wait_for`` does."""
        while not self._ended and len(self._arrived) <= index:
            await self._change(index)
        return self._arrived[index]

    async def _change(self, index: int) -> None:
        import asyncio  # takes 30 ms, needed only by coroutines

        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self._changed:
            if self._ended or len(self._arrived) > index:
                return
            self._waiting.append(lambda: _wake(loop, future))
        await future


def _wake(loop: asyncio.AbstractEventLoop, future: asyncio.Future[None]) -> None:
    def resolve() -> None:
        if not future.done():
            future.set_result(None)

    with suppress(RuntimeError):  # the loop is closed, so no coroutine waits
        loop.call_soon_threadsafe(resolve)


class ResponseIterator:
    """Responses of a decoupled call, in order, for ``for`` and ``async for`` [L01, L05].

    At the end, iteration restarts with the first response. Dropping the iterator before its end cancels the call.
    """

    def __init__(self, answers: _Answers) -> None:
        self._answers = answers
        self._next = 0
        self._at_end = False

    def __iter__(self) -> Iterator[InferenceResponse]:
        self._rewind()
        return self

    def __next__(self) -> InferenceResponse:
        try:
            response = self._answers.wait_for(self._next)
        except IndexError:
            self._at_end = True
            raise StopIteration from None
        self._next += 1
        return response

    def __aiter__(self) -> ResponseIterator:
        self._rewind()
        return self

    async def __anext__(self) -> InferenceResponse:
        try:
            response = await self._answers.arrival_of(self._next)
        except IndexError:
            self._at_end = True
            raise StopAsyncIteration from None
        self._next += 1
        return response

    def _rewind(self) -> None:
        if self._at_end:
            self._next = 0
            self._at_end = False

    def cancel(self) -> None:
        """Ask the engine to stop producing responses.

        Responses that have arrived stay, and the iteration still ends.
        """
        self._answers.cancel()

    def __del__(self) -> None:
        self._answers.cancel()


def _response_of(outcome: Any) -> InferenceResponse:
    if outcome is None:
        return InferenceResponse()
    if isinstance(outcome, RemoraError):
        return InferenceResponse(error=TritonError(str(outcome), ErrorCode[outcome.code]))
    tensors = [Tensor.received(tensor.name, tensor.datatype, tensor.data) for tensor in outcome.outputs]
    return InferenceResponse(tensors, parameters=outcome.parameters)
