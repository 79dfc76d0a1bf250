"""Metrics of the models as lines of CloudWatch's embedded metric format.

They are for hosts whose log CloudWatch reads. A line has the metrics of one model version, with the dimensions
``model`` and ``version``. Counters are differences since the line before, because CloudWatch adds them up. Labels
beyond the dimensions are summed over, because each combination of dimensions is a metric that AWS charges for.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import orjson

from remora.calls import MetricFamily, MetricRow

Labels = tuple[tuple[str, str], ...]
MOST_METRICS = 100
"""Metrics of one line, and values of one metric, as the format permits."""
_LONGEST_DIMENSION = 255
_LARGEST = 2.0**360
"""Magnitude of the largest value that CloudWatch accepts."""
_UNITS = {"_us": "Microseconds", "_ms": "Milliseconds", "_seconds": "Seconds", "_secs": "Seconds", "_bytes": "Bytes"}


def open_sink(
    namespace: str, begin_ns: int, *, write_line: Callable[[str], object], environ: object
) -> EmbeddedMetrics:
    """Return the writer of these lines to the log; see `remora.management.export.MetricsSink`."""
    return EmbeddedMetrics(write_line, namespace or "remora")


class EmbeddedMetrics:
    """Writer of these lines.

    Args:
        write: writes whole lines; it may block.
        namespace: CloudWatch's namespace of the metrics.
    """

    def __init__(self, write: Callable[[str], object], namespace: str) -> None:
        self._write = write
        self._namespace = namespace
        self._known: dict[tuple[str, str, Labels], float] = {}

    def write(self, families: Sequence[MetricFamily], now_ns: int) -> None:
        """Write a line for each model version; ``now_ns`` is the wall-clock time of its metrics."""
        known, self._known = self._known, {}

        def since(name: str, row: MetricRow) -> float:
            """Return what a counter has counted since the last line, or since it began again."""
            key = name, row.suffix, row.labels
            before = known.get(key, 0)
            self._known[key] = row.value
            return row.value - before if row.value >= before else row.value

        lines = lines_of(families, now_ns // 1_000_000, self._namespace, since)
        if lines:
            self._write("".join(lines))


Since = Callable[[str, MetricRow], float]


def lines_of(families: Iterable[MetricFamily], now_ms: int, namespace: str, since: Since) -> list[str]:
    """Return the lines for these metrics.

    ``since`` returns the difference of a counter to the lines before.
    """
    found: dict[tuple[str, str], dict[str, tuple[str, Any]]] = {}
    for family in families:
        unit = _unit(family)
        for dimensions, rows in _by_model(family.rows).items():
            value = _value(family, rows, since)
            if value is not None:
                found.setdefault(dimensions, {})[family.name] = unit, value
    lines = []
    for dimensions, metrics in found.items():
        members = {name: value for name, value in zip(("model", "version"), dimensions, strict=True) if value}
        for begin in range(0, len(metrics), MOST_METRICS):
            part = list(metrics.items())[begin : begin + MOST_METRICS]
            directive = {
                "Namespace": namespace,
                "Dimensions": [list(members)],
                "Metrics": [{"Name": name, "Unit": unit} for name, (unit, _) in part],
            }
            line = {"_aws": {"Timestamp": now_ms, "CloudWatchMetrics": [directive]}, **members}
            lines.append(orjson.dumps(line | {name: value for name, (_, value) in part}).decode() + "\n")
    return lines


def _by_model(rows: Iterable[MetricRow]) -> dict[tuple[str, str], list[MetricRow]]:
    """Return the rows of models by model and version; vLLM's metrics have no version."""
    found: dict[tuple[str, str], list[MetricRow]] = {}
    for row in rows:
        labels = dict(row.labels)
        model = labels.get("model") or labels.get("model_name")
        if model:
            found.setdefault((_dimension(model), _dimension(labels.get("version", ""))), []).append(row)
    return found


def _dimension(value: str) -> str:
    return value.encode("ascii", "backslashreplace").decode()[:_LONGEST_DIMENSION]


def _value(family: MetricFamily, rows: Sequence[MetricRow], since: Since) -> float | list[float] | None:
    """Return the value of a metric, or values for the new observations of a histogram.

    None stands for no value: a summary, a histogram without new observations, a counter that has never counted.
    """
    if family.kind == "summary":
        return None
    if family.kind == "histogram":
        return _observations([row for row in rows if row.suffix == "_bucket"], family.name, since) or None
    if family.kind == "counter":
        differences = [since(family.name, row) for row in rows]
        value = sum(differences) if any(row.value for row in rows) else None
    else:
        value = sum(row.value for row in rows)
    return value if value is not None and math.isfinite(value) and abs(value) < _LARGEST else None


def _observations(buckets: Sequence[MetricRow], name: str, since: Since) -> list[float]:
    """Return up to `MOST_METRICS` new observations, at evenly spaced ranks.

    Each is the upper bound of its bucket.
    """
    counts: dict[float, float] = {}
    for row in buckets:
        bound = float(dict(row.labels)["le"])
        counts[bound] = counts.get(bound, 0) + since(name, row)
    bounds = sorted(counts)
    cumulative = [counts[bound] for bound in bounds]
    total = int(cumulative[-1]) if cumulative else 0
    largest = max((bound for bound in bounds if math.isfinite(bound)), default=0.0)
    size = min(total, MOST_METRICS)
    ranks = [(index + 0.5) * total / size for index in range(size)]
    return [min(bounds[bisect_left(cumulative, rank)], largest) for rank in ranks]


def _unit(family: MetricFamily) -> str:
    for suffix, unit in _UNITS.items():
        if family.name.endswith(suffix):
            return unit
    if "duration" in family.name:
        return "Microseconds"  # Triton's names of the cache's durations have no unit
    return "Count" if family.kind == "counter" else "None"
