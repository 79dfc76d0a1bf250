"""Entry point of a worker process.

It takes over the file descriptors that it inherited and serves until the server closes the connection or exits.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from typing import Any

_PR_SET_PDEATHSIG = 1


def main(options: dict[str, Any]) -> None:
    """Serve requests of the server.

    ``options`` (from `supervisor`): ``lifeline``, ``ends`` and ``poll_ns`` if there is shared memory,
    ``memory_limit``.
    """
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
        channel = MemoryChannel(ends, lifeline.fileno(), serves=False, poll_ns=options["poll_ns"])
    else:
        channel = PipeChannel(lifeline)
    sys.dont_write_bytecode = True  # what a model imports lies in its folder, which a host may forbid to change
    Worker(channel, lifeline, options["memory_limit"]).run()


def _die_with_the_server() -> None:
    """Have Linux kill this process when the server dies.

    This works even if model code never releases the GIL.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
