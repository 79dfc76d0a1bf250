"""Main loop of a worker, which opens one model, starts its instance and runs executions.

The *front* is the process's first thread: it runs the model's code and waits for messages between executions. A second
thread reads while the front is busy (cancellations, answers to the model's calls, clients' reads) and ends the process
when the server is gone. Requests and answers are those of the in-thread backend in `python`; only their transport
differs.
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

from remora.backends import Execution, Instance, Placement, Source, capabilities_of
from remora.backends.calling import Origin, calling_from
from remora.backends.python import PythonBackend, PythonModel, metrics
from remora.backends.python.instance import PythonInstance
from remora.backends.worker.channel import NoRoomError, PeerLostError
from remora.backends.worker.connection import Channel
from remora.backends.worker.encoding import OutcomeWriter, RequestReader, error_head, index_of, is_open_draft
from remora.backends.worker.proxies import ServerCalls, ServerLog, ServerMetrics, ServerRequests
from remora.backends.worker.settings import TRANSFER_LIMIT
from remora.backends.worker.wire import AGAIN, FINAL, Draft, Drafts, Item, Message, MessageKind, head
from remora.errors import CancelledError, InternalError, RemoraError, about
from remora.messages import Outcome, Request, Streamed
from remora.proto.model_config_pb2 import ModelConfig
from remora.system.logs import set_levels

AHEAD = 16
"""Most answers of one stream in flight that the client has not read."""
_IDLE_S = 1.0


class Worker:
    """One model in this process.

    Args:
        channel: to the server.
        lifeline: readable, or hung up, when the server is gone.
        memory_limit: bytes of address space the model may use beyond the memory shared with the server; 0 for no limit.
    """

    def __init__(self, channel: Channel, lifeline: socket.socket, memory_limit: int) -> None:
        self._channel = channel
        self._lifeline = lifeline
        self._memory_limit = memory_limit
        self._inbox: deque[Message] = deque()
        self._late: SimpleQueue[tuple[_Executing, int, Streamed]] = SimpleQueue()
        self._wake_read, self._wake_write = os.pipe()
        for fd in (self._wake_read, self._wake_write):
            os.set_blocking(fd, False)
        self._executing: dict[int, _Executing] = {}
        self._reader = RequestReader()
        self._writer = OutcomeWriter()
        self._requests = ServerRequests(channel)
        self._calls = ServerCalls(self._requests, self._place_of)
        self._model: PythonModel | None = None
        self._instance: Instance | None = None
        self._failure: RemoraError | None = None
        self._decoupled = False

    def run(self) -> None:
        """Serve until the server sends CLOSE or is gone."""
        os.register_at_fork(after_in_child=self._forked)
        metrics.report_to(ServerMetrics(self._requests))
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
                    message = self._channel.poll_next(_IDLE_S)
                    if message is None:
                        self._channel.tidy()
                    else:
                        self._handle_or_queue(message)
                for message in self._channel.rest():  # spares waking the background thread
                    self._handle_or_queue(message)
                return self._inbox.popleft()

    # -- requests of the server -------------------------------------------------------------------------------------

    def _do(self, message: Message) -> None:
        number, begin_ns = message.number, monotonic_ns()
        drafts: Drafts
        try:
            drafts = self._answer(message)
            kind = MessageKind.DONE
        except RemoraError as error:
            kind, drafts = MessageKind.FAILED, [Draft(error_head(error))]
        except Exception as error:  # a fault of this engine, because the model's exceptions are RemoraErrors here
            failure = InternalError(f"{type(error).__name__}: {error}", from_model=True)
            kind, drafts = MessageKind.FAILED, [Draft(error_head(failure))]
        try:
            self._channel.send(kind, number, drafts, begin_ns=begin_ns, end_ns=monotonic_ns())
        except NoRoomError as error:
            if kind is MessageKind.DONE and len(drafts) > 1 and isinstance(drafts, list):
                self._send_one_by_one(number, drafts, begin_ns)
                return
            failure = _unsent("the outputs", error)
            self._channel.send(MessageKind.FAILED, number, [Draft(error_head(failure))])

    def _send_one_by_one(self, number: int, drafts: list[Draft], begin_ns: int) -> None:
        """Send answers that have no room in one message as late ones.

        Only those that are too large alone then fail.
        """
        open_items = [draft if draft.flags & AGAIN else self._writer.draft(None) for draft in drafts]
        self._channel.send(MessageKind.DONE, number, open_items, begin_ns=begin_ns, end_ns=monotonic_ns())
        for index, draft in enumerate(drafts):
            if not draft.flags & AGAIN and not is_open_draft(draft):
                self._send_draft(number, index, draft._replace(flags=index << 8 | FINAL))

    def _send_draft(self, number: int, index: int, draft: Draft) -> bool:
        """Send a streamed or late answer; send an error and return False if it has no room."""
        try:
            self._channel.send(MessageKind.STREAMED, number, [draft])
        except NoRoomError as error:
            failure = _unsent("an output", error)
            self._channel.send(MessageKind.STREAMED, number, [self._writer.draft(Streamed(failure, True), index)])
            return False
        return True

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
                gc.freeze()  # the objects of the loaded model stay, so the collector may skip them
                return [Draft(head(decides=capabilities_of(self._instance).ask_ready is not None))]
            case MessageKind.READY:
                assert isinstance(self._instance, PythonInstance)  # the answer to START has told that it decides
                return [Draft(head(ready=self._instance.is_ready()))]
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
                message.items.clear()  # so that only the requests hold the tensors' memory
            outcomes, rescheduled = executing.run(instance)
            drafts = self._writer.drafts(outcomes, rescheduled)
            executing.returned(outcomes, rescheduled)
            return drafts
        except BaseException:
            executing.close()
            raise
        finally:
            if not executing.open:
                self._executing.pop(number, None)

    def stream(self, executing: _Executing, index: int, streamed: Streamed) -> None:
        """Send a streamed or late answer, waiting while the client is too far behind.

        Any thread may call.
        """
        if not streamed.final:
            executing.ahead[index].acquire()
        sent = self._send_draft(executing.number, index, self._writer.draft(streamed, index))
        if streamed.final or not sent:
            executing.open.discard(index)
            if not executing.open and executing.done:
                self._executing.pop(executing.number, None)

    def stream_soon(self, executing: _Executing, index: int, streamed: Streamed) -> None:
        """Send an answer from the background thread. Takes no lock."""
        self._late.put((executing, index, streamed))
        os.write(self._wake_write, b"\0")

    def _request_ids(self) -> Sequence[str]:
        executing = list(self._executing.values())
        return [request.form.id for each in executing for request in each.requests if request.form.id]

    def _place_of(self, request: Request) -> tuple[int, int] | None:
        for number, executing in list(self._executing.items()):
            for index, each in enumerate(executing.requests):
                if each is request:
                    return number, index
        return None

    # -- background thread ------------------------------------------------------------------------------------------

    def _in_background(self) -> None:
        poller = select.poll()
        for fd in (self._channel.back_fd, self._lifeline.fileno(), self._wake_read):
            poller.register(fd, select.POLLIN)
        while True:
            events = {fd for fd, _ in poller.poll()}
            if self._lifeline.fileno() in events and self._lifeline.fileno() != self._channel.back_fd:
                os._exit(0)  # the server is gone
            try:
                if self._channel.back_fd in events:
                    self._channel.background(self._handle_or_queue)
                if self._wake_read in events:
                    os.read(self._wake_read, 4096)
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

    def _handle_or_queue(self, message: Message) -> None:
        if not self._handle_aside(message):
            self._inbox.append(message)

    def _handle_aside(self, message: Message) -> bool:
        """Handle a message and return True, or return False if it is for the model's thread."""
        match message.kind:
            case MessageKind.EXECUTE:
                # Registered now, because messages about it may be read before the model's thread starts it.
                self._executing[message.number] = _Executing(self, message.number)
                return False
            case MessageKind.CANCEL | MessageKind.STREAM_READ:
                executing = self._executing.get(message.number)
                if executing is not None:
                    executing.update(message)
            case MessageKind.ANSWER | MessageKind.REFUSED | MessageKind.CALL_STREAMED:
                if message.kind is MessageKind.CALL_STREAMED or not self._requests.handle_answer(message):
                    self._calls.handle_answer(message)
            case _:
                return False
        return True

    def _forked(self) -> None:
        """Detach a child that the model's code has forked from its parent's channel.

        The child may continue, but ends if it returns to this loop.
        """
        self._channel.send = _orphan  # type: ignore[method-assign]
        self._channel.next = _orphan  # type: ignore[method-assign]


