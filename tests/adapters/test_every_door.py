"""The same request through every door gets the same tensors, and every door keeps the same rules.

A door is a platform's way to a model: its server in this process, asked over a socket, or its function, called. What is
tested here holds for all of them; what is a platform's own is in its own tests.
"""

from __future__ import annotations

import gzip
import http.client
import json
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remora.engine import Engine
from remora.errors import RetiredError
from remora.messages import Array, Ticket
from remora.models.served_model import ServedModel
from remora.models.table import LoadingError
from remora.options import ServerOptions
from remora.server.host import Host, find_adapter
from remora.server.main import Ports
from remora.tracing.settings import TraceSetting
from remora_adapters.aws_lambda import Function, Settings
from support.servers.hosting import PATIENCE_S, Got, ask, running, write_scale

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install '.[onnx]'")
pytest.importorskip("mangum", reason="mangum is not installed: pip install '.[lambda]'")
grpc = pytest.importorskip("tritonclient.grpc", reason="tritonclient is not installed: pip install '.[dev]'")
grpcio = pytest.importorskip("grpc", reason="grpcio is not installed: pip install '.[grpcio]'")
service_pb2 = grpc.service_pb2

Rows = list[list[float]]
Send = Callable[[bytes, Mapping[str, str]], Got]


def v2(rows: Rows) -> bytes:
    return json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [len(rows), 4], "data": rows}]}).encode()


def instances(rows: Rows) -> bytes:
    return json.dumps({"instances": rows}).encode()


def outputs(body: bytes) -> Array:
    (output,) = json.loads(body)["outputs"]
    return np.array(output["data"], np.float32).reshape(output["shape"])


def predictions(body: bytes) -> Array:
    return np.array(json.loads(body)["predictions"], np.float32)


def message(rows: Rows) -> bytes:
    """The request of gRPC."""
    tensor = grpc.InferInput("x", [len(rows), 4], "FP32")
    tensor.set_data_from_numpy(np.array(rows, np.float32))
    request = service_pb2.ModelInferRequest(
        model_name="scale", inputs=[tensor._get_tensor()], raw_input_contents=[tensor._get_content()]
    )
    return bytes(request.SerializeToString())


def tensors(body: bytes) -> Array:
    return np.array(grpc.InferResult(service_pb2.ModelInferResponse.FromString(body)).as_numpy("y"))


def streamed(body: bytes) -> Array:
    return tensors(service_pb2.ModelStreamInferResponse.FromString(body).infer_response.SerializeToString())


class Door(NamedTuple):
    """A platform, the path that its clients post to, and how requests and answers look there."""

    platform: str
    path: str
    write: Callable[[Rows], bytes] = v2
    read: Callable[[bytes], Array] = outputs


INFER = "/inference.GRPCInferenceService/ModelInfer"
DOORS = {
    "container": Door("container", "/v2/models/scale/infer"),
    "knative": Door("knative", "/v2/models/scale/infer"),
    "cloud_run": Door("cloud_run", "/v2/models/scale/infer"),
    "knative grpc": Door("knative", INFER, message, tensors),
    "kserve grpc": Door("kserve", INFER, message, tensors),
    "sagemaker": Door("sagemaker", "/invocations"),
    "sagemaker of many": Door("sagemaker-mme", "/models/one/invoke"),
    "azureml": Door("azureml", "/score"),
    "azureml v2": Door("azureml", "/v2/models/scale/infer"),
    "kserve v1": Door("kserve", "/v1/models/scale:predict", instances, predictions),
    "kserve v2": Door("kserve", "/v2/models/scale/infer"),
    "vertex predict": Door("vertex", "/predict", instances, predictions),
    "vertex raw": Door("vertex", "/predict"),
}
FUNCTION = Door("lambda", "/v2/models/scale/infer")
EVERY = pytest.mark.parametrize("name", [*DOORS, "lambda url"])
JSON = {"Content-Type": "application/json"}


