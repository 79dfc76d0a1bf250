"""Instance of a Python model.

A model that answers once returns its responses; a decoupled model sends them, during ``execute`` or after it.

Invariant: every request of an execution is answered, whatever the model's code does.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import CoroutineType
from typing import TYPE_CHECKING, Any

from remora.backends import Capabilities, Execution
from remora.backends.arrays import output_names
from remora.backends.calling import executing, opening
from remora.backends.model_readiness import SharedAnswer
from remora.backends.python.failures import describe
from remora.backends.python.host import Host, hosted, leave, settle
from remora.backends.python.loading import LoadedModule
from remora.backends.python.messages import COMPLETE_FINAL, InferenceResponse
from remora.backends.python.requests import RELEASE_RESCHEDULE, ReceivedRequest
from remora.backends.python.streams import LateReply, StreamedReply, StreamedRequest
from remora.backends.python.tensor import DATATYPES, Tensor
from remora.custom_metrics import REGISTRY
from remora.errors import FAILED_EXECUTION, InternalError, RemoraError, UnsupportedError, error_of
from remora.messages import Outcome, Response
from remora.messages import Tensor as MessageTensor
from remora.proto.model_config_pb2 import ModelConfig

if TYPE_CHECKING:
    from remora.backends.python.coroutines import BackgroundLoop

CLASS_NAME = "TritonPythonModel"


def model_class(loaded: LoadedModule) -> Any:
    """Return the class that a model's file must define, or None."""
    return getattr(loaded.module, CLASS_NAME, None)


class _ContractError(Exception):
    """Invalid return value of a model's ``execute``."""


