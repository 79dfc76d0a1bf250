"""The process that a platform starts: its output, its ports, its end; the law: it never outlives whoever started it."""

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
    """A port that is listened to. ``everywhere`` is False when only some interfaces reach it."""

    port: int
    everywhere: bool


class Ending(NamedTuple):
    """How a process ended: after how many seconds, with which status, and whether it had to be killed."""

    seconds: float
    status: int
    killed: bool


class Process:
    """A started server, with a process group of its own.

    Args:
        command: the entrypoint with all its arguments.
        environ: its whole environment.
        log: a file that takes both its streams.

    Raises OSError when it cannot be started.
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
        """Whether it has not ended by itself."""
        return self._process.poll() is None

    def last_words(self, lines: int = 5) -> str:
        """The end of what it printed."""
        return " | ".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def listening(self) -> list[Listening]:
        """The ports that it and its children listen to, as /proc has them."""
        inodes = {inode for pid in _family(self._process.pid) for inode in _sockets(pid)}
        found = {
            row for table in ("tcp", "tcp6") for inode, row in _table(Path("/proc/net") / table) if inode in inodes
        }
        return sorted(found)

    def resident_bytes(self) -> int:
        """The memory that it and its children hold, shared pages counted for each."""
        return sum(_resident_pages(pid) for pid in _family(self._process.pid)) * os.sysconf("SC_PAGE_SIZE")

    def terminate(self) -> None:
        """Send SIGTERM, as the platform does: to the container's first process alone."""
        self._process.send_signal(signal.SIGTERM)

    def freeze(self) -> None:
        """Stop it and its children where they are, until `thaw`."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let them go on."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGCONT)

    def wait(self, grace_s: float) -> Ending:
        """Its end, which SIGTERM has asked for; SIGKILL after ``grace_s`` seconds."""
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
        """End it and all that it started, now."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # it has just ended
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
    except OSError:  # it has just ended
        return 0


def _sockets(pid: int) -> set[str]:
    folder = Path("/proc") / str(pid) / "fd"
    try:
        names = os.listdir(folder)
    except OSError:  # it has just ended
        return set()
    found = set()
    for name in names:
        with contextlib.suppress(OSError):  # it has just closed this one: the others count
            if match := _SOCKET.fullmatch(os.readlink(folder / name)):
                found.add(match[1])
    return found


def _table(path: Path) -> list[tuple[str, Listening]]:
    """The listening sockets of a kernel table, by inode."""
    try:
        lines = path.read_text().splitlines()[1:]
    except OSError:  # no IPv6 here
        return []
    rows = []
    for fields in (line.split() for line in lines):
        if fields[3] == _LISTENING:
            address, _, port = fields[1].partition(":")
            rows.append((fields[9], Listening(int(port, 16), not address.strip("0"))))
    return rows
