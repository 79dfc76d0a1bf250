"""Lines of the access log: what they contain, and what a client cannot make them contain."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.protocols.http1 import Head
from remora.server.access_lines import (
    Entry,
    JsonLines,
    RequestLine,
    Run,
    TextLines,
    line_of_call,
    line_of_entry,
    line_of_head,
)

TRACE = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
HEADERS = ((b"X-Request-Id", b"r1"), (b"Traceparent", TRACE), (b"User-Agent", b"curl/8"))
HEAD = Head("POST", "/v2/models/m/infer?token=SECRET", HEADERS)
OFFSET_NS = 1_700_000_000_250 * 1_000_000
RUN: Run = ("m", "3", 2, 8, 5_000, (1_000, 20_000, 3_000), "")


def entry(line: RequestLine, status: int = 200, *, id: str = "", run: Run | None = None) -> Entry:
    return line, status, 7, 1_234_567, 99, "10.0.0.1", id, run


def read(made: Entry) -> dict[str, Any]:
    (line,) = JsonLines().lines([made], OFFSET_NS)
    assert line.endswith("\n")
    assert line.count("\n") == 1
    return dict(json.loads(line))


def test_a_line_has_the_names_of_cloud_logging_and_the_figures_of_the_execution() -> None:
    assert read(entry(line_of_head(HEAD, "team"), id="r1", run=RUN)) == {
        "timestamp": "2023-11-14T22:13:20.250Z",
        "severity": "INFO",
        "level": "INFO",
        "logger": "remora.access",
        "message": "POST /v2/models/m/infer 200",
        "httpRequest": {
            "requestMethod": "POST",
            "requestUrl": "/v2/models/m/infer",
            "userAgent": "curl/8",
            "status": 200,
            "responseSize": "99",
            "latency": "0.001235s",
            "remoteIp": "10.0.0.1",
        },
        "model": "m",
        "version": "3",
        "queue_us": 5,
        "compute_us": 24,
        "rows": 2,
        "batch_size": 8,
        "request_id": "r1",
        "key": "team",
        "trace_id": "0af7651916cd43dd8448eb211c80319c",
        "logging.googleapis.com/trace": "0af7651916cd43dd8448eb211c80319c",
        "span_id": "b7ad6b7169203331",
        "logging.googleapis.com/spanId": "b7ad6b7169203331",
    }


def test_a_text_line_has_the_same_for_people() -> None:
    made = [entry(line_of_head(HEAD, "team"), 503, id="r1", run=RUN)]
    assert TextLines(iso8601=True).lines(made, OFFSET_NS) == [
        "2023-11-14T22:13:20Z E remora.access: 10.0.0.1 POST /v2/models/m/infer 503 bytes=99 took=1234us id=r1 "
        "model=m/3 queue=5us compute=24us rows=2 batch=8 trace=0af7651916cd43dd8448eb211c80319c key=team\n"
    ]


@pytest.mark.parametrize("printer", [TextLines(), TextLines(iso8601=True), JsonLines()])
def test_lines_of_a_batch_are_those_of_its_entries_alone(printer: TextLines | JsonLines) -> None:
    line = line_of_head(HEAD)
    made = [(*entry(line)[:2], at, *entry(line)[3:7], run) for at, run in ((0, RUN), (10**6, None), (3 * 10**9, RUN))]
    assert printer.lines(made, OFFSET_NS) == [one for each in made for one in printer.lines([each], OFFSET_NS)]
    assert len(set(printer.lines(made, OFFSET_NS))) == 3


@pytest.mark.parametrize(("status", "severity"), [(200, "INFO"), (302, "INFO"), (404, "WARNING"), (503, "ERROR")])
def test_the_severity_follows_the_status(status: int, severity: str) -> None:
    assert read(entry(line_of_head(HEAD), status))["severity"] == severity


@pytest.mark.parametrize(("status", "severity"), [(0, "INFO"), (5, "WARNING"), (13, "ERROR"), (14, "ERROR")])
def test_a_grpc_call_has_its_own_status(status: int, severity: str) -> None:
    line = read(entry(line_of_call(((b":path", b"/s/m"), (b"x-request-id", b"a"))), status))
    assert (line["severity"], line["grpc_status"], line["httpRequest"]["status"]) == (severity, status, 200)
    assert (line["httpRequest"]["protocol"], line["message"]) == ("gRPC", f"POST /s/m {status}")


def test_one_line_serves_all_statuses_of_a_head() -> None:
    line = line_of_head(HEAD)
    assert [read(entry(line, status))["httpRequest"]["status"] for status in (200, 404, 200)] == [200, 404, 200]


@pytest.mark.parametrize("text", ["/a\nb", "/\x1b[31m", "/é", '/"}', "/\\"])
def test_a_path_forges_neither_lines_nor_members_nor_colours(text: str) -> None:
    made = entry(line_of_head(Head("GET", text, ())))
    (printed,) = TextLines().lines([made], 0)
    assert printed.count("\n") == 1
    assert printed[:-1].isascii()
    assert printed[:-1].isprintable()
    assert "evil" not in read(made)


@pytest.mark.parametrize("name", ['m"},"evil":1', "m\n", "größe"])
def test_names_and_ids_of_clients_are_escaped(name: str) -> None:
    line = read(entry(line_of_head(HEAD), run=(name, "1", 1, 1, 0, (0, 0, 0), name)))
    assert (line["model"], line["request_id"]) == (name, name)
    assert "evil" not in line
    (text,) = TextLines().lines([entry(line_of_head(HEAD), run=("m", "1", 1, 1, 0, (0, 0, 0), name))], 0)
    assert text.count("\n") == 1


NAMELESS: Run = ("", "", 2, 8, 5_000, (1_000, 20_000, 3_000), "")


@pytest.mark.parametrize(
    "runs", [(NAMELESS,), (NAMELESS, NAMELESS), (RUN, NAMELESS), (None, NAMELESS), (NAMELESS, None, RUN, NAMELESS)]
)
def test_the_line_of_an_execution_without_the_name_of_its_model_is_whole(runs: tuple[Run | None, ...]) -> None:
    made = [entry(line_of_head(HEAD), run=run) for run in runs]
    lines = [json.loads(line) for line in JsonLines().lines(made, OFFSET_NS)]
    assert [line.get("model") for line in lines] == [None if run is None else run[0] for run in runs]
    assert [line.get("queue_us") for line in lines] == [None if run is None else 5 for run in runs]
    for printer in (TextLines(), TextLines(iso8601=True)):
        found = [TEXT.fullmatch(line) for line in printer.lines(made, OFFSET_NS)]
        assert [match and match["model"] for match in found] == [None if run is None else run[0] for run in runs]


TEXT = re.compile(
    r"(?P<time>[-\dT:]+(?: [\d:,]+|Z)) [IWE] remora\.access: (?P<peer>\S+) (?P<message>.+) bytes=(?P<size>\d+) "
    r"took=(?P<took>\d+)us(?: id=(?P<id>\S+))?"
    r"(?: model=(?P<model>\S*)/(?P<version>\d*) queue=(?P<queue>\d+)us compute=(?P<compute>\d+)us rows=(?P<rows>\d+) "
    r"batch=(?P<batch>\d+))?(?: trace=(?P<trace>\w+))?(?: key=(?P<key>\S+))?\n"
)
"""A line of text."""
HEADS = (
    line_of_head(HEAD, "team"),
    line_of_head(Head("GET", '/"}\n\\', ())),
    line_of_call(((b":path", b"/s/m"), (b"traceparent", TRACE)), "a"),
)
TIMES = st.integers(0, 10**11)
NAMES = st.sampled_from(("", "m", 'm"},"evil":1', "größe")) | st.text(max_size=3)


def batches(names: st.SearchStrategy[str]) -> st.SearchStrategy[list[Entry]]:
    """Return batches whose models and ids of V2 have these names."""
    counts, versions = st.integers(1, 999), st.sampled_from(("", "1", "23"))
    runs = st.tuples(names, versions, counts, counts, TIMES, st.tuples(TIMES, TIMES, TIMES), names)
    sizes, statuses = st.integers(0, 1 << 40), st.sampled_from((0, 5, 13, 200, 404, 503))
    peers, ids = st.sampled_from(("", "10.0.0.1", "::1")), st.sampled_from(("", "r1"))
    entries = st.tuples(st.sampled_from(HEADS), statuses, TIMES, TIMES, sizes, peers, ids, st.none() | runs)
    return st.lists(entries, min_size=1, max_size=40)


@given(batches(NAMES))
def test_each_line_of_json_is_one_object_with_the_values_of_its_request(made: list[Entry]) -> None:
    printed = JsonLines().lines(made, OFFSET_NS)
    assert len(printed) == len(made)
    for (line, status, end_ns, took_ns, size, peer, request_id, run), text in zip(made, printed, strict=True):
        assert text.endswith("}\n")
        assert text.count("\n") == 1
        members = json.loads(text)
        request = members["httpRequest"]
        assert members["message"] == f"{line.title} {status}"
        assert request["status"] == (200 if line.grpc else status)
        assert members.get("grpc_status") == (status if line.grpc else None)
        milliseconds = timedelta(milliseconds=(end_ns + OFFSET_NS) // 1_000_000)
        assert datetime.fromisoformat(members["timestamp"]) == datetime(1970, 1, 1, tzinfo=UTC) + milliseconds
        assert (request["responseSize"], request["remoteIp"]) == (str(size), peer)
        assert re.fullmatch(r"\d+\.\d{6}s", request["latency"])
        assert abs(float(request["latency"][:-1]) - took_ns / 1e9) < 1e-6
        assert members.get("request_id", "") == (request_id or (run[6] if run is not None else ""))
        names = ("model", "version", "rows", "batch_size", "queue_us", "compute_us")
        found = tuple(members.get(name) for name in names)
        assert found == ((*run[:4], run[4] // 1000, sum(run[5]) // 1000) if run is not None else (None,) * 6)


@given(batches(NAMES))
def test_a_line_is_exported_with_the_members_of_its_json(made: list[Entry]) -> None:
    for each, text in zip(made, JsonLines().lines(made, OFFSET_NS), strict=True):
        members = json.loads(text)
        seconds, *named, exported = line_of_entry(each, OFFSET_NS)
        assert abs(datetime.fromisoformat(members.pop("timestamp")).timestamp() - seconds) < 1e-6
        del members["level"]  # another form of the severity
        assert [members.pop(name) for name in ("severity", "logger", "message")] == named
        assert exported == members


@pytest.mark.parametrize("iso8601", [False, True])
@given(made=batches(st.sampled_from(("", "m", "resnet-50"))))
def test_each_line_of_text_has_the_values_of_its_request(iso8601: bool, made: list[Entry]) -> None:
    printed = TextLines(iso8601=iso8601).lines(made, OFFSET_NS)
    for (line, status, _end_ns, took_ns, size, peer, request_id, run), text in zip(made, printed, strict=True):
        found = TEXT.fullmatch(text)
        assert found is not None
        assert found["message"] == f"{line.title} {status}"
        assert (found["peer"], found["size"], found["took"]) == (peer or "-", str(size), str(took_ns // 1000))
        assert (found["id"] or "") == (request_id or (run[6] if run is not None else ""))
        figures = None if run is None else (*run[:4], run[4] // 1000, sum(run[5]) // 1000)
        names = ("model", "version", "rows", "batch", "queue", "compute")
        assert found.group(*names) == ((None,) * 6 if figures is None else tuple(map(str, figures)))