def _unsent(what: str, error: NoRoomError) -> InternalError:
    return InternalError(
        f"{what} cannot be sent to the server: {error}; let the model return less or raise {TRANSFER_LIMIT}",
        from_model=True,
    )


def _orphan(*_: object, **__: object) -> Any:
    os._exit(0)


class _Executing:
    """A batch that the model has not finished.

    It has no requests until the model's thread opens it.
    """

    def __init__(self, worker: Worker, number: int) -> None:
        self.number = number
        self.requests: list[Request] = []
        self.open: set[int] = set()
        self.ahead: list[threading.Semaphore] = []
        self.done = False
        self._worker = worker
        self._cancelled: list[int] = []

    def open_with(self, requests: list[Request], *, streams: bool) -> None:
        """Set the requests, some of which may be cancelled already.

        ``streams``: each has a stream of answers.
        """
        self.open = set(range(len(requests)))
        if streams:  # 2 us each
            self.ahead = [threading.Semaphore(AHEAD) for _ in requests]
        self.requests = requests
        for index in tuple(self._cancelled):  # later cancels find the requests
            requests[index].cancel()

    def run(self, instance: Instance) -> tuple[Sequence[Outcome | None], frozenset[int]]:
        """Run the requests and return their outcomes and the indices to schedule again.

        Requests cancelled before the batch started do not run, unless the model is decoupled.
        """
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
            return instance.execute(execution), execution.rescheduled
        outcomes: list[Outcome | None] = [
            CancelledError(about(request.form.id, "request was cancelled before it ran")) for request in requests
        ]
        for at, outcome in zip(kept, instance.execute(execution) if kept else (), strict=True):
            outcomes[at] = outcome
        return outcomes, frozenset(kept[at] for at in execution.rescheduled)

    def returned(self, outcomes: Sequence[object], rescheduled: frozenset[int]) -> None:
        """Close the requests that ``execute`` has answered or that run again."""
        self.done = True
        self.open -= {index for index, outcome in enumerate(outcomes) if outcome is not None} | rescheduled

    def update(self, message: Message) -> None:
        """Apply a message about cancelled requests or about answers that were read."""
        for item in message.items:
            index, _ = index_of(item)
            if message.kind is MessageKind.CANCEL:
                self._cancelled.append(index)
                if self.requests:
                    self.requests[index].cancel()
            else:
                self.ahead[index].release()

    def close(self) -> None:
        """Close all requests, because the execution has failed as a whole."""
        self.done = True
        self.open.clear()


def _config(item: Item) -> ModelConfig:
    return ModelConfig.FromString(item.arrays[0].tobytes())
