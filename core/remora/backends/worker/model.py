"""Python models in worker processes, as the engine sees them; the law: no code of a model runs in the server's process,
and a model cannot tell where it runs.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from time import monotonic_ns

import numpy as np

from remora.backends import Done, Execution, Instance, Placement, Source
from remora.backends.calling import current_origin
from remora.backends.worker.callbacks import WorkerCallbacks
from remora.backends.worker.encoding import RequestWriter
from remora.backends.worker.settings import WorkerSettings, asks_for_environment
from remora.backends.worker.supervisor import Steps, Supervisor
from remora.backends.worker.wire import Draft, MessageKind, head, nbytes_of
from remora.errors import ConfigError, InvalidArgumentError
from remora.messages import Outcome, Watcher
from remora.proto.model_config_pb2 import ModelConfig

LOOP_BYTES = 256 << 10
"""An event loop copies no more than this into shared memory at once: it takes some 50 us."""


class WorkerModel:
    """One version of a Python model. The process that has opened it becomes its first instance's.

    Raises:
        RemoraError: as ``PythonBackend.open`` does in a thread.
    """

    def __init__(self, source: Source, config: ModelConfig) -> None:
        self._source = source
        self._settings = WorkerSettings.of(source.settings)
        self._python = _interpreter(source, config)
        self._opening = [_opening(source, config)]
        self._spare: WorkerInstance | None = self._open()

    def _open(self) -> WorkerInstance:
        instance = WorkerInstance(self._source, self._settings, self._python)
        try:
            instance.keeper.ask(MessageKind.OPEN, self._opening)
        except InvalidArgumentError as error:
            instance.abandon()
            raise ConfigError(error.message, from_model=error.from_model) from None
        except BaseException:
            instance.abandon()
            raise
        return instance

    def complete(self, config: ModelConfig) -> None:
        """Let the model's ``auto_complete_config`` fill in its configuration, in its process."""
        self._spare = self._spare or self._open()
        try:
            (item,) = self._spare.keeper.ask(MessageKind.COMPLETE, [_config_draft(config)])
        except InvalidArgumentError as error:
            raise ConfigError(error.message, from_model=error.from_model) from None
        config.Clear()
        config.MergeFromString(item.arrays[0].tobytes())

    def instance(self, config: ModelConfig, placement: Placement) -> Instance:
        """A new instance, initialized, in a process of its own. Raises InternalError when it does not start."""
        instance, self._spare = self._spare or self._open(), None
        try:
            instance.start(config, placement, self._opening)
        except BaseException:
            instance.abandon()
            raise
        return instance

    def close(self) -> None:
        """End the process that has become no instance."""
        if self._spare is not None:
            self._spare.abandon()
            self._spare = None


class WorkerInstance:
    """One worker process, and the next one when it dies."""

    quick = False
    ahead = True
    answers_late = True

    def __init__(self, source: Source, settings: WorkerSettings, python: Path) -> None:
        self.name = source.name
        self._settings = settings
        self._decoupled = False
        self._writer = RequestWriter()
        errands = WorkerCallbacks(source.name, source.name, self, source.calls, monotonic_ns)
        self._errands = errands
        self.keeper = Supervisor(source.name, errands, settings, python)

    def start(self, config: ModelConfig, placement: Placement, opening: Sequence[Draft]) -> None:
        """Make the opened model an instance. Raises InternalError."""
        self.name = placement.name
        self._decoupled = config.model_transaction_policy.decoupled
        self._errands.instance = placement.name
        starting = [_config_draft(config, placement=[placement.name, placement.kind, placement.device_id])]
        steps: Steps = [(MessageKind.OPEN, opening), (MessageKind.START, starting)]
        self.keeper.ask(MessageKind.START, starting)
        self.keeper.serve(placement.name, steps)

    @property
    def remote(self) -> bool:
        """See ``RemoteInstance.remote``."""
        return self.keeper.in_memory and not self._decoupled

    @property
    def trouble(self) -> str:
        """Why it does not serve now; empty when it does."""
        return self.keeper.trouble

    def execute(self, execution: Execution) -> Sequence[Outcome | None]:
        """Run the batch in the worker; see ``Instance.execute``.

        Raises:
            RemoraError: what the model's code raised [Y03, Y04], or an InternalError when the worker died, was
                ended because it took too long, or does not serve now.
        """
        link = self.keeper.link()
        drafts = self._writer.drafts(execution.requests)
        return link.execute(drafts, execution, self._settings.execute_timeout_s, decoupled=self._decoupled)

    def begin(self, execution: Execution, watcher: Watcher, done: Done) -> bool:
        """Begin a batch in the worker; see ``RemoteInstance.begin``. Much data is better copied by a thread."""
        link = self.keeper.serving
        if link is None:
            return False
        drafts = self._writer.drafts(execution.requests)
        if nbytes_of(drafts) > LOOP_BYTES:
            return False
        return link.begin(drafts, execution, self._settings.execute_timeout_s, watcher, done)

    def close(self) -> None:
        """Let the model finalize and end its process."""
        self.keeper.close()

    def abandon(self) -> None:
        """End a process whose model has not started."""
        self.keeper.close()


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
