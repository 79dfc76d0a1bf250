"""The FastAPI app: the same answers through every door, and pages that tell the truth and let nothing break out."""

from __future__ import annotations

import asyncio
import gzip
import json
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from remora.engine import Engine
from remora.options import EngineOptions, ServerOptions
from remora.server.main import Server

httpx = pytest.importorskip("httpx", reason="httpx is not installed: pip install '.[dev]'")
onnx = pytest.importorskip("onnx", reason="onnx is not installed: pip install '.[demo]'")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install '.[onnx]'")

from remora.server.http import pages  # noqa: E402
from remora.server.http.asgi import create_app  # noqa: E402 - only where the tests can run
from remora.server.http.pages import (  # noqa: E402
    curl_line,
    example_of,
    openapi,
    paths_of,
    prefers_html,
    status,
    status_page,
)

PATIENCE_S = 60.0
HOSTILE = "<script>alert(1)</script>"
HOSTILE_FOLDER = '<img src=x onerror="alert(1)">'
QUOTING_FOLDER = "it's$(id)"
FP32, FP16, INT64, STRING = 1, 10, 7, 8


def write_onnx(
    folder: Path, datatype: int, shape: list[Any], *, name: str = "x", versions: tuple[str, ...] = ("1",)
) -> None:
    """A model that gives its one input back, as ``y``."""
    helper = onnx.helper
    values = [helper.make_tensor_value_info(each, datatype, shape) for each in (name, "y")]
    node = helper.make_node("Identity", [name], ["y"])
    graph = helper.make_graph([node], "identity", values[:1], values[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    for version in versions:
        (folder / version).mkdir(parents=True)
        (folder / version / "model.onnx").write_bytes(model.SerializeToString())


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model for each thing an example request must get right, and two whose names mean harm."""
    folder = tmp_path_factory.mktemp("models")
    write_onnx(folder / "rows", FP32, ["n", 4], versions=("1", "2"))
    write_onnx(folder / "fixed", INT64, [2, 2])
    write_onnx(folder / "half", FP16, ["n", 3])
    write_onnx(folder / "words", STRING, ["n"])
    write_onnx(folder / "image", FP32, [3, 64, 64])
    write_onnx(folder / HOSTILE_FOLDER, FP32, [1])
    write_onnx(folder / QUOTING_FOLDER, FP32, [1], name=HOSTILE)
    (folder / "rows" / "config.pbtxt").write_text("max_batch_size: 8 version_policy { all {} } dynamic_batching {}")
    return folder


@pytest.fixture(scope="module")
def engine(repository: Path) -> Iterator[Engine]:
    with Engine(repository) as running:
        yield running


class Got(NamedTuple):
    """An answer as it was sent: the body not inflated, header names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()


class Ask(NamedTuple):
    """A request."""

    method: str
    path: str
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()


async def send(client: Any, ask: Ask) -> Got:
    headers = {"accept-encoding": "identity", **dict(ask.headers)}
    async with client.stream(ask.method, ask.path, content=ask.body, headers=headers) as response:
        body = b"".join([piece async for piece in response.aiter_raw()])
    return Got(response.status_code, dict(response.headers), body)


def asgi_client(app: Any) -> Any:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://served.test:80", timeout=PATIENCE_S)


def through_app(engine: Engine, *asks: Ask, options: ServerOptions = ServerOptions()) -> list[Got]:  # noqa: B008
    """What the app answers."""

    async def talk() -> list[Got]:
        async with asgi_client(create_app(engine, options)) as client:
            return [await send(client, ask) for ask in asks]

    return asyncio.run(asyncio.wait_for(talk(), PATIENCE_S))


def get(engine: Engine, path: str, **headers: str) -> Got:
    (got,) = through_app(engine, Ask("GET", path, headers=tuple(headers.items())))
    return got


def infer_body(rows: int = 1, **more: Any) -> bytes:
    data = [[float(column) for column in range(4)] for _ in range(rows)]
    return json.dumps(
        {"inputs": [{"name": "x", "datatype": "FP32", "shape": [rows, 4], "data": data}], **more}
    ).encode()


def binary_ask(path: str = "/v2/models/rows/infer", **headers: str) -> Ask:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "parameters": {"binary_data_size": 16}}
    header = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    told = {"Inference-Header-Content-Length": str(len(header)), "Content-Type": "application/octet-stream", **headers}
    return Ask("POST", path, header + bytes(range(16)), tuple(told.items()))


# -- every door gives the same answer -------------------------------------------------------------------------------

SAME = [
    *(Ask("GET", path) for path in ("/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/rows/ready")),
    *(Ask("GET", f"/v2/models/rows{rest}") for rest in ("", "/config", "/stats", "/versions/1", "/versions/9")),
    *(Ask("GET", path) for path in ("/", "/v2/", "/v3", "/v2/models/none", "/v2/models/rows/infer", "/metrics")),
    *(Ask("GET", path) for path in ("/v2/models/r%6Fws", "/v2/models/rows?verbose=1", "/v2/models/rows/versions/x")),
    *(Ask("GET", path) for path in ("/v2/systemsharedmemory/status", "/v2/docs/", "/v2/openapi.json", "/v2/docs")),
    *(Ask(method, "/v2/models/rows") for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS")),
    *(Ask("POST", path) for path in ("/v2/docs", "/v2/status")),
    *(Ask("HEAD", path) for path in ("/v2/docs", "/v2/openapi.json", "/v2/status")),
    Ask("POST", "/v2/metrics"),
    Ask("POST", "/v2/repository/index"),
    Ask("POST", "/v2/repository/index", b"{"),
    Ask("POST", "/v2/repository/models/rows/load"),
    Ask("POST", "/v2/repository/models/rows/unload"),
    Ask("POST", "/v2/models/rows/infer", infer_body()),
    Ask("POST", "/v2/models/rows/infer", infer_body(3, id="seven")),
    Ask("POST", "/v2/models/rows/versions/1/infer", infer_body(8)),
    Ask("POST", "/v2/models/rows/infer", infer_body(9)),
    Ask("POST", "/v2/models/rows/infer", infer_body(outputs=[{"name": "z"}])),
    Ask("POST", "/v2/models/rows/infer", infer_body()[:-1]),
    Ask("POST", "/v2/models/rows/infer"),
    Ask("POST", "/v2/models/none/infer", infer_body()),
    Ask("POST", "/v2/models/rows/infer", infer_body(), (("Accept-Encoding", "gzip"),)),
    Ask("POST", "/v2/models/rows/infer", gzip.compress(infer_body(), mtime=0), (("Content-Encoding", "gzip"),)),
    Ask("POST", "/v2/models/rows/infer", infer_body(), (("Content-Encoding", "br"),)),
    Ask("POST", "/v2/models/rows/infer", b"x" * 70_000),
    binary_ask(),
    binary_ask(**{"Inference-Header-Content-Length": "99999"}),
]


def test_our_own_connections_and_the_app_give_the_same_answers(repository: Path) -> None:
    options = ServerOptions(http_port=0, allow_grpc=False, metrics_port=0, http_max_input_size=65_536)

    async def talk() -> None:
        server = Server(Engine(options=EngineOptions(model_repository=(repository,))), options)
        await server.start()
        origin = f"http://127.0.0.1:{server.ports.http}"
        transport = httpx.ASGITransport(create_app(server.engine, options))
        async with (
            httpx.AsyncClient(base_url=origin, timeout=PATIENCE_S) as native,
            httpx.AsyncClient(transport=transport, base_url=origin, timeout=PATIENCE_S) as hosted,
        ):
            for ask in SAME:
                first, second = await send(native, ask), await send(hosted, ask)
                assert first == second, ask
        await server.stop()

    asyncio.run(asyncio.wait_for(talk(), PATIENCE_S))


@pytest.fixture(scope="module")
def uvicorn_origin(engine: Engine) -> Iterator[str]:
    """A real uvicorn server in a thread; what is sent before it accepts waits in the socket's backlog."""
    uvicorn = pytest.importorskip("uvicorn", reason="uvicorn is not installed")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        app = create_app(engine, ServerOptions(http_max_input_size=65_536))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="none"))
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_uvicorn_serves_the_app(uvicorn_origin: str) -> None:
    with httpx.Client(base_url=uvicorn_origin, timeout=PATIENCE_S) as client:
        assert client.get("/v2/health/ready").status_code == 200
        answer = client.post("/v2/models/rows/infer", content=infer_body())
        assert answer.json()["outputs"][0]["data"] == [0.0, 1.0, 2.0, 3.0]
        ask = binary_ask()
        answer = client.post(ask.path, content=ask.body, headers=dict(ask.headers))
        assert answer.content[int(answer.headers["inference-header-content-length"]) :] == bytes(range(16))
        assert client.get("/v2/models/r%6Fws").status_code == 404
        assert client.get("/v2/status").json()["server"]["ready"] is True


