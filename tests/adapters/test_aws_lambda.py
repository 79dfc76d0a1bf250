"""Lambda: every event gets the answer that the server would give, and the function's own rules are kept."""

from __future__ import annotations

import base64
import gzip
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import ROOT
from remora.engine import Engine
from remora.errors import InvalidArgumentError, NotFoundError, UnavailableError, UnsupportedError
from remora_adapters.aws_lambda import PAYLOAD_LIMIT, Function, Settings, base_path_of, flush_telemetry, load
from support.servers.hosting import retire_once, write_scale, write_words
from support.servers.trace_receiver import collector

pytest.importorskip("mangum", reason="mangum is not installed: pip install '.[lambda]'")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install '.[onnx]'")

ROWS = [[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.5]]
DOUBLED = [2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 17.0]

SLOW = """
import os, time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        while not os.path.exists(os.path.join(os.path.dirname(__file__), "go")):
            time.sleep(0.005)
        return [pb_utils.InferenceResponse([]) for _ in requests]

    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "x", "data_type": "TYPE_FP32", "dims": [1]})
        config.add_output({"name": "y", "data_type": "TYPE_FP32", "dims": [1]})
        return config
"""


class Context:
    """What Lambda tells about an invocation."""

    def __init__(self, remaining_ms: int = 60_000) -> None:
        self.remaining_ms = remaining_ms

    def get_remaining_time_in_millis(self) -> int:
        return self.remaining_ms