class Context:
    def get_remaining_time_in_millis(self) -> int:
        return 60_000


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lies as each platform mounts it: SageMaker's base directory, and Azure's NAME/VERSION."""
    folder = tmp_path_factory.mktemp("mounts") / "model"
    write_scale(folder / "scale")
    write_scale(folder.parent / "models" / "one" / "model" / "scale")  # as unpacked for a multi-model endpoint
    return folder


def host_of(platform: str, repository: Path, more: Mapping[str, str] | None = None, **limits: Any) -> Host:
    """A platform's host over the repository, with some of the server's options set as an operator would."""
    variables = {
        **(more or {}),
        "REMORA_MODEL_REPOSITORY": str(repository),
        "AZUREML_MODEL_DIR": str(repository),
        "SAGEMAKER_BASE_DIR": str(repository.parent),
    }
    if platform == "sagemaker-mme":
        variables["SAGEMAKER_MULTI_MODEL"] = "true"
    host = find_adapter(platform.removesuffix("-mme")).host(variables)
    return replace(host, server=replace(host.server, allow_grpc=platform == "container", **limits))


@contextmanager
def opened(platform: str, repository: Path, **limits: Any) -> Iterator[Ports]:
    """A platform's server, with its model loaded."""
    with running(host_of(platform, repository, **limits)) as ports:
        if platform == "sagemaker-mme":
            place = {"model_name": "one", "url": str(repository.parent / "models" / "one" / "model")}
            assert ask(ports.http, "POST", "/models", place).status == 200
        yield ports


STATUSES = {"INVALID_ARGUMENT": 400, "UNAVAILABLE": 403, "NOT_FOUND": 404, "RESOURCE_EXHAUSTED": 413}
"""What stands for gRPC's codes in the rules that hold for all; a missing secret is UNAVAILABLE there, as in Triton."""


def by_grpc(port: int, body: bytes, headers: Mapping[str, str]) -> Got:
    """A message on the one port. HTTP's headers mean nothing there; a secret has its own name."""
    metadata = [(f"triton-grpc-protocol-{name}", text) for name, text in headers.items() if name == "api-key"]
    with grpcio.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            return Got(200, {}, channel.unary_unary(INFER)(body, timeout=PATIENCE_S, metadata=metadata))
        except grpcio.RpcError as error:
            return Got(STATUSES.get(error.code().name, 500), {}, json.dumps({"error": error.details()}).encode())


def sent(door: Door, port: int, body: bytes, headers: Mapping[str, str]) -> Got:
    """A request through a door of the server at a port."""
    return by_grpc(port, body, headers) if door.path == INFER else ask(port, "POST", door.path, body, headers)


def event(path: str, body: bytes, headers: Mapping[str, str]) -> dict[str, Any]:
    """What a function URL makes of a request."""
    import base64

    http = {"method": "POST", "path": path, "sourceIp": "192.0.2.1", "protocol": "HTTP/1.1"}
    return {
        "version": "2.0",
        "rawPath": path,
        "rawQueryString": "",
        "headers": {name.lower(): value for name, value in headers.items()},
        "requestContext": {"stage": "$default", "http": http},
        "body": base64.b64encode(body).decode(),
        "isBase64Encoded": True,
    }


def through(function: Function) -> Send:
    def send(body: bytes, headers: Mapping[str, str]) -> Got:
        answer = function(event(FUNCTION.path, body, headers), Context())
        return Got(answer["statusCode"], answer["headers"], answer["body"].encode())

    return send


def function_of(repository: Path, **limits: Any) -> Function:
    found = Settings.of({"REMORA_MODEL_REPOSITORY": str(repository)})
    found = found._replace(server=replace(ServerOptions(), **limits))
    return Function(Engine(options=found.engine).start(), found)


def open_doors(stack: ExitStack, repository: Path, **limits: Any) -> dict[str, Send]:
    """Every door, with those of one platform on one server."""
    ports = {
        platform: stack.enter_context(opened(platform, repository, **limits))
        for platform in sorted({door.platform for door in DOORS.values()})
    }
    function = function_of(repository, **limits)
    stack.callback(function.close)

    def over(door: Door) -> Send:
        return lambda body, headers: sent(door, ports[door.platform].http, body, headers)

    return {**{name: over(door) for name, door in DOORS.items()}, "lambda url": through(function)}


