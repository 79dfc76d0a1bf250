"""Line splitting and rate limiting of a worker's output. Pure.

Bytes and times are arguments, lines are results. Invariant: a flood of output neither fills memory nor floods the log.
"""

from __future__ import annotations

LONGEST_LINE = 8192
LINES_PER_SECOND = 500
_NS = 1_000_000_000


class Budget:
    """Limit on logged lines per second. Not thread-safe.

    Args:
        per_second: most lines in one second of the given clock.
    """

    def __init__(self, per_second: int = LINES_PER_SECOND) -> None:
        self._per_second = per_second
        self._second = -1
        self._left = 0
        self._dropped = 0

    def grant(self, lines: int, now_ns: int) -> int:
        """Return how many of ``lines`` may be logged now and count the rest as dropped."""
        if now_ns // _NS != self._second:
            self._second, self._left = now_ns // _NS, self._per_second
        granted = min(lines, self._left)
        self._left -= granted
        self._dropped += lines - granted
        return granted

    def take_dropped(self, now_ns: int) -> int:
        """Return and reset the number of lines dropped in earlier seconds.

        Returns 0 while the second of the drops still lasts.
        """
        if now_ns // _NS == self._second or not self._dropped:
            return 0
        dropped, self._dropped = self._dropped, 0
        return dropped


class Lines:
    """Splitter of a byte stream into lines. Not thread-safe."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """Return the lines that ``data`` completes.

        Lines longer than LONGEST_LINE are split; empty lines are omitted.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LONGEST_LINE:
            lines.append(self._rest)
            self._rest = b""
        return [part for line in lines for part in _parts(line)]

    def end(self) -> list[str]:
        """Return the rest after the end of the stream."""
        rest, self._rest = self._rest, b""
        return _parts(rest)


def _parts(line: bytes) -> list[str]:
    line = line.rstrip(b"\r")
    return [
        line[start : start + LONGEST_LINE].decode("utf-8", "replace") for start in range(0, len(line), LONGEST_LINE)
    ]
