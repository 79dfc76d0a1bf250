"""Which requests are traced: every Nth, until as many as wanted have been; the law: each request counts once, and one
that is refused does not count as traced.

One `Sampling` stands for one state of the settings: a change makes another one, which counts from the beginning.
"""

from __future__ import annotations

from itertools import count
from threading import Lock

from remora.tracing.settings import TraceSettings


class Sampling:
    """Requests of the models that share these settings. Thread-safe; most requests take no lock."""

    def __init__(self, settings: TraceSettings) -> None:
        self.settings = settings
        self.off = settings.off
        self.exports = settings.exports
        self.timestamps = "TIMESTAMPS" in settings.trace_level
        self.tensors = "TENSORS" in settings.trace_level and not settings.exports  # spans have no room for them
        self.log_frequency = int(settings.log_frequency)
        self.limited = int(settings.trace_count) >= 0
        self.left = int(settings.trace_count)
        """How many more requests will be traced; below 0 for any number."""
        self.wanted = self.left
        self._rate = int(settings.trace_rate)
        self._seen = count(1)
        self._lock = Lock()

    def hits(self) -> bool:
        """Count a request: is it to be traced, if it is taken?"""
        rate = self._rate
        return not self.off and rate > 0 and self.left != 0 and not next(self._seen) % rate

    def take(self) -> bool:
        """One of those to be traced has come; False when there were enough."""
        if not self.limited:
            return True
        with self._lock:
            if not self.left:
                return False
            self.left -= 1
            return True

    def give_back(self) -> None:
        """What was taken leaves no trace."""
        if self.limited:
            with self._lock:
                self.left += 1

    def now(self) -> TraceSettings:
        """The settings as clients see them: the count is what is left of it [T04]."""
        return self.settings._replace(trace_count=str(self.left)) if self.limited else self.settings