@pytest.fixture(scope="module")
def sends(repository: Path) -> Iterator[dict[str, Send]]:
    with ExitStack() as stack:
        yield open_doors(stack, repository)


def door_of(name: str) -> Door:
    return DOORS.get(name, FUNCTION)


# -- the same tensors -------------------------------------------------------------------------------------------------

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**100), max_value=2.0**100)


@settings(max_examples=15)
@given(st.lists(st.lists(FLOATS, min_size=4, max_size=4), min_size=1, max_size=8))
def test_every_door_gives_the_same_tensors(sends: dict[str, Send], rows: Rows) -> None:
    wanted = np.array(rows, np.float32) * np.float32(2)
    for name, send in sends.items():
        door = door_of(name)
        got = send(door.write(rows), JSON)
        assert got.status == 200, (name, got)
        assert np.array_equal(door.read(got.body), wanted), name


def test_grpc_and_direct_invocations_give_them_as_well(repository: Path) -> None:
    rows = np.array([[1, 2, 3, 4], [5, 6, 7, 8.5]], np.float32)
    with running(host_of("container", repository)) as ports:
        client = grpc.InferenceServerClient(f"127.0.0.1:{ports.grpc}")
        tensor = grpc.InferInput("x", rows.shape, "FP32")
        tensor.set_data_from_numpy(rows)
        assert np.array_equal(client.infer("scale", [tensor]).as_numpy("y"), rows * 2)
        client.close()
    function = function_of(repository)
    try:
        answer = function({"model_name": "scale", **json.loads(v2(rows.tolist()))}, Context())
        assert np.array_equal(outputs(json.dumps(answer).encode()), rows * 2)
    finally:
        function.close()


ODD = "a?b:c 50%41 é"
"""A folder may have such a name; in V2's paths, as Triton reads them, it has no place."""


@pytest.mark.parametrize(
    "door",
    [
        *(DOORS[name] for name in ("sagemaker", "sagemaker of many", "azureml", "vertex predict", "vertex raw")),
        DOORS["kserve v1"]._replace(path=f"/v1/models/{quote(ODD)}:predict"),
        DOORS["kserve v2"]._replace(path=f"/v2/models/{quote(ODD)}/infer"),
    ],
    ids=lambda door: f"{door.platform} {door.path}",
)
def test_a_model_is_found_whatever_its_folder_is_called(door: Door, tmp_path: Path) -> None:
    write_scale(tmp_path / "model" / ODD)
    write_scale(tmp_path / "models" / "one" / "model" / ODD)
    with opened(door.platform, tmp_path / "model") as ports:
        got = ask(ports.http, "POST", door.path, door.write([[1, 2, 3, 4]]), JSON)
        assert got.status == 200, got
        assert door.read(got.body).tolist() == [[2, 4, 6, 8]]


