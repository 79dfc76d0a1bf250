"""Engine's view of Python models in worker processes.

Invariant: no code of a model runs in the server's process, and a model cannot detect where it runs.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from time import monotonic_ns

import numpy as np

from remora.backends import Capabilities, Done, Execution, Instance, Placement, Source
from remora.backends.calling import current_origin
from remora.backends.model_readiness import SharedAnswer
from remora.backends.worker.callbacks import WorkerCallbacks
from remora.backends.worker.channel import NoRoomError, TooLargeError
from remora.backends.worker.encoding import RequestWriter
from remora.backends.worker.polling import poll_limit_ns
from remora.backends.worker.settings import TRANSFER_LIMIT, WorkerSettings, asks_for_environment
from remora.backends.worker.supervisor import Steps, Supervisor
from remora.backends.worker.suspects import Suspects, Verdict, error_of_end, parts_of, refusal
from remora.backends.worker.wire import Draft, MessageKind, head, nbytes_of
from remora.errors import ConfigError, InternalError, InvalidArgumentError, RemoraError
from remora.messages import Outcome, Watcher
from remora.proto.model_config_pb2 import ModelConfig

LOOP_BYTES = 256 << 10
"""Most bytes that an event loop copies into shared memory at once, which takes some 50 us."""


class WorkerModel:
    """One version of a Python model.

    The process that has opened the model becomes that of its first instance.

    Raises:
        RemoraError: as ``PythonBackend.open`` does in a thread.
    """

    def __init__(self, source: Source, config: ModelConfig) -> None:
        self._source = source
        settings = WorkerSettings.of(source.settings)
        self._settings = settings._replace(poll_ns=poll_limit_ns(settings.poll_ns, source.cpus))
        self._python = _interpreter(source, config)
        self._opening = [_opening(source, config)]
        self._suspects = Suspects(time.monotonic)
        self._spare: WorkerInstance | None = self._open()

    def _open(self) -> WorkerInstance:
        instance = WorkerInstance(self._source, self._settings, self._python, self._suspects)
        try:
            instance.supervisor.request(MessageKind.OPEN, self._opening)
        except InvalidArgumentError as error:
            instance.discard()
            raise ConfigError(error.message, from_model=error.from_model) from None
        except BaseException:
            instance.discard()
            raise
        return instance

    def complete(self, config: ModelConfig) -> None:
        """Let the model's ``auto_complete_config`` fill in its configuration, in its process."""
        self._spare = self._spare or self._open()
        try:
            (item,) = self._spare.supervisor.request(MessageKind.COMPLETE, [_config_draft(config)])
        except InvalidArgumentError as error:
            raise ConfigError(error.message, from_model=error.from_model) from None
        config.Clear()
        config.MergeFromString(item.arrays[0].tobytes())

    def instance(self, config: ModelConfig, placement: Placement) -> Instance:
        """Create and initialize an instance in a separate process.

        Raises InternalError if it fails to start.
        """
        instance, self._spare = self._spare or self._open(), None
        try:
            instance.start(config, placement, self._opening)
        except BaseException:
            instance.discard()
            raise
        return instance

    def close(self) -> None:
        """End the process that no instance has used."""
        if self._spare is not None:
            self._spare.discard()
            self._spare = None


