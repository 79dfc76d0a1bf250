"""Figures of `remora bench load` beside those of wrk, h2load and Triton's perf_analyzer, and loads of other servers.

The model waits and takes no processor, so that its answers per second depend on how a client counts, and not on what
else the machine does. `make test-load` runs them.
"""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pytest

from conftest import free_ports
from remora.proto.inference_pb2 import ModelInferRequest
from support.process.eventually import eventually
from support.servers.live_server import status_of

pytestmark = pytest.mark.skipif(not os.environ.get("TEST_LOAD_PEERS"), reason="takes minutes: run make test-load")

CONNECTIONS, SECONDS, PAIRS = 8, 4, 7
WITHIN = 0.05
MODEL = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        time.sleep(0.12)
        arrays = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", array)]) for array in arrays]
"""
CONFIG = """
backend: "python" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: 2 }
output { name: "y" data_type: TYPE_FP32 dims: 2 }
instance_group { count: 8 kind: KIND_CPU }
"""
ENDS = (("inputs", "x"), ("outputs", "y"))
BODY = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}


class Figures(NamedTuple):
    """Answers per second, and the median latency in milliseconds, 0 if the program does not state it."""

    per_s: float
    median_ms: float


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, serving: Any) -> Iterator[Any]:
    models = tmp_path_factory.mktemp("wait") / "models"
    (models / "wait" / "1").mkdir(parents=True)
    (models / "wait" / "1" / "model.py").write_text(MODEL)
    (models / "wait" / "config.pbtxt").write_text(CONFIG)
    with serving(models, "--backend-config=python,isolation=thread") as running:
        yield running


def _run(*words: object) -> str:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _found(pattern: str, text: str) -> float:
    match = re.search(pattern, text, re.MULTILINE)
    assert match is not None, text
    return float(match[1])


def _own(server: Any, *words: str) -> Figures:
    load = (f"--concurrency={CONNECTIONS}", f"--duration={SECONDS}", "--fixed", "--warm-up=1", "--quiet", "--json-out")
    url = f"http://127.0.0.1:{server.http}"
    (level,) = json.loads(_run(sys.executable, "-m", "remora", "bench", "load", "wait", "--url", url, *load, *words))
    assert level["failures"] == {}
    return Figures(level["requests_per_s"], level["latency_us"]["p50"] / 1e3)


def _wrk(server: Any, folder: Path) -> Figures:
    script = folder / "post.lua"
    script.write_text(
        f"wrk.method = 'POST'\nwrk.body = '{json.dumps(BODY)}'\nwrk.headers['Content-Type'] = 'application/json'\n"
    )
    url = f"http://127.0.0.1:{server.http}/v2/models/wait/infer"
    shown = _run("wrk", "-t1", f"-c{CONNECTIONS}", f"-d{SECONDS}s", "--latency", "-s", script, url)
    assert "Non-2xx" not in shown, shown
    return Figures(_found(r"Requests/sec:\s+([\d.]+)", shown), _found(r"50%\s+([\d.]+)ms", shown))


def _h2load(server: Any, folder: Path, *, grpc: bool) -> Figures:
    body = folder / "body"
    if grpc:
        message = ModelInferRequest(model_name="wait")
        message.inputs.add(name="x", datatype="FP32", shape=[1, 2])
        message.raw_input_contents.append(struct.pack("<2f", 1, 2))
        content = message.SerializeToString()
        body.write_bytes(struct.pack(">BI", 0, len(content)) + content)
        url = f"http://127.0.0.1:{server.grpc}/inference.GRPCInferenceService/ModelInfer"
        words = ("-m1", "-H", "content-type: application/grpc", "-H", "te: trailers")
    else:
        body.write_text(json.dumps(BODY))
        url = f"http://127.0.0.1:{server.http}/v2/models/wait/infer"
        words = ("--h1", "-H", "content-type: application/json")
    shown = _run("h2load", f"-c{CONNECTIONS}", "-t1", f"-D{SECONDS}", "--warm-up-time=1", "-d", body, *words, url)
    assert " 0 failed, 0 errored, 0 timeout" in shown, shown
    return Figures(_found(r"([\d.]+) req/s", shown), 0.0)


def _perf_analyzer(server: Any, folder: Path, *, grpc: bool) -> Figures:
    program = os.environ["PERF_ANALYZER"]
    report = folder / "perf.csv"
    words = ("-i", "grpc", "-u", f"127.0.0.1:{server.grpc}") if grpc else ("-u", f"127.0.0.1:{server.http}")
    time = ("--measurement-interval", SECONDS * 1000, "--max-trials", 3, "--stability-percentage", 50)
    _run(program, "-m", "wait", *words, "--concurrency-range", CONNECTIONS, "-f", report, *time)
    (row,) = csv.DictReader(report.read_text().splitlines())
    return Figures(float(row["Inferences/Second"]), float(row["p50 latency"]) / 1e3)


def _agree(own: Callable[[], Figures], theirs: Callable[[], Figures], title: str) -> None:
    """Compare medians of pairs whose order alternates."""
    found: tuple[list[Figures], list[Figures]] = ([], [])
    for number in range(PAIRS):
        for which in (0, 1) if number % 2 else (1, 0):
            found[which].append((own, theirs)[which]())
    for field in Figures._fields:
        pairs = [(getattr(one, field), getattr(other, field)) for one, other in zip(*found, strict=True)]
        if pairs[0][1]:
            ratio = median(one / other for one, other in pairs)
            print(f"{title}: {field} {pairs[-1][0]:.2f} and {pairs[-1][1]:.2f}, median of the ratios {ratio:.3f}")
            assert abs(ratio - 1) < WITHIN, pairs


@pytest.mark.skipif(shutil.which("wrk") is None, reason="wrk is not installed")
def test_wrk_measures_the_same_over_http(server: Any, tmp_path: Path) -> None:
    _agree(lambda: _own(server, "--encoding=json"), lambda: _wrk(server, tmp_path), "wrk")


@pytest.mark.skipif(shutil.which("h2load") is None, reason="h2load is not installed: apt install nghttp2-client")
@pytest.mark.parametrize("grpc", [False, True], ids=["http", "grpc"])
def test_h2load_measures_the_same(grpc: bool, server: Any, tmp_path: Path) -> None:
    words = (f"--grpc=127.0.0.1:{server.grpc}",) if grpc else ("--encoding=json",)
    _agree(lambda: _own(server, *words), lambda: _h2load(server, tmp_path, grpc=grpc), "h2load")


@pytest.mark.skipif(not os.environ.get("PERF_ANALYZER"), reason="perf_analyzer is not installed")
@pytest.mark.parametrize("grpc", [False, True], ids=["http", "grpc"])
def test_perf_analyzer_measures_the_same(grpc: bool, server: Any, tmp_path: Path) -> None:
    words = (f"--grpc=127.0.0.1:{server.grpc}",) if grpc else ()
    _agree(lambda: _own(server, *words), lambda: _perf_analyzer(server, tmp_path, grpc=grpc), "perf_analyzer")


ECHO = """
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceResponse

