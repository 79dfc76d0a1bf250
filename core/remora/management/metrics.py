"""Metrics as families and as Prometheus' page [P01-P04, P09], built on demand.

Uses Triton's ``nv_*`` names, so that dashboards made for Triton work, and adds our histograms and dispatch reasons.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate

from remora import plugins
from remora.cache import CacheStats, ResponseCache
from remora.calls import Duration, MetricFamily, MetricRow, ModelStats, ReleaseShare
from remora.custom_metrics import Family
from remora.custom_metrics import snapshot as custom_families
from remora.models.served_model import ServedModel
from remora.startup import StartupReport
from remora.statistics import (
    FAILURE_REASONS,
    FIRST_RESPONSES,
    LATENCY_BOUNDS_NS,
    CacheSample,
    Histogram,
    MetricsSettings,
    ServerLoad,
)
from remora.system.clock import Clock
from remora.system.cpus import memory_in_use_bytes, memory_limit_bytes
from remora.system.gpus import GpuReading
from remora.system.machine import CpuUsage, memory_bytes, resident_bytes

_log = logging.getLogger("remora.metrics")

_CACHED_TOO = ("request", "queue")
"""The durations of a cached request; it has no others."""
_SUMMARY_WINDOW_NS = 60 * 10**9
Labels = tuple[tuple[str, str], ...]


_RELEASE_FAMILIES: tuple[tuple[str, str, str, Callable[[ReleaseShare], float]], ...] = (
    ("remora_release_weight", "gauge", "Part of the requests that a version gets, from 0 to 1", lambda row: row.weight),
    ("remora_release_answers", "gauge", "Answers since the step of the release began", lambda row: row.answers),
    ("remora_release_errors", "gauge", "Failed answers since the step of the release began", lambda row: row.errors),
)


def _share_labels(share: ReleaseShare) -> Labels:
    return ("model", share.model), ("version", str(share.version)), ("alias", share.alias)


_NO_COUNTS: Mapping[str, int] = {}
_NO_ENERGY: Mapping[str, float] = {}


_Reader = Callable[[Sequence[ServedModel]], Iterable[Family]]
"""Returns the families of a plug-in."""


def _metric_plugins() -> list[tuple[str, _Reader]]:
    """Return the plug-ins with their names; the log names those that cannot be loaded."""
    loads = [(target, partial(plugins.load, target)) for target in plugins.METRICS if plugins.is_present(target)]
    loads += [(entry.name, partial(plugins.load_installed, entry)) for entry in plugins.installed("metrics")]
    readers: list[tuple[str, _Reader]] = []
    for name, load in loads:
        try:
            readers.append((name, load()))
        except Exception:
            _log.exception("the metrics of the plug-in '%s' cannot be loaded", name)
    return readers


class MetricsExporter:
    """Reader of the metrics. Its only state is the last CPU reading."""

    def __init__(
        self,
        settings: MetricsSettings,
        clock: Clock,
        cache: ResponseCache | None = None,
        gpus: Callable[[], Sequence[GpuReading]] = tuple,
        energy_j: Mapping[str, float] = _NO_ENERGY,
    ) -> None:
        self._settings = settings
        self._gpus = gpus
        self._energy_j = energy_j
        """The energy that each GPU had used when the server started, by UUID."""
        self._cache = cache
        self._clock = clock
        self._cpu = CpuUsage()
        self._readers: Sequence[tuple[str, _Reader]] | None = None
        self._failed: set[str] = set()

    def families(
        self,
        models: Sequence[ServedModel],
        startup: StartupReport | None = None,
        connections: Mapping[str, int] = _NO_COUNTS,
        denials: Mapping[str, int] = _NO_COUNTS,
        load: ServerLoad | None = None,
        shares: Sequence[ReleaseShare] = (),
    ) -> list[MetricFamily]:
        """Return the metrics of these models, start and counts in the order of the page."""
        found: list[MetricFamily] = []
        for name, kind, help_text, read in _FAMILIES:
            if name.endswith("_duration_us") and not self._settings.counter_latencies:
                continue
            _family(found, name, kind, help_text, [row for model in models for row in read(model)])
        self._ages(found, models)
        self._caches(found, [model for model in models if model.caches])
        if self._settings.histogram_latencies:
            _family(found, FIRST_RESPONSES, "histogram", _FIRST_HELP, [row for each in models for row in _first(each)])
        if self._settings.summary_latencies:
            self._summaries(found, models)
        self._machine(found)
        self._devices(found)
        rows = [MetricRow("", (("protocol", protocol),), count) for protocol, count in connections.items()]
        if rows:
            _family(found, "remora_open_connections", "gauge", "Connections that clients have open", rows)
        rows = [MetricRow("", (("reason", reason),), count) for reason, count in denials.items()]
        if rows:
            _family(found, "remora_denied_requests_total", "counter", "Requests without a valid API key", rows)
        if load is not None:
            _load(found, load)
        for name, kind, help_text, value in _RELEASE_FAMILIES if shares else ():
            rows = [MetricRow("", _share_labels(share), value(share)) for share in shares]
            _family(found, name, kind, help_text, rows)
        if startup is not None and startup.ready:
            _startup(found, startup)
        for family in (*self._plugged(models), *custom_families()):
            rows = [MetricRow(sample.suffix, tuple(sample.labels.items()), sample.value) for sample in family.samples]
            _family(found, family.name, family.kind.lower(), family.description, rows)
        return found

    def _plugged(self, models: Sequence[ServedModel]) -> Iterable[Family]:
        """Yield the families of plug-ins, without those that fail.

        The log says so once for each.
        """
        if self._readers is None:
            self._readers = _metric_plugins()
        for name, read in self._readers:
            try:
                families = list(read(models))
            except Exception:
                if name not in self._failed:
                    self._failed.add(name)
                    _log.exception("the metrics of the plug-in '%s' are left out", name)
            else:
                yield from families

    def _ages(self, found: list[MetricFamily], models: Sequence[ServedModel]) -> None:
        """Add how long the requests that are still queued have waited."""
        now_ns = self._clock.monotonic_ns()
        oldest = [(model, model.scheduler.oldest_ns or now_ns) for model in models]
        rows = [MetricRow("", _labels(model), max(now_ns - since_ns, 0) / 1e9) for model, since_ns in oldest]
        help_text = "Age of the queued request that has waited longest; 0 without one"
        _family(found, "remora_queue_oldest_age_seconds", "gauge", help_text, rows)

    def _caches(self, found: list[MetricFamily], models: Sequence[ServedModel]) -> None:
        """Add the metrics of the cache and of the models that use it [P07]."""
        for name, kind, help_text, read in _CACHE_FAMILIES if models else ():
            if name.endswith("_duration_per_model") and not self._settings.counter_latencies:
                continue
            _family(found, name, kind, help_text, [row for model in models for row in read(model)])
        if self._cache is not None:
            stats = self._cache.stats()
            for name, help_text, value in _CACHE_GAUGES:
                _family(found, name, "gauge", help_text, [MetricRow("", (), value(stats))])

    def _summaries(self, found: list[MetricFamily], models: Sequence[ServedModel]) -> None:
        since_ns = self._clock.monotonic_ns() - _SUMMARY_WINDOW_NS
        samples = [(model, model.statistics.samples(since_ns)) for model in models]
        hits = {model: _cache_samples(model, since_ns, hit=True) for model in models if model.caches}
        for field, help_text in _SUMMARIES:
            rows: list[MetricRow] = []
            for model, kept in samples:
                total = getattr(_stats(model), "success" if field == "request" else field)
                values = [getattr(sample, f"{field}_ns") for sample in kept]
                if field in _CACHED_TOO:
                    values += [getattr(sample, f"{field}_ns") for sample in hits.get(model, ())]
                rows += self._summary(model, total, values)
            _family(found, f"nv_inference_{field}_summary_us", "summary", help_text, rows)
        for hit, name in ((True, "cache_hit"), (False, "cache_miss")) if hits else ():
            rows = []
            for model in hits:
                kept_ns = [sample.cache_ns for sample in _cache_samples(model, since_ns, hit=hit)]
                rows += self._summary(model, getattr(_stats(model), name), kept_ns)
            help_text = f"Summary of {name.replace('_', ' ')} counts/durations per model, in microseconds."
            _family(found, f"nv_{name}_summary_per_model", "summary", help_text, rows)

    def _summary(self, model: ServedModel, total: Duration, samples_ns: Sequence[int]) -> Iterable[MetricRow]:
        labels = _labels(model)
        yield MetricRow("_count", labels, total.count)
        yield MetricRow("_sum", labels, total.ns // 1000)
        values = sorted(ns // 1000 for ns in samples_ns)
        for quantile in self._settings.quantiles:
            value = values[min(int(quantile * len(values)), len(values) - 1)] if values else math.nan
            yield MetricRow("", (*labels, ("quantile", f"{quantile:g}")), value)

    def _machine(self, found: list[MetricFamily]) -> None:
        total, used = memory_bytes()
        limit = memory_limit_bytes()
        for name, help_text, value in (
            ("nv_pinned_memory_pool_total_bytes", "Pinned memory pool total memory size, in bytes", 0),
            ("nv_pinned_memory_pool_used_bytes", "Pinned memory pool used memory size, in bytes", 0),
            ("nv_cpu_utilization", "CPU utilization rate [0.0 - 1.0]", self._cpu.read()),
            ("nv_cpu_memory_total_bytes", "CPU total memory (RAM), in bytes", total),
            ("nv_cpu_memory_used_bytes", "CPU used memory (RAM), in bytes", used),
            # Those above are the machine's, as Triton reports them; a container is ended at its own limit.
            ("remora_memory_limit_bytes", "Memory limit of the container, or else of the machine", limit or total),
            ("remora_memory_used_bytes", "Memory in use in the container, without cache", memory_in_use_bytes()),
        ):
            _family(found, name, "gauge", help_text, [MetricRow("", (), value)])
        if resident := resident_bytes():
            help_text = "Resident memory of the server's process, in bytes"
            _family(found, "process_resident_memory_bytes", "gauge", help_text, [MetricRow("", (), resident)])

    def _devices(self, found: list[MetricFamily]) -> None:
        """Add the GPU metrics [P08]. A value that a device does not report has no row."""
        readings = self._gpus()
        for name, kind, help_text, read in _GPU_FAMILIES if readings else ():
            values = [(reading, read(reading)) for reading in readings]
            rows = [
                MetricRow("", (("gpu_uuid", reading.uuid),), value) for reading, value in values if value is not None
            ]
            _family(found, name, kind, help_text, rows)
        energy = [(each.uuid, each.energy_j - self._energy_j.get(each.uuid, 0.0)) for each in readings if each.energy_j]
        if energy:
            rows = [MetricRow("", (("gpu_uuid", uuid),), joules) for uuid, joules in energy]
            _family(found, "nv_energy_consumption", "counter", "GPU energy in joules since the server started", rows)


def _load(found: list[MetricFamily], load: ServerLoad) -> None:
    """Add the answers by HTTP status, the lateness of the event loop and the held bytes."""
    rows = [MetricRow("", (("code", str(status)),), count) for status, count in sorted(load.answers.items())]
    if rows:
        _family(found, "remora_http_responses_total", "counter", "Answers over HTTP by status", rows)
    rows = [MetricRow("", (("reason", reason),), count) for reason, count in sorted(load.closed.items())]
    if rows:
        help_text = "Connections and streams closed by timeouts, for errors or for want of descriptors"
        _family(found, "remora_closed_connections_total", "counter", help_text, rows)
    if load.lateness is not None:
        help_text = "How late the event loop ran a timer, sampled twice a second"
        rows = list(_histogram_rows((), load.lateness))
        _family(found, "remora_event_loop_lateness_seconds", "histogram", help_text, rows)
    if load.held is not None:
        held = load.held
        kinds = {"requests": held.requests, "answers": held.answers}
        rows = [MetricRow("", (("kind", kind),), size) for kind, size in kinds.items()]
        _family(found, "remora_held_bytes", "gauge", "Bytes of requests and unread answers in connections", rows)
        if held.limit:
            row = MetricRow("", (), held.limit)
            _family(found, "remora_held_bytes_limit", "gauge", "Limit of remora_held_bytes of all kinds", [row])
        rows = [MetricRow("", (("limit", limit),), held.refused.get(limit, 0)) for limit in ("connection", "server")]
        _family(found, "remora_held_bytes_refusals_total", "counter", "Requests refused at a limit of bytes", rows)


def _startup(found: list[MetricFamily], report: StartupReport) -> None:
    """Add the phases of the start, which sum to the total so that a graph of them stacks."""
    rows = [MetricRow("", (("phase", each.name),), (each.end_ns - each.begin_ns) / 1e9) for each in report.phases]
    _family(found, "remora_startup_phase_seconds", "gauge", "Phases of this server's start", rows)
    if report.first_answer_ns:
        row = MetricRow("", (), report.first_answer_ns / 1e9)
        _family(found, "remora_startup_first_answer_seconds", "gauge", "From exec to the first answered request", [row])


def _labels(model: ServedModel) -> Labels:
    tags = ((f"_{key}", value) for key, value in model.config.metric_tags.items())
    return tuple(sorted((*tags, *model.metric_labels, ("model", model.name), ("version", model.version_text))))


def _one(read: Callable[[ServedModel], float]) -> Callable[[ServedModel], Iterable[MetricRow]]:
    return lambda model: [MetricRow("", _labels(model), read(model))]


def _total_us(name: str) -> Callable[[ServedModel], Iterable[MetricRow]]:
    return _one(lambda model: getattr(_stats(model), name).ns // 1000)


def _stats(model: ServedModel) -> ModelStats:
    # Without per-response statistics: a stream has a row per response, and no metric reads them.
    return model.statistics.snapshot(model.name, model.version_text, responses=False)


def _cache_samples(model: ServedModel, since_ns: int, *, hit: bool) -> list[CacheSample]:
    return [sample for sample in model.statistics.cache_samples(since_ns) if sample.hit is hit]


def _failures(model: ServedModel) -> Iterable[MetricRow]:
    labels = _labels(model)
    failures = model.statistics.failures
    return [MetricRow("", tuple(sorted((*labels, ("reason", reason)))), failures[reason]) for reason in FAILURE_REASONS]


def _dispatches(model: ServedModel) -> Iterable[MetricRow]:
    labels = _labels(model)
    return [
        MetricRow("", (*labels, ("reason", why)), count) for why, count in sorted(model.statistics.dispatches.items())
    ]


def _histogram(index: int) -> Callable[[ServedModel], Iterable[MetricRow]]:
    return lambda model: _histogram_rows(_labels(model), model.statistics.histograms()[index])


def _histogram_rows(labels: Labels, histogram: Histogram) -> Iterable[MetricRow]:
    seen = 0
    for bound_ns, count in zip(LATENCY_BOUNDS_NS, histogram.counts, strict=False):
        seen += count
        yield MetricRow("_bucket", (*labels, ("le", f"{bound_ns / 1e9:g}")), seen)
    total = sum(histogram.counts)
    yield MetricRow("_bucket", (*labels, ("le", "+Inf")), total)
    yield MetricRow("_sum", labels, histogram.sum_ns / 1e9)
    yield MetricRow("_count", labels, total)


def _first(model: ServedModel) -> Iterable[MetricRow]:
    read = model.statistics.first_responses()
    if read is None:
        return
    labels = _labels(model)
    for bound_ms, seen in zip((*read.bounds_ms, math.inf), accumulate(read.counts), strict=True):
        yield MetricRow("_bucket", (*labels, ("le", _number(bound_ms))), seen)
    yield MetricRow("_sum", labels, read.sum_ms)
    yield MetricRow("_count", labels, sum(read.counts))


def _family(found: list[MetricFamily], name: str, kind: str, help_text: str, rows: Sequence[MetricRow]) -> None:
    found.append(MetricFamily(name, kind, help_text, rows))


def page_text(families: Iterable[MetricFamily]) -> str:
    """Return metrics in Prometheus' text format."""
    lines: list[str] = []
    for name, kind, help_text, rows in families:
        if help_text:
            lines.append(f"# HELP {name} {_escape_help(help_text)}")
        lines.append(f"# TYPE {name} {kind}")
        lines.extend(f"{name}{row.suffix}{_label_text(row.labels)} {_number(row.value)}" for row in rows)
    return "\n".join(lines) + "\n"