class Flushes:
    """Counts how often telemetry was flushed."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    delayed = "max_batch_size: 8 dynamic_batching { max_queue_delay_microseconds: 30000000 preferred_batch_size: 8 }"
    write_scale(folder / "scale", config=delayed)
    write_words(folder / "words")
    return folder


@pytest.fixture(scope="module")
def flushes() -> Flushes:
    return Flushes()


@pytest.fixture(scope="module")
def function(repository: Path, flushes: Flushes) -> Iterator[Function]:
    settings = Settings.of({"REMORA_MODEL_REPOSITORY": str(repository), "REMORA_BASE_PATH": "ml"})
    running = Function(Engine(options=settings.engine).start(), settings, flushes)
    yield running
    running.close()


def v2(data: list[list[float]] = ROWS, **more: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "x", "datatype": "FP32", "shape": [len(data), 4], "data": data}], **more}


def binary() -> tuple[bytes, dict[str, str]]:
    tensor = np.array(ROWS, np.float32)
    spec = {"name": "x", "datatype": "FP32", "shape": [2, 4], "parameters": {"binary_data_size": tensor.nbytes}}
    header = json.dumps({"inputs": [spec], "parameters": {"binary_data_output": True}}).encode()
    headers = {"Inference-Header-Content-Length": str(len(header)), "Content-Type": "application/octet-stream"}
    return header + tensor.tobytes(), headers


# -- events as AWS documents them; of each, what this kind of front sends ---------------------------------------------


def _body(body: bytes, headers: dict[str, str]) -> dict[str, Any]:
    text = headers.get("Content-Type", "application/json").startswith(("application/json", "text/"))
    if text and "Content-Encoding" not in headers:
        return {"body": body.decode() or None, "isBase64Encoded": False}
    return {"body": base64.b64encode(body).decode(), "isBase64Encoded": True}


def rest_api(method: str, path: str, body: bytes, headers: dict[str, str]) -> dict[str, Any]:
    return {
        "resource": "/{proxy+}",
        "path": path,
        "httpMethod": method,
        "headers": headers or None,
        "multiValueHeaders": {name: [value] for name, value in headers.items()} or None,
        "queryStringParameters": None,
        "multiValueQueryStringParameters": None,
        "requestContext": {"stage": "prod", "path": f"/prod{path}", "identity": {"sourceIp": "192.0.2.1"}},
        **_body(body, headers),
    }


def http_api(method: str, path: str, body: bytes, headers: dict[str, str], stage: str = "prod") -> dict[str, Any]:
    before = "" if stage == "$default" else f"/{stage}"
    return {
        "version": "2.0",
        "routeKey": "$default",
        "rawPath": before + path,
        "rawQueryString": "",
        "headers": {name.lower(): value for name, value in headers.items()},
        "requestContext": {
            "stage": stage,
            "http": {"method": method, "path": before + path, "sourceIp": "192.0.2.1", "protocol": "HTTP/1.1"},
        },
        **_body(body, headers),
    }


def http_api_v1(method: str, path: str, body: bytes, headers: dict[str, str]) -> dict[str, Any]:
    event = rest_api(method, f"/prod{path}", body, headers)
    return {**event, "version": "1.0"}


def function_url(method: str, path: str, body: bytes, headers: dict[str, str]) -> dict[str, Any]:
    return http_api(method, path, body, headers, "$default")


def load_balancer(method: str, path: str, body: bytes, headers: dict[str, str]) -> dict[str, Any]:
    return {
        "requestContext": {"elb": {"targetGroupArn": "arn:aws:elasticloadbalancing:x:1:targetgroup/t/1"}},
        "httpMethod": method,
        "path": path,
        "queryStringParameters": {},
        "headers": {"host": "models.example", **{name.lower(): value for name, value in headers.items()}},
        **_body(body, headers),
    }


def load_balancer_multi(method: str, path: str, body: bytes, headers: dict[str, str]) -> dict[str, Any]:
    event = load_balancer(method, path, body, headers)
    many = {name: [value] for name, value in event.pop("headers").items()}
    return {**event, "multiValueHeaders": many, "multiValueQueryStringParameters": {}}


FRONTS = [rest_api, http_api, http_api_v1, function_url, load_balancer, load_balancer_multi]


def body_of(answer: dict[str, Any]) -> bytes:
    return base64.b64decode(answer["body"]) if answer["isBase64Encoded"] else answer["body"].encode()


def header_of(answer: dict[str, Any], name: str) -> str:
    """A header by its name, in whichever form the front wants headers."""
    found = {key.lower(): value for key, value in (answer.get("headers") or {}).items()}
    found |= {key.lower(): value[0] for key, value in (answer.get("multiValueHeaders") or {}).items()}
    return str(found.get(name, ""))


# -- HTTP -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("front", FRONTS)
def test_json_through_every_front_is_answered_as_text(function: Function, front: Any) -> None:
    answer = function(front("POST", "/v2/models/scale/infer", json.dumps(v2()).encode(), {}), Context())
    assert (answer["statusCode"], answer["isBase64Encoded"]) == (200, False)
    assert json.loads(answer["body"])["outputs"][0]["data"] == DOUBLED


@pytest.mark.parametrize("front", FRONTS)
def test_binary_tensors_travel_as_base64_both_ways(function: Function, front: Any) -> None:
    answer = function(front("POST", "/v2/models/scale/infer", *binary()), Context())
    assert (answer["statusCode"], answer["isBase64Encoded"]) == (200, True)
    assert header_of(answer, "content-type") == "application/octet-stream"
    length = int(header_of(answer, "inference-header-content-length"))
    assert np.frombuffer(body_of(answer)[length:], np.float32).tolist() == DOUBLED


@pytest.mark.parametrize("front", FRONTS)
def test_a_compressed_request_is_read(function: Function, front: Any) -> None:
    body = gzip.compress(json.dumps(v2()).encode())
    headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    answer = function(front("POST", "/v2/models/scale/infer", body, headers), Context())
    assert json.loads(body_of(answer))["outputs"][0]["data"] == DOUBLED


@pytest.mark.parametrize("front", FRONTS)
def test_refusals_are_http_answers_and_no_function_errors(function: Function, front: Any) -> None:
    unknown = function(front("POST", "/v2/models/none/infer", json.dumps(v2()).encode(), {}), Context())
    nowhere = function(front("GET", "/elsewhere", b"", {}), Context())
    garbage = function(front("POST", "/v2/models/scale/infer", b"{", {}), Context())
    assert [unknown["statusCode"], nowhere["statusCode"], garbage["statusCode"]] == [404, 404, 500]
    assert "none" in json.loads(body_of(unknown))["error"]


@pytest.mark.parametrize("front", FRONTS)
def test_health_and_pages_are_there(function: Function, front: Any) -> None:
    assert function(front("GET", "/v2/health/ready", b"", {}), Context())["statusCode"] == 200
    page = function(front("GET", "/v2/openapi.json", b"", {}), Context())
    assert "/v2/models/scale/infer" in json.loads(body_of(page))["paths"]


def test_a_custom_domains_path_is_taken_off_for_every_front(function: Function) -> None:
    for front in FRONTS:
        event = front("GET", "/ml/v2/health/ready", b"", {})
        assert function(event, Context())["statusCode"] == 200, front.__name__


@given(st.text(min_size=1, max_size=8), st.text(max_size=12))
def test_only_a_whole_first_part_counts_as_the_stage(stage: str, rest: str) -> None:
    event = {"version": "2.0", "requestContext": {"stage": stage}}
    base = base_path_of(event, f"/{stage}/{rest}", "")
    assert base == ("" if stage == "$default" else f"/{stage}")
    assert base_path_of(event, f"/{stage}x", "") == ""
    assert base_path_of({"requestContext": {"stage": stage}}, f"/{stage}/{rest}", "") == ""


def test_an_answer_that_lambda_would_not_take_is_refused_with_a_reason(function: Function) -> None:
    words: dict[str, Any] = {"name": "x", "datatype": "BYTES", "shape": [1], "data": ["a" * (PAYLOAD_LIMIT - 5000)]}
    body = json.dumps({"inputs": [words]}).encode()
    for front in FRONTS:
        answer = function(front("POST", "/v2/models/words/infer", body, {}), Context())
        assert answer["statusCode"] == 200, front.__name__
    words["data"] = ["é" * (PAYLOAD_LIMIT // 6 + 1000)]  # two bytes that the runtime writes as six
    body = json.dumps({"inputs": [words]}, ensure_ascii=False).encode()
    for front in FRONTS:
        answer = function(front("POST", "/v2/models/words/infer", body, {}), Context())
        assert answer["statusCode"] == 413, front.__name__
        assert str(PAYLOAD_LIMIT) in json.loads(answer["body"])["error"]
        assert len(json.dumps(answer)) < PAYLOAD_LIMIT
    with pytest.raises(UnavailableError, match=str(PAYLOAD_LIMIT)):
        function({"model_name": "words", "inputs": [words]}, Context())


@pytest.mark.parametrize(
    "event", [{"requestContext": None}, {"requestContext": {}}, {"requestContext": {"elb": {}}, "path": 3}]
)
def test_an_event_that_only_looks_like_http_is_named(function: Function, event: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="not an HTTP request"):
        function(event, Context())


# -- direct invocations -----------------------------------------------------------------------------------------------


def test_a_direct_event_is_a_v2_request_and_its_answer_plain_json(function: Function) -> None:
    answer = function(v2(model_name="scale", id="7"), Context())
    assert answer["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [2, 4], "data": DOUBLED}]
    assert (answer["model_name"], answer["model_version"], answer["id"]) == ("scale", "1", "7")
    assert json.loads(json.dumps(answer)) == answer


def test_a_direct_event_whose_version_is_replaced_is_answered_by_the_next_one(
    function: Function, monkeypatch: pytest.MonkeyPatch
) -> None:
    retired = retire_once(monkeypatch)
    assert function(v2(model_name="scale"), Context())["outputs"][0]["data"] == DOUBLED
    assert retired == []


def test_a_direct_event_runs_no_event_loop(repository: Path, child_environment: dict[str, str]) -> None:
    program = f"""
