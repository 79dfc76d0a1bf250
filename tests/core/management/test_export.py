"""The thread that exports metrics: when it does, and what a sink that fails costs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from conftest import needs
from remora.calls import MetricFamily
from remora.engine import Engine
from remora.errors import ConfigError
from remora.management.export import MetricsExport
from support.engine.fakes import FakeClock

PATIENCE_S = 30.0


class FakeSink:
    """Keeps the times of exports; fails while it has a failure."""

    def __init__(self) -> None:
        self.times: list[int] = []
        self.failure: Exception | None = None
        self.go = threading.Event()
        self.go.set()
        self.enough = threading.Event()

    def write(self, families: Sequence[MetricFamily], now_ns: int) -> None:
        assert self.go.wait(PATIENCE_S)
        if self.failure is not None:
            raise self.failure
        self.times.append(now_ns)
        if len(self.times) == 3:
            self.enough.set()


def export_to(sink: FakeSink, interval_s: float = 0.0, clock: FakeClock | None = None) -> MetricsExport:
    return MetricsExport(list, [("fake", sink)], interval_s, clock or FakeClock())


def test_metrics_are_exported_at_each_interval_and_at_the_end() -> None:
    sink = FakeSink()
    export = export_to(sink, 0.001)
    export.start()
    assert sink.enough.wait(PATIENCE_S)
    export.close(PATIENCE_S)
    count = len(sink.times)
    assert count > 3
    export.close(PATIENCE_S)
    assert not export.flush(0.0)


def test_without_an_interval_only_a_flush_exports() -> None:
    sink, clock = FakeSink(), FakeClock()
    export = export_to(sink, clock=clock)
    export.start()
    assert export.flush(PATIENCE_S)
    clock.advance(1_000_000)
    assert export.flush(PATIENCE_S)
    assert sink.times == [1_000_000_000, 1_001_000_000]
    export.close(PATIENCE_S)
    assert len(sink.times) == 3


def test_a_sink_that_hangs_does_not_hold_up_the_end() -> None:
    sink = FakeSink()
    sink.go.clear()
    export = export_to(sink)
    export.start()
    assert not export.flush(0.01)
    export.close(0.01)
    sink.go.set()


def test_one_sink_that_fails_is_logged_once_and_leaves_the_other_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    bad, good = FakeSink(), FakeSink()
    bad.failure = ConnectionError("down")
    export = MetricsExport(list, [("bad", bad), ("good", good)], 0.0, FakeClock())
    for _ in range(3):
        export.export()
    bad.failure = None
    export.export()
    assert len(good.times) == 4
    assert [record.getMessage() for record in caplog.records] == [
        "metrics cannot be exported by bad until this ends: down",
        "metrics are exported again by bad",
    ]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"metrics_export": ("statsd",)}, "--metrics-export=statsd: expected otlp"),
        ({"metrics_export": ("http://u:s3cret@h",)}, r"--metrics-export=http://\*\*\*@h: expected otlp"),
        ({"metrics_export": ("emf",), "metrics_export_secs": -1.0}, "--metrics-export-secs=-1: expected 0 or more"),
        pytest.param(
            {"metrics_export": ("otlp=ftp://collector",)},
            "needs a URL such as http://collector:4318",
            marks=needs("remora_adapters"),
        ),
    ],
)
def test_an_export_that_cannot_be_is_refused_at_the_start(
    tmp_path: Path, settings: dict[str, object], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        Engine(tmp_path, **settings)