class PythonInstance:
    """One object of a model's class.

    ``execute`` raises if the whole execution has failed. Errors with which the model has answered single requests are
    returned and marked as answered [T02].
    """

    quick = False

    def __init__(
        self, name: str, loaded: LoadedModule, folders: Sequence[Path], host: Host, config: ModelConfig
    ) -> None:
        self.name = name
        self._loaded = loaded
        self._folders = folders
        self._host = host
        self._decoupled = config.model_transaction_policy.decoupled
        self._iterative = config.sequence_batching.iterative_sequence
        states = config.sequence_batching.state
        self._outputs = frozenset(output_names(config))
        self._datatypes = {tensor.name: DATATYPES[tensor.data_type] for tensor in config.input if tensor.data_type}
        self._datatypes |= {state.input_name: DATATYPES[state.data_type] for state in states}
        self.capabilities = Capabilities(answers_late=True)
        self._readiness = SharedAnswer()
        self._background: BackgroundLoop | None = None
        self._model: Any = None
        settle(loaded.package, host)

    def initialize(self, arguments: dict[str, str]) -> None:
        """Create the model's object and call its ``initialize`` [Y02].

        Raises InternalError if that fails.
        """
        failure = ""
        try:
            with hosted(self._host, opening(self._host.model_name)):
                self._model = model_class(self._loaded)()
                initialize = getattr(self._model, "initialize", None)
                if initialize is not None:
                    self._awaited(initialize(arguments))
        except BaseException as error:
            failure = describe(error, self._folders)
        if failure:
            raise InternalError(failure, from_model=True)
        if callable(getattr(self._model, "is_ready", None)):
            self.capabilities = replace(self.capabilities, ask_ready=self._ask_ready)

    def is_ready(self) -> bool:
        """Return what the model's ``is_ready`` returns.

        Raises InternalError if it raises, or returns something else than a boolean.
        """
        failure = ""
        try:
            with hosted(self._host, opening(self._host.model_name)):
                ready = self._awaited(self._model.is_ready())
        except BaseException as error:
            failure = describe(error, self._folders)
        if failure:
            raise InternalError(f"is_ready of '{self.name}' failed: {failure}", from_model=True)
        if not isinstance(ready, bool):
            kind = type(ready).__name__
            raise InternalError(f"is_ready of '{self.name}' returned {kind}, expected True or False", from_model=True)
        return ready

    def _ask_ready(self) -> Future[bool]:
        return self._readiness.get(self.is_ready, f"is_ready of {self.name}")

    def execute(self, execution: Execution) -> Sequence[Outcome | None]:
        """Run the batch, see ``Instance.execute``.

        A decoupled model answers through ``execution.send``.

        Raises:
            InternalError: the model raised, or broke the contract of ``execute`` [Y03, Y04].
            UnsupportedError: the model requests rescheduling and may not.
        """
        if self._decoupled:
            self._stream(execution)
            return [None] * len(execution.requests)
        host = self._host
        requests = [
            ReceivedRequest(request, self._datatypes, host.model_name, host.model_version)
            for request in execution.requests
        ]
        try:
            with hosted(host, executing(execution.requests, self)):
                answers = self._awaited(self._model.execute(list(requests)))  # a copy, because the model may change it
            outcomes = self._outcomes(requests, answers, execution)
            execution.rescheduled = rescheduled = self._rescheduled(requests)
            if None in outcomes:
                execution.late = frozenset(
                    at for at, each in enumerate(outcomes) if each is None and at not in rescheduled
                )
            return outcomes
        except UnsupportedError:
            raise
        except BaseException as error:  # SystemExit and KeyboardInterrupt too: a model does not stop the server
            sent = [request.reply.response if request.reply is not None else None for request in requests]
            failure = self._failure(error, unheard=all(sent))
        # Raised outside of the handler, so that the error does not keep the model's frames and their arrays alive.
        if not any(sent):
            raise failure
        # Responses that were sent count although the execution failed.
        return [
            failure
            if answer is None
            else self._response(
                request.wanted(), answer, request.seen_inputs(), keep_on_device=request.keep_on_device()
            )
            for request, answer in zip(requests, sent, strict=True)
        ]

    def _stream(self, execution: Execution) -> None:
        """Run a batch of a decoupled model.

        Its answers may arrive from now on, also after this method has returned.
        """
        host = self._host
        requests: list[StreamedRequest] = []
        streams: list[StreamedReply] = []
        for index, request in enumerate(execution.requests):
            convert = partial(self._response, request.requested)
            streams.append(StreamedReply(execution, index, convert, self.name))
            requests.append(StreamedRequest(request, self._datatypes, host.model_name, host.model_version, streams[-1]))
        try:
            with hosted(host, executing(execution.requests, self)):
                result = self._model.execute(list(requests))  # a copy, because the model may empty it
                if self._iterative:  # the coroutine's end determines the next turn, which must wait for it
                    result = self._awaited(result)
            if isinstance(result, CoroutineType):
                with hosted(host, executing(execution.requests)):  # continues after the instance is free
                    self._in_background().start(result, partial(self._streamed, requests, streams))
            else:
                self._check_streamed(requests, streams, result)
                # A request with a final response does not run again, even if the model requests it.
                execution.rescheduled = frozenset(at for at in self._rescheduled(requests) if not streams[at].closed)
                for index in execution.rescheduled:
                    streams[index].close()  # the next execution continues the stream
            return
        except BaseException as error:
            failure = self._failure(error, unheard=all(stream.closed for stream in streams))
        for stream in streams:
            stream.close()  # the scheduler ends open streams with the error raised here
        raise failure

    def _streamed(
        self,
        requests: list[StreamedRequest],
        streams: list[StreamedReply],
        result: object,
        error: BaseException | None,
    ) -> None:
        """Fail the open streams if the coroutine that executed a batch has failed."""
        if error is None:
            try:
                self._check_streamed(requests, streams, result)
            except _ContractError as broken:
                error = broken
        if error is not None:
            failure = self._failure(error, unheard=all(stream.closed for stream in streams))
            for stream in streams:
                stream.fail(failure)

    def _check_streamed(self, requests: list[StreamedRequest], streams: list[StreamedReply], result: object) -> None:
        if result is not None:
            raise _ContractError(
                f"Python model '{self.name}' is using the decoupled mode and the execute function must return None."
            )
        for request, stream in zip(requests, streams, strict=True):
            if request.release_flags == RELEASE_RESCHEDULE and not self._iterative:
                stream.fail(self._no_rescheduling())

    def _failure(self, error: BaseException, *, unheard: bool = False) -> InternalError:
        """Return the client's error for a failed execution [Y04].

        ``unheard`` is True if every request has been answered, so that only the log shows the failure.
        """
        log = logging.getLogger(f"remora.model.{self._host.model_name}")
        if isinstance(error, _ContractError):
            text = str(error)
        else:
            text = describe(error, self._folders)
            log.debug("execute failed", exc_info=error)
        if unheard:
            log.error("execute of '%s' failed after it had answered: %s", self.name, text)
        return InternalError(FAILED_EXECUTION.format(self.name, text), from_model=True)

    def close(self) -> None:
        """Call the model's ``finalize`` and log its exceptions."""
        log = logging.getLogger(f"remora.model.{self._host.model_name}")
        try:
            finalize = getattr(self._model, "finalize", None)
            if finalize is not None:
                with hosted(self._host):
                    self._awaited(finalize())
        except BaseException as error:
            log.error("finalize of instance '%s' failed: %s", self.name, describe(error, self._folders), exc_info=error)
        finally:
            self.discard()

    def discard(self) -> None:
        """Release everything without calling the model."""
        self._model = None
        if self._background is not None:
            self._background.close()
            self._background = None
        REGISTRY.retire(self._host)
        leave(self._loaded.package)
        self._loaded.close()

    def _awaited(self, result: Any) -> Any:
        """Return the result, awaiting it first if the model's method is a coroutine.

        The instance keeps its loop, which also runs between executions, so that a connection or task from one execution
        is still usable in the next.
        """
        return self._in_background().run(result) if isinstance(result, CoroutineType) else result

    def _in_background(self) -> BackgroundLoop:
        """Return the event loop of the instance, starting it if necessary."""
        if self._background is None:
            from remora.backends.python.coroutines import BackgroundLoop  # takes 30 ms, needed only by coroutines

            self._background = BackgroundLoop(f"remora {self.name} coroutines")
        return self._background

    def _outcomes(self, requests: list[ReceivedRequest], answers: object, execution: Execution) -> list[Outcome | None]:
        if answers is None:
            answers = [None] * len(requests)
        if not isinstance(answers, list):
            raise _ContractError(f"Expected a list in the execute return, found type '{type(answers)}'.")
        if len(answers) != len(requests):
            raise _ContractError(
                "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
                f"InferenceRequest(s) size is:{len(requests)}, and InferenceResponse(s) size is:{len(answers)}\n"
            )
        return [
            self._outcome(request, answer, execution, index)
            for index, (request, answer) in enumerate(zip(requests, answers, strict=True))
        ]

    def _rescheduled(self, requests: Sequence[ReceivedRequest]) -> frozenset[int]:
        if not self._iterative:
            return frozenset()
        return frozenset(at for at, request in enumerate(requests) if request.release_flags == RELEASE_RESCHEDULE)

    def _outcome(self, request: ReceivedRequest, answer: object, execution: Execution, index: int) -> Outcome | None:
        """Return the outcome of a request, or None if the answer comes later.

        None means that the request runs again, or that the model may still send its response.
        """
        if request.release_flags == RELEASE_RESCHEDULE:
            if not self._iterative:
                raise self._no_rescheduling()
            if answer is not None:
                raise _ContractError(  # Triton's text, with its spelling
                    "Expected a None object in the execute function return list for reschduled request, found type "
                    f"'{type(answer)}'."
                )
            return None
        if answer is None:
            late = LateReply(execution, index, partial(self._response, request.wanted()), self.name)
            answer = request.replying().go_on(late.send, late.lost)
        elif not isinstance(answer, InferenceResponse):
            raise _ContractError(
                "Expected an 'InferenceResponse' object in the execute function return list, found type "
                f"'{type(answer)}'."
            )
        elif request.reply is not None:
            request.reply.send(answer, COMPLETE_FINAL)
        if answer is None:
            return None
        return self._response(
            request.wanted(),
            answer,
            request.seen_inputs(),
            keep_on_device=request.keep_on_device(),
            copied=execution.copied,
        )

    def _no_rescheduling(self) -> UnsupportedError:
        return UnsupportedError(
            f"model '{self._host.model_name}' asks for its request to be scheduled again, which only models with "
            "sequence_batching { iterative_sequence: true } may do: configure that, or let the model finish a request "
            "in one execution"
        )

    def _response(
        self,
        requested: Sequence[str],
        answer: InferenceResponse,
        seen: Collection[Tensor] = (),
        *,
        keep_on_device: bool = False,
        copied: bool = False,
    ) -> Response | RemoraError:
        """Convert a model's answer, keeping the outputs that are declared and requested.

        The outputs may be inputs that the model has ``seen``. ``copied``: the receiver copies the outputs before the
        model runs again.
        """
        error = answer.error()
        if error is not None:
            return error_of(error.code().name, error.message(), from_model=True, answered=True)
        outputs: list[MessageTensor] = []
        for tensor in answer.output_tensors():
            name = tensor.name()
            if name in requested and name in self._outputs:
                outputs.append(tensor.as_it_is() if copied else tensor.message(seen, keep_on_device=keep_on_device))
        return Response(outputs, answer.parameter_values())
