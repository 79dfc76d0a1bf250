"""What a worker prints and logs, on its way into the server's log; the law: a flood costs neither memory nor the log.

Pure: bytes and times come in as arguments, lines go out as values.
"""

from __future__ import annotations

LONGEST_LINE = 8192
LINES_PER_SECOND = 500
_NS = 1_000_000_000


class Budget:
    """How many lines may still be logged in this second. Not thread-safe.

    Args:
        per_second: the most in any one second of the given clock.
    """

    def __init__(self, per_second: int = LINES_PER_SECOND) -> None:
        self._per_second = per_second
        self._second = -1
        self._left = 0
        self._dropped = 0

    def grant(self, lines: int, now_ns: int) -> int:
        """How many of so many lines may be logged now; the rest is counted as dropped."""
        if now_ns // _NS != self._second:
            self._second, self._left = now_ns // _NS, self._per_second
        granted = min(lines, self._left)
        self._left -= granted
        self._dropped += lines - granted
        return granted

    def take_dropped(self, now_ns: int) -> int:
        """How many were dropped in the seconds before this one; 0 as long as the flood goes on within one second."""
        if now_ns // _NS == self._second or not self._dropped:
            return 0
        dropped, self._dropped = self._dropped, 0
        return dropped


class Lines:
    """Cuts a stream of bytes into lines. Not thread-safe."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """The lines that ``data`` completes; longer ones than LONGEST_LINE come in parts. Empty ones are left out."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LONGEST_LINE:
            lines.append(self._rest)
            self._rest = b""
        return [part for line in lines for part in _parts(line)]

    def end(self) -> list[str]:
        """What is left when the stream has ended."""
        rest, self._rest = self._rest, b""
        return _parts(rest)


def _parts(line: bytes) -> list[str]:
    line = line.rstrip(b"\r")
    return [
        line[start : start + LONGEST_LINE].decode("utf-8", "replace") for start in range(0, len(line), LONGEST_LINE)
    ]
