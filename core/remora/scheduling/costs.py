"""How long will a batch of n rows take? Learned from how long batches took; pure numbers, no clock."""

from __future__ import annotations


class CostModel:
    """Run times by batch size, smoothed.

    A faster run moves the estimate half way, a slower one a tenth: a run that had to wait for a processor is noise,
    a model that became slow shows within a few runs all the same.
    """

    def __init__(self) -> None:
        self._ns: dict[int, float] = {}

    def learn(self, rows: int, ns: int) -> None:
        """Note that a batch of ``rows`` took ``ns`` nanoseconds."""
        size = 1 << max(rows - 1, 0).bit_length()
        known = self._ns.get(size)
        if known is None:
            self._ns[size] = float(ns)
        else:
            self._ns[size] = known + (ns - known) * (0.5 if ns < known else 0.1)

    def predict(self, rows: int) -> float:
        """Nanoseconds a batch of ``rows`` is expected to take; infinite while nothing near it is known."""
        size = 1 << max(rows - 1, 0).bit_length()
        known = self._ns.get(size)
        if known is not None:
            return known
        smaller = [other for other in tuple(self._ns) if other < size]
        if not smaller:
            return min((ns for other, ns in tuple(self._ns.items()) if other > size), default=float("inf"))
        nearest = max(smaller)
        return self._ns[nearest] * size / nearest

    def curve(self) -> dict[int, float]:
        """Batch size (powers of two) -> nanoseconds, for `explain`."""
        return dict(sorted(self._ns.items()))
