"""Metrics as OpenTelemetry's collectors get them: the same families as the page, with its numbers."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse
from opentelemetry.proto.metrics.v1.metrics_pb2 import AGGREGATION_TEMPORALITY_CUMULATIVE, Metric

from conftest import free_ports
from remora.calls import MetricFamilies, MetricFamily, MetricRow
from remora.engine import Engine
from remora.models import loader as loading
from remora_adapters.telemetry.collector import Collector
from remora_adapters.telemetry.metrics import OtlpMetrics, request_of
from support.engine.fakes import FakeBackend, FakeClock, write_model
from support.servers.trace_receiver import attributes, collector

M = (("model", "m"), ("version", "1"))
OTHER = (("model", "other"), ("version", "1"))
HISTOGRAM = MetricFamily(
    "h_seconds",
    "histogram",
    "",
    [
        row
        for labels in (M, OTHER)
        for row in (
            MetricRow("_bucket", (*labels, ("le", "0.5")), 1),
            MetricRow("_bucket", (*labels, ("le", "2")), 4),
            MetricRow("_bucket", (*labels, ("le", "+Inf")), 6),
            MetricRow("_sum", labels, 9.5),
            MetricRow("_count", labels, 6),
        )
    ],
)
SUMMARY = MetricFamily(
    "s_us",
    "summary",
    "",
    [
        MetricRow("_count", M, 3),
        MetricRow("_sum", M, 12),
        MetricRow("", (*M, ("quantile", "0.5")), 4),
        MetricRow("", (*M, ("quantile", "0.99")), float("nan")),
    ],
)


def metric_of(family: MetricFamily) -> Metric:
    request = request_of([family], [], lambda name, labels, value: 5, 9)
    (metric,) = request.resource_metrics[0].scope_metrics[0].metrics
    return metric


def test_a_counter_becomes_a_cumulative_sum_that_only_grows() -> None:
    metric = metric_of(MetricFamily("c_total", "counter", "Help", [MetricRow("", M, 7)]))
    assert (metric.name, metric.description) == ("c_total", "Help")
    assert metric.sum.is_monotonic
    assert metric.sum.aggregation_temporality == AGGREGATION_TEMPORALITY_CUMULATIVE
    (point,) = metric.sum.data_points
    assert (point.as_int, point.start_time_unix_nano, point.time_unix_nano) == (7, 5, 9)
    assert attributes(point) == {"model": "m", "version": "1"}


def test_a_gauge_keeps_fractions_and_has_no_start() -> None:
    metric = metric_of(MetricFamily("g_bytes", "gauge", "", [MetricRow("", (), 0.5)]))
    (point,) = metric.gauge.data_points
    assert (point.as_double, point.start_time_unix_nano, metric.unit) == (0.5, 0, "By")


def test_the_buckets_of_a_histogram_count_their_own_observations() -> None:
    metric = metric_of(HISTOGRAM)
    assert metric.unit == "s"
    assert [attributes(point)["model"] for point in metric.histogram.data_points] == ["m", "other"]
    for point in metric.histogram.data_points:
        assert (list(point.explicit_bounds), list(point.bucket_counts)) == ([0.5, 2.0], [1, 3, 2])
        assert (point.sum, point.count, point.start_time_unix_nano) == (9.5, 6, 5)


def test_a_quantile_without_observations_is_left_out_of_a_summary() -> None:
    (point,) = metric_of(SUMMARY).summary.data_points
    assert (point.count, point.sum) == (3, 12)
    assert [(each.quantile, each.value) for each in point.quantile_values] == [(0.5, 4.0)]


def test_a_family_without_rows_is_not_sent() -> None:
    request = request_of([MetricFamily("c", "counter", "", [])], [], lambda name, labels, value: 0, 9)
    assert not request.resource_metrics[0].scope_metrics[0].metrics


def test_a_collector_gets_each_family_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "find_backend", FakeBackend().find)
    write_model(tmp_path, "m")
    with (
        collector() as kept,
        Engine(tmp_path, metrics_export=(f"otlp={kept.base}",), metrics_export_secs=0) as engine,
    ):
        for rows in (1, 3):
            engine.infer("m", {"IN": np.zeros((rows, 1), np.int32)})
        families = engine.perform(MetricFamilies())
        engine.flush(30.0)
        metrics = kept.metrics(lambda found: "nv_inference_count" in found)
        assert set(metrics) == {family.name for family in families if family.rows}
        (point,) = metrics["nv_inference_count"].sum.data_points
        assert (point.as_int, attributes(point)) == (4, {"model": "m", "version": "1"})
        (durations,) = metrics["remora_request_duration_seconds"].histogram.data_points
        assert (durations.count, sum(durations.bucket_counts)) == (2, 2)
        assert kept.resource["service.name"] == "triton-inference-server"


def test_a_counter_that_began_again_has_a_new_start() -> None:
    with collector() as kept:
        sink = OtlpMetrics(Collector("metrics", kept.base, {}), 100)
        for value, now_ns in ((5, 200), (7, 300), (2, 400), (3, 500)):
            sink.write([MetricFamily("c", "counter", "", [MetricRow("", M, value)])], now_ns)
        starts = [
            found["c"].sum.data_points[0].start_time_unix_nano
            for now_ns in (200, 300, 400, 500)
            for found in [kept.metrics(lambda each, at=now_ns: each["c"].sum.data_points[0].time_unix_nano == at)]
        ]
    assert starts == [100, 100, 300, 300]


def test_metrics_that_a_collector_refuses_are_reported_with_its_reason() -> None:
    with collector() as kept:
        refusal = ExportMetricsServiceResponse()
        refusal.partial_success.rejected_data_points = 1
        refusal.partial_success.error_message = "no room"
        kept.answer = refusal.SerializeToString()
        sink = OtlpMetrics(Collector("metrics", kept.base, {}), 0)
        with pytest.raises(ConnectionError, match="refused 1 data points: no room"):
            sink.write([HISTOGRAM], 1)


def test_a_collector_that_is_down_is_logged_once_and_loses_no_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loading, "find_backend", FakeBackend().find)
    write_model(tmp_path, "m")
    caplog.set_level(logging.INFO, "remora.metrics")
    with (
        collector() as kept,
        Engine(tmp_path, clock=FakeClock(), metrics_export=(f"otlp={kept.base}",), metrics_export_secs=0) as engine,
    ):
        kept.status = 503
        for _ in range(3):
            engine.infer("m", {"IN": np.zeros((1, 1), np.int32)})
            engine.flush(30.0)
        kept.status = 200
        engine.flush(30.0)
        metrics = kept.metrics(lambda found: "nv_inference_count" in found)
        assert metrics["nv_inference_count"].sum.data_points[0].as_int == 3
    assert [record.getMessage() for record in caplog.records if record.name == "remora.metrics"] == [
        f"metrics cannot be exported by otlp until this ends: the collector at {kept.base}/v1/metrics answered 503",
        "metrics are exported again by otlp",
    ]


def test_an_engine_starts_and_stops_without_its_collector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "find_backend", FakeBackend().find)
    write_model(tmp_path, "m")
    (port,) = free_ports(1)
    with Engine(tmp_path, metrics_export=(f"otlp=http://127.0.0.1:{port}",)) as engine:
        assert engine.infer("m", {"IN": np.ones((1, 1), np.int32)})["OUT"].tolist() == [[2]]
