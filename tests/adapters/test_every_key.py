"""Each route of each platform, port and protocol: without a key, with a wrong one, and with a key of each role.

The same with JSON Web Tokens in place of keys.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from remora.engine import Engine
from remora.options.roles import ROLES
from remora.proto import inference_pb2 as pb
from remora.server.host import Host, find_adapter
from remora.server.http.pages import home_page
from remora.server.main import Ports
from remora_adapters.aws_lambda import Function, Settings
from support.process.eventually import eventually
from support.servers.hosting import PATIENCE_S, Got, ask, running, v2_request, write_scale
from support.servers.issuer import AUDIENCE, ISSUER, Key, KeyServer, key_set, token

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install '.[onnx]'")
grpcio = pytest.importorskip("grpc", reason="grpcio is not installed: pip install '.[grpcio]'")

SERVICE, HEALTH = "/inference.GRPCInferenceService/", "/grpc.health.v1.Health/"
REFLECTION = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
WORDS = tuple(f"{role}:{role}=sha256:{hashlib.sha256(f'key-{role}'.encode()).hexdigest()}" for role in ROLES)
ROWS = [[1.0, 2.0, 3.0, 4.0]]
V2 = v2_request(ROWS)
V1 = {"instances": ROWS}


class Way(NamedTuple):
    """A request and the permission that it needs; "" for a probe."""

    needs: str
    method: str
    path: str
    body: object = b""
    port: str = "http"


PROBES = [Way("", "GET", path) for path in ("/livez", "/readyz", "/startupz", "/v2/health/live", "/v2/health/ready")]
INFER = Way("infer", "POST", "/v2/models/scale/infer", V2)
READS = [
    INFER,
    Way("infer", "POST", "/v2/models/scale/versions/1/infer", V2),
    Way("infer", "POST", "/v2/models/scale/generate", {"x": ROWS[0]}),
    Way("infer", "POST", "/v2/models/scale/generate_stream", {"x": ROWS[0]}),
    Way("metadata", "GET", "/v2"),
    Way("metadata", "GET", "/v2/models/scale"),
    Way("metadata", "GET", "/v2/models/scale/ready"),
    Way("read", "GET", "/v2/models/scale/config"),
    Way("read", "GET", "/v2/models/scale/stats"),
    Way("read", "GET", "/v2/models/stats"),
    Way("read", "GET", "/v2/models/scale/explain"),
    Way("read", "GET", "/v2/models/scale/sequences"),
    Way("read", "GET", "/v2/startup"),
    Way("read", "GET", "/v2/metrics"),
    Way("read", "POST", "/v2/repository/index", {}),
    Way("read", "GET", "/v2/logging"),
    Way("read", "GET", "/v2/trace/setting"),
    Way("read", "GET", "/v2/trace/recent"),
    Way("read", "GET", "/v2/systemsharedmemory/status"),
    Way("read", "GET", "/v2/cudasharedmemory/status"),
]
CHANGES = [
    Way("control", "POST", "/v2/repository/models/none/load", {}),
    Way("deploy", "POST", "/v2/repository/models/none/load", {"parameters": {"config": "{}"}}),
    Way("deploy", "POST", "/v2/repository/models/none/load", {"parameters": {"file:1/model.py": ""}}),
    Way("deploy", "POST", "/v2/repository/models/none/load", {"parameters": {"config": " " * 300_000}}),
    Way("control", "POST", "/v2/repository/models/none/unload", {}),
    Way("control", "POST", "/v2/logging", {"log_verbose_level": 0}),
    Way("control", "POST", "/v2/trace/setting", {"trace_rate": "1000"}),
    Way("control", "POST", "/v2/systemsharedmemory/region/r/register", {}),
    Way("control", "POST", "/v2/cudasharedmemory/region/r/unregister", {}),
]
PAGES = [Way("", "GET", "/"), *(Way("read", "GET", f"/v2/{name}") for name in ("docs", "openapi.json", "status"))]
UNKNOWN = [Way("any", "GET", "/nothing"), Way("any", "POST", "/v1/none", {}), Way("any", "GET", "/v2/models/scale/x")]
OPENAI = [
    Way("infer", "POST", "/v1/chat/completions", {}),
    Way("infer", "POST", "/openai/v1/completions", {}),
    Way("infer", "POST", "/v1/embeddings", {}),
    Way("infer", "POST", "/tokenize", {}),
    Way("infer", "POST", "/v1/responses/input_tokens", {}),
    Way("control", "POST", "/v1/models/none/load", {}),
    Way("control", "POST", "/openai/v1/models/none/unload", {}),
    Way("metadata", "GET", "/v1/models"),
    Way("metadata", "GET", "/openai/v1/models"),
]
OTHER_PATHS = [
    *(Way("", "GET", path) for path in ("/health", "/health/live", "/health/ready")),
    Way("read", "GET", "/metrics"),
]
METRICS = [Way("read", "GET", "/metrics", port="metrics"), Way("any", "GET", "/", port="metrics")]

PLATFORMS = {
    "container": [*PROBES, *READS, *CHANGES, *PAGES, *UNKNOWN, *METRICS, *OPENAI, *OTHER_PATHS],
    "cloud_run": [*PROBES, *READS, *CHANGES, *PAGES, Way("read", "GET", "/metrics")],
    "knative": [*PROBES, *READS, Way("read", "GET", "/metrics")],
    "kserve": [
        *PROBES,
        *READS,
        *CHANGES,
        Way("read", "GET", "/metrics"),
        Way("", "GET", "/"),
        Way("metadata", "GET", "/v1/models"),
        Way("metadata", "GET", "/v1/models/scale"),
        Way("metadata", "GET", "/v2/models"),
        Way("infer", "POST", "/v1/models/scale:predict", V1),
        Way("infer", "POST", "/v1/models/sc%61le:predict", V1),
    ],
    "sagemaker": [
        *PROBES[:0],
        Way("", "GET", "/ping"),
        Way("", "GET", "/execution-parameters"),
        Way("infer", "POST", "/invocations", V2),
        Way("read", "GET", "/models"),
        Way("deploy", "POST", "/models", {"model_name": "none", "url": "/nowhere"}),
        Way("control", "DELETE", "/models/none"),
    ],
    "azureml": [
        *PROBES,
        *READS,
        Way("", "GET", "/"),
        Way("infer", "POST", "/score", V2),
        Way("read", "GET", "/swagger.json"),
        Way("read", "GET", "/metrics"),
    ],
    "vertex": [
        *PROBES,
        *READS,
        Way("", "GET", "/"),
        Way("", "GET", "/health"),
        Way("infer", "POST", "/predict", V1),
        Way("infer", "POST", "/predict", V2),
    ],
}
CALLS = {
    "": ("ServerLive", "ServerReady"),
    "infer": ("ModelInfer", "ModelStreamInfer"),
    "metadata": ("ServerMetadata", "ModelMetadata", "ModelReady", "NoSuchMethod"),
    "read": (
        "ModelConfig",
        "ModelStatistics",
        "RepositoryIndex",
        "SystemSharedMemoryStatus",
        "CudaSharedMemoryStatus",
    ),
    "control": (
        "RepositoryModelLoad",
        "RepositoryModelUnload",
        "TraceSetting",
        "LogSettings",
        "SystemSharedMemoryRegister",
        "SystemSharedMemoryUnregister",
        "CudaSharedMemoryRegister",
        "CudaSharedMemoryUnregister",
    ),
}


def loading(parameter: str) -> bytes:
    """A request to load a model with what the request brings."""
    request = pb.RepositoryModelLoadRequest(model_name="none")
    if parameter == "config":
        request.parameters[parameter].string_param = "{}"
    else:
        request.parameters[parameter].bytes_param = b"raise SystemExit"
    return request.SerializeToString()


RPCS = [
    *((needs, SERVICE + name, b"") for needs, names in CALLS.items() for name in names),
    *(("deploy", f"{SERVICE}RepositoryModelLoad", message) for message in map(loading, ("config", "file:1/model.py"))),
    ("", f"{HEALTH}Check", b""),
    ("metadata", REFLECTION, b""),
]
SIGNER = Key("one")


def wrong_tokens() -> list[str]:
    """A token for each reason to refuse it."""
    now, rsa = time.time(), Key("one", "RS256")
    return [
        token(SIGNER, now - 3600),
        token(SIGNER, now + 3600, nbf=now + 3000),
        token(SIGNER, now + 3600, aud="other"),
        token(SIGNER, now + 3600, aud=None),
        token(SIGNER, now + 3600, iss="https://other.example"),
        token(SIGNER, now + 3600, sub=None),
        token(Key("one"), now + 3600, roles=["all"]),
        token(Key("unknown"), now + 3600, roles=["all"]),
        token(rsa, now + 3600, roles=["all"]),
        "eyJhbGciOiJub25lIiwia2lkIjoib25lIn0." + token(SIGNER, now + 3600).split(".")[1] + ".",
    ]


class Credentials(NamedTuple):
    """What clients send: the credential of a role, the name of its holder, and wrong ones."""

    of: Callable[[str], str]
    name: str
    wrong: list[str]


CREDENTIALS = {
    "key": Credentials(lambda role: f"key-{role}", "{}", ["wrong"]),
    "token": Credentials(
        lambda role: token(SIGNER, time.time() + 3600, sub=f"key-{role}", roles=[role]), "jwt:key-{}", wrong_tokens()
    ),
}
HTTP_CODES = {"UNAUTHENTICATED": 401, "PERMISSION_DENIED": 403, "RESOURCE_EXHAUSTED": 429}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mounts") / "model"
    write_scale(folder / "scale")
    return folder


def host_of(platform: str, repository: Path, **more: Any) -> Host:
    """A platform's host with a key of each role, tokens, and models that clients may load."""
    jwks = repository.parent / "jwks.json"
    if not jwks.exists():
        jwks.write_bytes(key_set(SIGNER))
    tokens = {"jwt_jwks": str(jwks), "jwt_issuer": ISSUER, "jwt_audience": (AUDIENCE,)}
    host = find_adapter(platform).host(
        {
            "REMORA_MODEL_REPOSITORY": str(repository),
            "AZUREML_MODEL_DIR": str(repository),
            "SAGEMAKER_BASE_DIR": str(repository.parent),
        }
    )
    return replace(host, server=replace(host.server, **{"api_key": WORDS, **tokens, **more}))


