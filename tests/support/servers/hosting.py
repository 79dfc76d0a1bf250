"""Small models, a platform's server in this process and HTTP requests for host tests."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from remora.engine import Engine
from remora.errors import RetiredError
from remora.messages import Ticket
from remora.models.served_model import ServedModel
from remora.options import EngineOptions, ServerOptions
from remora.server.host import Host, find_adapter
from remora.server.main import Ports, Server

PATIENCE_S = 60.0

SCALE = 2.0
"""What the model `scale` multiplies by."""


_PARTS = """
import os
import time

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for number in range(3):
                read = os.path.join(os.path.dirname(__file__), "read")
                while number == 2 and not os.path.exists(read):
                    time.sleep(0.005)
                answer = pb_utils.Tensor("y", np.array([number], np.float32))
                sender.send(pb_utils.InferenceResponse([answer]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
_PARTS_CONFIG = """
backend: "python"
model_transaction_policy { decoupled: True }
input { name: "x" data_type: TYPE_FP32 dims: 1 }
output { name: "y" data_type: TYPE_FP32 dims: 1 }
"""


def write_scale(model: Path, *, config: str = "max_batch_size: 8 dynamic_batching { }", versions: int = 1) -> Path:
    """Write a model whose FP32 output ``y`` doubles ``x``, in rows of four; return its folder."""
    onnx = pytest.importorskip("onnx", reason="onnx is not installed: pip install '.[demo]'")
    helper, proto = onnx.helper, onnx.TensorProto
    nodes = [
        helper.make_node("Constant", [], ["factor"], value=helper.make_tensor("f", proto.FLOAT, [], [SCALE])),
        helper.make_node("Mul", ["x", "factor"], ["y"]),
    ]
    values = [helper.make_tensor_value_info(name, proto.FLOAT, ["n", 4]) for name in ("x", "y")]
    return _write(onnx, model, nodes, values, config, versions)


def write_words(model: Path) -> Path:
    """Write a model that returns its BYTES input ``x``, of one element, as ``y``."""
    onnx = pytest.importorskip("onnx", reason="onnx is not installed: pip install '.[demo]'")
    helper = onnx.helper
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.STRING, [1]) for name in ("x", "y")]
    return _write(onnx, model, [helper.make_node("Identity", ["x"], ["y"])], values, "", 1)


def write_parts(folder: Path) -> Path:
    """Write a decoupled model with three responses, and return the file that must exist before the last one."""
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(_PARTS)
    (folder / "config.pbtxt").write_text(_PARTS_CONFIG)
    return folder / "1" / "read"


def _write(onnx: object, model: Path, nodes: list[object], values: list[object], config: str, versions: int) -> Path:
    helper = onnx.helper  # type: ignore[attr-defined]
    graph = helper.make_graph(nodes, "graph", values[:1], values[1:])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    for version in range(1, versions + 1):
        folder = model / str(version)
        folder.mkdir(parents=True)
        (folder / "model.onnx").write_bytes(made.SerializeToString())
    if config:
        (model / "config.pbtxt").write_text(config)
    return model


class Got(NamedTuple):
    """HTTP answer with header names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def ask(port: int, method: str, path: str, body: bytes | object = b"", headers: Mapping[str, str] | None = None) -> Got:
    """Send one request to a loopback port, with a body other than bytes as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    kind = {} if isinstance(body, bytes) else {"Content-Type": "application/json"}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.request(method, path, data, {**kind, **(headers or {})})
        answer = connection.getresponse()
        return Got(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
    finally:
        connection.close()


def running_container(repository: Path, **options: Any) -> AbstractContextManager[Ports]:
    """Run the server of `remora serve`, with options of `ServerOptions`; see `running`."""
    return running(Host(EngineOptions(paths=(str(repository),)), ServerOptions(**options)))


@contextmanager
def running(host: Host, engine: Engine | None = None, loading: Future[Engine] | None = None) -> Iterator[Ports]:
    """Run a platform's server in a thread of this process on free loopback ports.

    It is ready on entry. With ``loading``, which signals that the engine has started, it only listens for HTTP on
    entry.
    """
    options = replace(host.server, http_address="127.0.0.1", http_port=0, grpc_port=0, metrics_port=0)
    extra_ports = tuple(replace(door, address="127.0.0.1", port=0) for door in host.extra_ports)
    server = Server(engine or Engine(options=host.engine), options, host.front, extra_ports)
    ready: Future[asyncio.AbstractEventLoop] = Future()
    stop = asyncio.Event()

    async def serve() -> None:
        try:
            starting = asyncio.ensure_future(server.start(loading))
            while loading is not None and not server.ports.http and not starting.done():
                await asyncio.sleep(0)
            if loading is None or starting.done():
                await starting
            ready.set_result(asyncio.get_running_loop())
        except BaseException as error:
            ready.set_exception(error)
        else:
            await stop.wait()
        await server.stop()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        loop = ready.result(PATIENCE_S)
        try:
            yield server.ports
        finally:
            loop.call_soon_threadsafe(stop.set)
    finally:
        thread.join(PATIENCE_S)


@contextmanager
def hosted(platform: str, environ: Mapping[str, str]) -> Iterator[int]:
    """Run a platform's server with that environment, as `running`, and yield its HTTP port."""
    with running(find_adapter(platform).host(environ)) as ports:
        yield ports.http


def retire_once(monkeypatch: pytest.MonkeyPatch) -> list[RetiredError]:
    """Replace the version of the next request before it is submitted; the list is empty from then on."""
    submit, retired = ServedModel.submit, [RetiredError("replaced")]

    def submit_late_once(self: ServedModel, *arguments: Any, **more: Any) -> Ticket:
        if retired:
            raise retired.pop()
        return submit(self, *arguments, **more)

    monkeypatch.setattr(ServedModel, "submit", submit_late_once)
    return retired


def v2_request(rows: list[list[float]], **more: Any) -> dict[str, Any]:
    """Return a V2 request to the model `scale`."""
    return {"inputs": [{"name": "x", "datatype": "FP32", "shape": [len(rows), 4], "data": rows}], **more}