def test_uvicorn_passes_on_no_more_than_the_limit_of_a_body_without_a_length(uvicorn_origin: str) -> None:
    with httpx.Client(base_url=uvicorn_origin, timeout=PATIENCE_S) as client:
        answer = client.post("/v2/models/rows/infer", content=iter([b"x" * 40_000, b"x" * 40_000]))
    assert answer.status_code == 400
    assert "exceeds the maximum allowed input size of 65536 bytes" in answer.json()["error"]


def test_mangum_serves_the_app(engine: Engine) -> None:
    mangum = pytest.importorskip("mangum", reason="mangum is not installed: pip install '.[lambda]'")
    event = {
        "version": "2.0",
        "routeKey": "$default",
        "rawPath": "/v2/models/rows/infer",
        "rawQueryString": "",
        "headers": {"content-type": "application/json", "host": "lambda.test"},
        "requestContext": {
            "domainName": "lambda.test",
            "http": {
                "method": "POST",
                "path": "/v2/models/rows/infer",
                "protocol": "HTTP/1.1",
                "sourceIp": "127.0.0.1",
            },
            "stage": "$default",
        },
        "body": infer_body().decode(),
        "isBase64Encoded": False,
    }
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        answer = mangum.Mangum(create_app(engine), lifespan="off")(event, None)
    finally:
        asyncio.set_event_loop(None)
        loop.close()
    assert answer["statusCode"] == 200, answer
    assert json.loads(answer["body"])["outputs"][0]["data"] == [0.0, 1.0, 2.0, 3.0]