def expected(needs: str, role: str | None) -> int | None:
    """The status of a refusal, or None if the request is not refused for its key."""
    if needs == "":
        return None
    if role is None:
        return 401
    return None if needs == "any" or needs in ROLES[role] else 403


def headers_of(key: str, number: int) -> dict[str, str]:
    """A key in one header or the other."""
    return {"X-API-Key": key} if number % 2 else {"Authorization": f"Bearer {key}"}


Send = Callable[[Way, dict[str, str]], Got]
"""Sends a request with headers."""


def to_ports(ports: Ports) -> Send:
    def send(way: Way, headers: dict[str, str]) -> Got:
        port = ports.metrics if way.port == "metrics" else ports.http
        return ask(port, way.method, way.path, way.body, headers)

    return send


def check_http(send: Send, ways: list[Way], kind: str = "key") -> None:
    credentials = CREDENTIALS[kind]
    for number, way in enumerate(ways):
        for role in (None, *ROLES):
            headers = {} if role is None else headers_of(credentials.of(role), number)
            got = send(way, headers)
            want = expected(way.needs, role)
            assert (got.status if got.status in (401, 403) else None) == want, (way, role, got)
            assert b"key-" not in got.body.replace(b"token of 'jwt:key-", b""), way
            assert (got.headers.get("www-authenticate") == 'Bearer realm="remora"') == (want == 401)
        headers = headers_of(credentials.wrong[number % len(credentials.wrong)], number)
        wrong = send(way, headers)
        assert wrong.status not in (401, 429) if way.needs == "" else wrong.status in (401, 429), (way, wrong)


