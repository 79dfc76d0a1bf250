"""One life of one worker process: what was asked of it and who gets its answers; the law: whatever was asked is
answered exactly once, by the worker or by its end.

Messages are handled by whoever reads: the thread that runs an execution, the event loop that has begun one, or the
keeper's thread. None of them waits here.
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
    turns_again,
)
from remora.backends.worker.process import WorkerProcess
from remora.backends.worker.ring import RingError
from remora.backends.worker.wire import AGAIN, FINAL, Draft, Drafts, Item, Message, MessageKind, Stacked, WireError
from remora.errors import InternalError, RemoraError
from remora.messages import Outcome, Request, Streamed, Watcher

_LAST_WORDS_S = 5.0
"""How long to wait for the keeper to say why the process ended."""
LOOK_S = 0.025
"""How often who waits for an execution looks whether its requests were cancelled or its time is over."""


class Channel(Protocol):
    """See `channel.MemoryChannel`, whose methods these are."""

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
    def rest(self) -> Iterable[Message]: ...
    def background(self, handle: Handle) -> None: ...
    def tidy(self) -> None: ...
    def close(self) -> None: ...


class _Stream:
    """The answers to one request of a decoupled model, handed on by a thread of their own: a client that reads slowly
    holds up nobody else, and the worker is told how far it has come."""

    def __init__(self, execution: Execution, index: int, read: Callable[[int], None]) -> None:
        self._send = execution.send
        self._index = index
        self._read = read
        self._queue: SimpleQueue[Streamed | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self.open = True

    def put(self, streamed: Streamed) -> None:
        """Hand one on. Does not wait."""
        self.open = not streamed.final
        if self._thread is None and streamed.final:
            self._send(self._index, streamed)  # a final one never waits for the client
            return
        self._queue.put(streamed)
        if self._thread is None:
            self._thread = threading.Thread(target=self._deliver, name="remora stream", daemon=True)
            self._thread.start()

    def hand_over(self) -> None:
        """Let another execution go on with the stream, once all that this one has sent is handed on."""
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
    """An execution that the worker has not done with: its streams if it is decoupled, and if it was begun by an event
    loop, who waits for its end and until when."""

    def __init__(
        self, execution: Execution, streams: list[_Stream], done: Done | None = None, timeout_s: float = 0
    ) -> None:
        self.execution = execution
        self.streams = streams
        self.done = done
        self.timeout_s = timeout_s
        self.end: float | None = None
        self.late: frozenset[int] = frozenset()  # which requests the model has returned without an answer to
        self.early: set[int] = set()  # which of these were answered before that was known here
        self.told: set[int] | None = None  # of which cancels the worker was told; None until it knows the execution
        self.answer: Message | None = None

    def has_its_turn(self) -> None:
        """The worker goes to work on it: from now on its time counts."""
        self.end = time.monotonic() + self.timeout_s if self.timeout_s else None

    def answered(self, message: Message) -> None:
        """The worker's ``execute`` has returned. Streams that it has answered by that are ended by the scheduler."""
        if message.kind is MessageKind.DONE:
            for stream, item in zip(self.streams, message.items, strict=False):
                stream.open = stream.open and is_open(item)
        self.answer = message


class _Late(NamedTuple):
    """An execution that has ended, and which of its requests the model still has to answer."""

    execution: Execution
    open: set[int]


