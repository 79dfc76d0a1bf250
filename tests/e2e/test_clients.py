"""The real clients of the V2 protocols against a real server: tritonclient's four and kserve's two."""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from conftest import RunningServer, Serving

ROWS = np.arange(12, dtype=np.float32).reshape(3, 4)
TEXTS = np.array([["héllo".encode(), b""]], dtype=np.object_)


@pytest.fixture(scope="module")
def server(serving: Serving, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Two ONNX models: `double` (FP32, batches) and `echo` (BYTES)."""
    onnx = pytest.importorskip("onnx", reason="the models of this test are made with onnx: pip install '.[dev]'")
    repository = tmp_path_factory.mktemp("clients")
    _save(onnx, repository / "double", onnx.TensorProto.FLOAT, "Add", ["INPUT", "INPUT"], ["batch", 4])
    _save(onnx, repository / "echo", onnx.TensorProto.STRING, "Identity", ["INPUT"], ["batch", 2])
    with serving(repository) as running:
        yield running


def _save(onnx: object, folder: Path, kind: int, op: str, inputs: list[str], shape: list[object]) -> None:
    from onnx import helper, save

    tensors = [helper.make_tensor_value_info(name, kind, shape) for name in ("INPUT", "OUTPUT")]
    graph = helper.make_graph([helper.make_node(op, inputs, ["OUTPUT"])], folder.name, [tensors[0]], [tensors[1]])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    (folder / "1").mkdir(parents=True)
    save(model, str(folder / "1" / "model.onnx"))


def test_tritonclient_over_http(server: RunningServer) -> None:
    http = pytest.importorskip("tritonclient.http", reason="needs tritonclient[http]: pip install '.[dev]'")
    with http.InferenceServerClient(f"127.0.0.1:{server.http}") as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("double")
        assert client.get_server_metadata()["extensions"]
        assert client.get_model_metadata("double")["inputs"][0]["shape"] == [-1, 4]
        assert client.get_model_config("double")["backend"] == "onnxruntime"
        assert {row["name"] for row in client.get_model_repository_index()} == {"double", "echo"}
        for binary in (True, False):
            sent = http.InferInput("INPUT", [3, 4], "FP32")
            sent.set_data_from_numpy(ROWS, binary_data=binary)
            wanted = http.InferRequestedOutput("OUTPUT", binary_data=binary)
            answer = client.infer("double", [sent], outputs=[wanted], request_id="r1")
            np.testing.assert_array_equal(answer.as_numpy("OUTPUT"), ROWS * 2)
            assert answer.get_response()["id"] == "r1"
        texts = http.InferInput("INPUT", [1, 2], "BYTES")
        texts.set_data_from_numpy(TEXTS)
        np.testing.assert_array_equal(client.infer("echo", [texts]).as_numpy("OUTPUT"), TEXTS)
        squeezed = http.InferInput("INPUT", [3, 4], "FP32")
        squeezed.set_data_from_numpy(ROWS)
        packed = client.infer(
            "double", [squeezed], request_compression_algorithm="gzip", response_compression_algorithm="gzip"
        )
        np.testing.assert_array_equal(packed.as_numpy("OUTPUT"), ROWS * 2)
        classes = http.InferRequestedOutput("OUTPUT", class_count=1)
        assert client.infer("double", [squeezed], outputs=[classes]).as_numpy("OUTPUT")[0][0] == b"6.000000:3"
        assert client.get_inference_statistics("double")["model_stats"][0]["inference_stats"]["success"]["count"] >= 4
        with pytest.raises(http.InferenceServerException, match="Request for unknown model: 'nope' is not found"):
            client.infer("nope", [squeezed])


def test_tritonclient_over_http_with_many_requests_at_once(server: RunningServer) -> None:
    http = pytest.importorskip("tritonclient.http", reason="needs tritonclient[http]: pip install '.[dev]'")
    with http.InferenceServerClient(f"127.0.0.1:{server.http}", concurrency=8) as client:
        pending = []
        for number in range(40):
            sent = http.InferInput("INPUT", [1, 4], "FP32")
            sent.set_data_from_numpy(np.full((1, 4), number, np.float32))
            pending.append(client.async_infer("double", [sent]))
        for number, request in enumerate(pending):
            np.testing.assert_array_equal(request.get_result().as_numpy("OUTPUT"), np.full((1, 4), 2.0 * number))


def test_tritonclient_over_http_with_asyncio(server: RunningServer) -> None:
    http = pytest.importorskip("tritonclient.http.aio", reason="needs tritonclient[http]: pip install '.[dev]'")

    async def talk() -> None:
        async with http.InferenceServerClient(f"127.0.0.1:{server.http}") as client:
            assert await client.is_model_ready("double")
            sent = http.InferInput("INPUT", [3, 4], "FP32")
            sent.set_data_from_numpy(ROWS)
            answers = await asyncio.gather(*[client.infer("double", [sent]) for _ in range(8)])
            for answer in answers:
                np.testing.assert_array_equal(answer.as_numpy("OUTPUT"), ROWS * 2)

    asyncio.run(talk())


# kserve and tritonclient's gRPC half both put the package `inference` into protobuf's default pool, so that neither can
# be imported beside the other. Each gets a separate process, and shares it with remora's messages.
_GRPC_HEAD = """
import sys, numpy as np
from remora.proto import inference_pb2
rows = np.arange(12, dtype=np.float32).reshape(3, 4)
texts = np.array([["h\\u00e9llo".encode(), b""]], dtype=np.object_)
address = sys.argv[1]
"""

TRITON_GRPC = (
    _GRPC_HEAD
    + """
import tritonclient.grpc as grpc
with grpc.InferenceServerClient(address) as client:
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("double")
    assert client.get_model_metadata("double").inputs[0].shape == [-1, 4]
    assert client.get_model_config("double").config.backend == "onnxruntime"
    assert {row.name for row in client.get_model_repository_index().models} == {"double", "echo"}
    sent = grpc.InferInput("INPUT", [3, 4], "FP32"); sent.set_data_from_numpy(rows)
    answer = client.infer("double", [sent], request_id="r1")
    assert (answer.as_numpy("OUTPUT") == rows * 2).all() and answer.get_response().id == "r1"
    said = grpc.InferInput("INPUT", [1, 2], "BYTES"); said.set_data_from_numpy(texts)
    assert (client.infer("echo", [said]).as_numpy("OUTPUT") == texts).all()
    assert client.get_inference_statistics("double").model_stats[0].inference_stats.success.count >= 1
    try:
        client.infer("nope", [sent])
    except grpc.InferenceServerException as error:
        assert error.message() == "Request for unknown model: 'nope' is not found", error
    else:
        raise SystemExit("an unknown model was answered")
print("done")
"""
)

TRITON_GRPC_AIO = (
    _GRPC_HEAD
    + """
import asyncio, tritonclient.grpc.aio as grpc
async def talk():
    async with grpc.InferenceServerClient(address) as client:
        assert await client.is_model_ready("double")
        sent = grpc.InferInput("INPUT", [3, 4], "FP32"); sent.set_data_from_numpy(rows)
        for answer in await asyncio.gather(*[client.infer("double", [sent]) for _ in range(8)]):
            assert (answer.as_numpy("OUTPUT") == rows * 2).all()
asyncio.run(talk())
print("done")
"""
)

KSERVE_REST = (
    _GRPC_HEAD
    + """
import asyncio
from kserve import InferenceRESTClient, InferInput, InferRequest, RESTConfig
async def talk():
    client = InferenceRESTClient(RESTConfig(protocol="v2"))
    base = "http://" + address
    # Its health calls want the JSON of KServe's own server; Triton's health answers, which ours are, have no body.
    for binary in (False, True):
        sent = InferInput("INPUT", [3, 4], "FP32"); sent.set_data_from_numpy(rows, binary_data=binary)
        answer = await client.infer(base, InferRequest("double", [sent]), model_name="double")
        assert (answer.outputs[0].as_numpy() == rows * 2).all()
    await client.close()
asyncio.run(talk())
print("done")
"""
)

KSERVE_GRPC = (
    _GRPC_HEAD
    + """
import asyncio
from kserve import InferenceGRPCClient, InferInput, InferRequest
async def talk():
    client = InferenceGRPCClient(url=address)
    assert await client.is_server_ready() and await client.is_model_ready("double")
    sent = InferInput("INPUT", [3, 4], "FP32"); sent.set_data_from_numpy(rows, binary_data=True)
    answer = await client.infer(InferRequest("double", [sent]))
    assert (answer.outputs[0].as_numpy() == rows * 2).all()
asyncio.run(talk())
print("done")
"""
)


@pytest.mark.parametrize(
    ("package", "script", "port"),
    [
        pytest.param("tritonclient", TRITON_GRPC, "grpc", id="tritonclient-grpc"),
        pytest.param("tritonclient", TRITON_GRPC_AIO, "grpc", id="tritonclient-grpc-asyncio"),
        pytest.param("kserve", KSERVE_REST, "http", id="kserve-rest"),
        pytest.param("kserve", KSERVE_GRPC, "grpc", id="kserve-grpc"),
    ],
)
def test_a_client_in_one_process_with_remora(
    server: RunningServer, child_environment: dict[str, str], package: str, script: str, port: str
) -> None:
    if importlib.util.find_spec(package) is None:  # looked for, not imported: see above
        pytest.skip(f"needs {package}: pip install '.[dev]'")
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, f"127.0.0.1:{getattr(server, port)}"],
        env=child_environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert (ran.returncode, ran.stdout.strip()) == (0, "done"), ran.stderr[-3000:]
