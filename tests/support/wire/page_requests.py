"""ASGI app with models that have hostile names, and requests to it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from remora.engine import Engine
from remora.options import ServerOptions
from remora.server.http.asgi import create_app

httpx = pytest.importorskip("httpx", reason="httpx is not installed: pip install '.[dev]'")
onnx = pytest.importorskip("onnx", reason="onnx is not installed: pip install '.[demo]'")
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
