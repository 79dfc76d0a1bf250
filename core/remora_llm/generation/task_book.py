"""Tasks of one engine from their entry to their ends: admission, cancellation and unload.

Any thread enters and cancels tasks. One thread, the engine's, takes them, posts the pieces and ends each choice.

Invariant: a task that is cancelled after its entry is taken before its cancellation, or together with it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Generic, NamedTuple, TypeVar

from remora.api.system import start_daemon
from remora.errors import InternalError, QueueFullError, RemoraError, UnavailableError
from remora_llm.generation.answering import Outbox
from remora_llm.generation.grammar_limits import GRAMMAR_STACK_BYTES
from remora_llm.generation.measurements import Measurements
from remora_llm.generation.tasks import End, Piece, Sink, Task

MAX_WAITING = 4096
"""Number of waiting choices beyond which an engine refuses tasks; half of it for one caller."""

P = TypeVar("P")


class Entry(NamedTuple, Generic[P]):
    """Task that was admitted, and what the engine ``prepared`` for it in the caller's thread."""

    task: Task
    sink: Sink
    arrival_ns: int
    prepared: P


class TaskBook(Generic[P]):
    """Entries, cancellations and ends of one engine's tasks.

    Args:
        name: of the model, for errors.
        context: maximum number of tokens of an answer.
        trouble: returns why the engine cannot run tasks, "" if it can.
        wake: makes the engine's thread take the notes; raises RuntimeError if it cannot.
        max_waiting: see `MAX_WAITING`.
    """

    def __init__(
        self,
        name: str,
        context: int,
        *,
        trouble: Callable[[], str],
        wake: Callable[[], None],
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self.name = name
        self.measurements = Measurements(context)
        self.cancelled: set[Task] = set()
        """Tasks whose cancellation has not been taken."""
        self.ended: dict[str, int] = {}
        """Number of ended choices by reason."""
        self.queued: Counter[str] = Counter()
        """Number of choices that were taken and wait, by caller; the engine's thread keeps it."""
        self._trouble = trouble
        self._wake = wake
        self._max_waiting = max_waiting
        outbox = Outbox(name, self.cancel)
        self.post, self.deliver = outbox.post, outbox.deliver
        """See `Outbox`; both for the engine's thread."""
        self._changed = threading.Condition()
        self._inbox: list[Entry[P]] = []
        self._entered: Counter[str] = Counter()
        """Number of choices in the inbox by caller."""
        self._open: dict[Task, int] = {}
        """Number of choices without an end by task."""
        self._closing = False

    # -- Any thread ----------------------------------------------------------------------------------------------------

    def enter(self, task: Task, sink: Sink, arrival_ns: int, prepared: P) -> None:
        """Admit a task and wake the engine.

        Raises:
            QueueFullError: too many choices wait.
            UnavailableError: the engine is being unloaded, or cannot run.
        """
        with self._changed:
            self._refuse(task)
            try:
                self._wake()
            except RuntimeError as error:
                raise self.unusable(error) from error
            self._inbox.append(Entry(task, sink, arrival_ns, prepared))
            self._entered[task.caller] += task.choices
            self._open[task] = task.choices
            self._changed.notify()

    def _refuse(self, task: Task) -> None:
        if self._closing:
            raise UnavailableError(f"model '{self.name}' is being unloaded")
        if trouble := self._trouble():
            raise self.unusable(trouble)
        by_caller = self.waiting()
        waiting, own = sum(by_caller.values()), by_caller.get(task.caller, 0)
        if waiting and waiting + task.choices > self._max_waiting:
            raise QueueFullError(f"model '{self.name}' has {waiting} waiting requests, its limit; try again later")
        if task.caller and own and own + task.choices > self._max_waiting // 2:
            raise QueueFullError(
                f"this key has {own} waiting requests to model '{self.name}', its share; try again later"
            )

    def waiting(self) -> Mapping[str, int]:
        """Return the number of waiting choices by caller."""
        found = Counter(self.queued)
        found.update(self._entered.copy())  # a copy, because other threads may enter tasks
        return found

    def cancel(self, task: Task) -> None:
        """Cancel a task.

        Has no effect on an unknown task, or in a closed book, because all of its tasks end.
        """
        with self._changed:
            if task in self._open and not self._closing:
                self.cancelled.add(task)
                self._wake()
                self._changed.notify()

    def close(self) -> None:
        """Admit no more tasks."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    # -- The engine's thread -------------------------------------------------------------------------------------------

    def wait(self, idle: Callable[[], bool]) -> bool:
        """Wait for notes while the engine is idle. Return False once the book is closed."""
        with self._changed:
            while not (self._inbox or self.cancelled or self._closing) and idle():
                self._changed.wait()
            return not self._closing

    def take(self) -> tuple[list[Entry[P]], set[Task]]:
        """Return the tasks that entered since the last call, and those that were cancelled."""
        with self._changed:
            entries, self._inbox = self._inbox, []
            cancelled, self.cancelled = self.cancelled, set()
            self.queued.update(self._entered)
            self._entered = Counter()
        return entries, cancelled

    def count_started(self, task: Task) -> None:
        """Count a choice that waits no longer."""
        self.queued[task.caller] -= 1
        if not self.queued[task.caller]:
            del self.queued[task.caller]

    def end(self, sink: Sink, piece: Piece, end: End, arrival_ns: int, now_ns: int) -> None:
        """Post the last piece of a choice, and count its end."""
        task = piece.task
        self.measurements.record_end(task, piece.choice, end, arrival_ns, now_ns)
        self.ended = {**self.ended, end.reason: self.ended.get(end.reason, 0) + 1}
        with self._changed:
            self._open[task] -= 1
            if not self._open[task]:
                del self._open[task]
                self.cancelled.discard(task)
        self.post(sink, piece._replace(end=end))

    def unusable(self, why: object) -> UnavailableError:
        """Return the error of tasks that the engine cannot run."""
        return UnavailableError(f"model '{self.name}' cannot run: {why}")

    def unloaded(self) -> RemoraError:
        """Return the error of tasks that the unload ends."""
        return UnavailableError(f"model '{self.name}' was unloaded")

    def failure(self, error: Exception, where: str = "failed in a step") -> RemoraError:
        """Return the error of tasks that a failure of the model ends."""
        if isinstance(error, RemoraError):
            return error
        return InternalError(f"model '{self.name}' {where}: {type(error).__name__}: {error}", from_model=True)


def trouble_after(failure: Exception, again: Exception) -> str:
    """Return why an engine cannot run whose model failed and cannot be opened ``again``."""
    return f"it failed in a step ({failure}) and cannot be opened again ({again}); reload it"


class EngineThread:
    """Thread of an engine, which starts with the first task."""

    def __init__(self, name: str, run: Callable[[], None]) -> None:
        self._name = name
        self._run = run
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread if it does not run.

        Raises RuntimeError if the system has no more threads.
        """
        if self._thread is None:
            self._thread = start_daemon(self._run, f"remora {self._name} steps", stack_bytes=GRAMMAR_STACK_BYTES)

    def join(self) -> bool:
        """Wait for the thread's end. Return False if it never started."""
        if self._thread is None:
            return False
        self._thread.join()
        return True
