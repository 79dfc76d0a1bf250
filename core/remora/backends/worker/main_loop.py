"""A worker's life: it opens one model, makes it an instance and runs what the server sends; the law: the model's code
runs in the process's first thread, and that thread alone answers for it.

The *front* is the first thread: between executions it waits for messages. A second thread reads while it is busy:
cancelled requests, answers to the model's calls, how far clients have read; and it ends the process when the server is
gone. The process is the in-thread backend's: requests and answers are those of `python`, and only their way differs.
"""

from __future__ import annotations

import gc
import logging
import os
import select
import socket
import sys
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from time import monotonic_ns
from typing import Any

from remora.backends import Execution, Instance, Placement, Source
from remora.backends.calling import Origin, calling_from
from remora.backends.python import PythonBackend, PythonModel, metrics
from remora.backends.worker.channel import NoRoomError, PeerLostError
from remora.backends.worker.connection import Channel
from remora.backends.worker.encoding import OutcomeWriter, RequestReader, error_head, index_of
from remora.backends.worker.proxies import Questions, ServerCalls, ServerLog, ServerMetrics
from remora.backends.worker.wire import Draft, Drafts, Item, Message, MessageKind, head
from remora.errors import CancelledError, InternalError, RemoraError, about
from remora.messages import Outcome, Request, Streamed
from remora.proto.model_config_pb2 import ModelConfig
from remora.system.logs import set_levels

AHEAD = 16
"""How many answers of one stream may be on their way before the client has read one."""
_IDLE_S = 1.0


