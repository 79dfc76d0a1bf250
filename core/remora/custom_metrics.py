"""Registry of the metrics that models define [P11], as plain data for the exporter.

A ``Claim`` is one user's reference to a family: two instances of a model that claim the same family share its series.
Claims end by ``retire`` (their owner was closed) or because their holder was garbage-collected; a collection is only
queued, because it may happen while the lock is held. Nothing here depends on a wire format or a framework.

Invariant: a series exists for exactly as long as a claim refers to it.
"""

from __future__ import annotations

import math
import re
import threading
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import accumulate, pairwise
from typing import NamedTuple

Labels = tuple[tuple[str, str], ...]

_FAMILY_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL_NAME = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")


class MetricError(ValueError):
    """An invalid metric, or an operation that its kind does not support."""


class MetricKind(StrEnum):
    """What a family measures. The values are Prometheus' type names."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class MetricSample(NamedTuple):
    """One number of a series.

    A histogram has several, distinguished by ``suffix``: ``_bucket`` (observations up to the label ``le``), ``_sum``
    and ``_count``. It is empty for the other kinds.
    """

    suffix: str
    labels: dict[str, str]
    value: float


class Family(NamedTuple):
    """A family and the samples of its series, in the order of creation.

    ``kind`` is one of ``MetricKind``.
    """

    name: str
    description: str
    kind: MetricKind
    samples: tuple[MetricSample, ...]


class Series:
    """One series that a claim may update.

    All methods are thread-safe and raise MetricError for the wrong kind.
    """

    __slots__ = ("_bounds", "_counts", "_kind", "_lock", "_value", "claims")

    def __init__(self, kind: MetricKind, bounds: tuple[float, ...]) -> None:
        self.claims = 0
        self._kind = kind
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._value = 0.0
        self._lock = threading.RLock()  # reentrant, because a destructor may count while samples are taken

    def increment(self, value: float) -> None:
        """Add to a counter or a gauge. A counter never decreases."""
        self._need("Increment", MetricKind.COUNTER, MetricKind.GAUGE)
        if self._kind is MetricKind.COUNTER and not value >= 0:
            raise MetricError(
                "TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically by non-negative values."
            )
        with self._lock:
            self._value += value

    def set(self, value: float) -> None:
        """Set the value of a gauge."""
        self._need("Set", MetricKind.GAUGE)
        with self._lock:
            self._value = value

    def observe(self, value: float) -> None:
        """Add an observation to a histogram."""
        self.observe_equal(value, 1)

    def observe_equal(self, value: float, times: int) -> None:
        """Add several equal observations to a histogram."""
        self._need("Observe", MetricKind.HISTOGRAM)
        with self._lock:
            self._value += value * times
            self._counts[bisect_left(self._bounds, value)] += times

    def value(self) -> float:
        """Return the value of a counter or a gauge."""
        self._need("Value", MetricKind.COUNTER, MetricKind.GAUGE)
        return self._value

    def samples(self, labels: Labels) -> Iterator[MetricSample]:
        """Yield a consistent snapshot of the series."""
        with self._lock:
            value, counts = self._value, tuple(accumulate(self._counts))
        if self._kind is not MetricKind.HISTOGRAM:
            yield MetricSample("", dict(labels), value)
            return
        for bound, count in zip((*self._bounds, math.inf), counts, strict=True):
            yield MetricSample(
                "_bucket", {**dict(labels), "le": "+Inf" if bound == math.inf else f"{bound:.16g}"}, count
            )
        yield MetricSample("_sum", dict(labels), value)
        yield MetricSample("_count", dict(labels), counts[-1])

    def same_buckets(self, bounds: tuple[float, ...]) -> bool:
        """Return True if this histogram has these upper bounds."""
        return self._bounds == bounds

    def _need(self, operation: str, *kinds: MetricKind) -> None:
        if self._kind not in kinds:
            raise MetricError(f"TRITONSERVER_METRIC_KIND_{self._kind.name} does not support {operation}")


class _Family:
    __slots__ = ("claims", "description", "kind", "name", "series")

    def __init__(self, name: str, description: str, kind: MetricKind) -> None:
        self.name = name
        self.description = description
        self.kind = kind
        self.claims = 0
        self.series: dict[Labels, Series] = {}


class Claim:
    """One user's reference to a family. See ``Registry.claim``."""

    __slots__ = ("__weakref__", "family", "labels", "owner")

    def __init__(self, family: _Family, owner: object) -> None:
        self.family = family
        self.owner = owner
        self.labels: set[Labels] = set()