class Echo(MLModel):
    async def load(self):
        return True

    async def predict(self, payload):
        array = NumpyCodec.decode_input(payload.inputs[0])
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("y", array)])
"""


@pytest.fixture
def mlserver(tmp_path: Path) -> Iterator[tuple[int, int]]:
    """MLServer with a model that returns its input; yields the ports of HTTP and gRPC."""
    program = os.environ["MLSERVER"]
    http, grpc, metrics = free_ports(3)
    ports = {"http_port": http, "grpc_port": grpc, "metrics_port": metrics, "parallel_workers": 0}
    (tmp_path / "settings.json").write_text(json.dumps({"host": "127.0.0.1", **ports}))
    (tmp_path / "echo.py").write_text(ECHO)
    ends = {end: [{"name": name, "datatype": "FP32", "shape": [-1, 2]}] for end, name in ENDS}
    (tmp_path / "model-settings.json").write_text(json.dumps({"name": "m", "implementation": "echo.Echo", **ends}))
    log = tmp_path / "log"
    with log.open("w") as sink:
        server = subprocess.Popen(
            [program, "start", str(tmp_path)], stdout=sink, stderr=sink, env={**os.environ, "PYTHONPATH": str(tmp_path)}
        )
    try:
        eventually(lambda: status_of(http, "/v2/models/m/ready") == 200, process=server, log=log)
        yield http, grpc
    finally:
        server.terminate()
        server.wait()


KSERVE_ECHO = """
from kserve import InferOutput, InferResponse, Model, ModelServer

class Echo(Model):
    def __init__(self):
        super().__init__("m")
        self.ready = True

    async def get_input_types(self):
        return [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}]

    async def get_output_types(self):
        return [{"name": "y", "datatype": "FP32", "shape": [-1, 2]}]

    def predict(self, payload, headers=None, response_headers=None):
        array = payload.inputs[0].as_numpy()
        output = InferOutput("y", list(array.shape), "FP32")
        output.set_data_from_numpy(array, binary_data=False)
        return InferResponse(payload.id or "none", "m", [output])

ModelServer().start([Echo()])
"""


@pytest.fixture
def kserve(tmp_path: Path) -> Iterator[tuple[int, int]]:
    """KServe's model server with a model that returns its input; yields the ports of HTTP and gRPC."""
    http, grpc = free_ports(2)
    (tmp_path / "echo.py").write_text(KSERVE_ECHO)
    words = [os.environ["KSERVE_PYTHON"], str(tmp_path / "echo.py"), f"--http_port={http}", f"--grpc_port={grpc}"]
    with (tmp_path / "log").open("w") as sink:
        server = subprocess.Popen(words, stdout=sink, stderr=sink)
    try:
        eventually(lambda: status_of(http, "/v2/models/m/ready") == 200, process=server, log=tmp_path / "log")
        yield http, grpc
    finally:
        server.kill()  # after SIGTERM it waits for connections
        server.wait()


def _measure_peer(name: str, http: int, *ways: str) -> None:
    load = ("--duration=2", "--window=0.5", "--concurrency=2", "--quiet", "--json-out")
    for way in ways:
        command = ("-m", "remora", "bench", "load", "m", "--url", f"http://127.0.0.1:{http}", *load, way)
        (level,) = json.loads(_run(sys.executable, *command))
        print(f"{name}, {way}: {level['requests_per_s']} req/s")
        assert level["failures"] == {}
        assert level["requests"] > 10
        assert level["server_us"] == {}


@pytest.mark.skipif(not os.environ.get("MLSERVER"), reason="MLServer is not installed")
def test_mlserver_is_measured_over_json_and_grpc(mlserver: tuple[int, int]) -> None:
    _measure_peer("MLServer", mlserver[0], "--encoding=json", f"--grpc=127.0.0.1:{mlserver[1]}")


@pytest.mark.skipif(not os.environ.get("KSERVE_PYTHON"), reason="KServe's server is not installed")
def test_kserves_server_is_measured_over_http_and_grpc(kserve: tuple[int, int]) -> None:
    _measure_peer("KServe", kserve[0], "--encoding=binary", "--encoding=json", f"--grpc=127.0.0.1:{kserve[1]}")
