"""Our own HTTP/2: gRPC as grpcio's client speaks it, and REST beside it on one connection's port."""

from __future__ import annotations

import gzip
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import ROOT, RunningServer, Serving
from support.servers.hosting import ask

grpc = pytest.importorskip("grpc", reason="needs grpcio: pip install '.[grpcio]'")
httpx = pytest.importorskip("httpx", reason="needs httpx: pip install '.[dev]'")
pytest.importorskip("h2", reason="needs h2: pip install '.[dev]'")
pb = pytest.importorskip("remora.proto.inference_pb2")

PATIENCE_S = 60.0
FLAGS = (
    "--grpc-transport=own",
    "--grpc-on-http-port=true",
    "--backend-config=python,isolation=thread",
    "--grpc-header-forward-pattern=my-.*",
)
SERVICE = "/inference.GRPCInferenceService"
CONFIG = """
backend: "python"
max_batch_size: 0
input {{ name: "IN" data_type: TYPE_INT32 dims: -1 }}
output {{ name: "OUT" data_type: TYPE_{kind} dims: -1 }}
{more}
"""
TWICE = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy() * 2)]) for r in requests]
"""
STUCK = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            while not request.is_cancelled():
                time.sleep(0.002)
        return [pb_utils.InferenceResponse(error=pb_utils.TritonError("gone")) for r in requests]
"""
WATCHED = """
import time
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            with open({begun!r}, "w") as begun:  # the test reads it
                begun.write("x")
            while not request.is_cancelled():
                time.sleep(0.002)
            with open({ended!r}, "w") as ended:
                ended.write("cancelled")
        return [pb_utils.InferenceResponse(error=pb_utils.TritonError("gone")) for r in requests]
"""
TOLD = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        said = [np.array([r.parameters().encode()], object) for r in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", each)]) for each in said]
"""
WORDS = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for number in range(int(request.inputs()[0].as_numpy()[0])):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([number], np.int32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def write(repository: Path, name: str, code: str, kind: str = "INT32", more: str = "") -> None:
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(CONFIG.format(kind=kind, more=more))
    (repository / name / "1" / "model.py").write_text(code)


@pytest.fixture(scope="module")
def pipes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By which the model `watched` tells that it has begun, and how it ended."""
    folder = tmp_path_factory.mktemp("pipes")
    found = {word: folder / word for word in ("begun", "ended")}
    for path in found.values():
        os.mkfifo(path)
    return found


@pytest.fixture(scope="module")
def server(
    serving: Serving, tmp_path_factory: pytest.TempPathFactory, pipes: dict[str, Path]
) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("own-http2")
    write(repository, "watched", WATCHED.format(**{word: str(path) for word, path in pipes.items()}))
    write(repository, "twice", TWICE)
    write(repository, "stuck", STUCK)
    write(repository, "told", TOLD, "STRING")
    write(repository, "words", WORDS, more="model_transaction_policy { decoupled: true }")
    with serving(repository, *FLAGS) as running:
        yield running


@pytest.fixture(params=["http", "grpc"])
def channel(server: RunningServer, request: pytest.FixtureRequest) -> Iterator[Any]:
    """To each of the ports that answer gRPC."""
    with grpc.insecure_channel(f"127.0.0.1:{getattr(server, request.param)}") as found:
        yield found


def infer_bytes(model: str, *values: int) -> bytes:
    tensor = pb.ModelInferRequest.InferInputTensor(name="IN", datatype="INT32", shape=[len(values)])
    raw = np.array(values, "<i4").tobytes()
    return bytes(pb.ModelInferRequest(model_name=model, inputs=[tensor], raw_input_contents=[raw]).SerializeToString())


def rpc(channel: Any, method: str = "ModelInfer", service: str = SERVICE) -> Any:
    return channel.unary_unary(f"{service}/{method}")


def answer_of(message: bytes) -> list[int]:
    return list(np.frombuffer(pb.ModelInferResponse.FromString(message).raw_output_contents[0], "<i4"))


def refusal(call: Any, *arguments: Any, **options: Any) -> tuple[Any, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call(*arguments, timeout=options.pop("timeout", PATIENCE_S), **options)
    error: Any = caught.value
    return error.code(), error.details()


def test_calls_of_one_message_are_answered_on_both_ports(channel: Any) -> None:
    assert answer_of(rpc(channel)(infer_bytes("twice", 1, 2), timeout=PATIENCE_S)) == [2, 4]
    assert pb.ServerReadyResponse.FromString(rpc(channel, "ServerReady")(b"")).ready
    assert rpc(channel, "Check", "/grpc.health.v1.Health")(b"") == b"\x08\x01"
    metadata = pb.ModelMetadataRequest(name="twice").SerializeToString()
    assert pb.ModelMetadataResponse.FromString(rpc(channel, "ModelMetadata")(metadata)).inputs[0].name == "IN"


def test_errors_have_tritons_codes_and_words(channel: Any) -> None:
    code, text = refusal(rpc(channel), infer_bytes("nope", 1))
    assert (code, text) == (grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'nope' is not found")
    assert refusal(rpc(channel), b"\xff\xff")[0] == grpc.StatusCode.INTERNAL
    assert refusal(rpc(channel, "Nothing"), b"")[0] == grpc.StatusCode.UNIMPLEMENTED
    assert refusal(rpc(channel, "Of", "/nobodys.Service"), b"")[0] == grpc.StatusCode.UNIMPLEMENTED
    assert answer_of(rpc(channel)(infer_bytes("twice", 3), timeout=PATIENCE_S)) == [6]


def test_an_error_text_of_any_characters_arrives(channel: Any) -> None:
    code, text = refusal(rpc(channel), infer_bytes("nö%\n"))
    assert code == grpc.StatusCode.NOT_FOUND
    assert "nö%\n" in text


def test_a_deadline_ends_the_call_and_the_model(channel: Any) -> None:
    assert refusal(rpc(channel), infer_bytes("stuck", 1), timeout=0.2)[0] == grpc.StatusCode.DEADLINE_EXCEEDED
    call = rpc(channel).future(infer_bytes("stuck", 1), timeout=PATIENCE_S)
    call.cancel()
    assert answer_of(rpc(channel)(infer_bytes("twice", 4), timeout=PATIENCE_S)) == [8]


@pytest.mark.parametrize("kind", ["Gzip", "Deflate"])
def test_compressed_messages_are_read(channel: Any, kind: str) -> None:
    compression = getattr(grpc.Compression, kind)
    got = rpc(channel)(infer_bytes("twice", *range(5000)), timeout=PATIENCE_S, compression=compression)
    assert answer_of(got)[:3] == [0, 2, 4]


def test_metadata_become_parameters_and_binary_ones_too(channel: Any) -> None:
    metadata = (("my-word", "x"), ("my-bytes-bin", b"\x01y"), ("other", "z"))
    got = pb.ModelInferResponse.FromString(rpc(channel)(infer_bytes("told", 1), timeout=PATIENCE_S, metadata=metadata))
    said = json.loads(got.raw_output_contents[0][4:])
    assert said == {"my-word": "x", "my-bytes-bin": "\x01y"}


def test_messages_far_beyond_the_windows_pass_both_ways(channel: Any) -> None:
    values = range(4_000_000)  # 16 MB
    with grpc.insecure_channel(
        channel._channel.target().decode(), options=[("grpc.max_receive_message_length", -1)]
    ) as wide:
        assert answer_of(rpc(wide)(infer_bytes("twice", *values), timeout=PATIENCE_S)) == [2 * each for each in values]


def test_many_calls_of_one_connection_at_once_keep_their_answers(channel: Any) -> None:
    calls = [rpc(channel).future(infer_bytes("twice", number), timeout=PATIENCE_S) for number in range(1500)]
    assert [answer_of(call.result()) for call in calls] == [[2 * number] for number in range(1500)]


def test_streams_give_all_answers_to_clients_quick_and_slow(channel: Any) -> None:
    stream = channel.stream_stream(f"{SERVICE}/ModelStreamInfer")
    more = threading.Event()

    def asked() -> Iterator[bytes]:
        yield infer_bytes("words", 3000)
        more.wait(PATIENCE_S)
        yield infer_bytes("twice", 7)

    answers = stream(asked(), timeout=PATIENCE_S)
    got = [next(answers) for _ in range(3000)]
    more.set()
    last = list(answers)
    read = [pb.ModelStreamInferResponse.FromString(each).infer_response for each in (*got, *last)]
    values = [int(np.frombuffer(each.raw_output_contents[0], "<i4")[0]) for each in read if each.raw_output_contents]
    assert values == [*range(3000), 14]


def test_a_stream_that_its_client_leaves_is_cancelled_in_the_model(channel: Any, pipes: dict[str, Path]) -> None:
    answers = channel.stream_stream(f"{SERVICE}/ModelStreamInfer")(iter([infer_bytes("watched", 1)]))
    assert pipes["begun"].read_text() == "x"
    answers.cancel()
    assert pipes["ended"].read_text() == "cancelled"


def test_reflection_lists_the_services(channel: Any) -> None:
    reflection = pytest.importorskip(
        "grpc_reflection.v1alpha.reflection_pb2", reason="needs grpcio-reflection: pip install '.[dev]'"
    )
    ask_all = reflection.ServerReflectionRequest(list_services="").SerializeToString()
    stream = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
    (answer,) = stream(iter([ask_all]), timeout=PATIENCE_S)
    services = reflection.ServerReflectionResponse.FromString(answer).list_services_response.service
    assert "inference.GRPCInferenceService" in [each.name for each in services]


# -- REST ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def rest(server: RunningServer) -> Iterator[Any]:
    with httpx.Client(
        http1=False, http2=True, base_url=f"http://127.0.0.1:{server.http}", timeout=PATIENCE_S
    ) as client:
        yield client


def v2(*values: int) -> dict[str, Any]:
    return {"inputs": [{"name": "IN", "datatype": "INT32", "shape": [len(values)], "data": values}]}


def test_rest_is_answered_over_http2_as_over_http1(rest: Any, server: RunningServer) -> None:
    for method, path, body in (
        ("POST", "/v2/models/twice/infer", json.dumps(v2(1, 2)).encode()),
        ("POST", "/v2/models/nope/infer", json.dumps(v2(1, 2)).encode()),
        ("POST", "/v2/models/twice/infer", b"{"),
        ("GET", "/v2/models/twice", b""),
        ("GET", "/nothing/here", b""),
        ("DELETE", "/v2/models/twice/infer", b""),
    ):
        old, new = ask(server.http, method, path, body), rest.request(method, path, content=body)
        assert (new.http_version, new.status_code, new.content) == ("HTTP/2", old.status, old.body), path
        assert new.headers.get("content-type") == old.headers.get("content-type"), path


def test_long_bodies_compressed_ones_and_heads_pass(rest: Any) -> None:
    body = json.dumps(v2(*range(300_000))).encode()
    packed = rest.post("/v2/models/twice/infer", content=gzip.compress(body), headers={"content-encoding": "gzip"})
    plain = rest.post("/v2/models/twice/infer", content=body)
    assert packed.json() == plain.json()
    assert plain.json()["outputs"][0]["data"][-1] == 599_998
    assert rest.head("/v2/health/ready").status_code in (200, 405)
    pieces = (bytes(1 << 20) for _ in range(70))  # of one body the client copies the rest for every frame
    length = {"content-length": str(70 << 20)}
    assert rest.post("/v2/models/twice/infer", content=pieces, headers=length).status_code == 400


def test_events_come_over_http2(rest: Any) -> None:
    with rest.stream("POST", "/v2/models/words/generate_stream", json={"IN": 4}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line]
    assert [event["OUT"] for event in events] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "junk", [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 99, b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n", b"PRI"]
)
def test_junk_ends_its_own_connection_alone(server: RunningServer, rest: Any, junk: bytes) -> None:
    for port in (server.http, server.grpc):
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as client:
            client.sendall(junk)
            client.shutdown(socket.SHUT_WR)
            while client.recv(65_536):
                pass
    assert rest.get("/v2/health/ready").status_code == 200


# -- Stubs of clients -----------------------------------------------------------------------------------------------

CLIENT = """
import sys, grpc
import remora.proto.inference_pb2  # the server's own messages share the process
import inference_pb2 as pb, inference_pb2_grpc as stubs
with grpc.insecure_channel(sys.argv[1]) as channel:
    stub = stubs.GRPCInferenceServiceStub(channel)
    assert stub.ServerLive(pb.ServerLiveRequest()).live
    name = stub.RepositoryIndex(pb.RepositoryIndexRequest()).models[0].name
    assert stub.ModelReady(pb.ModelReadyRequest(name=name)).ready
    assert not stub.ModelReady(pb.ModelReadyRequest(name="nope")).ready
    config = stub.ModelConfig(pb.ModelConfigRequest(name=name)).config
    info = stub.ModelMetadata(pb.ModelMetadataRequest(name=name))
    assert (config.name, [each.name for each in config.input]) == (name, [each.name for each in info.inputs])
"""


def test_stubs_that_are_generated_from_the_published_file_call_the_server(
    server: RunningServer, tmp_path: Path
) -> None:
    pytest.importorskip("grpc_tools", reason="grpcio-tools is not installed")
    output = [f"-I{ROOT / 'core/remora/proto'}", f"--python_out={tmp_path}", f"--grpc_python_out={tmp_path}"]
    protoc = [sys.executable, "-m", "grpc_tools.protoc", *output, "inference.proto", "model_config.proto"]
    subprocess.run(protoc, check=True)
    (tmp_path / "client.py").write_text(CLIENT)
    client = [sys.executable, "client.py", f"127.0.0.1:{server.grpc}"]
    answer = subprocess.run(client, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert answer.returncode == 0, answer.stderr
