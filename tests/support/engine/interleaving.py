"""Deterministic thread scheduler, which makes a race reproducible by its seed.

`Interleaving.threading` replaces the module `threading` where code under test takes its locks and starts its threads.
Rules:

1. One thread runs at a time, until it acquires or releases a lock, waits, joins, or calls `pause`.
2. The seed chooses the next thread among the runnable ones. Nothing depends on real time.
3. If no thread is runnable, the clock jumps to the next timeout; without a timeout it is a deadlock.
"""

from __future__ import annotations

import random
import threading as real
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

from remora.messages import Outcome, Ticket

STEP_LIMIT = 200_000


class MovableClock(Protocol):
    """Clock that moves only when set."""

    now_ns: int


class DeadlockError(AssertionError):
    """Deadlock, because no thread is runnable."""


class _Thread:
    """Replacement of `threading.Thread`."""

    def __init__(self, stage: Interleaving, target: Callable[..., object], args: tuple[Any, ...], name: str) -> None:
        self.name = name
        self.done = False
        self.error: BaseException | None = None
        self.ready: Callable[[], bool] = lambda: True
        self.wake_ns = 0
        self.gate = real.Semaphore(0)
        self._stage = stage
        self._work = lambda: target(*args)
        self._thread = real.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._stage.threads.append(self)
        self._thread.start()

    def _run(self) -> None:
        self._stage.known[real.get_ident()] = self
        self.gate.acquire()
        try:
            if not self._stage.over:
                self._work()
        except _OverError:
            pass
        except BaseException as error:
            self.error = error
        self.done = True
        self._stage.control.release()

    def join(self, timeout: float | None = None) -> None:
        self._stage.pause(lambda: self.done, timeout)

    def is_alive(self) -> bool:
        return not self.done


class _OverError(BaseException):
    """Ends a thread of a finished test."""


class _Lock:
    """Lock whose acquisition and release let other threads run."""

    def __init__(self, stage: Interleaving, *, reentrant: bool = True) -> None:
        self._stage = stage
        self._reentrant = reentrant
        self._owner: object = None
        self._depth = 0

    def acquire(self) -> None:
        me = real.get_ident()
        self._stage.pause(lambda: self._owner is None or (self._reentrant and self._owner == me))
        self._owner = me
        self._depth += 1

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._stage.pause()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class _Condition(_Lock):
    """Condition over a new lock, or over ``lock``."""

    def __init__(self, stage: Interleaving, lock: _Lock | None = None) -> None:
        super().__init__(stage)
        self._lock = lock
        self._waiting: list[list[bool]] = []

    def acquire(self) -> None:
        if self._lock is not None:
            self._lock.acquire()
        else:
            super().acquire()

    def release(self) -> None:
        if self._lock is not None:
            self._lock.release()
        else:
            super().release()

    def wait(self, timeout: float | None = None) -> bool:
        told = [False]
        self._waiting.append(told)
        self.release()
        self._stage.pause(lambda: told[0], timeout)
        if not told[0]:
            self._waiting = [other for other in self._waiting if other is not told]  # equal ones are of others
        self.acquire()
        return told[0]

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        end_ns = self._stage.end_of(timeout)
        while not predicate():
            if end_ns and self._stage.clock.now_ns >= end_ns:
                return False
            self.wait(None if not end_ns else (end_ns - self._stage.clock.now_ns) / 1e9)
        return True

    def notify(self, count: int = 1) -> None:
        for told in self._waiting[:count]:
            told[0] = True
        del self._waiting[:count]

    def notify_all(self) -> None:
        self.notify(len(self._waiting))


