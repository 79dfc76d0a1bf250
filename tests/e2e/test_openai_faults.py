"""Faults around OpenAI's routes on real sockets: hostile bodies, forms of HTTP, slow clients, workers that die."""

from __future__ import annotations

import gzip
import http.client
import json
import os
import re
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from conftest import RunningServer, Serving
from remora.proto import inference_pb2 as pb
from support.models.generation_models import tiny
from support.process.eventually import eventually

grpc = pytest.importorskip("grpc", reason="grpcio is not installed: pip install '.[grpcio]'")
h2_connection = pytest.importorskip("h2.connection", reason="h2 is not installed: pip install '.[dev]'")
h2_events = pytest.importorskip("h2.events", reason="h2 is not installed: pip install '.[dev]'")

PATIENCE_S = 60.0
SEEDED = {"max_tokens": 24, "temperature": 0.9, "seed": 7, "ignore_eos": True}
PROMPT = "The baker opens"
COMPLETION = {"model": "tiny", "prompt": PROMPT, **SEEDED}
DYING = """
backend: "python" model_transaction_policy { decoupled: true }
input { name: "text_input" data_type: TYPE_STRING dims: 1 }
output { name: "text_output" data_type: TYPE_STRING dims: 1 }
"""
# After two words it waits for a writer of the pipe, and then ends its process.
DYING_MODEL = """
import os
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for word in (b"one ", b"two "):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("text_output", np.array([word], np.object_))]))
            if b"die" in request.inputs()[0].as_numpy()[0]:
                open(os.path.join(os.path.dirname(__file__), "gate")).read()
                os._exit(1)
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
RELAY = """
backend: "python"
input { name: "text_input" data_type: TYPE_STRING dims: 1 }
input { name: "sampling_parameters" data_type: TYPE_STRING dims: 1 }
output { name: "text_output" data_type: TYPE_STRING dims: 1 }
"""
RELAY_MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            plain = pb_utils.Tensor("exclude_input_in_output", np.array([True]))
            call = pb_utils.InferenceRequest(model_name="tiny", requested_output_names=["text_output"],
                                             inputs=[*request.inputs(), plain])
            responses = list(call.exec(decoupled=True))
            assert not any(each.has_error() for each in responses), responses[0].error().message()
            texts = [pb_utils.get_output_tensor_by_name(each, "text_output").as_numpy()
                     for each in responses if each.output_tensors()]
            joined = b"".join(one for each in texts for one in each)
            answers.append(pb_utils.InferenceResponse(
                [pb_utils.Tensor("text_output", np.array([joined], np.object_))]))
        return answers
"""


def write_python(models: Path, name: str, config: str, code: str) -> Path:
    version = models / name / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(config)
    (version / "model.py").write_text(code)
    return version


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny(folder)
    os.mkfifo(write_python(folder, "dying", DYING, DYING_MODEL) / "gate")
    write_python(folder, "relay", RELAY, RELAY_MODEL)
    return folder


@pytest.fixture(scope="module", params=["--frontends=0", "--frontends=2"])
def server(request: Any, serving: Serving, models: Path) -> Iterator[RunningServer]:
    with serving(models, "--openai", "--grpc-on-http-port=true", request.param) as made:
        yield made


def post(server: RunningServer, path: str, body: bytes, **headers: str) -> tuple[int, Any]:
    with closing(http.client.HTTPConnection("127.0.0.1", server.http, timeout=PATIENCE_S)) as connection:
        connection.request("POST", path, body, {"Content-Type": "application/json", **headers})
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())


def text_of(answer: Any) -> str:
    text: str = answer["choices"][0]["text"]
    return text


def metric(server: RunningServer, name: str, label: str = "") -> float:
    with closing(http.client.HTTPConnection("127.0.0.1", server.metrics, timeout=PATIENCE_S)) as connection:
        connection.request("GET", "/metrics")
        rows = connection.getresponse().read().decode()
    found = re.findall(rf"^vllm:{name}{{[^}}]*{label}[^}}]*}} ([\d.e+]+)$", rows, re.MULTILINE)
    return sum(map(float, found))


# -- Hostile bodies ----------------------------------------------------------------------------------------------------


def body_with(**fields: Any) -> bytes:
    return json.dumps({**COMPLETION, **fields}).encode()


