"""Vertex AI: the platform's routes and storage, predict and rawPredict, and nothing that changes what is served."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from remora.server.http.large_bodies import LARGE_BYTES, LargeBodies
from remora_adapters import vertex
from support.servers.hosting import PATIENCE_S, ask, hosted, v2_request, write_parts, write_scale, write_words

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install '.[onnx]'")

ROWS = [[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.5]]
DOUBLED = [[2.0, 4.0, 6.0, 8.0], [10.0, 12.0, 14.0, 17.0]]
FLAT = [number for row in DOUBLED for number in row]
MIME = "application/vnd.vertex-ai-triton.binary+json;json-header-size="
ROUTES = {"AIP_HEALTH_ROUTE": "/v1/health/7", "AIP_PREDICT_ROUTE": "/v1/models/7:predict"}
PREDICT = ROUTES["AIP_PREDICT_ROUTE"]


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    folder = tmp_path_factory.mktemp("models")
    write_scale(folder / "scale")
    write_words(folder / "words")
    variables = {**ROUTES, "AIP_STORAGE_URI": str(folder), "REMORA_DEFAULT_MODEL": "scale"}
    with hosted("vertex", variables) as found:
        yield found


def test_the_routes_and_the_port_are_the_platforms(port: int) -> None:
    assert ask(port, "GET", ROUTES["AIP_HEALTH_ROUTE"]).status == 200
    assert ask(port, "GET", PREDICT).status == ask(port, "POST", ROUTES["AIP_HEALTH_ROUTE"]).status == 405
    assert ask(port, "POST", "/predict", {"instances": ROWS}).status == 404
    assert vertex.host({"AIP_HTTP_PORT": "9000"}).server.http_port == 9000
    assert vertex.host({}).server.http_address == "0.0.0.0"
    assert vertex.host({"AIP_STORAGE_URI": "gs://bucket/models"}).engine.paths == ("gs://bucket/models",)
    for variables in ({"AIP_HTTP_PORT": "x"}, {"AIP_HEALTH_ROUTE": "health"}, {"AIP_HEALTH_ROUTE": "/predict"}):
        with pytest.raises(ValueError, match=r"AIP_HTTP_PORT|AIP_HEALTH_ROUTE"):
            vertex.host(variables)


def test_health_is_not_good_before_the_models_are_there(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    (folder / "bad" / "1").mkdir(parents=True)
    (folder / "bad" / "1" / "model.onnx").write_bytes(b"garbage")
    from dataclasses import replace

    from support.servers.hosting import running

    host = vertex.host({"AIP_STORAGE_URI": str(folder)})
    with running(replace(host, engine=replace(host.engine, exit_on_error=False))) as ports:
        assert ask(ports.http, "GET", "/health").status == 503


def test_the_models_are_fetched_from_the_storage_that_the_platform_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("obstore", reason="obstore is not installed: pip install '.[gcs]'")
    from support.servers.object_store import object_store

    write_scale(tmp_path / "scale")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with object_store() as store:
        for path in (tmp_path / "scale").rglob("*"):
            if path.is_file():
                store.put("bucket", f"model-1/{path.relative_to(tmp_path)}", path.read_bytes())
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", store.url)
        with hosted("vertex", {**ROUTES, "AIP_STORAGE_URI": "gs://bucket/model-1"}) as port:
            assert ask(port, "POST", PREDICT, {"instances": ROWS}).json == {"predictions": DOUBLED}


def test_instances_become_predictions(port: int) -> None:
    body = {"instances": ROWS, "parameters": {"unused": 1}}
    assert ask(port, "POST", PREDICT, body).json == {"predictions": DOUBLED}
    named = {"parameters": {}, "instances": [{"x": row} for row in ROWS]}
    assert ask(port, "POST", PREDICT, named).json == {"predictions": DOUBLED}


@pytest.mark.parametrize(
    "body", [b"{", b'{"instances": 3}', b'{"instances": [["a"]]}', b'{"instances"', b"[]", b"\xff"]
)
def test_a_malformed_body_is_an_error_with_a_reason(port: int, body: bytes) -> None:
    answer = ask(port, "POST", PREDICT, body)
    assert answer.status in (400, 500)
    assert answer.json["error"]


def test_v2_passes_through_raw_predict(port: int) -> None:
    assert ask(port, "POST", PREDICT, v2_request(ROWS)).json["outputs"][0]["data"] == FLAT


@pytest.mark.parametrize("name", ["pad", "instances"])
def test_a_large_body_takes_two_turns_in_threads(port: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[object] = []
    run = LargeBodies._run
    monkeypatch.setattr(LargeBodies, "_run", lambda self, work: turns.append(work) or run(self, work))
    padding = {name: "x" * LARGE_BYTES}
    assert ask(port, "POST", PREDICT, v2_request(ROWS, parameters=padding)).json["outputs"][0]["data"] == FLAT
    assert len(turns) == 2  # for its protocol and for its tensors
    turns.clear()
    assert ask(port, "POST", PREDICT, {"instances": ROWS, "parameters": padding}).json == {"predictions": DOUBLED}
    assert len(turns) == 2


def binary() -> tuple[bytes, int]:
    tensor = np.array(ROWS, np.float32)
    spec = {"name": "x", "datatype": "FP32", "shape": [2, 4], "parameters": {"binary_data_size": tensor.nbytes}}
    header = json.dumps({"inputs": [spec], "parameters": {"binary_data_output": True}}).encode()
    return header + tensor.tobytes(), len(header)


def test_binary_tensors_have_their_size_in_the_content_type_both_ways(port: int) -> None:
    body, length = binary()
    answer = ask(port, "POST", PREDICT, body, {"Content-Type": f"{MIME}{length}"})
    assert answer.headers["content-type"].startswith(MIME)
    told = int(answer.headers["content-type"].removeprefix(MIME))
    assert np.frombuffer(answer.body[told:], np.float32).tolist() == FLAT


@pytest.mark.parametrize("size", ["", "-1", "x", "99999999", "9" * 40, "1;a=2"])
def test_a_size_that_cannot_be_is_refused(port: int, size: str) -> None:
    answer = ask(port, "POST", PREDICT, binary()[0], {"Content-Type": f"{MIME}{size}"})
    assert answer.status == 400
    assert "header size" in answer.json["error"]


@pytest.mark.parametrize(
    ("target", "word"),
    [
        ("v2/models/words", "BYTES"),
        ("/v2/models/scale/config", "max_batch_size"),
        ("v2/health/ready", ""),
        ("v2/models/scale/stats", "inference_count"),
        ("v2/repository/index", "scale"),
    ],
)
def test_the_redirect_leads_to_what_only_looks(port: int, target: str, word: str) -> None:
    answer = ask(port, "POST", PREDICT, b"", {"X-Vertex-Ai-Triton-Redirect": target})
    assert answer.status == 200
    assert word in answer.body.decode()


def test_the_redirect_reaches_another_model(port: int) -> None:
    body = {"inputs": [{"name": "x", "datatype": "BYTES", "shape": [1], "data": ["a"]}]}
    answer = ask(port, "POST", PREDICT, body, {"X-Vertex-Ai-Triton-Redirect": "v2/models/words/infer"})
    assert answer.json["outputs"][0]["data"] == ["a"]


def test_the_redirect_takes_binary_tensors_as_predict_does(port: int) -> None:
    body, length = binary()
    redirect = {"X-Vertex-Ai-Triton-Redirect": "v2/models/scale/versions/1/infer"}
    answer = ask(port, "POST", PREDICT, body, {"Content-Type": f"{MIME}{length}", **redirect})
    told = int(answer.headers["content-type"].removeprefix(MIME))
    assert np.frombuffer(answer.body[told:], np.float32).tolist() == FLAT
    assert ask(port, "POST", PREDICT, b"", {"Content-Type": f"{MIME}x", **redirect}).status == 400
    assert ask(port, "POST", PREDICT, body, {"Content-Type": f"{MIME}{len(body) + 1}", **redirect}).status == 400


def test_the_redirect_leads_to_the_metrics(port: int) -> None:
    answer = ask(port, "POST", PREDICT, b"", {"X-Vertex-Ai-Triton-Redirect": "metrics"})
    assert b"nv_inference_request_success" in answer.body


CHANGING = [
    "v2/repository/models/scale/load",
    "v2/repository/models/scale/unload",
    "/v2/repository/x/models/scale/unload",
    "//v2/repository/models/scale/unload",
    "v2/systemsharedmemory/region/a/register",
    "v2/systemsharedmemory/unregister",
    "v2/cudasharedmemory/region/a/register",
    "v2/cudasharedmemory/unregister",
    "v2/trace/setting",
    "v2/models/scale/trace/setting",
    "v2/logging",
]


@pytest.mark.parametrize("target", CHANGING)
def test_what_changes_something_is_forbidden_by_redirect_and_by_path(port: int, target: str) -> None:
    answer = ask(port, "POST", PREDICT, b"{}", {"X-Vertex-Ai-Triton-Redirect": target})
    assert answer.status == 403
    assert ask(port, "POST", f"/{target.lstrip('/')}", b"{}").status == 403
    assert ask(port, "GET", "/v2/models/scale/ready").status == 200


@pytest.mark.parametrize("target", ["", "..", "../../etc/passwd", "v3/x", "v2/../v2/models", "http://elsewhere/v2"])
def test_a_redirect_to_nowhere_is_not_found(port: int, target: str) -> None:
    answer = ask(port, "POST", PREDICT, b"{}", {"X-Vertex-Ai-Triton-Redirect": target})
    assert answer.status == 404


def test_several_models_need_a_default(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_scale(tmp_path / name)
    with hosted("vertex", {"AIP_STORAGE_URI": str(tmp_path)}) as port:
        answer = ask(port, "POST", "/predict", {"instances": ROWS})
        assert answer.status == 400
        assert "REMORA_DEFAULT_MODEL" in answer.json["error"]


def test_a_stream_raw_prediction_gets_each_response_as_the_model_produces_it(tmp_path: Path) -> None:
    """The platform forwards streamRawPredict to the predict route, and passes the pieces of the answer on."""
    read = write_parts(tmp_path / "parts")
    with hosted("vertex", {**ROUTES, "AIP_STORAGE_URI": str(tmp_path)}) as found:
        connection = http.client.HTTPConnection("127.0.0.1", found, timeout=PATIENCE_S)
        headers = {"X-Vertex-Ai-Triton-Redirect": "v2/models/parts/generate_stream", "Content-Type": "application/json"}
        connection.request("POST", PREDICT, b'{"x": 1.0}', headers)
        answer = connection.getresponse()
        assert (answer.status, answer.headers["Content-Type"]) == (200, "text/event-stream; charset=utf-8")
        first = [answer.readline() for _ in range(3)]  # two events with the empty line between them
        assert [json.loads(line.removeprefix(b"data: "))["y"] for line in first if line.strip()] == [0.0, 1.0]
        read.touch()
        last = [line for line in answer.read().splitlines() if line]
        assert [json.loads(line.removeprefix(b"data: "))["y"] for line in last] == [2.0]
        connection.close()


def test_a_batch_prediction_job_gets_one_prediction_per_instance_in_order(port: int) -> None:
    """A job sends the lines of its input in requests of `batchSize` instances, beyond the model's batch size."""
    instances = [[float(number), 0.0, 0.0, 0.5] for number in range(300)]
    predictions = []
    for begin in range(0, len(instances), 64):
        answer = ask(port, "POST", PREDICT, {"instances": instances[begin : begin + 64], "parameters": {}})
        assert answer.status == 200, answer
        predictions += answer.json["predictions"]
    assert predictions == [[2 * number for number in instance] for instance in instances]
