"""Start and end of a worker's process.

The process is a fresh interpreter in a separate session, so that a terminal's Ctrl-C does not reach it and its child
processes can be killed with it.

Invariant: the server is never forked, and no process outlives its server.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from remora.system.environment import server_paths

_BOOT = (
    "import json, sys; options, first, last = map(json.loads, sys.argv[1:4]); sys.path[:] = first or sys.path; "
    "sys.path += last; from remora.backends.worker.__main__ import main; main(options)"
)


class WorkerProcess:
    """A running worker process.

    The thread that creates it must live as long as the process, because the system ends the process when that thread
    ends.

    Args:
        options: the options of ``remora.backends.worker.__main__``, JSON values.
        pass_fds: the descriptors in ``options``; they keep their numbers.
        label: shown in process lists.
        python: the interpreter. The server's interpreter has the server's path; any other finds its own packages first,
            then the server's.
    """

    def __init__(self, options: dict[str, object], pass_fds: Sequence[int], label: str, python: Path) -> None:
        own = str(python) == sys.executable
        first, last = (sys.path, []) if own else ([], server_paths())
        arguments = [json.dumps(options), json.dumps(first), json.dumps(last), label]
        self._popen = subprocess.Popen(
            [str(python), "-X", "faulthandler", "-c", _BOOT, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=tuple(pass_fds),
            start_new_session=True,
        )
        self._lock = threading.Lock()  # prevents a kill after the pid may belong to another process
        self.pid = self._popen.pid
        assert self._popen.stdout is not None
        assert self._popen.stderr is not None
        self.stdout = self._popen.stdout.fileno()
        self.stderr = self._popen.stderr.fileno()
        for fd in (self.stdout, self.stderr):
            os.set_blocking(fd, False)
        self.exit_fd = os.pidfd_open(self.pid) if hasattr(os, "pidfd_open") else -1
        """File descriptor that is readable when the process has ended; -1 without pidfd_open."""

    def kill(self) -> None:
        """Kill the process and its child processes. Does nothing if it has ended."""
        with self._lock:
            self._kill()

    def _kill(self) -> None:
        if self._popen.returncode is None:  # not yet reaped, so the pid is still valid
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def ended(self) -> bool:
        """Return True if the process has ended.

        Its child processes are then killed too.
        """
        with self._lock:
            if self._popen.returncode is not None:
                return True
            if not hasattr(os, "waitid"):
                return self._popen.poll() is not None
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return False
            self._kill()  # kills the rest of its session, while the pid is still valid
            self._popen.wait()
            return True

    def reason(self) -> str:
        """Return a text that explains why the process ended."""
        return end_in_words(self._popen.returncode)

    def close(self) -> None:
        """Close the descriptors."""
        for pipe in (self._popen.stdout, self._popen.stderr):
            if pipe is not None:
                pipe.close()
        if self.exit_fd >= 0:
            os.close(self.exit_fd)
            self.exit_fd = -1


def end_in_words(code: int | None) -> str:
    """Return a text with the meaning of an exit status and its remedy. Pure."""
    if code is None:
        return "its process does not answer"
    if code >= 0:
        return f"its process ended with exit code {code}: model code must not call sys.exit or os._exit"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    advice = {
        "SIGKILL": "killed from outside, most likely because memory ran out: give it more, or let the model use less",
        "SIGSEGV": "a crash in native code that the model uses; the log shows where",
        "SIGABRT": "native code that the model uses gave up; the log shows where",
        "SIGBUS": "a crash in native code that the model uses, or no memory left for shared tensors",
    }.get(name, "see the log")
    return f"its process ended by signal {-code} ({name}): {advice}"
