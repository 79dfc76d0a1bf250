"""Metrics API of Python models, on top of the registry of custom metrics [P11]."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from remora.backends.python.arguments import instance, real, text
from remora.backends.python.host import current_host
from remora.backends.python.tensor import TritonModelException
from remora.custom_metrics import REGISTRY, MetricError, MetricKind, Series

_registry: Any = REGISTRY


def report_to(registry: Any) -> None:
    """Replace the registry for all metrics of this process.

    A worker process, in which one model runs, calls this at its start. ``registry`` has the methods of
    ``custom_metrics.Registry`` that are used here.
    """
    global _registry  # per process, because models cannot name a registry
    _registry = registry


@contextmanager
def _explained(where: str) -> Iterator[None]:
    try:
        yield
    except MetricError as error:
        host = current_host()
        model = f"Failed to process the request for model '{host.instance_name}', message: " if host is not None else ""
        raise TritonModelException(f"{where}: {model}{error}") from None


class Metric:
    """One series of a family, created by ``MetricFamily.Metric``. Thread-safe.

    All methods raise TritonModelException for an operation that the family's kind does not support.
    """

    __slots__ = ("_family", "_series")

    def __init__(self, family: MetricFamily, series: Series) -> None:
        self._family = family  # keeps the series exported as long as the model keeps the metric
        self._series = series

    def increment(self, value: float) -> None:
        """Add to a counter (at least 0) or a gauge."""
        with _explained("Failed to increment metric value"):
            self._series.increment(real(value, "Metric.increment: the value"))

    def set(self, value: float) -> None:
        """Set a gauge."""
        with _explained("Failed to set metric value"):
            self._series.set(real(value, "Metric.set: the value"))

    def observe(self, value: float) -> None:
        """Add a value to a histogram."""
        with _explained("Failed to observe metric value"):
            self._series.observe(real(value, "Metric.observe: the value"))

    def value(self) -> float:
        """Return the value of a counter or a gauge."""
        with _explained("Failed to get metric value"):
            return self._series.value()


class MetricFamily:
    """A family of metrics with one name, exported until it is released or the model unloaded.

    Raises:
        TypeError: an argument has another type.
        TritonModelException: an invalid name, or a name in use for another kind or description.
    """

    COUNTER = MetricKind.COUNTER
    GAUGE = MetricKind.GAUGE
    HISTOGRAM = MetricKind.HISTOGRAM

    def __init__(self, name: str | bytes, description: str | bytes, kind: MetricKind) -> None:
        name, about = text(name, "MetricFamily: the name"), text(description, "MetricFamily: the description")
        kind = instance(kind, MetricKind, "MetricFamily: the kind")
        with _explained("Error when creating MetricFamily"):
            self._claim = _registry.claim(name, about, kind, holder=self, owner=current_host())

    def Metric(  # noqa: N802 - Triton's name
        self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None
    ) -> Metric:
        """Return the series with these labels.

        ``buckets`` are the ascending upper bounds of a histogram.

        Raises:
            TritonModelException: invalid labels or buckets.
        """
        if labels is not None and not isinstance(labels, Mapping):
            raise TritonModelException(
                f"Error when creating Metric: the labels must be a dict, not {type(labels).__name__}"
            )
        with _explained("Error when creating Metric"):
            return Metric(self, _registry.series(self._claim, labels or {}, buckets))
