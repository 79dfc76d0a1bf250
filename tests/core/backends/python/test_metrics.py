"""Metrics of Python models: what they count, who shares a series, and when it goes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from remora.backends.python.host import Host, hosted
from remora.backends.triton_python_backend_utils import MetricFamily, TritonModelException
from remora.custom_metrics import REGISTRY, Family, MetricKind, MetricSample, snapshot


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    yield
    gc.collect()
    assert snapshot() == []


def family(kind: MetricKind = MetricFamily.COUNTER, name: str = "f", description: str = "what") -> MetricFamily:
    return MetricFamily(name=name, description=description, kind=kind)


def test_counters_and_gauges_say_what_was_counted() -> None:
    counters, gauges = family(), family(MetricFamily.GAUGE, "g")
    counter, gauge = counters.Metric(labels={"b": "2", "a": "1"}), gauges.Metric()
    counter.increment(5)
    counter.increment(0.5)
    gauge.set(3)
    gauge.increment(-1)
    assert (counter.value(), gauge.value()) == (5.5, 2)
    assert snapshot() == [
        Family("f", "what", MetricKind.COUNTER, (MetricSample("", {"a": "1", "b": "2"}, 5.5),)),
        Family("g", "what", MetricKind.GAUGE, (MetricSample("", {}, 2),)),
    ]


def test_a_histogram_counts_up_to_each_bound() -> None:
    histograms = family(MetricFamily.HISTOGRAM)
    histogram = histograms.Metric(labels={"m": "x"}, buckets=[0.1, 1, 10])
    for value in (0.1, 0.5, 1, 100):
        histogram.observe(value)
    (read,) = snapshot()
    assert [(sample.suffix, sample.labels.get("le"), sample.value) for sample in read.samples] == [
        ("_bucket", "0.1", 1), ("_bucket", "1", 3), ("_bucket", "10", 3), ("_bucket", "+Inf", 4),
        ("_sum", None, 101.6), ("_count", None, 4),
    ]  # fmt: skip


def test_a_family_of_the_same_name_is_the_same_and_shares_its_series() -> None:
    first, second = family(), family()
    first.Metric(labels={"a": "1"}).increment(1)
    second.Metric(labels={"a": "1"}).increment(1)
    second.Metric(labels={"a": "2"}).increment(1)
    del second
    gc.collect()
    (read,) = snapshot()
    assert read.samples == (MetricSample("", {"a": "1"}, 2),)
    del first


def test_a_metric_keeps_its_family() -> None:
    metric = family().Metric()
    gc.collect()
    metric.increment(1)
    assert len(snapshot()) == 1


def test_what_a_model_holds_goes_with_the_model() -> None:
    mine, other = (Host(name, 1, "/models/x") for name in ("mine", "other"))
    with hosted(mine):
        kept = family().Metric()
    with hosted(other):
        stays = family(name="g").Metric()
    REGISTRY.retire(mine)
    kept.increment(1)
    assert [read.name for read in snapshot()] == ["g"]
    REGISTRY.retire(mine)
    del kept, stays


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (lambda: family(name="1x"), "Error when creating MetricFamily: '1x' is not a metric name"),
        (lambda: (family().Metric(), family(MetricFamily.GAUGE)), "Family name already exists with different type"),
        (lambda: family().Metric(labels={"__a": "1"}), "Invalid label name '__a'"),
        (lambda: family().Metric(labels={"a": 1}), "must be text, not int"),  # type: ignore[dict-item]
        (lambda: family().Metric(buckets=[1]), "a counter has no buckets"),
        (lambda: family(MetricFamily.HISTOGRAM).Metric(), "needs its buckets"),
        (lambda: family(MetricFamily.HISTOGRAM).Metric(buckets=[2, 1]), "must ascend"),
        (lambda: family().Metric().increment(-1), "only be incremented monotonically"),
        (lambda: family().Metric().increment(float("nan")), "only be incremented monotonically"),
        (lambda: family().Metric().set(1), "TRITONSERVER_METRIC_KIND_COUNTER does not support Set"),
        (lambda: family(MetricFamily.GAUGE).Metric().observe(1), "GAUGE does not support Observe"),
        (lambda: family(MetricFamily.HISTOGRAM).Metric(buckets=[1]).value(), "HISTOGRAM does not support Value"),
    ],
)
def test_what_a_kind_does_not_have_is_refused(act: Any, text: str) -> None:
    with pytest.raises(TritonModelException, match=text):
        act()


def test_a_family_keeps_its_first_description() -> None:
    first = family().Metric()
    family(description="else").Metric().increment(1)
    (read,) = snapshot()
    assert (read.description, read.samples[0].value) == ("what", 1)
    del first


def test_an_error_names_the_instance_whose_code_it_was() -> None:
    with (
        hosted(Host("mine", 1, "/models/x", None, "mine_0")),
        pytest.raises(TritonModelException) as caught,
    ):
        family().Metric().set(1)
    assert str(caught.value) == (
        "Failed to set metric value: Failed to process the request for model 'mine_0', message: "
        "TRITONSERVER_METRIC_KIND_COUNTER does not support Set"
    )


def test_a_series_with_other_buckets_is_refused() -> None:
    histograms = family(MetricFamily.HISTOGRAM)
    histograms.Metric(buckets=[1, float("inf")])
    histograms.Metric(buckets=[1])
    with pytest.raises(TritonModelException, match="other buckets"):
        histograms.Metric(buckets=[2])
