"""The metrics page: Triton's names and labels [P01-P04, P10], ours beside them, in lawful Prometheus text."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from remora import plugins
from remora.backends.python.metrics import MetricFamily
from remora.calls import Metrics
from remora.engine import Engine
from remora.management.metrics import MetricsExporter, page_text
from remora.models import loader as loading
from remora.options import EngineOptions
from remora.statistics import LATENCY_BOUNDS_NS, Histogram, MetricsSettings, ServerLoad
from remora.system.gpus import GpuReading
from support.engine.fakes import DOUBLER, FakeBackend, FakeClock, write_model
from support.process.eventually import eventually

SAMPLE = re.compile(r'^([a-zA-Z_:][\w:]*)(?:\{((?:\w+="(?:[^"\\\n]|\\.)*",?)+)\})? (\S+)$')
TAGGED = DOUBLER + 'metric_tags { key: "b" value: "2" } metric_tags { key: "a" value: "q\\"\\\\" }'


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An engine with a model m that has answered two requests, and one tagged that has answered none."""
    monkeypatch.setattr(loading, "find_backend", FakeBackend().find)
    write_model(tmp_path, "m")
    write_model(tmp_path, "tagged", config=TAGGED)
    settings = ("summary_latencies=true", "summary_quantiles=0.5:0.05,0.9:0.01")
    with Engine(tmp_path, clock=FakeClock(), metrics_config=settings) as running:
        for rows in (1, 3):
            running.infer("m", {"IN": np.zeros((rows, 1), np.int32)})
        eventually(lambda: not running.running)  # a request is counted as running until after its answer
        yield running


def page_of(engine: Engine) -> dict[str, float]:
    """Each series of the page with its value."""
    found: dict[str, float] = {}
    for line in engine.perform(Metrics()).splitlines():
        if not line.startswith("#"):
            match = SAMPLE.match(line)
            assert match, f"not a sample: {line}"
            series = f"{match[1]}{{{match[2] or ''}}}"
            assert series not in found, f"twice: {series}"
            found[series] = float(match[3])
    return found


def test_every_family_is_explained_before_its_samples(engine: Engine) -> None:
    known: set[str] = set()
    text = engine.perform(Metrics())
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name = line.split(" ")[2]
            assert name not in known, f"two families called {name}"
            known.add(name)
        elif not line.startswith("# TYPE "):
            name = re.split(r"[{ ]", line)[0]
            assert name in known or re.sub(r"_(bucket|sum|count|total)$", "", name) in known


@pytest.mark.parametrize(
    ("series", "value"),
    [
        ("nv_inference_request_success{%s}", 2),
        ('nv_inference_request_failure{model="m",reason="REJECTED",version="1"}', 0),
        ('nv_inference_request_failure{model="m",reason="CANCELED",version="1"}', 0),
        ('nv_inference_request_failure{model="m",reason="BACKEND",version="1"}', 0),
        ('nv_inference_request_failure{model="m",reason="OTHER",version="1"}', 0),
        ("nv_inference_count{%s}", 4),
        ("nv_inference_exec_count{%s}", 2),
        ("nv_inference_request_duration_us{%s}", 0),
        ("nv_inference_queue_duration_us{%s}", 0),
        ("nv_inference_compute_infer_duration_us{%s}", 0),
        ("nv_inference_pending_request_count{%s}", 0),
        ("remora_queue_oldest_age_seconds{%s}", 0),
        ("nv_model_load_duration_secs{%s}", 0),
        ("remora_requests_running{%s}", 0),
        ('remora_batch_dispatch_total{%s,reason="no_batching"}', 2),
        ('remora_request_duration_seconds_bucket{%s,le="+Inf"}', 2),
        ("remora_request_duration_seconds_count{%s}", 2),
        ("nv_inference_request_summary_us_count{%s}", 2),
        ('nv_inference_queue_summary_us{%s,quantile="0.9"}', 0),
    ],
)
def test_a_series_has_tritons_name_labels_and_value(engine: Engine, series: str, value: float) -> None:
    assert page_of(engine)[series.replace("%s", 'model="m",version="1"')] == value


def test_values_and_descriptions_of_a_models_own_metrics_are_printed_as_triton_prints_them(engine: Engine) -> None:
    described = MetricFamily(name="described", description="in \\ two\nlines", kind=MetricFamily.GAUGE)
    plain = MetricFamily(name="plain", description="", kind=MetricFamily.GAUGE)
    kept = []
    for family, label, value in (
        (described, "sum", 0.1 + 0.2),
        (described, "large", 1e21),
        (described, "small", -1.5e-7),
        (plain, "end", math.inf),
    ):
        kept.append(family.Metric(labels={"of": label}))
        kept[-1].set(value)
    text = engine.perform(Metrics())
    assert (
        "# HELP described in \\\\ two\\nlines\n# TYPE described gauge\n"
        'described{of="sum"} 0.3\ndescribed{of="large"} 1e+21\ndescribed{of="small"} -1.5e-07\n'
    ) in text
    assert "# HELP plain" not in text
    assert '# TYPE plain gauge\nplain{of="end"} +Inf\n' in text


