"""A worker process's beginning: takes over the descriptors it was started with, then serves as long as its server."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from typing import Any

_PR_SET_PDEATHSIG = 1


def main(options: dict[str, Any]) -> None:
    """Serve. ``options`` (from `keeper`): ``lifeline``, ``ends`` where there is shared memory, ``memory_limit``."""
    sys.argv = [sys.argv[-1]]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with_the_server()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    lifeline = socket.socket(fileno=options["lifeline"])
    lifeline.set_inheritable(False)

    from remora.backends.worker.channel import Ends, MemoryChannel
    from remora.backends.worker.main_loop import Worker
    from remora.backends.worker.pipes import PipeChannel

    channel: MemoryChannel | PipeChannel
    if "ends" in options:
        ends = Ends(*options["ends"])
        for fd in set(ends):
            os.set_inheritable(fd, False)
        channel = MemoryChannel(ends, lifeline.fileno(), serves=False)
    else:
        channel = PipeChannel(lifeline)
    Worker(channel, lifeline, options["memory_limit"]).run()


def _die_with_the_server() -> None:
    """Where the system can: also when the server is killed and the model's code never gives the interpreter free."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
