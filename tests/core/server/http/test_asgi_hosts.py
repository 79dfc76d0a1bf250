"""The ASGI app in uvicorn, Mangum and other apps, compared with our own connections."""

from __future__ import annotations

import asyncio
import gzip
import json
import queue
import re
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from remora.engine import Engine
from remora.options import EngineOptions, ServerOptions
from remora.server.http import held_bytes
from remora.server.http.asgi import create_app
from remora.server.http.large_bodies import LargeBodies
from remora.server.main import Server
from support.process.eventually import eventually
from support.wire.page_requests import PATIENCE_S, Ask, asgi_client, httpx, infer_body, send

pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: pip install '.[onnx]'")


def binary_ask(path: str = "/v2/models/rows/infer", **headers: str) -> Ask:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 4], "parameters": {"binary_data_size": 16}}
    header = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    told = {"Inference-Header-Content-Length": str(len(header)), "Content-Type": "application/octet-stream", **headers}
    return Ask("POST", path, header + bytes(range(16)), tuple(told.items()))


SAME = [
    *(Ask("GET", path) for path in ("/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/rows/ready")),
    *(Ask("GET", f"/v2/models/rows{rest}") for rest in ("", "/config", "/stats", "/versions/1", "/versions/9")),
    *(Ask("GET", path) for path in ("/", "/v2/", "/v3", "/v2/models/none", "/v2/models/rows/infer", "/nothing")),
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


@contextmanager
def uvicorn_of(engine: Engine, options: ServerOptions) -> Iterator[str]:
    """A real uvicorn server in a thread; what is sent before it accepts waits in the socket's backlog."""
    uvicorn = pytest.importorskip("uvicorn", reason="uvicorn is not installed")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        app = create_app(engine, options)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", ws="none"))
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        server.should_exit = True
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def uvicorn_origin(engine: Engine) -> Iterator[str]:
    with uvicorn_of(engine, ServerOptions(http_max_input_size=65_536)) as origin:
        yield origin


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


LONG = 16 << 20


def words_body(size: int) -> bytes:
    """A request of about ``size`` bytes of JSON, whose answer is as long."""
    words = ["x" * (size // 4)] * 4
    tensor = {"name": "x", "datatype": "BYTES", "shape": [4, 1], "data": words}
    return json.dumps({"inputs": [tensor]}).encode()


def test_uvicorn_serves_others_while_a_long_body_is_read_and_its_answer_printed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    work: queue.Queue[threading.Event] = queue.Queue()  # of the threads for long bodies
    run = LargeBodies._run_paused

    def run_later(self: LargeBodies, call: Callable[[], object]) -> object:
        go_on = threading.Event()
        work.put(go_on)
        assert go_on.wait(PATIENCE_S)
        return run(self, call)

    monkeypatch.setattr(LargeBodies, "_run_paused", run_later)
    with (
        uvicorn_of(engine, ServerOptions()) as origin,
        httpx.Client(base_url=origin, timeout=PATIENCE_S) as other,
        ThreadPoolExecutor(1) as threads,
    ):
        body = words_body(LONG)
        large = threads.submit(httpx.post, f"{origin}/v2/models/words/infer", content=body, timeout=PATIENCE_S)
        for _ in ("the body", "the answer"):
            go_on = work.get(timeout=PATIENCE_S)
            assert other.post("/v2/models/rows/infer", content=infer_body()).status_code == 200
            assert not large.done()
            go_on.set()
        answer = large.result(PATIENCE_S)
        assert answer.status_code == 200
        assert answer.json()["outputs"][0]["data"] == json.loads(body)["inputs"][0]["data"]


def test_uvicorn_refuses_a_body_beyond_the_held_bytes_until_an_upload_is_aborted(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_bytes, "ROOM_WAIT_S", 0.0)
    options, body = ServerOptions(max_held_bytes=LONG + LONG // 2, max_connection_bytes=-1), words_body(LONG)
    with uvicorn_of(engine, options) as origin, httpx.Client(base_url=origin, timeout=PATIENCE_S) as client:

        def held() -> int:
            found = re.findall(r'remora_held_bytes{kind="requests"} (\d+)', client.get("/v2/metrics").text)
            return sum(map(int, found))

        url = httpx.URL(origin)
        with socket.create_connection((url.host, url.port)) as upload:
            upload.sendall(b"POST /v2/models/words/infer HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % LONG)
            upload.sendall(b"x" * 100_000)
            eventually(lambda: held() == LONG)
            refused = client.post("/v2/models/words/infer", content=body)
            assert (refused.status_code, refused.json()) == (503, {"error": held_bytes.TEXT})
            assert refused.headers["retry-after"] == "1"
        eventually(lambda: held() == 0)
        answer = client.post("/v2/models/words/infer", content=body)
        assert answer.status_code == 200, answer.text[:500]
        eventually(lambda: held() == 0)


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
