"""Decorated functions behind `remora serve`: worker processes, all protocols, and replacement on change."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import free_ports
from support.process.eventually import eventually
from support.servers.live_server import client, process, replace, until

APP = """
import numpy as np
import remora

@remora.model(batch=8, max_delay="1ms")
def scale(x: remora.Array[np.float32, -1, 2]) -> remora.Array[np.float32, -1, 2]:
    return {factor} * x

@remora.model(isolation="thread")
def count(n: int):
    for index in range(n):
        yield {{"index": index}}

@remora.model(isolation="thread")
async def shout(text: str, mark: str = "!") -> str:
    return text.upper() + mark
"""


def _ask(port: int, path: str, body: dict[str, Any]) -> tuple[int, str]:
    with client(port) as connection:
        connection.request("POST", path, json.dumps(body))
        reply = connection.getresponse()
        return reply.status, reply.read().decode()


def test_functions_answer_over_http_and_grpc_in_processes_of_their_own(tmp_path: Path) -> None:
    grpcclient = pytest.importorskip("tritonclient.grpc", reason="tritonclient is not installed")
    (tmp_path / "app.py").write_text(APP.format(factor=2))
    http, grpc = free_ports(2)
    flags = ("--allow-grpc=true", f"--grpc-port={grpc}")
    with process(tmp_path / "app.py", http, dict(os.environ), *flags) as server:
        until(http, "/v2/health/ready", server)
        assert _ask(http, "/v2/models/shout/generate", {"text": "hi"})[1].endswith('"output":"HI!"}')
        status, events = _ask(http, "/v2/models/count/generate_stream", {"n": 2})
        assert (status, events.count("data: ")) == (200, 2)
        assert _ask(http, "/v2/models/shout/generate", {"txt": "hi"})[0] == 400
        with grpcclient.InferenceServerClient(f"127.0.0.1:{grpc}") as connection:
            tensor = grpcclient.InferInput("x", [3, 2], "FP32")
            tensor.set_data_from_numpy(np.ones((3, 2), np.float32))
            assert connection.infer("scale", [tensor]).as_numpy("output").tolist() == [[2.0, 2.0]] * 3


def test_a_changed_file_replaces_its_models_without_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "app.py"
    file.write_text(APP.format(factor=2))
    (port,) = free_ports(1)
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 1]}]}
    with process(file, port, dict(os.environ), "--reload") as server:
        until(port, "/v2/health/ready", server)
        assert '"data":[2.0,2.0]' in _ask(port, "/v2/models/scale/infer", body)[1]
        replace(file, APP.format(factor=30))
        eventually(lambda: '"data":[30.0,30.0]' in _ask(port, "/v2/models/scale/infer", body)[1], process=server)