class Interleaving:
    """Scheduler of the threads of a test.

    Args:
        seed: decides which thread runs next.
        clock: moved when all threads wait.
    """

    def __init__(self, seed: int, clock: MovableClock) -> None:
        self.random = random.Random(seed)
        self.clock = clock
        self.threads: list[_Thread] = []
        self.known: dict[int, _Thread] = {}
        self.control = real.Semaphore(0)
        self.over = False
        self.threading = SimpleNamespace(
            Lock=lambda: _Lock(self, reentrant=False),
            RLock=lambda: _Lock(self),
            Condition=lambda lock=None: _Condition(self, lock),
            Thread=lambda target, args=(), name="", daemon=False: _Thread(self, target, args, name),
        )

    def start(self, target: Callable[..., object], *args: Any, name: str = "") -> None:
        """Start a thread of the test."""
        _Thread(self, target, args, name or getattr(target, "__name__", "thread")).start()

    @property
    def running(self) -> str:
        """The name of the running thread."""
        return self.known[real.get_ident()].name

    def canceller(self, tickets: Sequence[Ticket]) -> None:
        """Cancel some of the existing tickets, in a thread of the test."""
        for _ in range(self.random.randint(0, 4)):
            self.pause()
            if tickets:
                self.random.choice(tickets).cancel()

    def clockwork(self, most: int, steps_ns: Sequence[int]) -> None:
        """Move the clock at most ``most`` times, in a thread of the test."""
        for _ in range(self.random.randint(0, most)):
            self.pause()
            self.clock.now_ns += self.random.choice(steps_ns)

    def end_of(self, timeout: float | None) -> int:
        """Return the end of a timeout, 0 for never."""
        return 0 if timeout is None else self.clock.now_ns + max(int(timeout * 1e9), 1)

    def pause(self, ready: Callable[[], bool] = lambda: True, timeout: float | None = None) -> None:
        """Let other threads run, and continue when ``ready`` or after the timeout."""
        me = self.known.get(real.get_ident())
        if me is None:
            assert ready(), "only threads of the stage can wait"
            return
        if self.over:
            raise _OverError
        me.ready, me.wake_ns = ready, self.end_of(timeout)
        self.control.release()
        me.gate.acquire()
        if self.over:
            raise _OverError

    def run(self) -> None:
        """Run all threads to their end. Raises a thread's exception, and DeadlockError."""
        try:
            for _ in range(STEP_LIMIT):
                alive = [thread for thread in self.threads if not thread.done]
                if not alive:
                    return
                thread = self.random.choice(self._able(alive))
                thread.gate.release()
                self.control.acquire()
                if thread.error is not None:
                    raise thread.error
            raise DeadlockError("the threads never end")
        finally:
            self.over = True
            for thread in self.threads:
                thread.gate.release()

    def _able(self, alive: list[_Thread]) -> list[_Thread]:
        def able() -> list[_Thread]:
            return [each for each in alive if each.ready() or 0 < each.wake_ns <= self.clock.now_ns]

        found = able()
        if not found:
            moments = [thread.wake_ns for thread in alive if thread.wake_ns]
            if not moments:
                raise DeadlockError(f"no thread can go on: {', '.join(thread.name for thread in alive)}")
            self.clock.now_ns = min(moments)
            found = able()
        return found


class Loop:
    """Event loop as a scheduler sees it, with the mailbox of its submissions and watchers.

    A thread called "loop" runs it.
    """

    def __init__(self, stage: Interleaving) -> None:
        self._stage = stage
        self.events: list[Callable[[], None]] = []
        self._inside = False

    @property
    def watcher(self) -> Loop:
        return self

    def watch(self, fd: int, work: Callable[[int], None]) -> Callable[[], None]:
        raise AssertionError("nothing to watch")

    def call_next(self, work: Callable[[], None]) -> None:
        self.events.append(work)

    def is_current(self) -> bool:
        return self._stage.running == "loop"

    def post(self, deliveries: list[tuple[Ticket, Outcome]]) -> None:
        def deliver() -> None:
            for ticket, outcome in deliveries:
                ticket.reply(ticket, outcome)

        if self.is_current():
            deliver()
        else:
            self.events.append(deliver)

    def defer(self, work: Callable[[], None]) -> bool:
        if not self.is_current():
            return False
        if self._inside or self._stage.random.random() < 0.5:
            self.events.append(work)
            return True
        self._inside = True  # at once, as a loop does in whose turn nothing more can arrive
        try:
            work()
        finally:
            self._inside = False
        return True

    def turn(self) -> None:
        """Run what was submitted since the last turn."""
        events, self.events = self.events, []
        for event in events:
            event()