HOSTILE = {
    "no JSON": b"{'model': 'tiny'}",
    "cut off": body_with()[:-1],
    "a text": b'"tiny"',
    "a list": b"[]",
    "nothing": b"",
    "deep": b"[" * 100_000,
    "deep field": b'{"model": "tiny", "prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    "NaN": b'{"model": "tiny", "prompt": "x", "temperature": NaN}',
    "infinite": b'{"model": "tiny", "prompt": "x", "temperature": 1e999}',
    "long number": b'{"model": "tiny", "prompt": "x", "seed": ' + b"9" * 5000 + b"}",
    "no UTF-8": b'{"model": "tiny", "prompt": "\xff\xfe"}',
    "a surrogate": b'{"model": "tiny", "prompt": "\\ud800"}',
    "a surrogate as name": b'{"model": "\\ud800", "prompt": "x"}',
    "many choices": body_with(n=10**9),
    "many tokens": body_with(max_tokens=10**18),
    "many stops": body_with(stop=["x"] * 1000),
    "an unknown token": body_with(logit_bias={"999999": 1}),
    "a bias without a token": body_with(logit_bias={"x": 1}),
    "a token beyond the vocabulary": body_with(prompt=[10**9]),
    "a negative token": body_with(prompt=[-1]),
    "mixed prompts": body_with(prompt=["a", [1]]),
    "an empty prompt": body_with(prompt=""),
    "a regex that explodes": body_with(structured_outputs={"regex": "((((a{1000}){1000}){1000}){1000})"}),
    "a schema that is none": body_with(structured_outputs={"json": {"type": "nonsense"}}),
    "an unknown field": body_with(tempurature=1),
    "a template": body_with(chat_template="{{ 1 }}"),
    "a prompt that never fits": body_with(prompt="word " * 20_000),
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_a_bad_body_is_the_clients_mistake(server: RunningServer, body: bytes) -> None:
    status, answer = post(server, "/v1/completions", body)
    assert status in (400, 404)
    error = answer["error"]
    assert error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] in ("invalid_request_error", "not_found_error")


def test_of_a_field_that_comes_twice_the_last_counts(server: RunningServer) -> None:
    twice = b'{"max_tokens": 1, ' + body_with().removeprefix(b"{")
    assert post(server, "/v1/completions", twice)[1]["usage"]["completion_tokens"] == 24


def test_a_prompt_that_can_never_fit_is_refused_with_both_numbers(server: RunningServer) -> None:
    _, answer = post(server, "/v1/completions", body_with(prompt=[5] * 700, max_tokens=100))
    error = answer["error"]
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    assert re.search(r"maximum context length is 512 tokens.* prompt resulted in 700 tokens", error["message"])


# -- Forms of HTTP -----------------------------------------------------------------------------------------------------


def raw(server: RunningServer, head: str, body: bytes) -> bytes:
    """Send a request by hand, and return all until the server closes."""
    with socket.create_connection(("127.0.0.1", server.http), timeout=PATIENCE_S) as client:
        client.sendall(head.replace("\n", "\r\n").encode() + b"\r\n\r\n" + body)
        return b"".join(iter(lambda: client.recv(65_536), b""))


def over_http2(server: RunningServer, body: bytes) -> bytes:
    machine, received = h2_connection.H2Connection(), b""
    machine.initiate_connection()
    fields = [(":method", "POST"), (":scheme", "http"), (":authority", "localhost"), (":path", "/v1/completions")]
    machine.send_headers(1, [*fields, ("content-type", "application/json")])
    machine.send_data(1, body, end_stream=True)
    with socket.create_connection(("127.0.0.1", server.http), timeout=PATIENCE_S) as client:
        ended = False
        while not ended:
            client.sendall(machine.data_to_send())
            data = client.recv(65_536)
            assert data, "the connection was closed"
            for event in machine.receive_data(data):
                if isinstance(event, h2_events.DataReceived):
                    received += event.data
                    machine.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                ended = ended or isinstance(event, h2_events.StreamEnded)
    return received


def joined(stream: bytes) -> str:
    """The text of the events of a stream, which must be complete."""
    assert b"data: [DONE]" in stream
    return "".join(text_of(json.loads(row)) for row in re.findall(rb"data: (\{.*\})", stream))


def test_every_form_of_http_gets_the_same_answer(server: RunningServer) -> None:
    body, streamed = body_with(), body_with(stream=True)
    _, answer = post(server, "/v1/completions", body)
    expected = text_of(answer)
    line = "POST /v1/completions HTTP/1.{}\nHost: localhost\nContent-Type: application/json\nContent-Length: {}{}"
    for minor, more in ((0, ""), (1, "\nConnection: close")):
        reply = raw(server, line.format(minor, len(body), more), body)
        assert text_of(json.loads(reply.partition(b"\r\n\r\n")[2])) == expected
        assert joined(raw(server, line.format(minor, len(streamed), more), streamed)) == expected
    assert text_of(json.loads(over_http2(server, body))) == expected
    assert joined(over_http2(server, streamed)) == expected
    packed = {"Content-Encoding": "gzip"}
    assert text_of(post(server, "/v1/completions", gzip.compress(body), **packed)[1]) == expected
    assert post(server, "/v1/completions", gzip.compress(body)[:-9], **packed)[0] == 400
    assert post(server, "/v1/completions", body, **packed)[0] == 400


# -- The same answer on every way --------------------------------------------------------------------------------------


def text_tensor(name: str, text: str) -> tuple[Any, bytes]:
    encoded = text.encode()
    tensor = pb.ModelInferRequest.InferInputTensor(name=name, datatype="BYTES", shape=[1])
    return tensor, len(encoded).to_bytes(4, "little") + encoded