class Registry:
    """All families of a process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._families: dict[str, _Family] = {}
        self._claims: set[Claim] = set()
        self._collected: deque[Claim] = deque()

    def claim(self, name: str, description: str, kind: MetricKind, *, holder: object, owner: object = None) -> Claim:
        """Claim a new family, or the existing one of this name and kind.

        An existing family keeps its description. The claim ends when ``holder`` is collected (it must allow weak
        references) or ``owner`` is retired.

        Raises:
            MetricError: an invalid Prometheus name, or one that is in use for another kind.
        """
        if not _FAMILY_NAME.fullmatch(name):
            raise MetricError(f"'{name}' is not a metric name: use letters, digits, '_' and ':', no leading digit")
        with self._lock:
            self._sweep()
            family = self._families.get(name)
            if family is None:
                family = self._families[name] = _Family(name, description, kind)
            elif family.kind is not kind:
                raise MetricError("Family name already exists with different type")
            family.claims += 1
            claim = Claim(family, owner)
            self._claims.add(claim)
        # deque.append takes none of our locks, because a collection may interrupt any of these methods.
        weakref.finalize(holder, self._collected.append, claim).atexit = False
        return claim

    def series(self, claim: Claim, labels: Mapping[str, str], buckets: Sequence[float] | None = None) -> Series:
        """Return the family's series with these labels, creating it if needed.

        ``buckets`` are a histogram's upper bounds, ascending.

        Raises:
            MetricError: bad labels or buckets, buckets for another kind, or a series with different buckets.
        """
        key = _checked_labels(labels)
        bounds = _checked_buckets(claim.family.kind, buckets)
        with self._lock:
            self._sweep()
            series = claim.family.series.get(key)
            if series is not None and not series.same_buckets(bounds):
                raise MetricError(f"metric '{claim.family.name}' exists already with other buckets for these labels")
            if series is None:
                series = Series(claim.family.kind, bounds)
                if claim in self._claims:
                    claim.family.series[key] = series
            if key not in claim.labels:
                claim.labels.add(key)
                series.claims += 1
        return series

    def retire(self, owner: object) -> None:
        """End all claims of an owner.

        Updates through existing handles are then discarded.
        """
        with self._lock:
            self._sweep()
            for claim in [claim for claim in self._claims if claim.owner is owner]:
                self._end(claim)

    def snapshot(self) -> list[Family]:
        """Return all families with their current values, in the order of creation."""
        with self._lock:
            self._sweep()
            return [
                Family(family.name, family.description, family.kind, tuple(_samples(family)))
                for family in self._families.values()
            ]

    def _sweep(self) -> None:
        while self._collected:
            self._end(self._collected.popleft())

    def _end(self, claim: Claim) -> None:
        if claim not in self._claims:
            return
        self._claims.remove(claim)
        family = claim.family
        for labels in claim.labels:
            series = family.series[labels]
            series.claims -= 1
            if not series.claims:
                del family.series[labels]
        family.claims -= 1
        if not family.claims:
            del self._families[family.name]


def _samples(family: _Family) -> Iterator[MetricSample]:
    for labels, series in family.series.items():
        yield from series.samples(labels)


def _checked_labels(labels: Mapping[str, str]) -> Labels:
    for name, value in labels.items():
        if not isinstance(name, str) or not _LABEL_NAME.fullmatch(name):
            raise MetricError(f"Invalid label name '{name}': use letters, digits and '_', no leading digit or '__'")
        if not isinstance(value, str):
            raise MetricError(f"label '{name}' must be text, not {type(value).__name__}")
    return tuple(sorted(labels.items()))


def _checked_buckets(kind: MetricKind, buckets: Sequence[float] | None) -> tuple[float, ...]:
    if kind is not MetricKind.HISTOGRAM:
        if buckets:
            raise MetricError(f"a {kind.value} has no buckets; use the HISTOGRAM kind")
        return ()
    if not buckets:
        raise MetricError("a histogram needs its buckets: the ascending upper bounds, e.g. [0.1, 1, 10]")
    bounds = tuple(float(bound) for bound in buckets)
    if any(math.isnan(bound) for bound in bounds) or any(a >= b for a, b in pairwise(bounds)):
        raise MetricError(f"histogram buckets must ascend, got {list(buckets)}")
    return bounds[:-1] if bounds[-1] == math.inf else bounds


REGISTRY = Registry()
"""The process-wide registry, because a model cannot name the server that it belongs to."""


def snapshot() -> list[Family]:
    """Return all families of this process."""
    return REGISTRY.snapshot()
