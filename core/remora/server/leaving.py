"""The end of the process; the law: it comes, whatever threads still do: those that load a model or run one cannot be
told to end, and a process that ends in order waits for them.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from typing import NoReturn

_log = logging.getLogger("remora.server")

_LEAST_S = 1.0
"""How long a process that has done all may take to end in order, be the exit timeout as short as it may."""


def leave(code: int) -> NoReturn:
    """End the process at once."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def give_up() -> NoReturn:
    """End the process, whose exit timeout is over (spec V03)."""
    _log.error("Exit timeout expired. Exiting immediately.")
    leave(1)


def give_up_after(seconds: float) -> None:
    """Give up after so long, all being done, unless the process has ended by itself before."""
    timer = threading.Timer(max(seconds, _LEAST_S), give_up)
    timer.daemon = True
    timer.start()