class WorkerConnection:
    """A connection to a running worker.

    Args:
        channel: to the process.
        process: running.
        instance: the instance's name, for errors; may be set once it is known.
        aside: handles what is neither an answer nor a streamed one: log lines, metrics, calls of other models.
    """

    def __init__(
        self,
        channel: Channel,
        process: WorkerProcess,
        instance: str,
        aside: Callable[[WorkerConnection, Message], None],
    ) -> None:
        self.channel = channel
        self.process = process
        self.ended = threading.Event()
        self.dozing = False
        """The keeper looks after executions only when it is woken."""
        self.reason = ""
        self.restarts = False
        self.instance = instance
        self._lied = False  # what it has said last may be nonsense, or missing
        self._aside = aside
        self._numbers = itertools.count(1)
        self._asked: dict[int, Future[Sequence[Item]]] = {}
        self._running: dict[int, _Running] = {}
        self._late: dict[int, _Late] = {}
        self._watched: tuple[Watcher, MemoryChannel] | None = None
        self._flushing = threading.Lock()
        self._outbox: deque[tuple[MessageKind, int, Sequence[Draft]]] = deque()

    # -- asking -----------------------------------------------------------------------------------------------------

    def ask(self, kind: MessageKind, items: Sequence[Draft] = ()) -> Future[Sequence[Item]]:
        """Ask for something that is no execution; the future gets the answer's items, or a RemoraError."""
        number = next(self._numbers) & 0xFFFFFFFF
        future: Future[Sequence[Item]] = Future()
        self._asked[number] = future
        with suppress(PeerLostError):  # the end of the process answers, soon
            self.channel.send(kind, number, items)
        if self.ended.is_set():
            self._fail(self.died())
        return future

    def tell(self, kind: MessageKind, number: int, items: Sequence[Draft] = ()) -> None:
        """Send something without waiting; it goes out later when there is no room now."""
        self._outbox.append((kind, number, items))
        self.flush()

    def flush(self) -> bool:
        """Send what could not be sent, in its order; False when something is left for the next time."""
        while self._outbox:  # once more after giving the lock back: whoever found it taken relies on that
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
            self._outbox.clear()  # the end of the process answers
            return True
        except NoRoomError as error:
            if kind is MessageKind.CALL_STREAMED:  # the model waits for an answer
                failure = InternalError(f"the answer does not get into the worker process: {error}")
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
        """
        number = next(self._numbers) & 0xFFFFFFFF
        streams = [self._stream_of(number, execution, at) for at in range(len(execution.requests) if decoupled else 0)]
        running = self._running[number] = _Running(execution, streams, timeout_s=timeout_s)
        running.has_its_turn()
        done = False
        try:
            with self.channel.front():
                sent = self.channel.send(MessageKind.EXECUTE, number, drafts, wait_s=0)
                message = self._await(number, running) if sent else None
            if message is None:  # there is no room now: who reads must not wait for it
                self.channel.send(MessageKind.EXECUTE, number, drafts, wait_s=timeout_s or None)
                with self.channel.front():
                    message = self._await(number, running)
            outcomes = self._outcomes(message, running)
            for index in execution.again if decoupled else ():
                streams[index].hand_over()
            done = True
            return outcomes
        except NoRoomError as error:
            raise InternalError(
                f"the inputs do not get into the worker process of '{self.instance}': {error}; send smaller requests "
                "or raise --backend-config=python,transfer-limit-byte-size=BYTES"
            ) from None
        except PeerLostError:
            self.ended.wait(_LAST_WORDS_S)
            raise self.died() from None
        except (WireError, RingError) as error:
            raise self.confused(error) from None
        finally:
            if not done or not any(stream.open for stream in streams):
                self._running.pop(number, None)

    def begin(self, drafts: Drafts, execution: Execution, timeout_s: float, watcher: Watcher, done: Done) -> bool:
        """The same from an event loop, without waiting: ``done`` is told what ``execute`` would have returned or
        raised. Behind another that was begun it waits for its turn, and is told a NotBegunError if that never comes.
        False when nothing was begun: there is no room now, the worker is gone, or another loop watches it."""
        channel = self._watched_by(watcher)
        if channel is None:
            return False
        number = next(self._numbers) & 0xFFFFFFFF
        running = self._running[number] = _Running(execution, [], done, timeout_s)
        behind = list(self._running)[:1] != [number]  # asked afterwards: who ends the one before finds this one there
        if not behind:
            running.has_its_turn()
        sent = False
        with suppress(PeerLostError, NoRoomError):
            sent = channel.send(MessageKind.EXECUTE, number, drafts, wait_s=0)
        if not sent or self.ended.is_set():
            return self._running.pop(number, None) is None  # its end may have been told already
        running.told = set()
        if self.dozing:
            self.dozing = False
            channel.rouse()
        for request in execution.requests if behind else ():  # the worker may get to it before the next look
            request.when_cancelled(lambda: self._tell_cancelled(number))
        return True

    def _watched_by(self, watcher: Watcher) -> MemoryChannel | None:
        """The channel, if this loop watches it; the first one that asks does."""
        channel = self.channel
        if self._watched is None and isinstance(channel, MemoryChannel):

            def turn(wake: int) -> None:
                try:
                    channel.turn(wake, self.handle)
                except (WireError, RingError) as error:
                    self.confused(error)

            try:
                channel.watch(watcher, turn)
            except PeerLostError:
                return None
            self._watched = watcher, channel
        return self._watched[1] if self._watched is not None and self._watched[0] is watcher else None

    def _stream_of(self, number: int, execution: Execution, index: int) -> _Stream:
        return _Stream(
            execution, index, lambda index: self.tell(MessageKind.STREAM_READ, number, [Draft(flags=index << 8)])
        )

    def _await(self, number: int, running: _Running) -> Message:
        running.told = set()
        while running.answer is None:
            message = self.channel.next(LOOK_S)
            if message is None:
                self._tell_cancelled(number)
                if self._overdue(running):
                    raise PeerLostError
            else:
                self.handle(message)
        return running.answer

    def _overdue(self, running: _Running) -> bool:
        """Has it taken too long? Then the process is ended."""
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
        execution.again = turns_again(message.items)
        execution.late = running.late
        return outcomes_from(message.items)

    def _expect_late(self, message: Message, running: _Running) -> None:
        """The worker has returned; it may still answer the requests that it has given nothing for."""
        if isinstance(message.items, Stacked):
            return  # answers, all of them
        items = enumerate(message.items)
        running.late = frozenset(index for index, item in items if is_open(item) and not item.flags & AGAIN)
        left = set(running.late - running.early)
        if left:
            self._late[message.number] = _Late(running.execution, left)
            for index in running.late & left:
                cancel = [Draft(flags=index << 8)]
                request = running.execution.requests[index]
                request.when_cancelled(partial(self._cancel_late, message.number, cancel))

    def _cancel_late(self, number: int, cancel: Sequence[Draft]) -> None:
        if number in self._late:
            self.tell(MessageKind.CANCEL, number, cancel)

    # -- handling ---------------------------------------------------------------------------------------------------

    def handle(self, message: Message) -> None:
        """Do what a message asks for. Called by who reads; does not wait."""
        match message.kind:
            case MessageKind.DONE | MessageKind.FAILED:
                running = self._running.get(message.number)
                future = self._asked.pop(message.number, None)
                if running is not None and not running.streams and message.kind is MessageKind.DONE:
                    self._expect_late(message, running)
                if running is not None and running.done is not None:
                    self._finish(message, running)
                elif running is not None:
                    running.answered(message)
                elif future is None:
                    return
                elif message.kind is MessageKind.DONE:
                    future.set_result(message.items)
                else:
                    future.set_exception(_failure(message))
            case MessageKind.STREAMED:
                self._stream(message)
            case _:
                self._aside(self, message)

    def _finish(self, message: Message, running: _Running) -> None:
        result: Sequence[Outcome | None] | RemoraError
        try:
            result = self._outcomes(message, running)
        except RemoraError as error:
            result = error
        self._end(message.number, result)

    def _end(self, number: int, result: Sequence[Outcome | None] | Exception) -> None:
        """Tell the loop that has begun an execution how it ended, unless that was told before."""
        running = self._running.pop(number, None)
        if running is None or running.done is None:
            return
        for following in list(self._running.values())[:1]:
            following.has_its_turn()
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
        """The requests of an execution that is under way, or has left requests open; none when it is not."""
        running = self._running.get(number) or self._late.get(number)
        return running.execution.requests if running is not None else ()

    @property
    def current(self) -> Sequence[str]:
        """The ids of the requests that the model works on."""
        running = next((each for each in list(self._running.values()) if each.answer is None), None)
        return [request.form.id for request in running.execution.requests if request.form.id] if running else ()

    @property
    def streaming(self) -> bool:
        """Is an execution under way, or are answers still to come from one?"""
        return bool(self._running)

    def look(self) -> None:
        """Look after the executions that no thread waits for: cancelled requests, time that is over."""
        for number, running in list(self._running.items()):
            if running.streams or running.done is not None:
                self._tell_cancelled(number)
            if running.done is not None and self._overdue(running):
                return

    def _tell_cancelled(self, number: int) -> None:
        running = self._running.get(number)
        if running is None or (told := running.told) is None:
            return
        for index, request in enumerate(running.execution.requests):
            if request.cancelled and index not in told:
                self.tell(MessageKind.CANCEL, number, [Draft(flags=index << 8)])
                told.add(index)  # afterwards: another thread may look meanwhile, and twice does no harm

    # -- the end ----------------------------------------------------------------------------------------------------

    def end(self, reason: str) -> None:
        """The process is gone: everything that was asked fails. ``reason`` counts unless a better one is known."""
        self.reason = self.reason or reason
        self.ended.set()
        error = self.died()
        self._fail(error)
        begun: Exception = error
        for number in list(self._running):
            running = self._running.get(number)
            for stream in running.streams if running is not None else ():
                if stream.open:
                    stream.put(Streamed(error, True))
            if running is not None and running.done is not None:
                self._end(number, begun)
                begun = error if self._lied else NotBegunError()  # a worker runs what it is sent in order
        for late in list(self._late.values()):
            for index in list(late.open):
                late.execution.send(index, Streamed(error, True))
        self._late.clear()
        self.channel.close()
        self.process.close()

    def _fail(self, error: RemoraError) -> None:
        for number in list(self._asked):
            if (future := self._asked.pop(number, None)) is not None:
                future.set_exception(error)

    def died(self) -> InternalError:
        """What those are told who were waiting [Y13]."""
        return InternalError(
            f"Stub process '{self.instance}' is not healthy: {self.reason or 'its process does not answer'}"
            + ("; the server starts it again" if self.restarts else ""),
            from_model=True,
        )

    def confused(self, error: Exception) -> InternalError:
        """The worker has written nonsense into the shared memory: it cannot be trusted and is ended."""
        self.reason = f"it broke the protocol ({error}) and was ended: native code that the model uses may be at fault"
        self._lied = True
        self.process.kill()
        return self.died()


def _failure(message: Message) -> RemoraError:
    error = error_from(message.items[0]) if message.items else None
    return error or InternalError("a worker failed without a reason")