import json, os, sys
from remora_adapters import aws_lambda
class Context:
    get_remaining_time_in_millis = lambda self: 60_000
answer = aws_lambda.handler({v2(model_name="scale")!r}, Context())
assert answer["outputs"][0]["data"] == {DOUBLED!r}
print([name for name in ("mangum", "fastapi", "grpc", "uvloop") if name in sys.modules])
import asyncio
try:
    asyncio.get_running_loop()
except RuntimeError:
    print("no loop")
"""
    environment = child_environment | {"REMORA_MODEL_REPOSITORY": str(repository)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout == "[]\nno loop\n", done.stderr


@pytest.mark.parametrize(
    ("event", "kind", "words"),
    [
        ({"Records": [{"eventSource": "aws:sqs"}]}, InvalidArgumentError, "neither an HTTP request nor a V2 request"),
        ({}, InvalidArgumentError, "neither"),
        ([1], InvalidArgumentError, "neither"),
        (None, InvalidArgumentError, "neither"),
        ({"inputs": []}, InvalidArgumentError, "expected one of scale, words"),
        ({"model_name": "none", "inputs": []}, NotFoundError, "none"),
        ({"model_name": 7, "inputs": []}, InvalidArgumentError, "model_name is text"),
        ({"model_name": "scale", "model_version": "x", "inputs": []}, InvalidArgumentError, "not a number"),
        ({"model_name": "scale", "model_version": 9, "inputs": []}, NotFoundError, "version 9"),
        ({"model_name": "scale", "inputs": []}, InvalidArgumentError, "expected 1 inputs but got 0"),
        ({"model_name": "../scale", "inputs": []}, NotFoundError, "unknown model"),
        (v2(model_name="scale", parameters={"binary_data_output": True}), UnsupportedError, "no binary outputs"),
        (v2(model_name="scale", outputs=[{"name": "z"}]), InvalidArgumentError, "z"),
    ],
)
def test_a_direct_event_that_cannot_be_answered_is_a_function_error(
    function: Function, event: Any, kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        function(event, Context())


def test_numbers_that_json_lacks_come_back_as_the_runtime_writes_them(function: Function) -> None:
    answer = function(v2([[1e38, 3e38, -3e38, 0.0]], model_name="scale"), Context())
    assert answer["outputs"][0]["data"][1:3] == [float("inf"), float("-inf")]


def test_one_model_needs_no_name(tmp_path: Path) -> None:
    write_scale(tmp_path / "only")
    settings = Settings.of({"REMORA_MODEL_REPOSITORY": str(tmp_path)})
    function = Function(Engine(options=settings.engine).start(), settings)
    try:
        assert function(v2(), Context())["model_name"] == "only"
    finally:
        function.close()


def test_the_invocation_gives_up_before_its_end_through_both_doors(tmp_path: Path) -> None:
    (tmp_path / "slow" / "1").mkdir(parents=True)
    (tmp_path / "slow" / "1" / "model.py").write_text(SLOW)
    settings = Settings.of({"REMORA_MODEL_REPOSITORY": str(tmp_path)})
    function = Function(Engine(options=settings.engine).start(), settings)
    request = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1.0]}]}
    try:
        with pytest.raises(UnavailableError, match="invocation ends"):
            function(request, Context(260))
        body = json.dumps(request).encode()
        answer = function(function_url("POST", "/v2/models/slow/infer", body, {}), Context(260))
        assert answer["statusCode"] == 503
    finally:
        (tmp_path / "slow" / "1" / "go").touch()
        function.close()


# -- settings ---------------------------------------------------------------------------------------------------------


def test_batchers_do_not_wait_for_other_requests(function: Function, repository: Path) -> None:
    answer = function(function_url("GET", "/v2/models/scale/config", b"", {}), Context())
    batching = json.loads(answer["body"])["dynamic_batching"]
    assert not batching.get("max_queue_delay_microseconds")


def test_models_are_beside_the_code_or_in_a_layer(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    assert Settings.of({"LAMBDA_TASK_ROOT": str(tmp_path)}).engine.paths == (str(tmp_path / "models"),)
    with pytest.raises(ValueError, match="REMORA_MODEL_REPOSITORY"):
        Settings.of({"REMORA_MODEL_REPOSITORY": str(tmp_path / "none")})


def test_models_may_lie_in_a_bucket() -> None:
    engine = Settings.of({"REMORA_MODEL_REPOSITORY": "s3://example/models/"}).engine
    assert engine.paths == ("s3://example/models/",)


def test_models_load_while_the_function_initialises_and_a_bad_one_says_so(tmp_path: Path) -> None:
    (tmp_path / "bad" / "1").mkdir(parents=True)
    (tmp_path / "bad" / "1" / "model.onnx").write_bytes(b"garbage")
    with pytest.raises(Exception, match="bad"):
        load({"REMORA_MODEL_REPOSITORY": str(tmp_path)})


def test_no_event_starts_or_stops_anything(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings.of({"REMORA_MODEL_REPOSITORY": str(repository)})
    function = Function(Engine(options=settings.engine).start(), settings)
    called: list[str] = []
    for name in ("start", "stop", "load", "unload"):
        original = getattr(Engine, name)
        monkeypatch.setattr(Engine, name, lambda *a, _n=name, _o=original, **k: (called.append(_n), _o(*a, **k))[1])
    try:
        for front in FRONTS:
            for _ in range(2):
                body = json.dumps(v2()).encode()
                assert function(front("POST", "/v2/models/scale/infer", body, {}), Context())["statusCode"] == 200
        function(v2(model_name="scale"), Context())
        assert called == []
    finally:
        function.close()
    assert "stop" in called


def test_a_stream_comes_in_one_piece(function: Function) -> None:
    for front in FRONTS:
        answer = function(front("POST", "/v2/models/words/generate_stream", b'{"x": "word"}', {}), Context())
        assert answer["statusCode"] == 200, answer
        (event,) = [line for line in body_of(answer).split(b"\n\n") if line]
        assert json.loads(event.removeprefix(b"data: "))["y"] == "word"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may start a process as nobody")
@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed: apt-get install bubblewrap")
def test_it_runs_as_nobody_where_nothing_but_tmp_can_be_written(repository: Path) -> None:
    program = (
        "import json; from remora_adapters.aws_lambda import handler\n"
        "class C:\n    def get_remaining_time_in_millis(self): return 60000\n"
        f"print(json.dumps(handler({v2(model_name='scale')!r}, C())))"
    )
    sandbox = ["bwrap", "--die-with-parent", "--ro-bind", "/", "/", "--tmpfs", "/tmp"]
    sandbox += ["--ro-bind", str(repository), "/tmp/models"]
    for needed in (ROOT, Path(sys.prefix)):  # which may lie below /tmp, as a checkout of CI does
        sandbox += ["--ro-bind", str(needed), str(needed)]
    sandbox += ["--proc", "/proc", "--dev", "/dev", "--unshare-user", "--uid", "993", "--gid", "990", "--clearenv"]
    sandbox += ["--setenv", "REMORA_MODEL_REPOSITORY", "/tmp/models", "--chdir", "/"]
    sandbox += ["--setenv", "PYTHONPATH", f"{ROOT / 'core'}:{ROOT / 'adapters'}"]
    done = subprocess.run([*sandbox, sys.executable, "-c", program], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["outputs"][0]["data"] == DOUBLED


def test_importing_the_module_loads_nothing() -> None:
    from remora_adapters import aws_lambda

    assert "handler" not in vars(aws_lambda)
    with pytest.raises(AttributeError, match="handlers"):
        aws_lambda.handlers  # noqa: B018


# -- telemetry --------------------------------------------------------------------------------------------------------


class Provider:
    def __init__(self, error: Exception | None = None) -> None:
        self.flushed: list[int] = []
        self.error = error

    def force_flush(self, timeout_ms: int) -> None:
        self.flushed.append(timeout_ms)
        if self.error:
            raise self.error


class Api:
    """An OpenTelemetry module with its provider."""

    def __init__(self, provider: object) -> None:
        self.get_tracer_provider = self.get_meter_provider = self.get_logger_provider = lambda: provider


def test_telemetry_is_flushed_after_each_event_even_a_failed_one(function: Function, flushes: Flushes) -> None:
    before = flushes.count
    function(v2(model_name="scale"), Context())
    function(function_url("GET", "/v2", b"", {}), Context())
    with pytest.raises(InvalidArgumentError):
        function({}, Context())
    assert flushes.count == before + 3


def test_what_cannot_be_flushed_stops_nothing() -> None:
    failing, traces = Provider(OSError("no way out")), Provider()
    flush_telemetry({"opentelemetry.trace": Api(failing), "opentelemetry.metrics": Api(traces)})
    flush_telemetry({"opentelemetry.trace": Api(object())})
    flush_telemetry({})
    assert (len(failing.flushed), len(traces.flushed)) == (1, 1)


def test_spans_hang_below_the_invocations_segment_and_are_sent_before_it_ends(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collector() as received:
        entries = f"mode=opentelemetry rate=0 level=TIMESTAMPS opentelemetry,url={received.url}"
        settings = Settings.of({"REMORA_MODEL_REPOSITORY": str(repository), "REMORA_TRACE_CONFIG": entries})
        function = Function(Engine(options=settings.engine).start(), settings, Flushes())
        try:
            root = "Root=1-0af76519-16cd43dd8448eb211c80319c;Parent=b7ad6b7169203331"
            monkeypatch.setenv("_X_AMZN_TRACE_ID", f"{root};Sampled=0")
            function(v2(ROWS, model_name="scale"), Context())
            monkeypatch.setenv("_X_AMZN_TRACE_ID", f"{root};Sampled=1")
            function(v2(ROWS, model_name="scale"), Context())
            assert len(received.spans(0)) == 3
            function(function_url("POST", "/v2/models/scale/infer", json.dumps(v2()).encode(), {}), Context())
            spans = received.spans(0)
        finally:
            function.close()
    assert [span.name for span in spans] == ["InferRequest", "scale", "compute"] * 2
    assert {span.trace_id.hex() for span in spans} == {"0af7651916cd43dd8448eb211c80319c"}
    assert [span.parent_span_id.hex() for span in spans[::3]] == ["b7ad6b7169203331"] * 2


def test_each_event_ends_with_a_line_of_metrics_for_cloudwatch(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Settings.of({"REMORA_MODEL_REPOSITORY": str(repository), "REMORA_METRICS_EXPORT": "emf=shop"})
    function = Function(Engine(options=settings.engine).start(), settings, Flushes())
    try:
        for _ in range(2):
            function(v2(ROWS, model_name="scale"), Context())
            lines = [json.loads(line) for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
            (line,) = (line for line in lines if line["model"] == "scale")
            assert (line["version"], line["nv_inference_request_success"]) == ("1", 1)
            assert line["_aws"]["CloudWatchMetrics"][0]["Namespace"] == "shop"
    finally:
        function.close()
