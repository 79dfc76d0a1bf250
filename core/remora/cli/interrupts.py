"""Threads for the models of commands, so that Ctrl-C ends the command.

In the main thread KeyboardInterrupt would be raised inside a model, which takes it for its own failure, or inside a
scheduler, which then never finishes the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn, TypeVar

if TYPE_CHECKING:
    from remora.engine import Engine

T = TypeVar("T")

INTERRUPTED = 130
"""Exit code after Ctrl-C."""
_GRACE_S = 2.0
"""Time of the requests in flight after Ctrl-C, in seconds."""


def run_aside(work: Callable[[], T]) -> T:
    """Run ``work`` in another thread and return its result or raise its exception.

    KeyboardInterrupt ends the wait alone.
    """
    from remora.system.threads import run_in_daemon  # imported here, because clients of a server need no thread

    return run_in_daemon(work, "remora command").result()


@contextmanager
def open_models(engine: Engine) -> Iterator[Engine]:
    """Load the models of an engine, and close them at the end. Raises RemoraError.

    KeyboardInterrupt leaves requests in flight little time. It ends the process if models are being loaded.
    """
    try:
        run_aside(engine.start)
    except KeyboardInterrupt:
        try:
            engine.stop(_GRACE_S)
        finally:
            _exit_now()
    grace_s: float | None = None
    try:
        yield engine
    except KeyboardInterrupt:
        grace_s = _GRACE_S
        raise
    finally:
        engine.stop(grace_s)


@contextmanager
def exit_on_interrupt() -> Iterator[None]:
    """End the process after KeyboardInterrupt, and leave its threads."""
    try:
        yield
    except KeyboardInterrupt:
        _exit_now()


def _exit_now() -> NoReturn:
    """End the process, because the interpreter would wait for the threads that load or read."""
    from remora.server.shutdown import exit_now  # imported here, because it is rare

    exit_now(INTERRUPTED)
