"""Lines of CloudWatch's embedded metric format: valid, small, and with differences of counters."""

from __future__ import annotations

import json
from typing import Any

from remora.calls import MetricFamily, MetricRow
from remora_adapters.telemetry.embedded_metrics import MOST_METRICS, EmbeddedMetrics, lines_of

M = (("model", "m"), ("version", "1"))
UNITS = {"Seconds", "Microseconds", "Milliseconds", "Bytes", "Count", "None"}


def counter(name: str, *values: tuple[str, float]) -> MetricFamily:
    return MetricFamily(name, "counter", "", [MetricRow("", (*M, ("reason", why)), value) for why, value in values])


def histogram(name: str, *counts: tuple[str, float]) -> MetricFamily:
    return MetricFamily(name, "histogram", "", [MetricRow("_bucket", (*M, ("le", le)), seen) for le, seen in counts])


class Written:
    """Lines that a writer has written, parsed and checked against the format's schema."""

    def __init__(self) -> None:
        self.sink = EmbeddedMetrics(self.take, "shop")
        self.lines: list[dict[str, Any]] = []

    def take(self, text: str) -> None:
        for line in text.splitlines():
            found = json.loads(line)
            assert isinstance(found["_aws"]["Timestamp"], int)
            (directive,) = found["_aws"]["CloudWatchMetrics"]
            assert directive["Namespace"] == "shop"
            for name in (name for names in directive["Dimensions"] for name in names):
                assert isinstance(found[name], str)
                assert found[name].isascii()
            assert 0 < len(directive["Metrics"]) <= 100
            for metric in directive["Metrics"]:
                value = found[metric["Name"]]
                assert metric["Unit"] in UNITS
                assert isinstance(value, (int, float)) or 0 < len(value) <= 100
            assert len(line) < 256 << 10
            self.lines.append(found)

    def write(self, *families: MetricFamily) -> list[dict[str, Any]]:
        self.lines.clear()
        self.sink.write(families, 5_000_000)
        return self.lines


def test_a_line_has_the_metrics_of_one_model_version() -> None:
    gauge = MetricFamily("g", "gauge", "", [MetricRow("", M, 3), MetricRow("", (("model", "n"), ("version", "2")), 4)])
    first, second = Written().write(gauge, MetricFamily("free_bytes", "gauge", "", [MetricRow("", (), 1)]))
    assert first == {
        "_aws": {
            "Timestamp": 5,
            "CloudWatchMetrics": [
                {
                    "Namespace": "shop",
                    "Dimensions": [["model", "version"]],
                    "Metrics": [{"Name": "g", "Unit": "None"}],
                }
            ],
        },
        "model": "m",
        "version": "1",
        "g": 3,
    }
    assert (second["model"], second["version"], second["g"]) == ("n", "2", 4)


def test_counters_are_differences_summed_over_further_labels() -> None:
    written = Written()
    assert written.write(counter("c", ("A", 2), ("B", 3)))[0]["c"] == 5
    assert written.write(counter("c", ("A", 2), ("B", 7)))[0]["c"] == 4
    assert written.write(counter("c", ("A", 2), ("B", 7)))[0]["c"] == 0


def test_a_counter_that_began_again_counts_from_0() -> None:
    written = Written()
    written.write(counter("c", ("A", 9)))
    assert written.write(counter("c", ("A", 2)))[0]["c"] == 2


def test_a_counter_that_has_never_counted_makes_no_metric() -> None:
    assert Written().write(counter("c", ("A", 0))) == []


def test_a_histogram_becomes_the_observations_since_the_last_line() -> None:
    written = Written()
    (line,) = written.write(histogram("h_seconds", ("0.1", 1), ("2", 3), ("+Inf", 4)))
    assert line["h_seconds"] == [0.1, 2, 2, 2], "an observation beyond the last bound counts as that bound"
    (line,) = written.write(histogram("h_seconds", ("0.1", 1), ("2", 5), ("+Inf", 6)))
    assert line["h_seconds"] == [2, 2]
    assert written.write(histogram("h_seconds", ("0.1", 1), ("2", 5), ("+Inf", 6))) == []


def test_many_observations_keep_their_distribution() -> None:
    (line,) = Written().write(histogram("h_seconds", ("0.1", 500_000), ("1", 900_000), ("2", 1_000_000)))
    found = line["h_seconds"]
    assert [found.count(bound) for bound in (0.1, 1, 2)] == [50, 40, 10]


def test_values_that_cloudwatch_refuses_are_left_out() -> None:
    families = [
        MetricFamily(f"g{number}", "gauge", "", [MetricRow("", M, value)])
        for number, value in enumerate((float("nan"), float("inf"), 2.0**361, 1.5))
    ]
    (line,) = Written().write(*families)
    assert [metric["Name"] for metric in line["_aws"]["CloudWatchMetrics"][0]["Metrics"]] == ["g3"]


def test_more_metrics_than_a_line_may_hold_become_several_lines() -> None:
    families = [
        MetricFamily(f"g{number}", "gauge", "", [MetricRow("", M, 1)]) for number in range(2 * MOST_METRICS + 1)
    ]
    assert [len(line) for line in Written().write(*families)] == [103, 103, 4]


def test_names_outside_of_ascii_are_escaped_in_dimensions() -> None:
    family = MetricFamily("g", "gauge", "", [MetricRow("", (("model", "modèle"), ("version", "1")), 1)])
    assert Written().write(family)[0]["model"] == "mod\\xe8le"


def test_vllms_metrics_have_the_dimension_model_alone() -> None:
    family = MetricFamily("vllm:x", "gauge", "", [MetricRow("", (("model_name", "m"), ("engine", "0")), 1)])
    (line,) = lines_of([family], 1, "shop", lambda name, row: row.value)
    assert json.loads(line)["_aws"]["CloudWatchMetrics"][0]["Dimensions"] == [["model"]]
