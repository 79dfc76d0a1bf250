"""Event loop thread of an instance whose methods are coroutines.

Tasks that a model starts run until the instance is closed, as in Triton.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

from remora.backends.calling import current_origin

_log = logging.getLogger(__name__)

GRACE_S = 5.0
"""Time that cancelled coroutines have to end, in seconds."""


class BackgroundLoop:
    """Event loop in a thread that runs coroutines until it is closed.

    Coroutines see the context variables of the code that submits them.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_task_factory(_task)
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._closing:
            try:
                self._loop.run_forever()
            except BaseException as error:  # SystemExit of a task: all other requests of the instance need the loop
                _log.warning("%s: a task raised %s; the event loop continues", self._thread.name, type(error).__name__)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine and return its result or raise its exception."""
        future: Future[Any] = Future()
        self.start(coroutine, partial(_settle, future))
        try:
            return future.result()
        finally:
            del future  # otherwise the exception would stay alive through this frame

    def start(self, coroutine: Coroutine[Any, Any, Any], done: Callable[[object, BaseException | None], None]) -> None:
        """Start a coroutine.

        ``done(result, None)`` or ``done(None, error)`` is called in the loop's thread.
        """

        async def watched() -> None:
            try:
                try:
                    result = await coroutine
                finally:
                    current_origin().end()  # here, because tasks that it started may run before its caller does
            except BaseException as error:  # SystemExit too, because it would end the loop and all other requests
                done(None, error)
            else:
                done(result, None)

        asyncio.run_coroutine_threadsafe(watched(), self._loop)

    def close(self) -> None:
        """Cancel running coroutines and end the thread.

        A thread that a model blocks for longer than GRACE_S is abandoned.
        """
        try:
            asyncio.run_coroutine_threadsafe(_cancel_others(self._loop), self._loop).result(2 * GRACE_S)
        except TimeoutError:
            _log.warning("%s: a coroutine blocks its thread, which is abandoned", self._thread.name)
            return
        self._closing = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _settle(future: Future[Any], result: object, error: BaseException | None) -> None:
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


def _task(
    loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any] | Generator[Any, None, Any], **more: Any
) -> asyncio.Task[Any]:
    task = asyncio.Task(coroutine, loop=loop, **more)
    task.add_done_callback(_let_go)
    return task


def _let_go(task: asyncio.Task[Any]) -> None:
    """Clear the local variables of a failed task's coroutine.

    A model that keeps its task keeps the exception and its frames, a response sender among them, and the request would
    stay open forever. Inner coroutines are left alone, because one that caught the error before may still run.
    """
    error = None if task.cancelled() else task._exception  # exception() would mark it as retrieved
    where = error.__traceback__ if error is not None else None
    code = getattr(task.get_coro(), "cr_code", None)
    while where is not None and where.tb_frame.f_code is not code:
        where = where.tb_next  # SystemExit passes through the loop's frames
    if where is not None:
        with suppress(RuntimeError):
            where.tb_frame.clear()


async def _cancel_others(loop: asyncio.AbstractEventLoop) -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=GRACE_S)
    await loop.shutdown_asyncgens()