def _label_text(labels: Labels) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{key}="{_escape(value)}"' for key, value in labels) + "}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _escape_help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _number(value: float) -> str:
    """Format a number with 16 digits, as Triton's library does. Counts are exact."""
    if isinstance(value, int):
        return str(value)
    if not math.isfinite(value):
        return "Nan" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
    return f"{value:.16g}"


_FIRST_HELP = "Duration from request to first response in milliseconds"

_SUMMARIES = (
    ("request", "Summary of inference request duration in microseconds (includes cached requests)"),
    ("queue", "Summary of inference queuing duration in microseconds (includes cached requests)"),
    ("compute_input", "Cumulative compute input duration in microseconds (does not include cached requests)"),
    ("compute_infer", "Cumulative compute inference duration in microseconds (does not include cached requests)"),
    (
        "compute_output",
        "Cumulative inference compute output duration in microseconds (does not include cached requests)",
    ),
)
"""Triton's help texts; the last three are those of its counters."""

_FAMILIES: tuple[tuple[str, str, str, Callable[[ServedModel], Iterable[MetricRow]]], ...] = (
    (
        "nv_inference_request_success",
        "counter",
        "Number of successful inference requests, all batch sizes",
        _one(lambda model: max(_stats(model).success.count - model.statistics.returned_errors, 0)),
    ),
    ("nv_inference_request_failure", "counter", "Number of failed inference requests, all batch sizes", _failures),
    (
        "nv_inference_count",
        "counter",
        "Number of inferences performed (does not include cached requests)",
        _one(lambda model: model.statistics.inference_count),
    ),
    (
        "nv_inference_exec_count",
        "counter",
        "Number of model executions performed (does not include cached requests)",
        _one(lambda model: model.statistics.execution_count),
    ),
    (
        "nv_inference_request_duration_us",
        "counter",
        "Cumulative inference request duration in microseconds (includes cached requests)",
        _total_us("success"),
    ),
    (
        "nv_inference_queue_duration_us",
        "counter",
        "Cumulative inference queuing duration in microseconds (includes cached requests)",
        _total_us("queue"),
    ),
    (
        "nv_inference_compute_input_duration_us",
        "counter",
        "Cumulative compute input duration in microseconds (does not include cached requests)",
        _total_us("compute_input"),
    ),
    (
        "nv_inference_compute_infer_duration_us",
        "counter",
        "Cumulative compute inference duration in microseconds (does not include cached requests)",
        _total_us("compute_infer"),
    ),
    (
        "nv_inference_compute_output_duration_us",
        "counter",
        "Cumulative inference compute output duration in microseconds (does not include cached requests)",
        _total_us("compute_output"),
    ),
    (
        "nv_inference_pending_request_count",
        "gauge",
        "Instantaneous number of pending requests awaiting execution per-model.",
        _one(lambda model: model.scheduler.pending),
    ),
    (
        "nv_model_load_duration_secs",
        "gauge",
        "Model load time in seconds",
        _one(lambda model: model.load_record.duration_ns / 1e9),
    ),
    (
        "remora_requests_running",
        "gauge",
        "Requests inside an execution now",
        _one(lambda model: model.scheduler.running),
    ),
    ("remora_batch_dispatch_total", "counter", "Batches by the reason they were dispatched for", _dispatches),
    (
        "remora_request_duration_seconds",
        "histogram",
        "Successful requests, from arrival to answer",
        _histogram(0),
    ),
    ("remora_queue_duration_seconds", "histogram", "Successful requests, time in the queue", _histogram(1)),
)