def test_series_are_there_before_the_first_request_with_the_models_tags_escaped(engine: Engine) -> None:
    labels = '_a="q\\"\\\\",_b="2",model="tagged",version="1"'
    assert page_of(engine)[f"nv_inference_request_success{{{labels}}}"] == 0


def test_a_summary_says_whether_requests_that_the_cache_answered_are_in_it(engine: Engine) -> None:
    text = engine.perform(Metrics())
    assert (
        "# HELP nv_inference_queue_summary_us Summary of inference queuing duration in microseconds (includes cached"
        in text
    )
    assert "_infer_summary_us Cumulative compute inference duration in microseconds (does not include cached" in text


def test_a_summary_of_nothing_is_not_a_number(engine: Engine) -> None:
    page = page_of(engine)
    assert any(
        math.isnan(value) for series, value in page.items() if 'model="tagged"' in series and "quantile" in series
    )


def test_histogram_buckets_never_shrink(engine: Engine) -> None:
    counts = [
        value
        for series, value in page_of(engine).items()
        if series.startswith('remora_queue_duration_seconds_bucket{model="m"')
    ]
    assert counts == sorted(counts)
    assert counts[-1] == 2


FIRST = "nv_inference_first_response_histogram_ms"


def test_waits_for_first_responses_have_the_buckets_of_all_models_or_the_models_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "find_backend", FakeBackend().find)
    control = f'metric_identifier {{ family: "{FIRST}" }} histogram_options {{ buckets: [ -1, 0.0, 1, 2.5 ] }}'
    write_model(tmp_path, "m")
    write_model(tmp_path, "own", config=DOUBLER + f"model_metrics {{ metric_control {{ {control} }} }}")
    with Engine(tmp_path, clock=FakeClock(), metrics_config=("histogram_latencies=true",)) as running:
        running.infer("m", {"IN": np.zeros((1, 1), np.int32)})
        page = page_of(running)
        assert f"# TYPE {FIRST} histogram\n" in running.perform(Metrics())
    of = 'model="%s",version="1"'
    assert {series: value for series, value in page.items() if series.startswith(FIRST)} == {
        **{f'{FIRST}_bucket{{{of % "m"},le="{le}"}}': 1 for le in ("100", "500", "2000", "5000", "+Inf")},
        f"{FIRST}_sum{{{of % 'm'}}}": 0,
        f"{FIRST}_count{{{of % 'm'}}}": 1,
        **{f'{FIRST}_bucket{{{of % "own"},le="{le}"}}': 0 for le in ("-1", "0", "1", "2.5", "+Inf")},
        f"{FIRST}_sum{{{of % 'own'}}}": 0,
        f"{FIRST}_count{{{of % 'own'}}}": 0,
    }


def test_waits_for_first_responses_are_not_there_unasked(engine: Engine) -> None:
    assert FIRST not in engine.perform(Metrics())


def test_an_entry_of_the_metrics_settings_without_a_value_is_refused() -> None:
    with pytest.raises(ValueError, match="--metrics-config=histogram_latencies: give KEY=VALUE"):
        MetricsSettings.of(("histogram_latencies",))


@pytest.mark.parametrize("name", ["counter_latencies", "summary_latencies", "histogram_latencies"])
def test_a_switch_of_the_metrics_settings_is_on_or_off_and_any_other_word_is_refused(name: str) -> None:
    for word, on in (("true", True), ("On", True), ("1", True), ("False", False), ("off", False), ("0", False)):
        assert getattr(MetricsSettings.of((f"{name}={word}",)), name) is on, word
    for word in ("yes", "", "true "):
        with pytest.raises(ValueError, match=f"--metrics-config={name}={word}: expected true or false"):
            MetricsSettings.of((f"{name}={word}",))


def test_the_machine_is_there_without_labels(engine: Engine) -> None:
    page = page_of(engine)
    assert 0 <= page["nv_cpu_utilization{}"] <= 1
    assert 0 < page["nv_cpu_memory_used_bytes{}"] < page["nv_cpu_memory_total_bytes{}"]