def test_a_request_that_found_its_version_replaced_is_answered_by_the_next_and_counts_once_for_traces(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = host_of("kserve", repository)
    traced = ("rate=2", "level=TIMESTAMPS", f"triton,file={tmp_path}/t")
    engine = Engine(options=replace(host.engine, trace_config=traced))
    rows, submit, late = [[1.0, 2.0, 3.0, 4.0]], ServedModel.submit, list[RetiredError]()

    def too_late(self: ServedModel, *arguments: Any, **more: Any) -> Ticket:
        if late:
            raise late.pop()
        return submit(self, *arguments, **more)

    monkeypatch.setattr(ServedModel, "submit", too_late)
    with running(host, engine) as ports, grpcio.insecure_channel(f"127.0.0.1:{ports.http}") as channel:
        stream = channel.stream_stream(INFER.replace("ModelInfer", "ModelStreamInfer"))
        ways: dict[str, Callable[[], object]] = {
            "infer": lambda: outputs(ask(ports.http, "POST", "/v2/models/scale/infer", v2(rows), JSON).body),
            "generate": lambda: ask(ports.http, "POST", "/v2/models/scale/generate", {"x": rows[0]}).json["y"],
            "predict": lambda: predictions(ask(ports.http, "POST", "/v1/models/scale:predict", instances(rows)).body),
            "gRPC": lambda: tensors(by_grpc(ports.http, message(rows), {}).body),
            "stream": lambda: [streamed(each) for each in stream(iter([message(rows)]), timeout=PATIENCE_S)],
            "program": lambda: engine.infer("scale", {"x": rows})["y"],
            "program's stream": lambda: [answer["y"] for answer in engine.infer_stream("scale", {"x": rows})],
        }
        for name, send in ways.items():
            engine.perform(TraceSetting("", {"trace_rate": ("2",)}))  # counts from the beginning
            late.append(RetiredError("replaced"))
            assert np.ravel(send()).tolist() == [2, 4, 6, 8], name
            assert not late, name
            model = engine.resolve("scale")
            assert engine.traces.wrap_model(model) is not model, f"{name}: the next one is the second"


EVENT = {"ce-specversion": "1.0", "ce-id": "1", "ce-source": "s", "ce-type": "t"}


@pytest.mark.parametrize(
    ("name", "headers"),
    [
        ("azureml", {}),
        ("kserve v1", {}),
        ("kserve v1", EVENT),
        ("kserve v2", {}),
        ("vertex predict", {}),
        ("vertex raw", {}),
    ],
)
def test_a_trace_begins_when_the_first_piece_of_its_request_came(
    name: str, headers: Mapping[str, str], repository: Path, tmp_path: Path
) -> None:
    door, file = DOORS[name], tmp_path / "trace"
    host = host_of(door.platform, repository)
    traced = ("rate=1", "level=TIMESTAMPS", f"triton,file={file}")
    with running(host, Engine(options=replace(host.engine, trace_config=traced))) as ports:
        body = door.write([[1.0, 2.0, 3.0, 4.0]])
        client = http.client.HTTPConnection("127.0.0.1", ports.http, timeout=PATIENCE_S)
        client.putrequest("POST", door.path)
        for header, value in {**JSON, **headers, "Content-Length": str(len(body))}.items():
            client.putheader(header, value)
        client.endheaders(body[:10])
        assert ask(ports.http, "GET", "/livez").status == 200  # so that the rest comes later
        client.send(body[10:])
        assert client.getresponse().status == 200
        client.close()
    stamps = {stamp["name"]: stamp["ns"] for row in json.loads(file.read_text()) for stamp in row.get("timestamps", ())}
    assert stamps["HTTP_RECV_START"] < stamps["HTTP_RECV_END"]


# -- the same rules ---------------------------------------------------------------------------------------------------


LIES = {"Inference-Header-Content-Length", "Content-Encoding"}
"""Headers that gRPC does not read."""


@pytest.mark.parametrize(
    "body",
    [
        b"\x00" * 64,
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"inputs": 3}',
        b'{"inputs": [{"name": "x"}]}',
        b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 4], "data": ["a"]}]}',
        b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4], "data": []}]}',
        b'{"instances": [[1, 2, 3]]}',
        b'{"instances": [' + b"[" * 5000 + b"]" * 5000 + b"]}",
    ],
)
def test_a_malformed_body_is_an_error_with_a_reason_and_nothing_more(sends: dict[str, Send], body: bytes) -> None:
    for name, send in sends.items():
        got = send(body, JSON)
        assert 400 <= got.status <= 500, (name, got)
        text = got.json
        assert text.get("error") or text.get("message"), (name, got)
        assert b"Traceback" not in got.body, name
        assert send(door_of(name).write([[1, 2, 3, 4]]), JSON).status == 200, name


