"""Management over V2 REST: calls from bodies, and the answers to them."""

from __future__ import annotations

import base64
import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.calls import (
    BatchStats,
    Duration,
    IndexEntry,
    LiveSequence,
    ModelConfig,
    ModelInfo,
    ModelLoad,
    ModelMetadata,
    ModelReady,
    ModelSequences,
    ModelStatistics,
    ModelStats,
    ModelUnload,
    PastSequence,
    RecentTraces,
    RefusedRequest,
    RepositoryIndex,
    ResponseStats,
    SequenceReport,
    ServerInfo,
    ServerLive,
    ServerMetadata,
    ServerReady,
    TensorInfo,
)
from remora.errors import InternalError, MalformedError, RemoraError, UnsupportedError
from remora.proto import model_config_pb2
from remora.protocols.rest.management import decode_call, encode_result
from remora.protocols.rest.routes import Route, route

LOAD = Route("load", "m")
UNLOAD = Route("unload", "m")
INDEX = Route("index")


@pytest.mark.parametrize(
    ("method", "path", "body", "call"),
    [
        ("GET", "/v2", b"", ServerMetadata()),
        ("GET", "/v2/health/live", b"", ServerLive()),
        ("GET", "/v2/health/ready", b"", ServerReady()),
        ("GET", "/v2/models/m/versions/2/ready", b"", ModelReady("m", 2)),
        ("GET", "/v2/models/m", b"", ModelMetadata("m", -1)),
        ("GET", "/v2/models/m/config", b"", ModelConfig("m", -1)),
        ("GET", "/v2/models/m/versions/3/stats", b"", ModelStatistics("m", 3)),
        ("GET", "/v2/models/stats", b"", ModelStatistics()),
        ("GET", "/v2/trace/recent", b"", RecentTraces()),
        ("POST", "/v2/repository/index", b"", RepositoryIndex()),
        ("POST", "/v2/repository/index", b"{}", RepositoryIndex()),
        ("POST", "/v2/repository/some/index", b'{"ready":true}', RepositoryIndex(True, "some")),
        ("POST", "/v2/repository/models/m/load", b"", ModelLoad("m", {})),
        ("POST", "/v2/repository/models/m/load", b"[]", ModelLoad("m", {})),
        ("POST", "/v2/repository/models/m/unload", b"", ModelUnload("m")),
        (
            "POST",
            "/v2/repository/models/m/unload",
            b'{"parameters":{"unload_dependents":true}}',
            ModelUnload("m", True),
        ),
    ],
)
def test_a_request_asks_for_its_call(method: str, path: str, body: bytes, call: object) -> None:
    assert decode_call(route(method, path), body) == call


def test_a_load_brings_a_config_and_files() -> None:
    octets = bytes(range(256))
    parameters = {
        "config": "{}",
        "file:1/model.onnx": base64.b64encode(octets).decode(),
        "file:x": "%%%",
        "file:y": "QUI",
    }
    call = decode_call(LOAD, json.dumps({"parameters": parameters}).encode())
    assert call == ModelLoad("m", {"config": "{}", "file:1/model.onnx": octets, "file:x": b"", "file:y": b"AB"})


@pytest.mark.parametrize(
    ("where", "body", "kind", "message"),
    [
        (
            INDEX,
            b"{bad",
            MalformedError,
            "failed to parse the request JSON buffer: Missing a name for object member. at 1",
        ),
        (INDEX, b'{"ready":1}', MalformedError, "attempt to access JSON non-boolean as boolean"),
        (LOAD, b'{"parameters":[1]}', MalformedError, "attempt to get members for non-object"),
        (LOAD, b'{"parameters":{"nope":5}}', MalformedError, "attempt to access JSON non-string as string"),
        (LOAD, b'{"parameters":{"config":5}}', MalformedError, "attempt to access JSON non-string as string"),
        (LOAD, b'{"parameters":{"nope":"x"}}', InternalError, "unexpected error on creating Triton parameter"),
        (
            Route("load", "m", repository="r"),
            b"",
            UnsupportedError,
            "'repository_name' specification is not supported",
        ),
        (
            Route("trace", verb="POST"),
            b"{bad",
            MalformedError,
            "failed to parse the request JSON buffer: Missing a name for object member. at 1",
        ),
    ],
)
def test_a_body_that_cannot_be_used_is_refused(
    where: Route, body: bytes, kind: type[RemoraError], message: str
) -> None:
    with pytest.raises(RemoraError) as caught:
        decode_call(where, body)
    assert type(caught.value) is kind
    assert caught.value.message == message


@pytest.mark.parametrize("body", [b"{bad", b"[]", b'{"parameters":7}', b'{"parameters":{"unload_dependents":1}}'])
def test_an_unload_ignores_an_invalid_body(body: bytes) -> None:
    assert decode_call(UNLOAD, body) == ModelUnload("m", False)


@given(st.binary() | st.sampled_from([b"{", b'{"parameters":{"file:a":"\\u0000="}}', b"[NaN]"]))
def test_any_body_is_a_call_or_refused(body: bytes) -> None:
    for where in (INDEX, LOAD, UNLOAD, Route("trace", verb="POST"), Route("logging", verb="POST")):
        with contextlib.suppress(RemoraError):
            decode_call(where, body)


# -- results --------------------------------------------------------------------------------------------------------

PLAIN = ((b"Content-Type", b"text/plain"),)
JSON = ((b"Content-Type", b"application/json"),)