class WorkerInstance:
    """Instance in a worker process that is restarted after a crash."""

    quick = False

    def __init__(self, source: Source, settings: WorkerSettings, python: Path, suspects: Suspects) -> None:
        self.name = source.name
        self._suspects = suspects
        self._settings = settings
        self._decoupled = self._decides = False
        self._readiness = SharedAnswer()
        self._writer = RequestWriter()
        callbacks = WorkerCallbacks(source.name, source.name, self, source.calls, monotonic_ns)
        self._callbacks = callbacks
        self.supervisor = Supervisor(source.name, callbacks, settings, python)
        self.capabilities = self._capabilities()

    def start(self, config: ModelConfig, placement: Placement, opening: Sequence[Draft]) -> None:
        """Make the opened model an instance. Raises InternalError."""
        self.name = placement.name
        self._decoupled = config.model_transaction_policy.decoupled
        self._callbacks.instance = placement.name
        starting = [_config_draft(config, placement=[placement.name, placement.kind, placement.device_id])]
        steps: Steps = [(MessageKind.OPEN, opening), (MessageKind.START, starting)]
        (started,) = self.supervisor.request(MessageKind.START, starting)
        self._decides = bool(started.head.fields["decides"])
        self.capabilities = self._capabilities()
        self.supervisor.serve(placement.name, steps)

    def _capabilities(self) -> Capabilities:
        supervisor = self.supervisor
        return Capabilities(
            remote=supervisor.in_memory and not self._decoupled,
            ahead=True,
            answers_late=True,
            unhealthy_reason=lambda: supervisor.trouble,
            ask_ready=self._ask_ready if self._decides else None,
        )

    def _ask_ready(self) -> Future[bool]:
        return self._readiness.get(self._is_ready, f"is_ready of {self.name}")

    def _is_ready(self) -> bool:
        (answer,) = self.supervisor.request(MessageKind.READY)
        return answer.head.fields["ready"] is True

    def execute(self, execution: Execution) -> Sequence[Outcome | None]:
        """Run the batch in the worker, see ``Instance.execute``.

        Raises:
            RemoraError: an error of the model's code [Y03, Y04], an InternalError if the worker died or was killed
                because it took too long, or an UnavailableError if it cannot run now.
        """
        verdicts = self._suspects.verdicts(execution.requests)
        if verdicts is None:
            return self._execute(execution)
        if len(verdicts) > 1:
            return self._execute_parts(execution, parts_of(verdicts))
        (request,) = execution.requests
        if verdicts[0] is Verdict.REFUSED:
            raise refusal(request)
        outcomes = self._execute(execution)
        self._suspects.clear(request)
        return outcomes

    def _execute_parts(self, execution: Execution, parts: Sequence[tuple[int, int]]) -> Sequence[Outcome | None]:
        """Run parts of a batch in order; the error of a part is the outcome of its requests alone."""
        outcomes: list[Outcome | None] = []
        for start, end in parts:
            part = execution.part(start, end)
            try:
                outcomes += self.execute(part)
            except RemoraError as error:
                outcomes += [error] * (end - start)
            execution.add_part(start, part)
        return outcomes

    def _execute(self, execution: Execution) -> Sequence[Outcome | None]:
        connection = self.supervisor.wait_for_connection()
        drafts = self._writer.drafts(execution.requests)
        try:
            return connection.execute(drafts, execution, self._settings.execute_timeout_s, decoupled=self._decoupled)
        except InternalError as error:
            if not connection.ended.is_set():
                raise
            self._suspects.record_end(execution.requests)
            raise error_of_end(error, execution.requests) from None
        except NoRoomError as error:
            count = len(execution.requests)
            if isinstance(error, TooLargeError) and count > 1:  # a request then fails only if it is too large alone
                return self._execute_parts(execution, [(0, count // 2), (count // 2, count)])
            raise InternalError(
                f"the inputs cannot be sent to the worker process of '{self.name}': {error}; send smaller requests "
                f"or raise {TRANSFER_LIMIT}"
            ) from None

    def begin(self, execution: Execution, watcher: Watcher, done: Done) -> bool:
        """Begin a batch in the worker, see ``RemoteInstance.begin``.

        Returns False for large batches, because a thread should copy them, and for suspected requests.
        """
        connection = self.supervisor.serving
        if connection is None:
            return False
        drafts = self._writer.drafts(execution.requests)
        # the size first, because the suspects hash the inputs
        if nbytes_of(drafts) > LOOP_BYTES or self._suspects.verdicts(execution.requests) is not None:
            return False

        def ended(result: Sequence[Outcome | None] | Exception) -> None:
            if isinstance(result, InternalError) and connection.ended.is_set():
                self._suspects.record_end(execution.requests)
                result = error_of_end(result, execution.requests)
            done(result)

        return connection.begin(drafts, execution, self._settings.execute_timeout_s, watcher, ended)

    def close(self) -> None:
        """Let the model finalize and end its process."""
        self.supervisor.close()

    def discard(self) -> None:
        """End the process of a model that has not started."""
        self.supervisor.close()


def _interpreter(source: Source, config: ModelConfig) -> Path:
    if asks_for_environment(source, config):
        from remora.backends.python.environment import interpreter_for

        return interpreter_for(source, config)
    return Path(sys.executable)


def _opening(source: Source, config: ModelConfig) -> Draft:
    return _config_draft(
        config,
        source=[source.name, source.version, str(source.model_dir), str(source.path), str(source.repository)],
        settings=dict(source.settings),
        cpus=source.cpus,
        calls=source.calls is not None,
        loading=sorted(current_origin().loading),
        log_level=_log_level(source.name),
    )


def _config_draft(config: ModelConfig, **fields: object) -> Draft:
    data = np.frombuffer(config.SerializeToString(), np.uint8)
    return Draft(head([("config", "UINT8", data.shape)], **fields), [data])


def _log_level(model: str) -> int:
    return logging.getLogger(f"remora.model.{model}").getEffectiveLevel()