@pytest.mark.parametrize(
    "headers",
    [
        {"Inference-Header-Content-Length": "-1"},
        {"Inference-Header-Content-Length": "999999999999"},
        {"Inference-Header-Content-Length": "x"},
        {"Content-Encoding": "gzip"},
        {"Content-Encoding": "unheard-of"},
    ],
)
def test_headers_that_lie_about_the_body_harm_no_door(sends: dict[str, Send], headers: dict[str, str]) -> None:
    for name, send in sends.items():
        if door_of(name).path == INFER and LIES & headers.keys():
            continue
        got = send(b'{"inputs": []}', {**JSON, **headers})
        assert 400 <= got.status <= 501, (name, got)  # 501 is Triton's for an unknown encoding
        assert send(door_of(name).write([[1, 2, 3, 4]]), JSON).status == 200, name


def test_the_limit_of_a_body_holds_at_every_door(repository: Path) -> None:
    with ExitStack() as stack:
        for name, send in open_doors(stack, repository, http_max_input_size=4096).items():
            rows = [[1.0, 2.0, 3.0, 4.0]]
            assert send(door_of(name).write(rows), JSON).status == 200, name
            got = send(door_of(name).write(rows * 1000), JSON)
            assert got.status in (400, 413), (name, got)


def test_what_inflates_beyond_the_limit_is_refused_at_every_door(repository: Path) -> None:
    bomb = gzip.compress(bytes(64 << 20))
    assert len(bomb) < 1 << 20
    with ExitStack() as stack:
        for name, send in open_doors(stack, repository, http_max_input_size=1 << 20).items():
            got = send(bomb, {**JSON, "Content-Encoding": "gzip"})
            assert 400 <= got.status <= 500, (name, got)
            assert send(door_of(name).write([[1.0, 2.0, 3.0, 4.0]]), JSON).status == 200, name


def test_a_restriction_holds_at_every_door_and_its_secret_opens_each(repository: Path) -> None:
    with ExitStack() as stack:
        for name, send in open_doors(stack, repository, http_restricted_api=("inference:api-key=secret",)).items():
            body = door_of(name).write([[1.0, 2.0, 3.0, 4.0]])
            for headers in ({}, {"api-key": "wrong"}):
                got = send(body, {**JSON, **headers})
                assert got.status == 403, (name, got)
                assert b"secret" not in got.body, name
            assert send(body, {**JSON, "api-key": "secret"}).status == 200, name


PLATFORMS = sorted({door.platform for door in DOORS.values()})

HEADS = {
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "two lengths": b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "length and chunks": b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
    "a length below zero": b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    "a length beyond memory": b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999\r\n\r\n",
    "a chunk beyond memory": b"POST %b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffff\r\n",
    "another transfer encoding": b"POST %b HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "a name with a line in it": b"POST %b HTTP/1.1\r\nHost: x\r\nA b: c\r\n\r\n",
    "a head without end": b"POST %b HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 100_000,
    "a later version": b"POST %b HTTP/3.0\r\nHost: x\r\n\r\n",
    "half a preface": b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n",
    "a preface and no frames": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 64,
}


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_malformed_head_is_refused_and_the_connection_ends(platform: str, repository: Path) -> None:
    door = next(door for door in DOORS.values() if door.platform == platform and door.path != INFER)
    with opened(platform, repository) as ports:
        for what, head in HEADS.items():
            sent = head.replace(b"%b", door.path.encode())
            with socket.create_connection(("127.0.0.1", ports.http), timeout=PATIENCE_S) as client:
                said = b""
                with suppress(ConnectionError):  # it need not read all that is sent
                    client.sendall(sent)
                    said = b"".join(iter(lambda client=client: client.recv(65_536), b""))
            preface = sent.startswith(b"PRI")
            assert preface or said[:10] in (b"HTTP/1.1 4", b"HTTP/1.1 5"), (what, said)
            assert b"Traceback" not in said
            assert ask(ports.http, "POST", door.path, door.write([[1, 2, 3, 4]]), JSON).status == 200, what


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_name_is_never_a_path(platform: str, repository: Path) -> None:
    with opened(platform, repository) as ports:
        for model in (
            "..",
            "%2e%2e",
            "../model/scale",
            "..%2fmodel%2fscale",
            "scale%00",
            "/etc/passwd",
            "scale/../scale",
        ):
            for path in (f"/v2/models/{model}/infer", f"/v1/models/{model}:predict", f"/models/{model}/invoke"):
                got = ask(ports.http, "POST", path, v2([[1, 2, 3, 4]]), JSON)
                assert 400 <= got.status < 600, (path, got)
                assert got.status != 200
                assert b"root:" not in got.body
            if any(door.path == INFER and door.platform == platform for door in DOORS.values()):
                named = service_pb2.ModelInferRequest.FromString(message([[1, 2, 3, 4]]))
                named.model_name = model
                assert by_grpc(ports.http, named.SerializeToString(), {}).status == 404, model
        assert ask(ports.http, "GET", "/../../../../etc/passwd").status != 200