@pytest.mark.parametrize(
    ("where", "result", "expected"),
    [
        (Route("live"), True, (200, PLAIN, b"")),
        (Route("ready"), False, (400, PLAIN, b"")),
        (Route("model_ready", "m"), True, (200, PLAIN, b"")),
        (Route("model_ready", "m"), False, (400, PLAIN, b'{"error":"Model version not ready"}')),
        (LOAD, None, (200, JSON, b"")),
        (UNLOAD, None, (200, JSON, b"")),
        (
            Route("server_metadata"),
            ServerInfo("triton", "2.73", ("a", "b")),
            (200, JSON, b'{"name":"triton","version":"2.73","extensions":["a","b"]}'),
        ),
        (
            Route("model_metadata", "m"),
            ModelInfo("m", ("1", "3"), "python", (TensorInfo("I", "FP32", (-1, 4)),), (TensorInfo("O", "BYTES", ()),)),
            (
                200,
                JSON,
                b'{"name":"m","versions":["1","3"],"platform":"python",'
                b'"inputs":[{"name":"I","datatype":"FP32","shape":[-1,4]}],'
                b'"outputs":[{"name":"O","datatype":"BYTES","shape":[]}]}',
            ),
        ),
        (
            INDEX,
            [IndexEntry("a", "1", "READY"), IndexEntry("b"), IndexEntry("c", "1", "UNAVAILABLE", "unloaded")],
            (
                200,
                JSON,
                b'[{"name":"a","version":"1","state":"READY"},{"name":"b"},'
                b'{"name":"c","version":"1","state":"UNAVAILABLE","reason":"unloaded"}]',
            ),
        ),
        (INDEX, [], (200, JSON, b"[]")),
        (Route("all_stats"), [], (200, JSON, b'{"model_stats":[]}')),
    ],
)
def test_a_result_has_tritons_answer(where: Route, result: object, expected: tuple[Any, ...]) -> None:
    answer = encode_result(where, result)
    assert (answer.status, answer.headers, b"".join(answer.body)) == expected


def test_a_config_is_printed_with_its_defaults() -> None:
    answer = encode_result(Route("model_config", "m"), model_config_pb2.ModelConfig(name="m", max_batch_size=8))
    config = json.loads(b"".join(answer.body))
    assert (answer.headers, config["name"], config["max_batch_size"], config["input"]) == (JSON, "m", 8, [])


def test_statistics_have_tritons_keys_in_tritons_order() -> None:
    durations = [Duration(i, 10 * i) for i in range(8)]
    batches = (BatchStats(2, Duration(1, 2), Duration(3, 4), Duration(5, 6)),)
    responses = {str(index): ResponseStats(*durations[:6]) for index in range(2)}
    stats = ModelStats("m", "1", 5, 7, 4, *durations, batches, responses)
    kinds = ["compute_infer", "compute_output", "success", "fail", "empty_response", "cancel"]
    text = b"".join(encode_result(Route("model_stats", "m"), [stats]).body)
    phases = ["success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss"]
    expected = {
        "model_stats": [
            {
                "name": "m",
                "version": "1",
                "last_inference": 5,
                "inference_count": 7,
                "execution_count": 4,
                "inference_stats": {phase: {"count": i, "ns": 10 * i} for i, phase in enumerate(phases)},
                "response_stats": {
                    index: {kind: {"count": i, "ns": 10 * i} for i, kind in enumerate(kinds)} for index in ("0", "1")
                },
                "batch_stats": [
                    {
                        "batch_size": 2,
                        "compute_input": {"count": 1, "ns": 2},
                        "compute_infer": {"count": 3, "ns": 4},
                        "compute_output": {"count": 5, "ns": 6},
                    }
                ],
                "memory_usage": [],
            }
        ]
    }
    assert text.decode() == json.dumps(expected, separators=(",", ":"))


def test_sequences_are_listed_with_places_and_times_in_microseconds() -> None:
    where = route("GET", "/v2/models/m/versions/2/sequences")
    assert decode_call(where, b"") == ModelSequences("m", 2)
    live = LiveSequence(2**64 - 1, "active", "m_0_0", 1, running=True, waiting=2, idle_ns=0)
    behind = LiveSequence('é"', "backlog", "", -1, running=False, waiting=1, idle_ns=0)
    past = PastSequence(5, "m_0_0", 0, "idle", 1500)
    refused = RefusedRequest(5, "r", "no", "because", 2500)
    report = SequenceReport("direct", 4, 1, 1, 1_000_000_000, (live, behind), (past,), (refused,))
    answer = encode_result(where, report)
    assert (answer.status, answer.headers) == (200, JSON)
    assert json.loads(b"".join(answer.body)) == {
        "strategy": "direct",
        "slots": 4,
        "active": 1,
        "backlog": 1,
        "max_sequence_idle_us": 1_000_000,
        "sequences": [
            {
                "correlation_id": 2**64 - 1,
                "state": "active",
                "instance": "m_0_0",
                "slot": 1,
                "running": True,
                "requests_waiting": 2,
                "idle_us": 0,
            },
            {"correlation_id": 'é"', "state": "backlog", "running": False, "requests_waiting": 1, "idle_us": 0},
        ],
        "ended": [{"correlation_id": 5, "why": "idle", "instance": "m_0_0", "slot": 0, "ago_us": 1}],
        "refused": [{"correlation_id": 5, "request_id": "r", "error": "no", "explanation": "because", "ago_us": 2}],
    }
