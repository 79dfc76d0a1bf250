"""An event loop in a thread of its own, for decoupled models whose ``execute`` is a coroutine; the law: what a model
starts there goes on while the instance takes further requests, as it does in Triton.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any

_log = logging.getLogger(__name__)

GRACE_S = 5.0
"""How long cancelled coroutines may take to end."""


class BackgroundLoop:
    """Runs coroutines until it is closed. They see the context variables of whoever hands them in.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Wait for a coroutine's result; raises what it raises."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def start(self, coroutine: Coroutine[Any, Any, Any], done: Callable[[object, BaseException | None], None]) -> None:
        """Let a coroutine run. ``done(result, None)`` or ``done(None, error)`` is called in the loop's thread."""

        async def watched() -> None:
            try:
                result = await coroutine
            except BaseException as error:  # SystemExit too: it would end the loop, and all other requests with it
                done(None, error)
            else:
                done(result, None)

        asyncio.run_coroutine_threadsafe(watched(), self._loop)

    def close(self) -> None:
        """Cancel what still runs and end the thread; a model that does not let go in GRACE_S is left behind."""
        try:
            asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result(2 * GRACE_S)
        except TimeoutError:
            _log.warning("%s: a coroutine keeps its thread busy and is left behind", self._thread.name)
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=GRACE_S)
