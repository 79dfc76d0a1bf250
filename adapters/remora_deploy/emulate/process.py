"""Server process with its output, ports and exit status.

Invariant: the process group ends with its `Process`.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

_LISTENING = "0A"
_SOCKET = re.compile(r"socket:\[(\d+)\]")


class Listening(NamedTuple):
    """Listening port, with ``everywhere`` False if only some interfaces reach it."""

    port: int
    everywhere: bool


class Ending(NamedTuple):
    """Duration and status of a process's exit, with ``killed`` True after SIGKILL."""

    seconds: float
    status: int
    killed: bool


class Process:
    """Started server in a dedicated process group.

    Args:
        command: the entrypoint with all its arguments.
        environ: its whole environment.
        log: file for stdout and stderr.

    Raises OSError if it cannot be started.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        self.log = log
        self.ending: Ending | None = None
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                list(command),
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        """True until it exits."""
        return self._process.poll() is None

    def log_tail(self, lines: int = 5) -> str:
        """Return the last lines of its output."""
        return " | ".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def listening(self) -> list[Listening]:
        """Return the listening ports of the process and its children from /proc."""
        inodes = {inode for pid in _family(self._process.pid) for inode in _sockets(pid)}
        found = {
            row for table in ("tcp", "tcp6") for inode, row in _table(Path("/proc/net") / table) if inode in inodes
        }
        return sorted(found)

    def resident_bytes(self) -> int:
        """Return the sum of the resident memory of the process and its children."""
        return sum(_resident_pages(pid) for pid in _family(self._process.pid)) * os.sysconf("SC_PAGE_SIZE")

    def terminate(self) -> None:
        """Send SIGTERM to the container's first process only, as the platform does."""
        self._process.send_signal(signal.SIGTERM)

    def freeze(self) -> None:
        """Stop the process and its children until `thaw`."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Continue the frozen processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGCONT)

    def wait(self, grace_s: float) -> Ending:
        """Wait for the exit after SIGTERM, and send SIGKILL after ``grace_s`` seconds."""
        begin = time.monotonic()
        killed = False
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            killed = True
        self.kill()
        self.ending = Ending(time.monotonic() - begin, self._process.wait(), killed)
        return self.ending

    def kill(self) -> None:
        """Kill the process group now."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def free_port() -> int:
    """Return a currently free loopback port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _family(pid: int) -> list[int]:
    """Return a process and its descendants."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # it has just exited
                continue
            parents.setdefault(parent, []).append(int(entry.name))
    family, at = [pid], 0
    while at < len(family):
        family += parents.get(family[at], [])
        at += 1
    return family


def _resident_pages(pid: int) -> int:
    try:
        return int((Path("/proc") / str(pid) / "statm").read_text().split()[1])
    except OSError:  # it has just exited
        return 0


def _sockets(pid: int) -> set[str]:
    folder = Path("/proc") / str(pid) / "fd"
    try:
        names = os.listdir(folder)
    except OSError:  # it has just exited
        return set()
    found = set()
    for name in names:
        with contextlib.suppress(OSError):  # the descriptor has just been closed
            if match := _SOCKET.fullmatch(os.readlink(folder / name)):
                found.add(match[1])
    return found


def _table(path: Path) -> list[tuple[str, Listening]]:
    """Return the listening sockets of a kernel table by inode."""
    try:
        lines = path.read_text().splitlines()[1:]
    except OSError:  # the machine has no IPv6
        return []
    rows = []
    for fields in (line.split() for line in lines):
        if fields[3] == _LISTENING:
            address, _, port = fields[1].partition(":")
            rows.append((fields[9], Listening(int(port, 16), not address.strip("0"))))
    return rows
