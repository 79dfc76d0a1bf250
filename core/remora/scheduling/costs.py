"""Prediction of a batch's duration from the durations of earlier batches."""

from __future__ import annotations


class CostModel:
    """Smoothed durations by batch size.

    A faster run moves the estimate half way, a slower one by a tenth: a single slow run may only have waited for a
    processor, while a model that became slow shows within a few runs.
    """

    def __init__(self) -> None:
        self._ns: dict[int, float] = {}

    def learn(self, rows: int, ns: int) -> None:
        """Record that a batch of ``rows`` took ``ns`` nanoseconds."""
        size = 1 << max(rows - 1, 0).bit_length()
        known = self._ns.get(size)
        if known is None:
            self._ns[size] = float(ns)
        else:
            self._ns[size] = known + (ns - known) * (0.5 if ns < known else 0.1)

    def predict(self, rows: int) -> float:
        """Return the expected nanoseconds of a batch of ``rows``, infinite before the first run."""
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
        """Return nanoseconds by batch size (powers of two), for `explain`."""
        return dict(sorted(self._ns.items()))
