"""Metrics as requests of OTLP, sent to an OpenTelemetry collector.

Imported only if metrics are sent there. Names and labels are those of the Prometheus page, so that one dashboard reads
both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    AGGREGATION_TEMPORALITY_CUMULATIVE,
    HistogramDataPoint,
    Metric,
    NumberDataPoint,
    SummaryDataPoint,
)

from remora._version import __version__
from remora.calls import MetricFamily, MetricRow
from remora_adapters.telemetry.collector import Collector, key_values, server_resource

Labels = tuple[tuple[str, str], ...]
_SCOPE = "remora"
_UNITS = {"_us": "us", "_ms": "ms", "_seconds": "s", "_secs": "s", "_bytes": "By", "_joules": "J"}


def open_sink(url: str, begin_ns: int, *, write_line: object, environ: Mapping[str, str]) -> OtlpMetrics:
    """Return the exporter to a collector; see `remora.management.export.MetricsSink`."""
    return OtlpMetrics(Collector("metrics", url, environ), begin_ns)


class OtlpMetrics:
    """Sender of metrics to a collector.

    Args:
        collector: the collector of metrics.
        begin_ns: wall-clock time at which all counters were 0.
    """

    def __init__(self, collector: Collector, begin_ns: int) -> None:
        self._collector = collector
        self._resource = key_values(server_resource({}).attributes)
        self._series = _SeriesStarts(begin_ns)

    def write(self, families: Sequence[MetricFamily], now_ns: int) -> None:
        """Send metrics of the wall-clock time ``now_ns``. Blocks; raises ConnectionError."""
        answer = self._collector.send(request_of(families, self._resource, self._series.begin, now_ns))
        self._series.end_export(now_ns)
        refused = ExportMetricsServiceResponse.FromString(answer).partial_success
        if refused.rejected_data_points:
            raise ConnectionError(
                f"the collector at {self._collector.place} refused {refused.rejected_data_points} data points: "
                f"{refused.error_message}"
            )


class _SeriesStarts:
    """Times at which the series of counters began.

    A counter that is less than before has begun again, because its model was loaded again.
    """

    def __init__(self, begin_ns: int) -> None:
        self._begin_ns = begin_ns
        self._exported_ns = begin_ns
        self._known: dict[tuple[str, Labels], tuple[int, float]] = {}
        self._seen: dict[tuple[str, Labels], tuple[int, float]] = {}

    def begin(self, name: str, labels: Labels, value: float) -> int:
        """Return the time since which a series counts."""
        begin_ns, before = self._known.get((name, labels), (self._begin_ns, 0.0))
        if value < before:
            begin_ns = self._exported_ns
        self._seen[name, labels] = begin_ns, value
        return begin_ns

    def end_export(self, now_ns: int) -> None:
        """Keep what this export saw, and nothing of series that have gone."""
        self._known, self._seen, self._exported_ns = self._seen, {}, now_ns


Begin = Callable[[str, Labels, float], int]


def request_of(
    families: Iterable[MetricFamily], resource: Iterable[KeyValue], begin: Begin, now_ns: int
) -> ExportMetricsServiceRequest:
    """Return the request for these metrics.

    ``begin`` returns the time since which the series of a name and labels counts, in nanoseconds since 1970.
    """
    request = ExportMetricsServiceRequest()
    found = request.resource_metrics.add()
    found.resource.attributes.extend(resource)
    scope = found.scope_metrics.add()
    scope.scope.name, scope.scope.version = _SCOPE, __version__
    for family in families:
        if family.rows:
            scope.metrics.append(_metric(family, begin, now_ns))
    return request


def _metric(family: MetricFamily, begin: Begin, now_ns: int) -> Metric:
    unit = next((unit for suffix, unit in _UNITS.items() if family.name.endswith(suffix)), "")
    metric = Metric(name=family.name, description=family.description, unit=unit)
    match family.kind:
        case "counter":
            metric.sum.aggregation_temporality = AGGREGATION_TEMPORALITY_CUMULATIVE
            metric.sum.is_monotonic = True
            for row in family.rows:
                point = _number(row, now_ns)
                point.start_time_unix_nano = begin(family.name, row.labels, row.value)
                metric.sum.data_points.append(point)
        case "histogram":
            metric.histogram.aggregation_temporality = AGGREGATION_TEMPORALITY_CUMULATIVE
            metric.histogram.data_points.extend(_histograms(family, begin, now_ns))
        case "summary":
            metric.summary.data_points.extend(_summaries(family, begin, now_ns))
        case _:
            metric.gauge.data_points.extend(_number(row, now_ns) for row in family.rows)
    return metric


def _number(row: MetricRow, now_ns: int) -> NumberDataPoint:
    point = NumberDataPoint(time_unix_nano=now_ns, attributes=key_values(dict(row.labels)))
    if isinstance(row.value, int) and -(2**63) <= row.value < 2**63:
        point.as_int = row.value
    else:
        point.as_double = float(row.value)
    return point


def _histograms(family: MetricFamily, begin: Begin, now_ns: int) -> Iterator[HistogramDataPoint]:
    """Yield a point for each combination of labels, with the counts of single buckets."""
    for labels, rows in _by_labels(family, "le"):
        point = HistogramDataPoint(time_unix_nano=now_ns, attributes=key_values(dict(labels)))
        for row in rows:
            if row.suffix == "_bucket":
                bound = float(dict(row.labels)["le"])
                if math.isfinite(bound):
                    point.explicit_bounds.append(bound)
                point.bucket_counts.append(int(row.value) - sum(point.bucket_counts))
            elif row.suffix == "_sum":
                point.sum = row.value
            else:
                point.count = int(row.value)
                point.start_time_unix_nano = begin(family.name, labels, row.value)
        yield point


def _summaries(family: MetricFamily, begin: Begin, now_ns: int) -> Iterator[SummaryDataPoint]:
    for labels, rows in _by_labels(family, "quantile"):
        point = SummaryDataPoint(time_unix_nano=now_ns, attributes=key_values(dict(labels)))
        for row in rows:
            if row.suffix == "_sum":
                point.sum = row.value
            elif row.suffix == "_count":
                point.count = int(row.value)
                point.start_time_unix_nano = begin(family.name, labels, row.value)
            elif not math.isnan(row.value):  # NaN on the page stands for "no observation"
                point.quantile_values.add(quantile=float(dict(row.labels)["quantile"]), value=row.value)
        yield point


def _by_labels(family: MetricFamily, apart: str) -> Iterable[tuple[Labels, list[MetricRow]]]:
    """Return the rows of each combination of labels without ``apart``, in their order."""
    rows: dict[Labels, list[MetricRow]] = {}
    for row in family.rows:
        rows.setdefault(tuple(label for label in row.labels if label[0] != apart), []).append(row)
    return rows.items()
