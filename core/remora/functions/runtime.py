"""Execution of a function as a Python model of Triton's API.

The generated ``model.py`` of an exported model contains a subclass of `FunctionModel`. It works in remora and in
Triton.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np

from remora.functions.definition import Model
from remora.functions.definition import model as as_model
from remora.functions.errors import BadRequestError, InvalidFieldError

_live: dict[str, Model] = {}


def register_live(model: Model) -> str:
    """Register a model object, which a repository serves, and return its key."""
    key = str(id(model))
    _live[key] = model
    return key


def forget_live(key: str) -> None:
    """Remove a registration."""
    _live.pop(key, None)


def live(key: str) -> Model:
    """Return the registered object. Raises LookupError."""
    return _live[key]


class FunctionModel:
    """A function or class as a ``TritonPythonModel``. Subclasses set ``target``."""

    target: ClassVar[Any]

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the model for the device of this instance."""
        import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]

        self._pb = pb_utils
        self._model = self._defined(args)
        self._inputs = self._model.signature.inputs
        self._input_names = tuple(field.name for field in self._inputs)
        self._has_options = any(field.optional for field in self._inputs)
        self._outputs = self._model.signature.outputs
        self._names = tuple(field.name for field in self._outputs)
        gpu = args.get("model_instance_kind") == "GPU"
        self._call = self._model.open(f"cuda:{args.get('model_instance_device_id', '0')}" if gpu else "cpu")
        self._loop = _Loop(self._model.name, self._model.settings.concurrency) if self._model.is_async else None
        self._run = self._chosen()

    def _defined(self, args: Mapping[str, str]) -> Model:
        target = vars(type(self))["target"]  # not self.target, which would bind a plain function to this object
        return target if isinstance(target, Model) else as_model(name=args.get("model_name", "model"))(target)

    def _chosen(self) -> Callable[[Sequence[Any]], Any]:
        if self._model.settings.stream:
            return self._begin_streams if self._loop else self._stream
        if self._loop:
            return self._begin
        return self._batched if self._model.settings.batch else self._single

    def execute(self, requests: Sequence[Any]) -> Any:
        """Run the function for the requests of a batch."""
        return self._run(requests)

    def finalize(self) -> None:
        """Stop the event loop of ``async`` functions."""
        if self._loop is not None:
            self._loop.close()

    # -- functions that return --------------------------------------------------------------------------------------

    def _single(self, requests: Sequence[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        try:
            return self._response(self._encoded(self._call(**self._decoded(self._arrays(request)))))
        except BadRequestError as error:
            return self._refusal(error)

    def _batched(self, requests: Sequence[Any]) -> list[Any]:
        """Run requests as one batch for each set of optional inputs."""
        names = self._input_names
        if not self._has_options:
            find = self._pb.get_input_tensor_by_name
            columns = {name: [find(request, name).as_numpy() for request in requests] for name in names}
            return self._run_batch(columns, len(requests))
        answers: list[Any] = [None] * len(requests)
        groups: dict[tuple[str, ...], list[tuple[int, dict[str, Any]]]] = {}
        for index, request in enumerate(requests):
            arrays = self._arrays(request)
            groups.setdefault(tuple(arrays), []).append((index, arrays))
        for present, members in groups.items():
            columns = {name: [arrays[name] for _, arrays in members] for name in present}
            for (index, _), answer in zip(members, self._run_batch(columns, len(members)), strict=True):
                answers[index] = answer
        return answers

    def _run_batch(self, columns: Mapping[str, list[Any]], count: int) -> list[Any]:
        """Run a batch and return the answers of its requests, of which each column has an array.

        After a BadRequestError the requests run one by one, so that only the invalid ones fail.
        """
        sizes = [len(array) for array in next(iter(columns.values()), ())] or [1] * count
        try:
            joined = {name: np.concatenate(arrays) if count > 1 else arrays[0] for name, arrays in columns.items()}
            outputs = self._encoded(self._call(**self._decoded(joined)), sum(sizes))
        except BadRequestError as error:
            if count == 1:
                return [self._refusal(error)]
            single = ({name: [arrays[index]] for name, arrays in columns.items()} for index in range(count))
            return [self._run_batch(each, 1)[0] for each in single]
        if count == 1:
            return [self._response(outputs)]
        spans = [slice(end - size, end) for end, size in zip(accumulate(sizes), sizes, strict=True)]
        tensor, response = self._pb.Tensor, self._pb.InferenceResponse
        cut = [[tensor(name, array[span]) for span in spans] for name, array in zip(self._names, outputs, strict=True)]
        return [response(list(tensors)) for tensors in zip(*cut, strict=True)]

    # -- coroutines and streams -------------------------------------------------------------------------------------

    def _begin(self, requests: Sequence[Any]) -> list[None]:
        """Start the coroutines of requests, which answer when they end; blocks while too many run."""
        assert self._loop is not None
        for request in requests:
            self._loop.start(self._answer_later(request, request.get_response_sender()))
        return [None] * len(requests)

    async def _answer_later(self, request: Any, sender: Any) -> None:
        try:
            arrays = self._arrays(request)
            result = await self._call(**self._decoded(arrays))
            response = self._response(self._encoded(result, _rows(arrays) if self._model.settings.batch else 0))
        except Exception as error:
            response = self._refusal(error)
        sender.send(response, self._pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _stream(self, requests: Sequence[Any]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._send_all(request, sender)
            except BadRequestError as error:
                sender.send(self._refusal(error))
            sender.send(flags=self._pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def _send_all(self, request: Any, sender: Any) -> None:
        results: Iterator[Any] = iter(self._call(**self._decoded(self._arrays(request))))
        try:
            for result in results:
                if sender.is_cancelled():
                    break
                sender.send(self._response(self._encoded(result)))
        finally:
            close = getattr(results, "close", None)
            if close is not None:
                close()  # runs the generator's cleanup now, not when it is collected

    def _begin_streams(self, requests: Sequence[Any]) -> None:
        assert self._loop is not None
        for request in requests:
            self._loop.start(self._send_all_later(request, request.get_response_sender()))

    async def _send_all_later(self, request: Any, sender: Any) -> None:
        try:
            results: AsyncIterator[Any] = self._call(**self._decoded(self._arrays(request)))
            try:
                async for result in results:
                    if sender.is_cancelled():
                        break
                    response = self._response(self._encoded(result))
                    await asyncio.to_thread(sender.send, response)  # blocks while the client reads slowly
            finally:
                close = getattr(results, "aclose", None)
                if close is not None:
                    await close()
        except Exception as error:
            sender.send(self._refusal(error))
        sender.send(flags=self._pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    # -- conversion -------------------------------------------------------------------------------------------------

    def _arrays(self, request: Any) -> dict[str, Any]:
        """Return the tensors of the inputs that a request has, in the order of the signature."""
        find = self._pb.get_input_tensor_by_name
        return {name: tensor.as_numpy() for name in self._input_names if (tensor := find(request, name)) is not None}

    def _decoded(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Return the function's arguments. Raises BadRequestError naming the input."""
        arguments = {}
        for field in self._inputs:
            array = arrays.get(field.name)
            if array is None:
                continue
            try:
                arguments[field.name] = field.kind.decode(array)
            except BadRequestError as error:
                raise BadRequestError(_named(field.name, error)) from None
        return arguments

    def _encoded(self, result: Any, rows: int = 0) -> list[Any]:
        """Return the output arrays of a result, of a batch of ``rows`` if positive.

        Raises TypeError with the place.
        """
        try:
            values = self._model.signature.pack(result)
        except ValueError as error:
            raise TypeError(f"{self._model.described()}: {error}") from None
        arrays = []
        for field, value in zip(self._outputs, values, strict=True):
            try:
                array = field.kind.encode(value)
            except (TypeError, ValueError) as error:
                raise TypeError(f"{self._model.described()} returned a wrong '{field.name}': {error}") from None
            if rows and len(array) != rows:
                raise TypeError(
                    f"{self._model.described()} returned {len(array)} rows of '{field.name}' for a batch of {rows}"
                )
            arrays.append(array)
        return arrays

    def _response(self, arrays: Sequence[Any]) -> Any:
        tensors = [self._pb.Tensor(name, array) for name, array in zip(self._names, arrays, strict=True)]
        return self._pb.InferenceResponse(output_tensors=tensors)

    def _refusal(self, error: Exception) -> Any:
        if isinstance(error, BadRequestError):
            failed = self._pb.TritonError(str(error), self._pb.TritonError.INVALID_ARG)
        else:
            failed = self._pb.TritonError(f"{type(error).__name__}: {error}")
        return self._pb.InferenceResponse(error=failed)


def _named(name: str, error: BadRequestError) -> str:
    """Return the text of an error with the input and the field of its document."""
    if not isinstance(error, InvalidFieldError) or not error.path:
        return f"input '{name}': {error}"
    return f"{name}{'' if error.path.startswith('[') else '.'}{error}"


def _rows(arrays: Mapping[str, Any]) -> int:
    return next((len(array) for array in arrays.values()), 1)


class _Loop:
    """Event loop in a thread for a limited number of coroutines of a model."""

    def __init__(self, name: str, concurrency: int) -> None:
        self._room = threading.BoundedSemaphore(concurrency)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"remora {name} coroutines", daemon=True)
        self._thread.start()

    def start(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Start a coroutine, and block while too many run."""
        self._room.acquire()
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).add_done_callback(lambda _future: self._room.release())

    def close(self) -> None:
        """Cancel the coroutines and end the thread."""
        asyncio.run_coroutine_threadsafe(_cancel_all(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_all() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
