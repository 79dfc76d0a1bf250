"""Export of the metrics at an interval, by a thread that passes them to sinks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from remora import plugins
from remora.calls import MetricFamily
from remora.errors import ConfigError, UnsupportedError
from remora.options import EngineOptions
from remora.system import logs
from remora.system.clock import Clock
from remora.system.environment import variables
from remora.system.install_advice import install_command
from remora.system.url_secrets import without_secrets

_log = logging.getLogger("remora.metrics")


def open_export(options: EngineOptions, read: Callable[[], Sequence[MetricFamily]], clock: Clock) -> MetricsExport:
    """Return the export of the metrics that ``read`` returns, not started.

    Raises ConfigError for a destination that does not exist, UnsupportedError without OpenTelemetry's packages.
    """
    if options.metrics_export_secs < 0:
        raise ConfigError(f"--metrics-export-secs={options.metrics_export_secs:g}: expected 0 or more seconds")
    sinks = [(each.partition("=")[0], _sink(each, clock)) for each in options.metrics_export]
    return MetricsExport(read, sinks, options.metrics_export_secs, clock)


def _sink(destination: str, clock: Clock) -> MetricsSink:
    kind, _, value = destination.partition("=")
    target = plugins.METRIC_SINKS.get(kind)
    if target is None:
        raise ConfigError(f"--metrics-export={without_secrets(kind)}: expected otlp, otlp=URL, emf or emf=NAMESPACE")
    try:
        open_sink = plugins.load_for(f"--metrics-export={kind}", target)
    except ImportError as error:
        raise UnsupportedError(f"--metrics-export={kind} needs: {install_command('otel')} ({error})") from error
    sink: MetricsSink = open_sink(value, clock.wall_ms() * 1_000_000, write_line=logs.OURS.write, environ=variables())
    return sink


class MetricsSink(Protocol):
    """Destination of metrics.

    A row of `remora.plugins.METRIC_SINKS` opens one from the text after ``NAME=``, the time of the start in nanoseconds
    of the wall clock, a function ``write_line`` that writes to the log, and the process's ``environ``.
    """

    def write(self, families: Sequence[MetricFamily], now_ns: int, /) -> None:
        """Write metrics that were read at ``now_ns`` of the wall clock. May block and raise."""


class MetricsExport:
    """Thread that exports the metrics.

    It holds no metrics between two exports, so a sink that fails costs no memory; its failure is logged once, and its
    recovery. Counters go on, so the next export has what a failed one had.

    Args:
        read: returns the metrics.
        sinks: destinations by name.
        interval_s: time between two exports; 0 exports on `flush` and `close` only.
        clock: source of the wall-clock time.
    """

    def __init__(
        self,
        read: Callable[[], Sequence[MetricFamily]],
        sinks: Sequence[tuple[str, MetricsSink]],
        interval_s: float,
        clock: Clock,
    ) -> None:
        self._read = read
        self._sinks = sinks
        self._interval_s = interval_s or None
        self._clock = clock
        self._changed = threading.Condition()
        self._wanted = 0  # exports that callers of `flush` have asked for
        self._done = 0
        self._closing = False
        self._failing: set[str] = set()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread. Idempotent."""
        with self._changed:
            if self._thread is None and not self._closing:
                self._thread = threading.Thread(target=self._serve, name="remora metrics", daemon=True)
                self._thread.start()

    def flush(self, timeout_s: float) -> bool:
        """Export now and return False on timeout."""
        self.start()
        with self._changed:
            if self._closing:
                return False
            self._wanted += 1
            wanted = self._wanted
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._done >= wanted, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Export a last time within the timeout and stop. Idempotent."""
        if self._thread is not None:
            self.flush(timeout_s)
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._wanted > self._done, self._interval_s)
                if self._closing:
                    return
                wanted = self._wanted
            self.export()
            with self._changed:
                self._done = wanted
                self._changed.notify_all()

    def export(self) -> None:
        """Read the metrics and write them to each sink."""
        try:
            families = self._read()
        except Exception as error:  # such as a metric of a model's code that cannot be read
            self._failed("reading", error)
            return
        now_ns = self._clock.wall_ms() * 1_000_000
        for name, sink in self._sinks:
            try:
                sink.write(families, now_ns)
            except Exception as error:  # such as an unreachable collector
                self._failed(name, error)
            else:
                if name in self._failing:
                    self._failing.remove(name)
                    _log.info("metrics are exported again by %s", name)

    def _failed(self, name: str, error: Exception) -> None:
        if name not in self._failing:
            self._failing.add(name)
            _log.warning("metrics cannot be exported by %s until this ends: %s", name, error)
