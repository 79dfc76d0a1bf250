"""Selection of the requests to trace, by rate and count.

Each `Sampling` belongs to one version of the settings; a change creates a new one with fresh counters.

Invariant: each request counts once for the rate, and a refused one does not use up the count of traces.
"""

from __future__ import annotations

from itertools import count
from threading import Lock

from remora.tracing.settings import TraceSettings


class Sampling:
    """Sampling of the models that share these settings. Thread-safe. Most requests take no lock."""

    def __init__(self, settings: TraceSettings) -> None:
        self.settings = settings
        self.off = settings.off
        self.exports = settings.exports
        self.timestamps = "TIMESTAMPS" in settings.trace_level
        self.tensors = "TENSORS" in settings.trace_level and not settings.exports  # spans cannot hold tensors
        self.log_frequency = int(settings.log_frequency)
        self.limited = int(settings.trace_count) >= 0
        self.left = int(settings.trace_count)
        """Number of traces still to make; below 0 for no limit."""
        self.wanted = self.left
        self._rate = int(settings.trace_rate)
        self._seen = count(1)
        self._lock = Lock()

    def hits(self) -> bool:
        """Count a request and return True if it is to be traced when accepted."""
        rate = self._rate
        return not self.off and rate > 0 and self.left != 0 and not next(self._seen) % rate

    def take(self) -> bool:
        """Claim one of the remaining traces and return False if the count is used up."""
        if not self.limited:
            return True
        with self._lock:
            if not self.left:
                return False
            self.left -= 1
            return True

    def give_back(self) -> None:
        """Return a claimed trace whose request was refused."""
        if self.limited:
            with self._lock:
                self.left += 1

    def now(self) -> TraceSettings:
        """Return the settings as clients see them, with the remaining count [T04]."""
        return self.settings._replace(trace_count=str(self.left)) if self.limited else self.settings