class Worker:
    """One model in this process.

    Args:
        channel: to the server.
        lifeline: readable, or hung up, when the server is gone.
        memory_limit: bytes of address space the model may use beyond what is shared with the server; 0 for no limit.
    """

    def __init__(self, channel: Channel, lifeline: socket.socket, memory_limit: int) -> None:
        self._channel = channel
        self._lifeline = lifeline
        self._memory_limit = memory_limit
        self._inbox: deque[Message] = deque()
        self._late: SimpleQueue[tuple[_Executing, int, Streamed]] = SimpleQueue()
        self._kick, self._kicked = os.pipe()
        for fd in (self._kick, self._kicked):
            os.set_blocking(fd, False)
        self._executing: dict[int, _Executing] = {}
        self._reader = RequestReader()
        self._writer = OutcomeWriter()
        self._questions = Questions(channel)
        self._calls = ServerCalls(self._questions, self._place_of)
        self._model: PythonModel | None = None
        self._instance: Instance | None = None
        self._failure: RemoraError | None = None
        self._decoupled = False

    def run(self) -> None:
        """Serve until the server says that it is enough, or is gone."""
        os.register_at_fork(after_in_child=self._forked)
        metrics.report_to(ServerMetrics(self._questions))
        threading.Thread(target=self._in_background, name="remora background", daemon=True).start()
        while True:
            try:
                message = self._next()
            except PeerLostError:
                os._exit(0)
            if message.kind is MessageKind.CLOSE:
                break
            self._do(message)
            del message
        self._close(message.number)

    def _next(self) -> Message:
        while True:
            with self._channel.front():
                while not self._inbox:
                    message = self._channel.next(_IDLE_S)
                    if message is None:
                        self._channel.tidy()
                    else:
                        self._aside_or_later(message)
                for message in self._channel.rest():  # the background is not to be woken for it
                    self._aside_or_later(message)
                return self._inbox.popleft()

    # -- what the server asks ---------------------------------------------------------------------------------------

    def _do(self, message: Message) -> None:
        number, begin_ns = message.number, monotonic_ns()
        drafts: Drafts
        try:
            drafts = self._answer(message)
            kind = MessageKind.DONE
        except RemoraError as error:
            kind, drafts = MessageKind.FAILED, [Draft(error_head(error))]
        except Exception as error:  # ours, not the model's: that has its own words by now
            failure = InternalError(f"{type(error).__name__}: {error}", from_model=True)
            kind, drafts = MessageKind.FAILED, [Draft(error_head(failure))]
        try:
            self._channel.send(kind, number, drafts, begin_ns=begin_ns, end_ns=monotonic_ns())
        except NoRoomError as error:
            failure = InternalError(
                f"the outputs do not get out of the worker process: {error}; let the model answer with less or raise "
                "--backend-config=python,transfer-limit-byte-size=BYTES",
                from_model=True,
            )
            self._channel.send(MessageKind.FAILED, number, [Draft(error_head(failure))])

    def _answer(self, message: Message) -> Drafts:
        match message.kind:
            case MessageKind.EXECUTE:
                return self._execute(message)
            case MessageKind.OPEN:
                self._open(message.items[0])
                return []
            case MessageKind.COMPLETE:
                config = _config(message.items[0])
                self._opened().complete(config)
                import numpy as np

                data = np.frombuffer(config.SerializeToString(), np.uint8)
                return [Draft(head([("config", "UINT8", data.shape)]), [data])]
            case MessageKind.START:
                name, kind, device_id = message.items[0].head.fields["placement"]
                config = _config(message.items[0])
                self._decoupled = config.model_transaction_policy.decoupled
                self._instance = self._opened().instance(config, Placement(name, kind, device_id))
                gc.collect()
                gc.freeze()  # what the model has made by now stays: no collection need look at it again
                return []
        raise InternalError(f"a worker does not know what to do with {message.kind.name}")

    def _open(self, item: Item) -> None:
        fields = item.head.fields
        self._limit_memory()
        log = logging.getLogger()
        set_levels(fields["log_level"], logging.getLogger("remora"), log)
        log.handlers[:] = [ServerLog(self._channel, self._request_ids)]
        name, version, model_dir, path, repository = fields["source"]
        source = Source(
            name,
            version,
            Path(model_dir),
            Path(path),
            Path(repository),
            fields["settings"],
            fields["cpus"],
            (lambda: self._calls) if fields["calls"] else None,
        )
        try:
            with calling_from(Origin(loading=frozenset(fields["loading"]))):
                self._model = PythonBackend().open_here(source, _config(item))
        except RemoraError as error:
            self._failure = error
            raise

    def _opened(self) -> PythonModel:
        if self._model is None:
            raise self._failure or InternalError("no model was opened")
        return self._model

    def _limit_memory(self) -> None:
        if self._memory_limit:
            import resource

            shared = os.fstat(fd).st_size if (fd := getattr(self._channel, "memory_fd", -1)) >= 0 else 0
            limit = self._memory_limit + shared
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    def _close(self, number: int) -> None:
        try:
            if self._instance is not None:
                self._instance.close()
            if self._model is not None:
                self._model.close()
        finally:
            sys.stdout.flush()
            try:
                self._channel.send(MessageKind.DONE, number)
            except PeerLostError:
                os._exit(0)

    # -- executions -------------------------------------------------------------------------------------------------

    def _execute(self, message: Message) -> Drafts:
        instance = self._instance
        if instance is None:
            self._executing.pop(message.number, None)
            raise InternalError("no instance was started")
        number = message.number
        executing = self._executing[number]
        try:
            executing.open_with(self._reader.requests(message.items), streams=self._decoupled)
            if isinstance(message.items, list):
                message.items.clear()  # the requests alone hold the tensors' memory from now on
            outcomes, again = executing.run(instance)
            drafts = self._writer.drafts(outcomes, again)
            executing.returned(outcomes, again)
            return drafts
        except BaseException:
            executing.close()
            raise
        finally:
            if not executing.open:
                self._executing.pop(number, None)

    def stream(self, executing: _Executing, index: int, streamed: Streamed) -> None:
        """Send an answer that streams, or that comes after its execution; waits while the client is far behind.

        Any thread may call.
        """
        if not streamed.final:
            executing.ahead[index].acquire()
        draft = self._writer.draft(streamed, index)
        try:
            self._channel.send(MessageKind.STREAMED, executing.number, [draft])
        except NoRoomError as error:
            failure = InternalError(f"an output does not get out of the worker process: {error}", from_model=True)
            self._channel.send(
                MessageKind.STREAMED, executing.number, [self._writer.draft(Streamed(failure, True), index)]
            )
            streamed = Streamed(failure, True)
        if streamed.final:
            executing.open.discard(index)
            if not executing.open and executing.done:
                self._executing.pop(executing.number, None)

    def stream_soon(self, executing: _Executing, index: int, streamed: Streamed) -> None:
        """The same by the background thread; takes no lock."""
        self._late.put((executing, index, streamed))
        os.write(self._kicked, b"\0")

    def _request_ids(self) -> Sequence[str]:
        executing = list(self._executing.values())
        return [request.form.id for each in executing for request in each.requests if request.form.id]

    def _place_of(self, request: Request) -> tuple[int, int] | None:
        for number, executing in list(self._executing.items()):
            for index, each in enumerate(executing.requests):
                if each is request:
                    return number, index
        return None

    # -- the background ---------------------------------------------------------------------------------------------

    def _in_background(self) -> None:
        poller = select.poll()
        for fd in (self._channel.back_fd, self._lifeline.fileno(), self._kick):
            poller.register(fd, select.POLLIN)
        while True:
            events = {fd for fd, _ in poller.poll()}
            if self._lifeline.fileno() in events and self._lifeline.fileno() != self._channel.back_fd:
                os._exit(0)  # the server is gone, and nobody is left to answer
            try:
                if self._channel.back_fd in events:
                    self._channel.background(self._aside_or_later)
                if self._kick in events:
                    os.read(self._kick, 4096)
                    self._send_late()
            except PeerLostError:
                os._exit(0)

    def _send_late(self) -> None:
        while True:
            try:
                executing, index, streamed = self._late.get_nowait()
            except Empty:
                return
            self.stream(executing, index, streamed)

    def _aside_or_later(self, message: Message) -> None:
        if not self._aside(message):
            self._inbox.append(message)

    def _aside(self, message: Message) -> bool:
        """Do what does not concern the model's thread; False for what does."""
        match message.kind:
            case (
                MessageKind.EXECUTE
            ):  # known from now on: what is told of it may be read before the model's thread gets to it
                self._executing[message.number] = _Executing(self, message.number)
                return False
            case MessageKind.CANCEL | MessageKind.STREAM_READ:
                executing = self._executing.get(message.number)
                if executing is not None:
                    executing.told(message)
            case MessageKind.ANSWER | MessageKind.REFUSED | MessageKind.CALL_STREAMED:
                if message.kind is MessageKind.CALL_STREAMED or not self._questions.answered(message):
                    self._calls.answered(message)
            case _:
                return False
        return True

    def _forked(self) -> None:
        """In a child that the model's code has forked: the channel is its parent's. The child may live on, but if it
        comes back to this loop it ends."""
        self._channel.send = _orphan  # type: ignore[method-assign]
        self._channel.next = _orphan  # type: ignore[method-assign]