def test_the_memory_of_a_container_is_reported_beside_the_machines(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("remora.management.metrics.memory_limit_bytes", lambda: 1 << 30)
    monkeypatch.setattr("remora.management.metrics.memory_in_use_bytes", lambda: 1 << 20)
    page = page_of(engine)
    assert (page["remora_memory_limit_bytes{}"], page["remora_memory_used_bytes{}"]) == (1 << 30, 1 << 20)
    monkeypatch.setattr("remora.management.metrics.memory_limit_bytes", lambda: None)
    page = page_of(engine)
    assert page["remora_memory_limit_bytes{}"] == page["nv_cpu_memory_total_bytes{}"]


def test_the_memory_of_the_process_is_reported_beside_the_machines(engine: Engine) -> None:
    page = page_of(engine)
    assert 1 << 20 < page["process_resident_memory_bytes{}"] < page["nv_cpu_memory_total_bytes{}"]


def test_plug_ins_that_cannot_be_loaded_or_read_are_logged_once_and_leave_the_page_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    named = [EntryPoint(name, target, "remora.metrics") for name, target in (("a", "absent:x"), ("b", "math:sqrt"))]
    monkeypatch.setattr(plugins, "METRICS", ("remora.management.metrics:absent",))
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: named)
    for _ in range(2):
        assert page_of(engine)["nv_cpu_memory_total_bytes{}"] > 0
    assert [record.getMessage() for record in caplog.records if record.name == "remora.metrics"] == [
        "the metrics of the plug-in 'remora.management.metrics:absent' cannot be loaded",
        "the metrics of the plug-in 'a' cannot be loaded",
        "the metrics of the plug-in 'b' are left out",
    ]


def test_an_unloaded_models_series_are_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "find_backend", FakeBackend().find)
    write_model(tmp_path, "m")
    with Engine(tmp_path, model_control_mode="explicit", load_model=("m",), clock=FakeClock()) as engine:
        assert 'model="m"' in engine.perform(Metrics())
        engine.unload("m")
        assert 'model="m"' not in engine.perform(Metrics())


def test_duration_counters_can_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "find_backend", FakeBackend().find)
    write_model(tmp_path, "m", config=DOUBLER + "response_cache { enable: true }")
    settings: dict[str, Any] = {"cache_config": ("local,size=1048576",), "metrics_config": ("counter_latencies=false",)}
    with Engine(tmp_path, clock=FakeClock(), **settings) as engine:
        text = engine.perform(Metrics())
    assert "_duration_us" not in text
    assert "_duration_per_model" not in text
    assert "nv_inference_count" in text
    assert "nv_cache_num_hits_per_model" in text


def test_every_setting_that_the_flags_help_names_is_one() -> None:
    (flag,) = (field for field in dataclasses.fields(EngineOptions) if field.name == "metrics_config")
    named = re.findall(r"\w+=[\w.:,]*\w", flag.metadata["help"])
    assert [setting.partition("=")[0] for setting in named] == [
        "counter_latencies",
        "histogram_latencies",
        "summary_latencies",
        "summary_quantiles",
    ]
    for setting in named:
        assert MetricsSettings.of((setting,)) != MetricsSettings()


def test_gpus_are_reported_under_tritons_names_and_absent_without_gpus() -> None:
    def readings() -> list[GpuReading]:
        return [GpuReading("GPU-1", 0.5, 1000, 250, 65.0, 300.0, 130.0), GpuReading("MIG-2", None, 500, 100)]

    page = page_text(
        MetricsExporter(MetricsSettings(), FakeClock(), gpus=readings, energy_j={"GPU-1": 100.0}).families([])
    )
    rows = {line for line in page.splitlines() if line.startswith(("nv_gpu", "nv_energy"))}
    assert rows == {
        'nv_gpu_utilization{gpu_uuid="GPU-1"} 0.5',
        'nv_gpu_memory_total_bytes{gpu_uuid="GPU-1"} 1000',
        'nv_gpu_memory_total_bytes{gpu_uuid="MIG-2"} 500',
        'nv_gpu_memory_used_bytes{gpu_uuid="GPU-1"} 250',
        'nv_gpu_memory_used_bytes{gpu_uuid="MIG-2"} 100',
        'nv_gpu_power_usage{gpu_uuid="GPU-1"} 65',
        'nv_gpu_power_limit{gpu_uuid="GPU-1"} 300',
        'nv_energy_consumption{gpu_uuid="GPU-1"} 30',
    }
    assert "gpu" not in page_text(MetricsExporter(MetricsSettings(), FakeClock()).families([]))


def test_the_load_of_a_server_is_on_the_page() -> None:
    load = ServerLoad({200: 7, 404: 1}, Histogram((1,) + (0,) * len(LATENCY_BOUNDS_NS), 50_000))
    page = page_text(MetricsExporter(MetricsSettings(), FakeClock()).families([], load=load))
    for line in (
        'remora_http_responses_total{code="200"} 7',
        'remora_http_responses_total{code="404"} 1',
        'remora_event_loop_lateness_seconds_bucket{le="0.0001"} 1',
        "remora_event_loop_lateness_seconds_count 1",
        "remora_event_loop_lateness_seconds_sum 5e-05",
    ):
        assert line in page.splitlines(), line


def test_the_age_of_the_oldest_queued_request_is_on_the_page(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = engine.resolve("m").scheduler
    monkeypatch.setattr(type(scheduler), "oldest_ns", property(lambda self: 400_000_000 if self is scheduler else 0))
    page = page_of(engine)
    assert page['remora_queue_oldest_age_seconds{model="m",version="1"}'] == 0.6
