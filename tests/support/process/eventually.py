"""The one way to wait for what another process or thread does without a signal of it."""

from __future__ import annotations

import asyncio
import subprocess
import time
import urllib.error
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

WITHIN_S = 60.0
"""Much more than a loaded machine needs."""
PAUSE_S = 0.01

T = TypeVar("T")


def eventually(
    condition: Callable[[], T],
    *,
    process: subprocess.Popen[Any] | None = None,
    log: Path | None = None,
    within_s: float = WITHIN_S,
    pause_s: float = PAUSE_S,
) -> T:
    """Return the first true value of a condition.

    An OSError counts as false, because a server refuses connections until it listens. Fails the test with the log when
    the time is over or the process has ended.
    """
    last = ""
    end = time.monotonic() + within_s
    while True:
        try:
            if value := condition():
                return value
            last = repr(value)
        except OSError as error:
            last = repr(error)  # not the error itself, whose traceback would keep this frame and the error's socket
            if isinstance(error, urllib.error.HTTPError):
                error.close()
        if time.monotonic() > end or (process is not None and process.poll() is not None):
            break
        time.sleep(pause_s)
    status = "" if process is None else f", exit status {process.poll()}"
    text = "" if log is None else f":\n{log.read_text(errors='replace')}"
    pytest.fail(f"it did not happen within {within_s:g} s ({last}{status}){text}")


async def eventually_in_loop(condition: Callable[[], object], *, within_s: float = WITHIN_S) -> None:
    """Run the event loop until a condition is true. Fails the test when the time is over."""
    end = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > end:
            pytest.fail(f"it did not happen within {within_s:g} s")
        await asyncio.sleep(PAUSE_S)
