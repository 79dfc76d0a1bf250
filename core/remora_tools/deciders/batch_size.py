"""Search for the batch size at which a model scores the most rows per second. Pure."""

from __future__ import annotations

_FACTOR = 4
_TRIALS = 3
_NEAR_BEST = 0.95
_WORSE = 0.8


class BatchSearch:
    """Batch sizes to try, by factors of 4, until throughput falls or the time is over.

    Args:
        limit: the largest size, which is tried even if it is not a power of 4.
        budget_ns: time after which no larger size is tried.
    """

    def __init__(self, limit: int, budget_ns: int) -> None:
        self._limit = max(limit, 1)
        self._left_ns = budget_ns
        self._best_ns: dict[int, int] = {}
        self._trials: dict[int, int] = {}

    def next_size(self) -> int | None:
        """Return the size to measure next, or None at the end of the search."""
        if not self._trials:
            return 1
        size = max(self._trials)
        if self._trials[size] < _TRIALS and self._left_ns > 0:
            return size
        rates = [self._rate(each) for each in sorted(self._trials)]
        if size >= self._limit or self._left_ns <= 0 or rates[-1] < _WORSE * max(rates):
            return None
        following = min(size * _FACTOR, self._limit)
        # A batch takes at most as many times longer as it has more rows, unless the machine runs out of memory.
        return following if self._best_ns[size] * (following // size) <= self._left_ns else None

    def record(self, size: int, elapsed_ns: int) -> None:
        """Add the duration of one batch."""
        self._left_ns -= elapsed_ns
        self._trials[size] = self._trials.get(size, 0) + 1
        self._best_ns[size] = min(elapsed_ns, self._best_ns.get(size, elapsed_ns))

    def _rate(self, size: int) -> float:
        return size / max(self._best_ns[size], 1)

    @property
    def best(self) -> int:
        """The smallest size that reaches 95 % of the highest throughput, at first 1."""
        if not self._best_ns:
            return 1
        highest = max(self._rate(size) for size in self._best_ns)
        return min(size for size in self._best_ns if self._rate(size) >= _NEAR_BEST * highest)

    @property
    def rows_per_s(self) -> dict[int, float]:
        """Throughput by measured size."""
        return {size: self._rate(size) * 1e9 for size in sorted(self._best_ns)}