def flag(name: str) -> tuple[Any, bytes]:
    return pb.ModelInferRequest.InferInputTensor(name=name, datatype="BOOL", shape=[1]), b"\1"


def grpc_request(model: str, *more: tuple[Any, bytes], **parameters: Any) -> bytes:
    pairs = [text_tensor("text_input", PROMPT), text_tensor("sampling_parameters", json.dumps(parameters)), *more]
    tensors, contents = zip(*pairs, strict=True)
    request = pb.ModelInferRequest(model_name=model, inputs=tensors, raw_input_contents=contents)
    return request.SerializeToString()


def texts(message: bytes) -> str:
    response = pb.ModelStreamInferResponse.FromString(message)
    assert not response.error_message
    raw_texts = response.infer_response.raw_output_contents
    return raw_texts[0][4:].decode() if raw_texts else ""


def test_a_seed_gives_the_same_text_over_grpc_and_from_a_worker_that_calls_the_model(server: RunningServer) -> None:
    _, answer = post(server, "/v1/completions", body_with())
    expected = text_of(answer)
    alone = [flag("exclude_input_in_output"), flag("stream")]
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc}") as channel:
        stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        parts = [texts(each) for each in stream(iter([grpc_request("tiny", *alone, **SEEDED)]), timeout=PATIENCE_S)]
        assert "".join(parts) == expected
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        relayed = pb.ModelInferResponse.FromString(call(grpc_request("relay", **SEEDED), timeout=PATIENCE_S))
    assert relayed.raw_output_contents[0][4:].decode() == expected


# -- Clients that leave, or do not read --------------------------------------------------------------------------------

LONG = {"max_tokens": 480, "n": 8, "ignore_eos": True, "seed": 1}


def leave_over_grpc(server: RunningServer) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc}") as channel:
        stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        answers = stream(iter([grpc_request("tiny", flag("stream"), **LONG)]), timeout=PATIENCE_S)
        next(answers)
        answers.cancel()


def leave_over_http(server: RunningServer, path: str, document: Any) -> None:
    body = json.dumps(document).encode()
    with socket.create_connection(("127.0.0.1", server.http), timeout=PATIENCE_S) as client:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        assert client.recv(1)


@pytest.mark.parametrize("way", ["grpc", "generate_stream", "openai"])
def test_a_client_that_leaves_ends_its_answers_on_every_protocol(server: RunningServer, way: str) -> None:
    before = metric(server, "request_success_total", 'finished_reason="abort"')
    streamed = {"text_input": PROMPT, "stream": True, "sampling_parameters": json.dumps(LONG)}

    def leaves() -> bool:
        if way == "grpc":
            leave_over_grpc(server)
        elif way == "openai":
            leave_over_http(server, "/v1/completions", {**COMPLETION, **LONG, "stream": True})
        else:
            leave_over_http(server, "/v2/models/tiny/generate_stream", streamed)
        eventually(lambda: metric(server, "num_requests_running") == 0)
        return metric(server, "request_success_total", 'finished_reason="abort"') > before

    eventually(leaves)  # an answer may be complete before its client has left


def test_a_client_that_reads_nothing_holds_no_row_and_gets_all_in_the_end(server: RunningServer) -> None:
    # megabytes of events, which no buffer of a socket holds
    body = body_with(**LONG, stream=True, logprobs=5)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(PATIENCE_S)
        client.connect(("127.0.0.1", server.http))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}"
        client.sendall(head.encode() + b"\r\n\r\n" + body)
        assert client.recv(1, socket.MSG_PEEK)
        assert post(server, "/v1/completions", body_with())[0] == 200
        eventually(lambda: metric(server, "num_requests_running") == 0)
        received = b"".join(iter(lambda: client.recv(1 << 20), b""))
    assert len(received) > 1 << 20
    assert received.count(b'"finish_reason":"length"') == LONG["n"]
    assert b"data: [DONE]" in received


# -- Workers that die --------------------------------------------------------------------------------------------------


def test_a_worker_that_dies_amid_a_stream_ends_it_with_an_error_event(server: RunningServer, models: Path) -> None:
    document = {"model": "dying", "prompt": "please die", "stream": True}
    with closing(http.client.HTTPConnection("127.0.0.1", server.http, timeout=PATIENCE_S)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(document), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        assert reply.status == 200
        first = reply.readline()
        (models / "dying" / "1" / "gate").write_text("")
        rest = reply.read()
    assert b"one" in first
    assert json.loads(rest.split(b"data: ")[-1])["error"]["type"] == "server_error"
    assert b"[DONE]" not in rest
    assert post(server, "/v1/completions", body_with())[0] == 200
    again = json.dumps({"model": "dying", "prompt": "live"}).encode()
    eventually(lambda: post(server, "/v1/completions", again)[0] == 200)  # in a new worker