def test_routes_can_be_added_to_the_app_and_the_app_to_another(engine: Engine) -> None:
    from fastapi import FastAPI

    inner = create_app(engine)
    inner.add_api_route("/hello", lambda: "hello", methods=["GET"])
    outer = FastAPI()
    outer.mount("/ml", inner)

    async def talk() -> None:
        async with asgi_client(outer) as client:
            assert (await send(client, Ask("GET", "/ml/hello"))).body == b'"hello"'
            assert (await send(client, Ask("POST", "/ml/v2/models/rows/infer", infer_body()))).status == 200
            assert json.loads((await send(client, Ask("GET", "/ml/v2/openapi.json"))).body)["servers"] == [
                {"url": "/ml"}
            ]
            assert "http://served.test/ml/v2/models/rows/infer" in (await send(client, Ask("GET", "/ml/v2/docs"))).text

    asyncio.run(asyncio.wait_for(talk(), PATIENCE_S))


# -- openapi.json ---------------------------------------------------------------------------------------------------


def test_openapi_has_a_path_for_each_model_version_and_operation(engine: Engine) -> None:
    document = json.loads(get(engine, "/v2/openapi.json").body)
    assert document["openapi"].startswith("3.1.")
    assert {"title", "version"} <= document["info"].keys()
    for path in ("/v2/models/rows", "/v2/models/rows/versions/1", "/v2/models/half"):
        assert {path, f"{path}/ready", f"{path}/config", f"{path}/stats", f"{path}/infer"} <= document["paths"].keys()
    assert "/v2/models/rows/versions/2" not in document["paths"], "the newest version needs no number"
    assert not [path for path in document["paths"] if "<" in path or "{" in path]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert path.startswith("/v2")
            assert method in ("get", "post")
            assert operation["responses"]["200"]["description"]