def _orphan(*_: object, **__: object) -> Any:
    os._exit(0)


class _Executing:
    """A batch that the model has not done with. It has no requests until the model's thread opens it."""

    def __init__(self, worker: Worker, number: int) -> None:
        self.number = number
        self.requests: list[Request] = []
        self.open: set[int] = set()
        self.ahead: list[threading.Semaphore] = []
        self.done = False
        self._worker = worker
        self._cancelled: list[int] = []

    def open_with(self, requests: list[Request], *, streams: bool) -> None:
        """Begin; some of the requests may be cancelled already. ``streams``: each has a stream of answers."""
        self.open = set(range(len(requests)))
        if streams:  # 2 us each
            self.ahead = [threading.Semaphore(AHEAD) for _ in requests]
        self.requests = requests
        for index in tuple(self._cancelled):  # a later one finds the requests there
            requests[index].cancel()

    def run(self, instance: Instance) -> tuple[Sequence[Outcome | None], frozenset[int]]:
        """Run the requests; their outcomes, and which want another turn. A batch may have waited for this: what was
        cancelled by now does not run, where each request has one answer."""
        requests = self.requests
        kept = [at for at, request in enumerate(requests) if not request.cancelled]
        if self.ahead or len(kept) == len(requests):
            kept = [*range(len(requests))]
        execution = Execution(
            [requests[at] for at in kept],
            lambda index, streamed: self._worker.stream(self, kept[index], streamed),
            lambda index, streamed: self._worker.stream_soon(self, kept[index], streamed),
            copied=True,
        )
        if len(kept) == len(requests):
            return instance.execute(execution), execution.again
        outcomes: list[Outcome | None] = [
            CancelledError(about(request.form.id, "request was cancelled before it ran")) for request in requests
        ]
        for at, outcome in zip(kept, instance.execute(execution) if kept else (), strict=True):
            outcomes[at] = outcome
        return outcomes, frozenset(kept[at] for at in execution.again)

    def returned(self, outcomes: Sequence[object], again: frozenset[int]) -> None:
        """The model's ``execute`` has returned; what it has answered, or wants to see again, is done with."""
        self.done = True
        self.open -= {index for index, outcome in enumerate(outcomes) if outcome is not None} | again

    def told(self, message: Message) -> None:
        """Requests were cancelled, or answers were read."""
        for item in message.items:
            index, _ = index_of(item)
            if message.kind is MessageKind.CANCEL:
                self._cancelled.append(index)
                if self.requests:
                    self.requests[index].cancel()
            else:
                self.ahead[index].release()

    def close(self) -> None:
        """The execution has failed as a whole."""
        self.done = True
        self.open.clear()


def _config(item: Item) -> ModelConfig:
    return ModelConfig.FromString(item.arrays[0].tobytes())