@pytest.mark.parametrize("platform", PLATFORMS)
def test_no_platform_lets_clients_change_models_by_default(platform: str, repository: Path) -> None:
    with opened(platform, repository) as ports:
        for verb in ("unload", "load"):
            got = ask(ports.http, "POST", f"/v2/repository/models/scale/{verb}", b"{}", JSON)
            assert got.status >= 400, (verb, got)
        door = next(door for door in DOORS.values() if door.platform == platform and door.path != INFER)
        assert ask(ports.http, "POST", door.path, door.write([[1, 2, 3, 4]]), JSON).status == 200


class EarlyEngine(Engine):
    """Says when a request has come for which it has no model yet."""

    def __init__(self, host: Host) -> None:
        super().__init__(options=host.engine)
        self.missed: Future[None] = Future()

    def resolve(self, model: str, version: int = -1) -> ServedModel:
        with self._noticing():
            return super().resolve(model, version)

    def wait_for(self, model: str, version: int = -1, timeout_s: float | None = None) -> ServedModel:
        self._notice()
        return super().wait_for(model, version, timeout_s)

    def only_model(self) -> str:
        with self._noticing():
            return super().only_model()

    @contextmanager
    def _noticing(self) -> Iterator[None]:
        try:
            yield
        except LoadingError:
            self._notice()
            raise

    def _notice(self) -> None:
        if not self.missed.done():  # a client that learns that there is none may wait for it then
            self.missed.set_result(None)


CSV = Door(
    "sagemaker", "/invocations", lambda rows: b"1,2,3,4\n", lambda body: np.loadtxt([body.decode()], delimiter=",")
)


WAITING = pytest.mark.parametrize("name", [*(name for name in DOORS if name != "sagemaker of many"), "sagemaker csv"])
"""A multi-model endpoint has no model before a call loads one."""


@WAITING
def test_a_request_that_comes_before_the_models_waits_for_them(name: str, repository: Path) -> None:
    door = CSV if name == "sagemaker csv" else DOORS[name]
    kind = {"Content-Type": "text/csv"} if door is CSV else JSON
    host = host_of(door.platform, repository)
    engine, loading = EarlyEngine(host), Future[Engine]()
    with running(host, engine, loading) as ports, ThreadPoolExecutor(1) as clients:
        answer = clients.submit(sent, door, ports.http, door.write([[1, 2, 3, 4]]), kind)
        wait((engine.missed, answer), PATIENCE_S, FIRST_COMPLETED)
        assert not answer.done(), answer.result()
        loading.set_result(engine.start())
        got = answer.result(PATIENCE_S)
        assert got.status == 200, got
        assert door.read(got.body).ravel().tolist() == [2, 4, 6, 8]


@WAITING
def test_the_first_request_for_a_model_on_demand_waits_for_it(name: str, repository: Path) -> None:
    door = CSV if name == "sagemaker csv" else DOORS[name]
    host = host_of(door.platform, repository)
    on_demand = replace(host.engine, model_control_mode="ondemand", load_model=())
    with running(replace(host, engine=on_demand)) as ports:
        kind = {"Content-Type": "text/csv"} if door is CSV else JSON
        got = sent(door, ports.http, door.write([[1, 2, 3, 4]]), kind)
        assert got.status == 200, got
        assert door.read(got.body).ravel().tolist() == [2, 4, 6, 8]
