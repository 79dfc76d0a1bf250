"""Loads and unloads leave nothing behind: memory, file descriptors and threads stay flat, also with many models.

`make soak` runs 1,000 cycles by REMORA_SOAK and prints the figures of docs/reliability.md.
"""

from __future__ import annotations

import http.client
import json
import os
from pathlib import Path
from typing import NamedTuple

import pytest

from support.process.eventually import eventually
from support.servers.live_server import ask, client, free_port, process, status_of, until, write_version

SOAK = bool(os.environ.get("REMORA_SOAK"))
CYCLES = 1000 if SOAK else 30
MODELS = 100
KIB = 1024

CENSUS = """
import os
import threading
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        tasks = {int(task) for task in os.listdir("/proc/self/task")}
        free = ("uvloop_", "asyncio_", "remora census", "remora lasting")
        count = len(tasks - {thread.native_id for thread in threading.enumerate() if thread.name.startswith(free)})
        arrays = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array * 0 + count)]) for array in arrays]
"""


class Held(NamedTuple):
    """What a process holds: resident bytes, file descriptors, threads but those that may begin at any time.

    The loop's pool grows up to its bound whenever work comes a moment before a thread has said that it is idle again,
    and the thread of the model that counts begins when an answer is not expected to be quick. So it is counted inside,
    all at one moment: a look from outside and a request make two, and a thread may begin between them.
    """

    rss: int
    fds: int
    threads: int


def held(pid: int, connection: http.client.HTTPConnection) -> Held:
    root = Path(f"/proc/{pid}")
    rows = dict(line.split(":", 1) for line in (root / "status").read_text().splitlines() if ":" in line)
    threads = ask(connection, 0, "census")[1]["outputs"][0]["data"][0]
    return Held(int(rows["VmRSS"].split()[0]) * KIB, len(os.listdir(root / "fd")), threads)


def settled(pid: int, connection: http.client.HTTPConnection, wanted: Held) -> Held:
    """Return what is held once retired models are closed; each look is a request."""

    def look() -> Held | None:
        now = held(pid, connection)
        return now if now.threads <= wanted.threads and now.fds <= wanted.fds else None

    return eventually(look)  # type: ignore[return-value]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """An ONNX model that adds one, a Python model, and one that counts threads but those that may always begin."""
    onnx = pytest.importorskip("onnx", reason="the ONNX model of this test is built with onnx: pip install onnx")
    path = tmp_path / "models"
    path.mkdir()
    write_version(path, 1)
    write_version(path, 1, name="census")
    (path / "census" / "1" / "model.py").write_text(CENSUS)
    shape = [None, 1]
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Add", ["IN", "ONE"], ["OUT"])],
        "adds_one",
        [onnx.helper.make_tensor_value_info("IN", onnx.TensorProto.INT32, shape)],
        [onnx.helper.make_tensor_value_info("OUT", onnx.TensorProto.INT32, shape)],
        [onnx.helper.make_tensor("ONE", onnx.TensorProto.INT32, [1], [1])],
    )
    model = onnx.helper.make_model(graph, ir_version=10, opset_imports=[onnx.helper.make_opsetid("", 17)])
    (path / "plus" / "1").mkdir(parents=True)
    onnx.save(model, path / "plus" / "1" / "model.onnx")
    return path


def test_cycles_of_load_and_unload_leave_nothing_behind(repository: Path, child_environment: dict[str, str]) -> None:
    port = free_port()
    # Without lines for each load, because this test does not read the pipe that they would fill.
    explicit = ("--model-control-mode=explicit", "--load-model=census", "--log-info=false")
    with process(repository, port, child_environment, *explicit) as server, client(port) as connection:
        until(port, "/readyz", server)
        for cycle in range(CYCLES):
            for name in ("plus", "m"):
                assert status_of(port, f"/v2/repository/models/{name}/load", "POST") == 200
                status, answer = ask(connection, 41, name)
                assert (status, answer["outputs"][0]["data"]) == (200, [42 if name == "plus" else 41])
                assert status_of(port, f"/v2/repository/models/{name}/unload", "POST") == 200
            if cycle == CYCLES // 5:  # those before fill pools and caches
                first = held(server.pid, connection)
        last = settled(server.pid, connection, first)
    grown = (last.rss - first.rss) / (CYCLES - CYCLES // 5)
    print(f"{CYCLES} cycles of 2 loads and unloads: {grown:.0f} bytes of RSS each, {first} -> {last}")
    assert last.threads <= first.threads
    assert last.fds <= first.fds
    assert last.rss - first.rss < 16 * KIB * KIB
    assert not SOAK or grown < 8 * KIB


def test_a_hundred_models_are_loaded_asked_and_unloaded_one_by_one(
    tmp_path: Path, child_environment: dict[str, str]
) -> None:
    repository = tmp_path / "models"
    repository.mkdir()
    names = [f"m{index:03}" for index in range(MODELS)]
    for index, name in enumerate(names):
        write_version(repository, index + 1, name=name)
    port = free_port()
    with process(repository, port, child_environment, "--model-control-mode=explicit") as server:
        until(port, "/readyz", server)
        with client(port) as connection:
            for index, name in enumerate(names):
                assert status_of(port, f"/v2/repository/models/{name}/load", "POST") == 200
                assert ask(connection, 1, name)[1]["outputs"][0]["data"] == [index + 1]
            connection.request("POST", "/v2/repository/index", '{"ready": true}')
            assert [row["name"] for row in json.loads(connection.getresponse().read())] == names
            for name in names:
                assert status_of(port, f"/v2/repository/models/{name}/unload", "POST") == 200
            connection.request("POST", "/v2/repository/index", '{"ready": true}')
            assert json.loads(connection.getresponse().read()) == []
        assert status_of(port, "/v2/health/ready") == 200
