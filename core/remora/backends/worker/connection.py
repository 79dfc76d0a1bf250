"""Connection to one worker process run, with its outstanding executions and requests.

Messages are handled by the thread that reads them: the thread that runs an execution, the event loop that watches the
worker, or the supervisor's thread. Handlers never wait.

Invariant: every execution and request is answered exactly once, by the worker or by the end of its process.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from functools import partial
from queue import SimpleQueue
from time import monotonic_ns
from typing import NamedTuple, Protocol

from remora.backends import Done, Execution, NotBegunError
from remora.backends.worker.channel import Handle, MemoryChannel, NoRoomError, PeerLostError
from remora.backends.worker.encoding import (
    error_from,
    error_head,
    index_of,
    is_open,
    outcome_from,
    outcomes_from,
    rescheduled_in,
)
from remora.backends.worker.polling import Look, LoopPoll
from remora.backends.worker.process import WorkerProcess
from remora.backends.worker.ring import RingError
from remora.backends.worker.wire import AGAIN, FINAL, Draft, Drafts, Item, Message, MessageKind, Stacked, WireError
from remora.errors import InternalError, RemoraError
from remora.messages import Outcome, Request, Streamed, Watcher

_EXIT_REASON_WAIT_S = 5.0
"""How long to wait for the supervisor to set the reason of the exit."""
POLL_S = 0.025
"""Interval at which a waiting thread checks for cancellation and timeout."""


class Channel(Protocol):
    """Interface of `channel.MemoryChannel` and `pipes.PipeChannel`."""

    @property
    def back_fd(self) -> int: ...
    def send(
        self,
        kind: MessageKind,
        number: int = 0,
        items: Drafts = (),
        *,
        begin_ns: int = 0,
        end_ns: int = 0,
        wait_s: float | None = None,
    ) -> bool: ...
    def front(self) -> AbstractContextManager[None]: ...
    def next(self, timeout_s: float) -> Message | None: ...
    def poll_next(self, timeout_s: float) -> Message | None: ...
    def rest(self) -> Iterable[Message]: ...
    def background(self, handle: Handle, *, last: bool = False) -> None: ...
    def tidy(self) -> None: ...
    def close(self) -> None: ...


class _Stream:
    """Answers to one request of a decoupled model, delivered by a separate thread.

    The thread keeps a slow client from delaying other streams, and notifies the worker of each answer read.
    """

    def __init__(self, execution: Execution, index: int, read: Callable[[int], None]) -> None:
        self._send = execution.send
        self._index = index
        self._read = read
        self._queue: SimpleQueue[Streamed | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.open = True

    def put(self, streamed: Streamed) -> None:
        """Queue an answer without waiting."""
        self.open = not streamed.final
        if self._thread is None and streamed.final:
            self._send(self._index, streamed)  # because a final answer never waits for the client
            return
        self._queue.put(streamed)
        if self._thread is None:
            self._thread = threading.Thread(target=self._deliver, name="remora stream", daemon=True)
            self._thread.start()

    def hand_over(self) -> None:
        """Close the stream for this execution after its answers are delivered.

        Another execution continues it.
        """
        self.open = False
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()

    def _deliver(self) -> None:
        final = False
        while not final:
            streamed = self._queue.get()
            if streamed is None:
                return
            final = streamed.final
            self._send(self._index, streamed)
            if not final:
                self._read(self._index)


class _Running:
    """An execution that the worker has not finished.

    It has the streams of a decoupled model, or ``done`` and a deadline if an event loop has begun it.
    """

    def __init__(
        self, execution: Execution, streams: list[_Stream], done: Done | None = None, timeout_s: float = 0
    ) -> None:
        self.execution = execution
        self.streams = streams
        self.done = done
        self.timeout_s = timeout_s
        self.sent_ns = 0  # when it was sent to an idle worker by an event loop
        self.end: float | None = None
        self.late: frozenset[int] = frozenset()  # requests without an answer when the model returned
        self.early: set[int] = set()  # late requests answered before the DONE message
        self.sent_cancels: set[int] | None = None  # indices whose cancel was sent; None until the execution was sent
        self.answer: Message | None = None

    def start_timer(self) -> None:
        """Start the timeout, because the worker starts this execution now."""
        self.end = time.monotonic() + self.timeout_s if self.timeout_s else None

    def set_answer(self, message: Message) -> None:
        """Record that the worker's ``execute`` has returned.

        Streams answered by that return are closed, and the scheduler ends them.
        """
        if message.kind is MessageKind.DONE:
            for stream, item in zip(self.streams, message.items, strict=False):
                stream.open = stream.open and is_open(item)
        self.answer = message


class _Late(NamedTuple):
    """An execution that has ended, with the indices of its unanswered requests."""

    execution: Execution
    open: set[int]


class WorkerConnection:
    """Connection to a running worker.

    Args:
        channel: to the process.
        process: running.
        instance: the instance's name, for errors; may be set later.
        handle_other: handles messages that are not answers: log lines, metrics, calls of other models.
    """

    def __init__(
        self,
        channel: Channel,
        process: WorkerProcess,
        instance: str,
        handle_other: Callable[[WorkerConnection, Message], None],
    ) -> None:
        self.channel = channel
        self.process = process
        self.ended = threading.Event()
        self.polled_slowly = False
        """True while the supervisor polls slowly, so that a new execution must wake it."""
        self.answered = False
        """True once the process has answered an execution."""
        self.reason = ""
        self.restarts = False
        self.instance = instance
        self._broke_protocol = False  # its last messages may be invalid or missing
        self._handle_other = handle_other
        self._numbers = itertools.count(1)
        self._pending: dict[int, Future[Sequence[Item]]] = {}
        self._running: dict[int, _Running] = {}
        self._late: dict[int, _Late] = {}
        self._watched: tuple[Watcher, MemoryChannel] | None = None
        self._watching = threading.Lock()  # held to change ``_watched``
        self._poll: LoopPoll | None = None
        self._flushing = threading.Lock()
        self._outbox: deque[tuple[MessageKind, int, Sequence[Draft]]] = deque()

    def _look(self, channel: MemoryChannel, *, last: bool) -> Look:
        """Handle the messages that a poll of the event loop finds."""
        last = last or not self._running
        try:
            return channel.poll_in_loop(self.handle, last=last)
        except (WireError, RingError) as error:
            self.fail_protocol(error)
            return Look.ENDED

    # -- requests ---------------------------------------------------------------------------------------------------

    def request(self, kind: MessageKind, items: Sequence[Draft] = ()) -> Future[Sequence[Item]]:
        """Send a request other than an execution and return a future.

        The future receives the answer's items, or a RemoraError.
        """
        number = next(self._numbers)
        future: Future[Sequence[Item]] = Future()
        self._pending[number] = future
        with suppress(PeerLostError):  # ``end`` answers
            self.channel.send(kind, number, items)
        if self.ended.is_set():
            self._fail(self.exit_error())
        return future

    def post(self, kind: MessageKind, number: int, items: Sequence[Draft] = ()) -> None:
        """Send a message without waiting, or queue it until there is room."""
        self._outbox.append((kind, number, items))
        self.flush()

    def flush(self) -> bool:
        """Send queued messages in order and return False if some remain."""
        while self._outbox:  # checked again after the release, for threads that found the lock taken
            if not self._flushing.acquire(blocking=False):
                return False
            try:
                while self._outbox:
                    if not self._send_next():
                        return False
            finally:
                self._flushing.release()
        return True

    def _send_next(self) -> bool:
        kind, number, items = self._outbox[0]
        try:
            if not self.channel.send(kind, number, items, wait_s=0):
                return False
        except PeerLostError:
            self._outbox.clear()  # ``end`` answers
            return True
        except NoRoomError as error:
            if kind is MessageKind.CALL_STREAMED:  # the model waits for an answer
                failure = InternalError(f"the answer does not fit into the worker's memory: {error}")
                self._outbox[0] = (kind, number, [Draft(error_head(failure), flags=FINAL)])
                return True
        self._outbox.popleft()
        return True

    def execute(
        self, drafts: Drafts, execution: Execution, timeout_s: float, *, decoupled: bool
    ) -> Sequence[Outcome | None]:
        """Run a batch in the worker.

        Raises:
            RemoraError: the whole execution failed, took longer than ``timeout_s`` (0: no limit), or the worker died.
            NoRoomError: the inputs cannot be sent at once, or not in time.
        """
        number = next(self._numbers)
        streams = [self._stream_of(number, execution, at) for at in range(len(execution.requests) if decoupled else 0)]
        running = self._running[number] = _Running(execution, streams, timeout_s=timeout_s)
        running.start_timer()
        done = False
        try:
            with self.channel.front():
                sent = self.channel.send(MessageKind.EXECUTE, number, drafts, wait_s=0)
                message = self._await(number, running) if sent else None
            if message is None:  # no room now, and the reading thread must not wait for it
                self.channel.send(MessageKind.EXECUTE, number, drafts, wait_s=timeout_s or None)
                with self.channel.front():
                    message = self._await(number, running)
            outcomes = self._outcomes(message, running)
            for index in execution.rescheduled if decoupled else ():
                streams[index].hand_over()
            done = True
            return outcomes
        except PeerLostError:
            self.ended.wait(_EXIT_REASON_WAIT_S)
            raise self.exit_error() from None
        except (WireError, RingError) as error:
            raise self.fail_protocol(error) from None
        finally:
            if not done or not any(stream.open for stream in streams):
                self._running.pop(number, None)

    def begin(self, drafts: Drafts, execution: Execution, timeout_s: float, watcher: Watcher, done: Done) -> bool:
        """Begin a batch from an event loop without waiting.

        ``done`` receives what ``execute`` would have returned or raised. A batch queued behind another receives a
        NotBegunError if the worker dies before starting it. Returns False if nothing was begun, because there is no
        room now, the worker is gone, or another loop watches it.
        """
        channel = self._watched_by(watcher)
        if channel is None:
            return False
        number = next(self._numbers)
        running = self._running[number] = _Running(execution, [], done, timeout_s)
        # After registering, so that the thread that ends the previous batch sees this one.
        behind = list(self._running)[:1] != [number]
        if not behind:
            running.start_timer()
            running.sent_ns = monotonic_ns()
        sent = False
        with suppress(PeerLostError, NoRoomError):
            sent = channel.send(MessageKind.EXECUTE, number, drafts, wait_s=0)
        if not sent or self.ended.is_set():
            return self._running.pop(number, None) is None  # ``end`` may have reported it already
        running.sent_cancels = set()
        if self.polled_slowly:
            self.polled_slowly = False
            channel.rouse()
        for request in execution.requests if behind else ():  # the worker may start it before the next check
            request.when_cancelled(lambda: self._send_cancels(number))
        if running.sent_ns and self._poll is not None:
            self._poll.begin(running.sent_ns)
        return True

    def _watched_by(self, watcher: Watcher) -> MemoryChannel | None:
        """Return the channel if this loop watches it.

        The first loop that calls this becomes the watching one, and after its end the next that calls.
        """
        watched = self._watched
        if watched is not None and watched[0] is watcher:
            return watched[1]
        channel = self.channel
        if not isinstance(channel, MemoryChannel):
            return None
        with suppress(PeerLostError), self._watching:
            if self._watched is None or self._watched[0].is_closed():
                self._watch(watcher, channel)
                return channel
        return None

    def _watch(self, watcher: Watcher, channel: MemoryChannel) -> None:
        """Have a loop read the messages. Raises PeerLostError if the channel is closed."""

        def turn(wake: int) -> None:
            try:
                channel.turn(wake, self.handle)
            except (WireError, RingError) as error:
                self.fail_protocol(error)

        channel.watch(watcher, turn)
        self._watched = watcher, channel
        self._poll = LoopPoll(channel.budget, watcher.call_next, partial(self._look, channel), monotonic_ns)

    def read_for_loop(self, now_s: float) -> None:
        """Handle the messages that the watching loop has left unread, as a closed one does.

        The supervisor's thread calls this. Raises as ``MemoryChannel.next`` does.
        """
        if self._watched is not None:
            self._watched[1].read_for_loop(self.handle, now_s, POLL_S)

    def _stream_of(self, number: int, execution: Execution, index: int) -> _Stream:
        return _Stream(
            execution, index, lambda index: self.post(MessageKind.STREAM_READ, number, [Draft(flags=index << 8)])
        )

    def _await(self, number: int, running: _Running) -> Message:
        running.sent_cancels = set()
        while running.answer is None:
            message = self.channel.next(POLL_S)
            if message is None:
                self._send_cancels(number)
                if self._overdue(running):
                    raise PeerLostError
            else:
                self.handle(message)
        return running.answer

    def _overdue(self, running: _Running) -> bool:
        """Return True and kill the process if the execution has timed out."""
        if running.end is None or time.monotonic() < running.end:
            return False
        self.reason = f"it did not answer within {running.timeout_s:g} s (execute-timeout) and was ended"
        self.process.kill()
        return True

    def _outcomes(self, message: Message, running: _Running) -> Sequence[Outcome | None]:
        execution = running.execution
        execution.input_end_ns, execution.output_start_ns = message.begin_ns, message.end_ns
        if message.kind is MessageKind.FAILED:
            raise _failure(message)
        execution.rescheduled = rescheduled_in(message.items)
        execution.late = running.late
        return outcomes_from(message.items)

    def _expect_late(self, message: Message, running: _Running) -> None:
        """Track the requests that a returned execution has not answered.

        The worker may still answer them.
        """
        if isinstance(message.items, Stacked):
            return  # a stack holds only answers
        items = enumerate(message.items)
        running.late = frozenset(index for index, item in items if is_open(item) and not item.flags & AGAIN)
        unanswered = set(running.late - running.early)
        if unanswered:
            self._late[message.number] = _Late(running.execution, unanswered)
            for index in running.late & unanswered:
                cancel = [Draft(flags=index << 8)]
                request = running.execution.requests[index]
                request.when_cancelled(partial(self._cancel_late, message.number, cancel))

    def _cancel_late(self, number: int, cancel: Sequence[Draft]) -> None:
        if number in self._late:
            self.post(MessageKind.CANCEL, number, cancel)

    # -- handling ---------------------------------------------------------------------------------------------------

    def handle(self, message: Message) -> None:
        """Process a message in the reading thread, without waiting."""
        match message.kind:
            case MessageKind.DONE | MessageKind.FAILED:
                running = self._running.get(message.number)
                future = self._pending.pop(message.number, None)
                self.answered = self.answered or running is not None
                if running is not None and not running.streams and message.kind is MessageKind.DONE:
                    self._expect_late(message, running)
                if running is not None and running.done is not None:
                    self._finish(message, running)
                elif running is not None:
                    running.set_answer(message)
                elif future is None:
                    return
                elif message.kind is MessageKind.DONE:
                    future.set_result(message.items)
                else:
                    future.set_exception(_failure(message))
            case MessageKind.STREAMED:
                self._stream(message)
            case _:
                self._handle_other(self, message)

    def _finish(self, message: Message, running: _Running) -> None:
        result: Sequence[Outcome | None] | RemoraError
        try:
            result = self._outcomes(message, running)
        except RemoraError as error:
            result = error
        self._end(message.number, result)

    def _end(self, number: int, result: Sequence[Outcome | None] | Exception) -> None:
        """Report the end of an execution to its event loop unless it was reported before."""
        running = self._running.pop(number, None)
        if running is None or running.done is None:
            return
        if running.sent_ns and isinstance(self.channel, MemoryChannel):
            self.channel.budget.record_wait(monotonic_ns() - running.sent_ns)
        for following in list(self._running.values())[:1]:
            following.start_timer()
        running.done(result)

    def _stream(self, message: Message) -> None:
        if (late := self._late.get(message.number)) is not None:
            self._answer_late(message, late)
            return
        if (running := self._running.get(message.number)) is None:
            return
        for item in message.items:
            index, final = index_of(item)
            if not running.streams and index < len(running.execution.requests):
                running.early.add(index)
                running.execution.send(index, Streamed(outcome_from(item), final=True))
            elif index < len(running.streams) and running.streams[index].open:
                running.streams[index].put(Streamed(outcome_from(item), final))
        if running.answer is not None and not any(stream.open for stream in running.streams):
            self._running.pop(message.number, None)

    def _answer_late(self, message: Message, late: _Late) -> None:
        for item in message.items:
            index, _ = index_of(item)
            if index in late.open:
                late.open.discard(index)
                late.execution.send(index, Streamed(outcome_from(item), final=True))
        if not late.open:
            self._late.pop(message.number, None)

    def requests_of(self, number: int) -> Sequence[Request]:
        """Return the requests of an execution with unanswered requests, else an empty sequence."""
        running = self._running.get(number) or self._late.get(number)
        return running.execution.requests if running is not None else ()

    @property
    def current(self) -> Sequence[str]:
        """Ids of the requests that the model is processing."""
        running = next((each for each in list(self._running.values()) if each.answer is None), None)
        return [request.form.id for request in running.execution.requests if request.form.id] if running else ()

    @property
    def streaming(self) -> bool:
        """True if an execution is running or has open streams."""
        return bool(self._running)

    def check_executions(self) -> None:
        """Handle cancellation and timeouts of the executions that no thread waits for."""
        for number, running in list(self._running.items()):
            if running.streams or running.done is not None:
                self._send_cancels(number)
            if running.done is not None and self._overdue(running):
                return

    def _send_cancels(self, number: int) -> None:
        running = self._running.get(number)
        if running is None or (sent_cancels := running.sent_cancels) is None:
            return
        for index, request in enumerate(running.execution.requests):
            if request.cancelled and index not in sent_cancels:
                self.post(MessageKind.CANCEL, number, [Draft(flags=index << 8)])
                sent_cancels.add(index)  # afterwards, because sending twice is harmless

    # -- the end ----------------------------------------------------------------------------------------------------

    def end(self, reason: str) -> None:
        """Fail all outstanding work after the process has ended.

        ``reason`` applies unless a more precise one is known.
        """
        self.reason = self.reason or reason
        self.ended.set()
        error = self.exit_error()
        self._fail(error)
        begun: Exception = error
        for number in list(self._running):
            running = self._running.get(number)
            for stream in running.streams if running is not None else ():
                if stream.open:
                    stream.put(Streamed(error, True))
            if running is not None and running.done is not None:
                self._end(number, begun)
                begun = error if self._broke_protocol else NotBegunError()  # a worker runs batches in order
        for late in list(self._late.values()):
            for index in list(late.open):
                late.execution.send(index, Streamed(error, True))
        self._late.clear()
        self.channel.close()
        self.process.close()

    def _fail(self, error: RemoraError) -> None:
        for number in list(self._pending):
            if (future := self._pending.pop(number, None)) is not None:
                future.set_exception(error)

    def exit_error(self) -> InternalError:
        """Return the error for outstanding work of an ended worker [Y13]."""
        return InternalError(
            f"Stub process '{self.instance}' is not healthy: {self.reason or 'its process does not answer'}"
            + ("; the server starts it again" if self.restarts else ""),
            from_model=True,
        )

    def fail_protocol(self, error: Exception) -> InternalError:
        """Kill a worker that has sent invalid data, because it cannot be trusted."""
        self.reason = f"it broke the protocol ({error}) and was ended: native code that the model uses may be at fault"
        self._broke_protocol = True
        self.process.kill()
        return self.exit_error()


def _failure(message: Message) -> RemoraError:
    error = error_from(message.items[0]) if message.items else None
    return error or InternalError("a worker failed without a reason")