@pytest.mark.parametrize("mode", ["explicit", "ondemand"])
def test_openapi_offers_loading_where_it_is_allowed(repository: Path, mode: str) -> None:
    options = EngineOptions(model_repository=(repository,), model_control_mode=mode)
    with Engine(options=options) as running:
        document = openapi(running, metrics=False)
    (parameter,) = document["paths"]["/v2/repository/models/{model}/load"]["post"]["parameters"]
    assert parameter == {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    assert "/v2/metrics" not in document["paths"]


def test_openapi_describes_the_tensors(engine: Engine) -> None:
    operation = openapi(engine)["paths"]["/v2/models/rows/infer"]["post"]
    content = operation["requestBody"]["content"]["application/json"]
    (tensor,) = content["schema"]["properties"]["inputs"]["items"]["oneOf"]
    assert tensor["properties"]["name"] == {"const": "x"}
    assert tensor["properties"]["datatype"] == {"const": "FP32"}
    assert tensor["properties"]["shape"]["prefixItems"] == [{"type": "integer", "minimum": 0}, {"const": 4}]
    assert content["example"]["inputs"][0]["shape"] == [1, 4]
    answer = operation["responses"]["200"]["content"]["application/json"]["schema"]
    assert answer["properties"]["model_version"] == {"const": "2"}
    assert answer["properties"]["outputs"]["items"]["oneOf"][0]["properties"]["name"] == {"const": "y"}


def references(value: Any) -> Iterator[str]:
    """Every $ref in a document."""
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"]
        for each in value.values():
            yield from references(each)
    elif isinstance(value, list):
        for each in value:
            yield from references(each)


def test_every_reference_of_openapi_leads_somewhere(engine: Engine) -> None:
    document = openapi(engine)
    found = set(references(document))
    assert found
    for reference in found:
        place: Any = document
        for step in reference.removeprefix("#/").split("/"):
            place = place[step]


def test_the_examples_of_openapi_are_answered(engine: Engine) -> None:
    paths = openapi(engine)["paths"]
    contents = {
        path: paths[path]["post"]["requestBody"]["content"]["application/json"] for path in paths if "/infer" in path
    }
    examples = {path: content["example"] for path, content in contents.items() if "example" in content}
    assert {"/v2/models/rows/infer", "/v2/models/fixed/infer", "/v2/models/words/infer"} <= examples.keys()
    asks = [Ask("POST", path, json.dumps(example).encode()) for path, example in examples.items()]
    assert [got.status for got in through_app(engine, *asks)] == [200] * len(asks)


def test_every_model_that_http_reaches_answers_its_example_binary_or_not(engine: Engine) -> None:
    asks = []
    for model, path in paths_of(engine):
        example = example_of(model)
        header = json.dumps(example.header).encode()
        told = (("Inference-Header-Content-Length", str(len(header))),) if example.zero_bytes else ()
        asks.append(Ask("POST", f"{path}/infer", header + bytes(example.zero_bytes), told))
    assert sum(bool(ask.headers) for ask in asks) == 2, "half and image are binary"
    for ask, got in zip(asks, through_app(engine, *asks), strict=True):
        assert got.status == 200, (ask.path, got.body)


# -- the pages ------------------------------------------------------------------------------------------------------


class Tags(HTMLParser):
    """What a browser would make of a page: its tags, their attributes and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_docs_page_names_models_tensors_and_commands(engine: Engine) -> None:
    got = get(engine, "/v2/docs")
    assert got.headers["content-type"] == "text/html; charset=utf-8"
    page = Tags(got.text)
    for told in ("rows", "version 2", "FP32", "[-1, 4]", "curl http://served.test/v2/models/rows/infer"):
        assert told in page.text, told
    assert ("href", "openapi.json") in page.attributes


@pytest.mark.parametrize("path", ["/v2/docs", "/v2/status"])
def test_a_page_asks_nothing_of_other_places_and_runs_nothing(engine: Engine, path: str) -> None:
    got = get(engine, path, accept="text/html")
    page = Tags(got.text)
    assert not {"script", "img", "link", "iframe", "form"} & set(page.tags)
    assert not [value for name, value in page.attributes if name == "src" or name.startswith("on")]
    assert {value for name, value in page.attributes if name == "href"} == {"docs", "status", "openapi.json"}
    assert "default-src 'none'" in got.headers["content-security-policy"]
    assert got.headers["x-content-type-options"] == "nosniff"


def test_what_models_say_of_themselves_is_text_on_every_page(engine: Engine) -> None:
    docs, state = (Tags(get(engine, path, accept="text/html").text) for path in ("/v2/docs", "/v2/status"))
    assert HOSTILE in docs.text
    assert HOSTILE_FOLDER in state.text


def test_the_reason_of_a_failure_is_text_too() -> None:
    model = {"name": "m", "version": "1", "state": "UNAVAILABLE", "reason": HOSTILE}
    page = status_page({"server": {"name": HOSTILE, "version": HOSTILE, "ready": False}, "models": [model]})
    assert "script" not in Tags(page).tags
    assert Tags(page).text.count(HOSTILE) == 3


@pytest.mark.parametrize("host", ["a.test/<b>", '"><b>', "$(id)", ""])
def test_a_host_header_that_is_no_host_is_not_shown(engine: Engine, host: str) -> None:
    got = get(engine, "/v2/docs", host=host)
    page = Tags(got.text)
    assert "b" not in page.tags
    assert f"http://{host}/" not in page.text
    assert "http://localhost:8000/v2/models/rows/infer" in page.text


def test_a_command_is_one_for_the_shell_whatever_the_names_in_it(engine: Engine) -> None:
    model, path = next((model, path) for model, path in paths_of(engine) if model.name == QUOTING_FOLDER)
    line = curl_line(example_of(model), f"http://served.test{path}/infer")
    words = shlex.split(line)
    assert words[:2] == ["curl", f"http://served.test/v2/models/{QUOTING_FOLDER}/infer"]
    assert json.loads(words[words.index("-d") + 1]) == example_of(model).header


def test_a_binary_command_sends_what_it_says(engine: Engine) -> None:
    example = example_of(engine.resolve("half"))
    line = curl_line(example, "http://served.test/x")
    shell = f'curl() {{ printf "%s\\n" "$@" >&2; cat; }}; {line}'
    done = subprocess.run(["sh", "-c", shell], capture_output=True, check=True)
    assert done.stdout == json.dumps(example.header, separators=(",", ":")).encode() + bytes(6)
    assert f"Inference-Header-Content-Length: {len(done.stdout) - 6}" in done.stderr.decode().splitlines()


def test_the_status_tells_what_models_did(repository: Path) -> None:
    with Engine(repository) as running:
        before = {(row["name"], row["version"]): row for row in status(running)["models"]}
        asks = [Ask("POST", "/v2/models/rows/infer", infer_body(rows)) for rows in (1, 2, 9)]
        assert [got.status for got in through_app(running, *asks)] == [200, 200, 400]
        found = json.loads(get(running, "/v2/status").body)
    assert found["server"]["ready"] is True
    after = {(row["name"], row["version"]): row for row in found["models"]}
    assert before["rows", "2"]["inferences"] == 0
    row = after["rows", "2"]
    assert row["state"] == "READY"
    assert row["load_ms"] > 0
    assert (row["requests"]["success"], row["inferences"], row["executions"]) == (2, 3, 2)
    assert row["batches"] == {"1": 1, "2": 1}
    assert row["batch_cost_us"].keys() == {"1", "2"}
    assert sum(row["dispatches"].values()) == 2
    assert row["queue"] == {"waiting": 0, "running": 0}


def test_the_status_names_models_that_are_not_loaded(repository: Path) -> None:
    with Engine(options=EngineOptions(model_repository=(repository,), model_control_mode="explicit")) as running:
        names = [row["name"] for row in status(running)["models"]]
        assert "rows" in names
        assert "rows" in Tags(get(running, "/v2/status", accept="text/html").text).text
        assert "No model is ready" in get(running, "/v2/docs").text


@pytest.mark.parametrize(
    ("accept", "wants"),
    [
        ("", False),
        ("*/*", False),
        ("application/json", False),
        ("text/html", True),
        ("text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", True),
        ("application/json, text/html;q=0.5", False),
        ("application/json;q=0.5, TEXT/HTML", True),
        ("text/html;q=0", False),
        ("text/html;q=nonsense", False),
    ],
)
def test_the_status_comes_as_html_only_for_those_who_ask(accept: str, wants: bool) -> None:
    assert prefers_html(accept) is wants


def test_metrics_are_on_the_port_of_the_requests(engine: Engine) -> None:
    got = get(engine, "/v2/metrics")
    assert got.headers["content-type"].startswith("text/plain")
    assert 'nv_inference_count{model="rows"' in got.text


# -- on our own connections -----------------------------------------------------------------------------------------


def test_pages_are_served_on_our_own_connections_without_fastapi(
    repository: Path, child_environment: dict[str, str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(repository), infer_body().decode()],
        env=child_environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "200 /v2/models/rows/infer fastapi: False",
        "200 /v2/metrics fastapi: False",
        "404 /v2/other fastapi: False",
        "200 /v2/docs fastapi: False",
        "200 /v2/openapi.json fastapi: False",
        "200 /v2/status fastapi: False",
    ]


PROGRAM = """
import asyncio, sys
from pathlib import Path
from remora.engine import Engine
from remora.options import ServerOptions
from remora.server.main import Server

async def main():
    server = Server(Engine(Path(sys.argv[1])), ServerOptions(http_port=0, metrics_port=0, allow_grpc=False))
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.ports.http)
    body = sys.argv[2]
    head = f"POST /v2/models/rows/infer HTTP/1.1\\r\\nHost: localhost\\r\\nContent-Length: {len(body)}"
    post = f"{head}\\r\\n\\r\\n{body}"
    paths = ("/v2/metrics", "/v2/other", "/v2/docs", "/v2/openapi.json", "/v2/status")
    for request in (post, *(f"GET {path} HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n" for path in paths)):
        writer.write(request.encode())
        head = await reader.readuntil(b"\\r\\n\\r\\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\\r\\n")[0])
        await reader.readexactly(length)
        print(head.split(b" ")[1].decode(), request.split(" ")[1], "fastapi:", "fastapi" in sys.modules)
    writer.close()
    await server.stop()

