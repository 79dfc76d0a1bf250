"""Results as table, JSON, CSV and page."""

from __future__ import annotations

import csv
import io
import re
from typing import Any

from remora_tools.deciders.latencies import Histogram
from remora_tools.load import Results, merge_results, results_from_json
from remora_tools.load.report import Level, as_csv, as_document, as_html, as_table
from remora_tools.load.resources import Usage


def results(us: int, count: int = 100, **more: Any) -> Results:
    found = Results(seconds=2.0, failures={"HTTP 503": 2}, cpu=0.25)
    for number in range(count):
        found.latency.record(us * 1000 + number)
        found.service.record(us * 500)
    for name, value in more.items():
        setattr(found, name, value)
    return found


LEVELS = [
    Level("1 connections", results(100), True, 1, {"whole": 50.0, "queue": 10.0}, []),
    Level("8 <connections>", results(900), False, 2, {"whole": 400.0, "queue": 300.0}, ["the generator is saturated"]),
]


def test_the_table_has_a_line_per_load_and_the_notes() -> None:
    text = as_table(LEVELS)
    assert re.search(r"^1 connections +50\.0 +2 +100 +100 ", text, re.MULTILINE)
    assert re.search(r"^8 <connections> .* not stable$", text, re.MULTILINE)
    assert re.search(r"^8 <connections> +400\.0 +300\.0$", text, re.MULTILINE)
    assert "8 <connections>: the generator is saturated" in text
    assert "1 connections: 2 x HTTP 503" in text


def test_streams_have_times_of_events() -> None:
    streamed = results(100)
    streamed.first.record(5_000_000)
    streamed.between.record(1_000_000)
    streamed.tokens = 8
    text = as_table([LEVELS[0]._replace(results=streamed)])
    assert "first event" in text
    assert "between events" in text
    assert re.search(r"^streams +events/s +tokens/s\n1 connections +1\.0 +4\.0$", text, re.MULTILINE)
    document = as_document([LEVELS[0]._replace(results=streamed)])[0]
    assert (document["events_per_s"], document["tokens_per_s"]) == (1.0, 4.0)
    (row,) = csv.DictReader(io.StringIO(as_csv([LEVELS[0]._replace(results=streamed)])))
    assert float(row["first_event_p50_us"]) == document["first_event_us"]["p50"]
    assert float(row["between_events_max_us"]) == document["between_events_us"]["max"]
    assert float(row["tokens_per_s"]) == 4.0
    assert abs(document["first_event_us"]["p50"] - 5000) < 50


def test_the_use_of_the_machine_stands_beside_the_loads() -> None:
    used = [LEVELS[0]._replace(usage=Usage(cpu=0.25, memory_bytes=1 << 20)), LEVELS[1]._replace(usage=Usage(cpu=0.5))]
    text = as_table(used)
    assert re.search(r"^the server's machine +cpu % +memory MiB\n1 connections +25\.0 +1\.0$", text, re.MULTILINE)
    assert as_document(used)[1]["machine"] == {"cpu %": 50.0}
    rows = list(csv.DictReader(io.StringIO(as_csv(used))))
    assert [row["machine_cpu_percent"] for row in rows] == ["25.0", "50.0"]
    assert rows[0]["machine_memory_mib"] == "1.0"
    assert re.search(r"^8 <connections> +50\.0 +-$", text, re.MULTILINE), "an unknown figure is not 0"
    assert rows[1]["machine_memory_mib"] == ""


def test_the_document_and_csv_have_the_same_figures() -> None:
    document = as_document(LEVELS)
    rows = list(csv.DictReader(io.StringIO(as_csv(LEVELS))))
    for row, level in zip(rows, document, strict=True):
        assert row["load"] == level["load"]
        assert float(row["requests_per_s"]) == level["requests_per_s"] == 50.0
        assert float(row["latency_p99_us"]) == level["latency_us"]["p99"]
        assert float(row["server_queue_us"]) == level["server_us"]["queue"]
    assert document[1]["generator"] == {"processes": 2, "cpu": 0.25}


def test_rows_of_a_batch_are_no_time() -> None:
    levels = [LEVELS[0]._replace(server={"whole": 50.0, "rows per batch": 4.04}), LEVELS[1]]
    first, second = as_document(levels)
    assert (first["server_us"], first["server_rows_per_batch"]) == ({"whole": 50.0}, 4.0)
    assert "server_rows_per_batch" not in second
    rows = list(csv.DictReader(io.StringIO(as_csv(levels))))
    assert [row["server_rows_per_batch"] for row in rows] == ["4.0", ""]
    assert [name for name in rows[0] if " " in name] == []


def test_the_first_reason_of_each_status_stands_beside_its_count() -> None:
    parts = [results(100), results(100, details={"HTTP 503": "too busy"}), results(100, details={"HTTP 503": "later"})]
    merged = merge_results([results_from_json(part.to_json()) for part in parts], same_time=True)
    level = LEVELS[0]._replace(results=merged)
    assert "1 connections: 6 x HTTP 503: too busy" in as_table([level]).splitlines()
    assert as_document([level])[0]["failure_reasons"] == {"HTTP 503": "too busy"}
    assert "failure_reasons" not in as_document(LEVELS)[0]


def test_the_page_has_curves_and_escapes_its_texts() -> None:
    page = as_html("load of <m>", LEVELS)
    assert page.count("<polyline") == 4
    assert "<m>" not in page
    assert "<connections>" not in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", ""), "no external resources"
    points = re.findall(r"([\d.]+),([\d.]+)", page)
    assert points
    assert all(0 <= float(x) <= 640 and 0 <= float(y) <= 320 for x, y in points)


def test_results_survive_json_and_merge_in_time_and_space() -> None:
    one = results_from_json(results(100, waiting=3).to_json())
    assert one.latency.count == 100
    together = merge_results([one, results(300)], same_time=True)
    assert (together.seconds, together.rate_per_s, together.waiting) == (2.0, 100.0, 3)
    after = merge_results([one, results(300)], same_time=False)
    assert (after.seconds, after.rate_per_s, after.waiting) == (4.0, 50.0, 0)
    assert (together.events_per_s, together.tokens_per_s) == (0.0, 0.0)
    assert after.failures == {"HTTP 503": 4}
    assert Results(latency=Histogram()).rate_per_s == 0.0