_CACHE_FAMILIES: tuple[tuple[str, str, str, Callable[[ServedModel], Iterable[MetricRow]]], ...] = (
    (
        "nv_cache_num_hits_per_model",
        "counter",
        "Number of cache hits per model",
        _one(lambda model: _stats(model).cache_hit.count),
    ),
    (
        "nv_cache_hit_duration_per_model",
        "counter",
        "Total cache hit duration per model, in microseconds",
        _total_us("cache_hit"),
    ),
    (
        "nv_cache_num_misses_per_model",
        "counter",
        "Number of cache misses per model",
        _one(lambda model: _stats(model).cache_miss.count),
    ),
    (
        "nv_cache_miss_duration_per_model",
        "counter",
        "Total cache miss (insert+lookup) duration per model, in microseconds",
        _total_us("cache_miss"),
    ),
)

_CACHE_GAUGES: tuple[tuple[str, str, Callable[[CacheStats], float]], ...] = (
    ("nv_cache_util", "Cache utilization [0.0 - 1.0]", lambda stats: stats.util),
    ("nv_cache_num_entries", "Number of responses stored in response cache", lambda stats: stats.entries),
    ("nv_cache_num_hits", "Number of cache hits in response cache", lambda stats: stats.hits),
    ("nv_cache_num_misses", "Number of cache misses in response cache", lambda stats: stats.misses),
    ("nv_cache_num_lookups", "Number of cache lookups in response cache", lambda stats: stats.lookups),
    ("nv_cache_num_evictions", "Number of cache evictions in response cache", lambda stats: stats.evictions),
    (
        "nv_cache_lookup_duration",
        "Total cache lookup duration (hit and miss), in microseconds",
        lambda stats: stats.lookup_ns // 1000,
    ),
    (
        "nv_cache_insertion_duration",
        "Total cache insertion duration, in microseconds",
        lambda stats: stats.insertion_ns // 1000,
    ),
)

_GPU_FAMILIES: Sequence[tuple[str, str, str, Callable[[GpuReading], float | None]]] = (
    ("nv_gpu_utilization", "gauge", "GPU utilization rate [0.0 - 1.0)", lambda gpu: gpu.utilization),
    ("nv_gpu_memory_total_bytes", "gauge", "GPU total memory, in bytes", lambda gpu: gpu.memory_total_bytes),
    ("nv_gpu_memory_used_bytes", "gauge", "GPU used memory, in bytes", lambda gpu: gpu.memory_used_bytes),
    ("nv_gpu_power_usage", "gauge", "GPU power usage in watts", lambda gpu: gpu.power_w),
    ("nv_gpu_power_limit", "gauge", "GPU power management limit in watts", lambda gpu: gpu.power_limit_w),
)
