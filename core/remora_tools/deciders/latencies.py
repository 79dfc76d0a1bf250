"""Histogram of durations with a relative error below 1 %, which merges with others. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

_BITS = 8
"""Significant bits of a value: a bucket is at most 1/128 of its value wide."""


class Histogram:
    """Counts of durations in nanoseconds.

    Memory depends on the range of the values, not on their number.
    """

    __slots__ = ("buckets", "count", "total_ns")

    def __init__(self, buckets: Mapping[int, int] | None = None, total_ns: int = 0) -> None:
        self.buckets = dict(buckets or {})
        self.count = sum(self.buckets.values())
        self.total_ns = total_ns

    def record(self, ns: int) -> None:
        """Add a duration; a negative one counts as 0."""
        ns = max(ns, 0)
        shift = max(ns.bit_length() - _BITS, 0)
        key = (shift << _BITS) | (ns >> shift)
        self.buckets[key] = self.buckets.get(key, 0) + 1
        self.count += 1
        self.total_ns += ns

    def percentile(self, percent: float) -> int:
        """Return the middle of the bucket that holds this percentile, 0 without values."""
        left = max(self.count * percent / 100, 1e-9)
        for key in sorted(self.buckets):
            left -= self.buckets[key]
            if left <= 0:
                return _middle(key)
        return _middle(max(self.buckets)) if self.buckets else 0

    @property
    def mean_ns(self) -> float:
        """The exact mean, 0 without values."""
        return self.total_ns / self.count if self.count else 0.0

    def curve(self) -> list[tuple[int, float]]:
        """Return (duration, share of values up to it) for each bucket, ascending."""
        seen, points = 0, []
        for key in sorted(self.buckets):
            seen += self.buckets[key]
            points.append((_middle(key), seen / self.count))
        return points

    def to_json(self) -> dict[str, object]:
        """Return the histogram as a JSON document."""
        return {"buckets": sorted(self.buckets.items()), "total_ns": self.total_ns}


def _middle(key: int) -> int:
    shift = key >> _BITS
    return ((key & ((1 << _BITS) - 1)) << shift) + ((1 << shift) >> 1)


def from_json(document: Mapping[str, object]) -> Histogram:
    """Return the histogram of `Histogram.to_json`."""
    buckets, total = document["buckets"], document["total_ns"]
    assert isinstance(buckets, list)
    assert isinstance(total, int)
    return Histogram(dict(buckets), total)


def merge(histograms: Iterable[Histogram]) -> Histogram:
    """Return the histogram of all values together."""
    buckets: dict[int, int] = {}
    total_ns = 0
    for each in histograms:
        total_ns += each.total_ns
        for key, count in each.buckets.items():
            buckets[key] = buckets.get(key, 0) + count
    return Histogram(buckets, total_ns)