asyncio.run(main())
"""


def test_restrictions_hold_in_any_asgi_host_for_v2_and_pages(engine: Engine) -> None:
    locked = ServerOptions(http_restricted_api=("inference,metadata:api-key=secret",))
    asks = [Ask("POST", "/v2/models/rows/infer", infer_body()), Ask("GET", "/v2/docs"), Ask("GET", "/v2/status")]
    for got in through_app(engine, *asks, options=locked):
        assert got.status == 403
        assert "secret" not in got.text
    with_secret = [ask._replace(headers=(("api-key", "secret"),)) for ask in asks]
    assert [got.status for got in through_app(engine, *with_secret, options=locked)] == [200, 200, 200]
    assert through_app(engine, Ask("GET", "/v2/health/live"), options=locked)[0].status == 200
    nowhere = through_app(engine, Ask("GET", "/nowhere"), Ask("GET", "/v2/models"), options=locked)
    assert [got.status for got in nowhere] == [404, 404], "where there is nothing there is nothing to lock"


@pytest.mark.parametrize("secret", ["", "@/run/secrets/key"])
def test_a_program_gives_the_secret_itself(engine: Engine, secret: str) -> None:
    with pytest.raises(ValueError, match="--http-restricted-api"):
        create_app(engine, ServerOptions(http_restricted_api=(f"metadata:api-key={secret}",)))


def test_a_page_takes_no_other_methods_than_get_and_head(engine: Engine) -> None:
    (got,) = through_app(engine, Ask("POST", "/v2/docs"))
    assert (got.status, got.headers["allow"]) == (405, "GET, HEAD")


def test_inference_is_answered_while_a_page_is_rendered(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rendering, may_render = threading.Event(), threading.Event()

    def slow(_engine: Engine) -> dict[str, Any]:
        rendering.set()
        assert may_render.wait(PATIENCE_S)
        return {}

    monkeypatch.setattr(pages, "status", slow)

    async def talk() -> None:
        options = ServerOptions(http_port=0, allow_grpc=False, allow_metrics=False)
        server = Server(Engine(repository), options)
        await server.start()
        origin = f"http://127.0.0.1:{server.ports.http}"
        async with httpx.AsyncClient(base_url=origin, timeout=PATIENCE_S) as client:
            page = asyncio.create_task(client.get("/v2/status"))
            await asyncio.to_thread(rendering.wait, PATIENCE_S)
            assert (await client.post("/v2/models/rows/infer", content=infer_body())).status_code == 200
            assert not page.done()
            may_render.set()
            assert (await page).json() == {}
        await server.stop()

    asyncio.run(asyncio.wait_for(talk(), PATIENCE_S))


def test_a_page_that_fails_is_an_internal_error(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_engine: Engine) -> dict[str, Any]:
        raise KeyError("secret")

    monkeypatch.setattr(pages, "status", fail)
    got = get(engine, "/v2/status")
    assert (got.status, json.loads(got.body)) == (500, {"error": "internal error: see the server's log"})
    assert [record.levelname for record in caplog.records] == ["ERROR"]
