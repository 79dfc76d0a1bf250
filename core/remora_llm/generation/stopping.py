"""Search for stop strings in a growing text. Pure.

Invariants: the result depends on the text alone, not on how it is cut into parts; no character of a match is released;
nothing else is withheld at the end.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopSearch:
    """Search for the first end of a stop string, with an automaton for each string.

    Of several strings that end at the same character, the longest one matches. ``matched`` is the match, None before.
    """

    __slots__ = ("_failures", "_held", "_states", "_stops", "matched")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(sorted(set(stops), key=len, reverse=True))
        self._failures = tuple(_failure(stop) for stop in self._stops)
        self._states = [0] * len(self._stops)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Return the text that can no longer belong to a stop string. After a match there is none."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        states = self._states
        for place, character in enumerate(text):
            for index, stop in enumerate(self._stops):
                state, failure = states[index], self._failures[index]
                while state and stop[state] != character:
                    state = failure[state - 1]
                if stop[state] == character:
                    state += 1
                states[index] = state
                if state == len(stop):
                    seen = self._held + text[: place + 1]
                    self.matched, self._held = stop, ""
                    return seen[: len(seen) - len(stop)]
        seen = self._held + text
        keep = len(seen) - max(states)
        self._held = seen[keep:]
        return seen[:keep]

    def flush(self) -> str:
        """Return what was withheld, at the end of the text."""
        held, self._held = self._held, ""
        return held


def _failure(stop: str) -> list[int]:
    """Return for each prefix the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(stop)
    state = 0
    for place in range(1, len(stop)):
        while state and stop[state] != stop[place]:
            state = table[state - 1]
        if stop[state] == stop[place]:
            state += 1
        table[place] = state
    return table