def call(port: int, path: str, key: str | None, message: bytes = b"") -> str:
    """The name of the status of a call."""
    metadata = [] if key is None else [("authorization", f"Bearer {key}")]
    streams = path.endswith(("ModelStreamInfer", "ServerReflectionInfo"))
    with grpcio.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            if streams:
                list(channel.stream_stream(path)(iter([b""]), timeout=PATIENCE_S, metadata=metadata))
            else:
                channel.unary_unary(path)(message, timeout=PATIENCE_S, metadata=metadata)
        except grpcio.RpcError as error:
            return str(error.code().name)
        return "OK"


def check_grpc(port: int, kind: str = "key") -> None:
    credentials = CREDENTIALS[kind]
    for number, (needs, path, message) in enumerate(RPCS):
        for role in (None, *ROLES):
            name = call(port, path, None if role is None else credentials.of(role), message)
            want = expected(needs, role)
            assert HTTP_CODES.get(name) == want, (path, role, name)
        wrong = call(port, path, credentials.wrong[number % len(credentials.wrong)])
        assert (wrong not in HTTP_CODES) == (needs == ""), (path, wrong)


FRONTS = ["0", pytest.param("2", marks=pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux"))]


@pytest.mark.parametrize("kind", CREDENTIALS)
@pytest.mark.parametrize("fronts", FRONTS)
@pytest.mark.parametrize("platform", PLATFORMS)
def test_each_route_of_a_platform_wants_the_same_roles(platform: str, repository: Path, fronts: str, kind: str) -> None:
    with running(host_of(platform, repository, allow_grpc=False, openai=True, frontends=fronts)) as ports:
        check_http(to_ports(ports), PLATFORMS[platform], kind)


class Context:
    """Lambda's context of an invocation."""

    def get_remaining_time_in_millis(self) -> int:
        return int(PATIENCE_S * 1e3)


def event_of(way: Way, headers: dict[str, str]) -> dict[str, Any]:
    """What a function URL makes of a request."""
    body = way.body if isinstance(way.body, bytes) else json.dumps(way.body).encode()
    return {
        "version": "2.0",
        "rawPath": way.path,
        "rawQueryString": "",
        "headers": {name.lower(): value for name, value in headers.items()},
        "requestContext": {
            "stage": "$default",
            "http": {"method": way.method, "path": way.path, "sourceIp": "192.0.2.1", "protocol": "HTTP/1.1"},
        },
        "body": body.decode(),
        "isBase64Encoded": False,
    }


def to_function(function: Function) -> Send:
    def send(way: Way, headers: dict[str, str]) -> Got:
        answer = function(event_of(way, headers), Context())
        return Got(answer["statusCode"], answer["headers"], answer["body"].encode())

    return send


def to_stream(function: Function) -> Send:
    """Answers as messages of ASGI, which the entry point sends to a response stream."""

    def send(way: Way, headers: dict[str, str]) -> Got:
        sent: list[Any] = []

        async def take(message: Any) -> None:
            sent.append(message)

        function.stream(event_of(way, headers), Context(), take)
        fields = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return Got(sent[0]["status"], fields, b"".join(each.get("body", b"") for each in sent[1:]))

    return send


@pytest.mark.parametrize("kind", CREDENTIALS)
@pytest.mark.parametrize("send_by", [to_function, to_stream])
def test_each_route_of_a_function_wants_the_same_roles(
    send_by: Callable[[Function], Send], repository: Path, kind: str
) -> None:
    pytest.importorskip("mangum", reason="mangum is not installed: pip install '.[lambda]'")
    settings = Settings.of({"REMORA_MODEL_REPOSITORY": str(repository)})
    host = host_of("container", repository, openai=True)
    function = Function(Engine(options=settings.engine).start(), settings._replace(server=host.server))
    try:
        check_http(send_by(function), [*PROBES, *READS, *CHANGES, *PAGES, *UNKNOWN, *OPENAI], kind)
    finally:
        function.close()


def test_a_function_reads_its_keys_from_a_file(repository: Path, tmp_path: Path) -> None:
    pytest.importorskip("mangum", reason="mangum is not installed: pip install '.[lambda]'")
    keys = file_of(tmp_path)["api_keys_file"]
    settings = Settings.of({"REMORA_MODEL_REPOSITORY": str(repository), "REMORA_API_KEYS_FILE": keys})
    function = Function(Engine(options=settings.engine).start(), settings)
    try:
        send = to_function(function)
        assert send(INFER, {}).status == 401
        assert send(INFER, {"X-API-Key": "limited"}).status == 200
        assert function({"model_name": "scale", **V2}, Context())["outputs"]  # IAM decides about direct invocations
    finally:
        function.close()


@pytest.mark.parametrize("fronts", FRONTS)
@pytest.mark.parametrize("platform", ["container", "cloud_run", "knative", "vertex"])
def test_a_browser_gets_a_page_without_data_that_can_ask_for_the_key(
    platform: str, repository: Path, fronts: str
) -> None:
    with running(host_of(platform, repository, allow_grpc=False, frontends=fronts)) as ports:
        got = ask(ports.http, "GET", "/", headers={"Accept": "text/html"})
    whole = home_page()
    assert (got.status, got.body) == (200, bytes(whole.body[0]))
    policy = dict(whole.headers)[b"Content-Security-Policy"].decode()
    assert got.headers["content-security-policy"] == policy
    assert got.headers["cache-control"] == "no-store"


@pytest.mark.parametrize("kind", CREDENTIALS)
@pytest.mark.parametrize("transport", ["own", "grpcio"])
def test_each_rpc_wants_the_same_roles(transport: str, repository: Path, kind: str) -> None:
    with running(host_of("container", repository, grpc_transport=transport)) as ports:
        check_grpc(ports.grpc, kind)


@pytest.mark.parametrize("kind", CREDENTIALS)
@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="front processes need Linux")
def test_each_rpc_of_front_processes_wants_the_same_roles(repository: Path, kind: str) -> None:
    host = host_of("container", repository, frontends="2", grpc_on_http_port=True)
    with running(host) as ports:
        check_grpc(ports.grpc, kind)
        check_grpc(ports.http, kind)


def test_each_wrong_token_is_refused_by_every_protocol(repository: Path) -> None:
    with running(host_of("container", repository)) as ports:
        for wrong in CREDENTIALS["token"].wrong:
            for port in (ports.http, ports.metrics):
                got = ask(port, "GET", "/v2", headers={"Authorization": f"Bearer {wrong}"})
                assert got.status in (401, 429), got
                assert wrong.encode() not in got.body
            assert call(ports.grpc, f"{SERVICE}ServerMetadata", wrong) in ("UNAUTHENTICATED", "RESOURCE_EXHAUSTED")


@pytest.mark.parametrize("fronts", FRONTS)
def test_keys_that_the_issuer_rotates_are_fetched(repository: Path, fronts: str) -> None:
    """A token of a new key is refused with 503 or 401 until the keys are fetched, and then accepted."""
    new = Key("new")
    with KeyServer(b"not yet") as server:
        host = host_of("container", repository, frontends=fronts, jwt_jwks=server.url)
        with running(host) as ports:
            headers = {"Authorization": "Bearer " + token(new, time.time() + 3600)}
            assert ask(ports.http, *INFER[1:4], headers=headers).status == 503
            assert ask(ports.http, *INFER[1:4], headers={"X-API-Key": "key-infer"}).status == 200
            assert call(ports.grpc, f"{SERVICE}ServerMetadata", token(new, time.time() + 3600)) == "UNAVAILABLE"
            server.content = key_set(SIGNER, new)
            eventually(lambda: ask(ports.http, *INFER[1:4], headers=headers).status == 200)


def test_a_limit_holds_for_each_subject(repository: Path) -> None:
    host = host_of("container", repository, jwt_limit=("requests-per-second=0.001", "burst=2"))
    with running(host) as ports:
        for subject in ("ann", "bob"):
            headers = {"Authorization": "Bearer " + token(SIGNER, time.time() + 3600, sub=subject)}
            got = [ask(ports.http, *INFER[1:4], headers=headers) for _ in range(3)]
            assert [each.status for each in got] == [200, 200, 429]
            assert f"token of 'jwt:{subject}'" in got[2].json["error"]


@pytest.fixture(scope="module")
def container(repository: Path) -> Iterator[Ports]:
    with running(host_of("container", repository)) as ports:
        yield ports


def test_a_probe_shows_its_details_only_to_a_key(container: Ports) -> None:
    path = "/readyz?verbose"
    assert ask(container.http, "GET", path).body == b"ok\n"
    assert ask(container.http, "GET", path, headers={"X-API-Key": "key-read"}).status == 200


def wrong_key(ports: Ports) -> Got:
    return ask(ports.http, "GET", "/v2", headers={"X-API-Key": "wrong"})


def test_wrong_keys_are_counted_and_limited_while_right_ones_work(container: Ports) -> None:
    statuses = [ask(container.http, "GET", "/v2", headers={"X-API-Key": f"wrong{each}"}).status for each in range(20)]
    assert statuses.index(429) <= 10
    assert set(statuses) == {401, 429}
    # One more wrong key is allowed every six seconds, which a busy machine may spend here.
    late = eventually(lambda: got if (got := wrong_key(container)).status == 429 else None)
    assert 1 <= int(late.headers["retry-after"]) <= 7
    page = ask(container.metrics, "GET", "/metrics", headers={"X-API-Key": "key-read"})
    assert page.status == 200
    counts = {
        line.split('"')[1]: float(line.split()[-1])
        for line in page.body.decode().splitlines()
        if "denied_" in line and line[0] != "#"
    }
    assert counts["wrong key"] >= 10
    assert counts["too many wrong keys"] >= 9


def test_the_roles_of_two_keys_do_not_add_up(container: Ports) -> None:
    both = {"X-API-Key": "key-infer", "Authorization": "Bearer key-control"}
    assert ask(container.http, "POST", "/v2/repository/models/none/load", {}, both).status == 403
    assert json.loads(ask(container.http, *INFER[1:4], headers=both).body)["outputs"]


def file_of(folder: Path, **limits: Any) -> dict[str, str]:
    """The option of a file with one limited key, "limited"."""
    path = folder / "keys.json"
    row = {"name": "ann", "roles": ["all"], "sha256": hashlib.sha256(b"limited").hexdigest(), **limits}
    path.write_text(json.dumps({"keys": [row]}))
    return {"api_keys_file": str(path)}


@pytest.mark.parametrize("fronts", ["0", "2"])
def test_a_rate_holds_for_a_key_over_all_connections_and_protocols(
    repository: Path, tmp_path: Path, fronts: str
) -> None:
    limits = file_of(tmp_path, requests_per_second=0.001, burst=6)
    host = host_of("container", repository, grpc_on_http_port=True, frontends=fronts, **limits)
    with running(host) as ports:
        key = {"X-API-Key": "limited"}
        statuses = [ask(ports.http, *INFER[1:4], headers=key).status for _ in range(3)]
        names = [call(port, f"{SERVICE}ServerMetadata", "limited") for port in (ports.http, ports.grpc, ports.grpc)]
        assert (statuses, names) == ([200] * 3, ["OK"] * 3)
        late = ask(ports.http, *INFER[1:4], headers=key)
        assert (late.status, int(late.headers["retry-after"]) > 900) == (429, True)
        assert call(ports.grpc, f"{SERVICE}ServerMetadata", "limited") == "RESOURCE_EXHAUSTED"
        assert ask(ports.http, *INFER[1:4], headers={"X-API-Key": "key-infer"}).status == 200


@pytest.mark.parametrize("transport", ["own", "grpcio"])
def test_calls_in_flight_are_limited_for_a_key(repository: Path, tmp_path: Path, transport: str) -> None:
    host = host_of("container", repository, grpc_transport=transport, **file_of(tmp_path, concurrent=1))
    with running(host) as ports, grpcio.insecure_channel(f"127.0.0.1:{ports.grpc}") as channel:
        path, metadata = f"{SERVICE}ModelStreamInfer", [("x-api-key", "limited")]
        for _ in range(2):
            gate = threading.Event()

            def messages(gate: threading.Event = gate) -> Iterator[bytes]:
                yield b""
                gate.wait(PATIENCE_S)

            stream = channel.stream_stream(path)(messages(), timeout=PATIENCE_S, metadata=metadata)
            next(iter(stream))
            assert call(ports.grpc, f"{SERVICE}ServerMetadata", "limited") == "RESOURCE_EXHAUSTED"
            assert ask(ports.http, "GET", "/v2", headers={"X-API-Key": "limited"}).status == 429
            gate.set()
            list(stream)
            eventually(lambda: call(ports.grpc, f"{SERVICE}ServerMetadata", "limited") == "OK")


def test_traces_have_the_name_of_the_key_and_never_the_key(repository: Path, tmp_path: Path) -> None:
    file = tmp_path / "trace"
    host = host_of("container", repository)
    traced = ("rate=1", "level=TIMESTAMPS", f"triton,file={file}")
    with running(host, Engine(options=replace(host.engine, trace_config=traced))) as ports:
        assert ask(ports.http, *INFER[1:4], headers={"Authorization": "Bearer key-infer"}).status == 200
        assert ask(ports.http, *INFER[1:4], headers={"X-API-Key": "key-all"}).status == 200
    heads = [row for row in json.loads(file.read_text()) if "model_name" in row]
    assert [head["api_key"] for head in heads] == ["infer", "all"]
    assert "key-infer" not in file.read_text()
