"""OpenAI's routes over ordinary models: the tensor shapes of Triton's vLLM and TensorRT-LLM, vectors and scores."""

from __future__ import annotations

import base64
import http.client
import json
import socket
import struct
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from conftest import RunningServer, Serving
from support.process.eventually import eventually

PATIENCE_S = 60.0
CODE = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

def text(request, name):
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy().reshape(-1)[0].decode()

def said(value, **more):
    tensors = [pb_utils.Tensor("text_output", np.array([value.encode()], np.object_))]
    tensors += [pb_utils.Tensor(name, np.array([one])) for name, one in more.items()]
    return pb_utils.InferenceResponse(tensors)
"""
VLLM = """
backend: "python" model_transaction_policy { decoupled: true }
input { name: "text_input" data_type: TYPE_STRING dims: 1 }
input { name: "stream" data_type: TYPE_BOOL dims: 1 optional: true }
input { name: "sampling_parameters" data_type: TYPE_STRING dims: 1 optional: true }
input { name: "exclude_input_in_output" data_type: TYPE_BOOL dims: 1 optional: true }
input { name: "return_finish_reason" data_type: TYPE_BOOL dims: 1 optional: true }
input { name: "return_num_output_tokens" data_type: TYPE_BOOL dims: 1 optional: true }
output { name: "text_output" data_type: TYPE_STRING dims: -1 }
output { name: "finish_reason" data_type: TYPE_STRING dims: -1 }
output { name: "num_output_tokens" data_type: TYPE_UINT32 dims: -1 }
parameters { key: "openai" value { string_value:
  '{"chat_template": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"}' } }
"""
# It repeats the prompt and the parameters, one word in each response.
VLLM_MODEL = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            words = (text(request, "text_input") + " " + text(request, "sampling_parameters")).split(" ")
            sender = request.get_response_sender()
            for place, word in enumerate(words):
                last = place == len(words) - 1
                tokens = np.uint32(1)
                sender.send(said(word if last else word + " ", num_output_tokens=tokens,
                                 finish_reason=b"length" if last else b"None"))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
TRT = """
backend: "python" max_batch_size: 4
input { name: "text_input" data_type: TYPE_STRING dims: -1 }
input { name: "max_tokens" data_type: TYPE_INT32 dims: -1 }
input { name: "stop_words" data_type: TYPE_STRING dims: -1 optional: true }
input { name: "temperature" data_type: TYPE_FP32 dims: 1 optional: true }
output { name: "text_output" data_type: TYPE_STRING dims: -1 }
"""
TRT_MODEL = """
class TritonPythonModel:
    def execute(self, requests):
        found = []
        for request in requests:
            heard = {each.name(): each.as_numpy().reshape(-1).tolist() for each in request.inputs()}
            told = {name: [one.decode() if isinstance(one, bytes) else round(one, 3) for one in values]
                    for name, values in heard.items()}
            tensor = np.array([[json.dumps(told, sort_keys=True).encode()]], np.object_)
            found.append(pb_utils.InferenceResponse([pb_utils.Tensor("text_output", tensor)]))
        return found
"""
PLAIN = """
backend: "python" model_transaction_policy { decoupled: true }
input { name: "messages" data_type: TYPE_STRING dims: 1 }
output { name: "text_output" data_type: TYPE_STRING dims: 1 }
"""
# It counts until it is cancelled, after the role of the last message.
PLAIN_MODEL = """
class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            sender.send(said(json.loads(text(request, "messages"))[-1]["role"] + ":"))
            for number in range(10**6):
                if request.is_cancelled():
                    break
                sender.send(said(f"{number},"))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
EMBED = """
backend: "python" max_batch_size: 8
input { name: "TEXT" data_type: TYPE_STRING dims: 1 }
output { name: "VECTOR" data_type: TYPE_FP32 dims: 2 }
"""
EMBED_MODEL = """
class TritonPythonModel:
    def execute(self, requests):
        rows = [pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy().reshape(-1) for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("VECTOR", np.array(
            [[len(one), one.count(b"a")] for one in each], np.float32))]) for each in rows]
"""
ENCODER = """
backend: "python" max_batch_size: 8
input { name: "input_ids" data_type: TYPE_INT64 dims: -1 }
input { name: "attention_mask" data_type: TYPE_INT64 dims: -1 }
output { name: "VECTOR" data_type: TYPE_FP32 dims: 2 }
output { name: "num_input_tokens" data_type: TYPE_INT32 dims: 1 }
"""
# It gives the sum and the number of the tokens within the mask.
ENCODER_MODEL = """
class TritonPythonModel:
    def execute(self, requests):
        found = []
        for request in requests:
            ids, mask = [pb_utils.get_input_tensor_by_name(request, name).as_numpy()
                         for name in ("input_ids", "attention_mask")]
            sums, counts = (ids * mask).sum(axis=1), mask.sum(axis=1)
            found.append(pb_utils.InferenceResponse([
                pb_utils.Tensor("VECTOR", np.stack([sums, counts], axis=1).astype(np.float32)),
                pb_utils.Tensor("num_input_tokens", counts.reshape(-1, 1).astype(np.int32))]))
        return found
"""
SCORE = """
backend: "python" max_batch_size: 8
input { name: "QUERY" data_type: TYPE_STRING dims: 1 }
input { name: "DOCUMENT" data_type: TYPE_STRING dims: 1 }
output { name: "SCORE" data_type: TYPE_FP32 dims: 1 }
"""
SCORE_MODEL = """
class TritonPythonModel:
    def execute(self, requests):
        found = []
        for request in requests:
            first, second = [pb_utils.get_input_tensor_by_name(request, name).as_numpy().reshape(-1)
                             for name in ("QUERY", "DOCUMENT")]
            same = [[len(set(a) & set(b))] for a, b in zip(first, second)]
            found.append(pb_utils.InferenceResponse([pb_utils.Tensor("SCORE", np.array(same, np.float32))]))
        return found
"""
MODELS = {
    "vllm": (VLLM, VLLM_MODEL),
    "trt": (TRT, TRT_MODEL),
    "plain": (PLAIN, PLAIN_MODEL),
    "embed": (EMBED, EMBED_MODEL),
    "score": (SCORE, SCORE_MODEL),
    "encoder": (ENCODER, ENCODER_MODEL),
}
FLAGS = ("--openai", "--allow-grpc=false", "--backend-config=python,isolation=thread")


@pytest.fixture(scope="module")
def server(serving: Serving, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    models = tmp_path_factory.mktemp("models")
    for name, (config, code) in MODELS.items():
        write(models, name, config, code)
    with serving(models, *FLAGS) as made:
        yield made


def write(models: Path, name: str, config: str, code: str) -> None:
    version = models / name / "1"
    version.mkdir(parents=True)
    (models / name / "config.pbtxt").write_text(config)
    (version / "model.py").write_text(CODE + code)


def ask(server: RunningServer, path: str, document: Any = None) -> tuple[int, Any]:
    with closing(http.client.HTTPConnection("127.0.0.1", server.http, timeout=PATIENCE_S)) as connection:
        body = None if document is None else json.dumps(document)
        connection.request("GET" if body is None else "POST", path, body, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        content = reply.read()
        if "event-stream" in (reply.getheader("Content-Type") or ""):
            lines = content.decode().removesuffix("\n\n").split("\n\n")
            assert lines[-1] == "data: [DONE]"
            return reply.status, [json.loads(line[6:]) for line in lines[:-1]]
        return reply.status, json.loads(content)


def executions(server: RunningServer, model: str) -> int:
    row = ask(server, f"/v2/models/{model}/stats")[1]["model_stats"][0]
    return int(row["execution_count"])


CHAT = [{"role": "user", "content": "Hello there"}]


def test_a_chat_of_vllms_tensors_has_the_template_and_all_parameters(server: RunningServer) -> None:
    request = {"model": "vllm", "messages": CHAT, "max_tokens": 5, "temperature": 0, "stop": ["x"], "seed": 3}
    status, answer = ask(server, "/v1/chat/completions", request)
    choice = answer["choices"][0]
    assert (status, choice["finish_reason"]) == (200, "length")
    prompt, _, parameters = choice["message"]["content"].partition(" {")
    assert prompt == "<user>Hello there"
    assert json.loads("{" + parameters) == {"max_tokens": 5, "temperature": 0, "stop": ["x"], "seed": 3}
    words = len(choice["message"]["content"].split(" "))
    assert answer["usage"]["completion_tokens"] == words
    _, rows = ask(server, "/v1/chat/completions", {**request, "stream": True})
    assert "".join(row["choices"][0]["delta"].get("content", "") for row in rows) == choice["message"]["content"]
    assert len(rows) > words


def test_a_completion_of_tensorrt_llms_tensors_has_each_parameter_in_its_input(server: RunningServer) -> None:
    request = {"model": "trt", "prompt": "Hi", "temperature": 0.5, "stop": ["a", "b"]}
    status, answer = ask(server, "/v1/completions", request)
    assert status == 200
    told = {"max_tokens": [16], "stop_words": ["a", "b"], "temperature": [0.5], "text_input": ["Hi"]}
    assert json.loads(answer["choices"][0]["text"]) == told
    _, several = ask(server, "/v1/completions", {**request, "prompt": ["one", "two"]})
    texts = [json.loads(choice["text"])["text_input"] for choice in several["choices"]]
    assert texts == [["one"], ["two"]]


@pytest.mark.parametrize(
    ("path", "request_of", "parameter"),
    [
        ("/v1/completions", {"model": "trt", "prompt": "Hi", "seed": 5}, "seed"),
        ("/v1/completions", {"model": "trt", "prompt": "Hi", "n": 2}, "n"),
        ("/v1/completions", {"model": "trt", "prompt": [1, 2]}, "prompt"),
        ("/v1/completions", {"model": "trt", "prompt": "Hi", "logprobs": 1}, "logprobs"),
        ("/v1/chat/completions", {"model": "trt", "messages": CHAT}, "messages"),
        ("/v1/completions", {"model": "embed", "prompt": "Hi"}, "model"),
        ("/v1/embeddings", {"model": "trt", "input": "Hi"}, "model"),
        ("/v1/embeddings", {"model": "score", "input": "Hi"}, "model"),
        ("/v1/embeddings", {"model": "embed", "input": "Hi", "dimensions": 5}, "dimensions"),
        ("/v1/embeddings", {"model": "embed", "input": [1, 2]}, "input"),
        ("/v1/embeddings", {"model": "embed", "input": []}, "input"),
        ("/v1/embeddings", {"model": "embed", "input": ""}, "input"),
        ("/v1/embeddings", {"model": "encoder", "input": "text"}, "input"),
        ("/v1/embeddings", {"model": "encoder", "input": [[1], [-1]]}, "input"),
        ("/v1/rerank", {"model": "encoder", "query": "q", "documents": ["d"]}, "documents"),
        ("/v1/embeddings", {"model": "embed", "input": "x", "encoding_format": "hex"}, "encoding_format"),
        ("/v1/rerank", {"model": "embed", "documents": ["x"]}, "query"),
        ("/v1/score", {"model": "score", "text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ("/tokenize", {"model": "trt", "prompt": "x"}, "model"),
    ],
)
def test_what_a_model_cannot_do_is_refused_by_name(
    server: RunningServer, path: str, request_of: Any, parameter: str
) -> None:
    status, answer = ask(server, path, request_of)
    assert (status, answer["error"]["param"]) == (400, parameter)


def test_a_model_may_take_the_messages_and_stop_strings_end_it(server: RunningServer) -> None:
    request = {"model": "plain", "messages": CHAT, "stop": "4,5"}
    for stream in (False, True):
        status, answer = ask(server, "/v1/chat/completions", {**request, "stream": stream})
        assert status == 200
        if stream:
            text = "".join(row["choices"][0]["delta"].get("content", "") for row in answer)
            reason = answer[-1]["choices"][0]["finish_reason"]
        else:
            text, reason = answer["choices"][0]["message"]["content"], answer["choices"][0]["finish_reason"]
        assert (text, reason) == ("user:0,1,2,3,", "stop")


def test_a_client_that_leaves_cancels_an_ordinary_model(server: RunningServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.http, timeout=PATIENCE_S)
    body = json.dumps({"model": "plain", "messages": CHAT, "stream": True})
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    reply = connection.getresponse()
    assert reply.read(10)
    reply.close()
    connection.close()
    # the model has one instance, which counts to a million unless it is cancelled
    eventually(lambda: ask(server, "/v1/chat/completions", {"model": "plain", "messages": CHAT, "stop": "3"})[0] == 200)


def test_a_connection_whose_client_sends_no_more_is_closed_after_the_cancellation(server: RunningServer) -> None:
    body = json.dumps({"model": "plain", "messages": CHAT, "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.http), timeout=PATIENCE_S) as connection:
        connection.sendall(head.encode() + body)
        assert connection.recv(10)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1 << 20):
            pass  # until the server closes the connection


def test_a_list_of_texts_is_one_batch(server: RunningServer) -> None:
    before = executions(server, "embed")
    status, answer = ask(server, "/v1/embeddings", {"model": "embed", "input": ["a", "bb", "aca"]})
    assert status == 200
    assert [row["embedding"] for row in answer["data"]] == [[1, 1], [2, 0], [3, 2]]
    assert [row["index"] for row in answer["data"]] == [0, 1, 2]
    assert executions(server, "embed") == before + 1
    status, answer = ask(server, "/v1/embeddings", {"model": "embed", "input": ["x" * size for size in range(1, 20)]})
    assert [row["embedding"][0] for row in answer["data"]] == [*range(1, 20)]
    assert executions(server, "embed") <= before + 1 + 3


def test_tokens_are_embedded_in_one_batch_by_a_model_that_takes_them(server: RunningServer) -> None:
    before = executions(server, "encoder")
    status, answer = ask(server, "/v1/embeddings", {"model": "encoder", "input": [[1, 2, 3], [9]]})
    assert (status, [row["embedding"] for row in answer["data"]]) == (200, [[6, 3], [9, 1]])
    assert answer["usage"] == {"prompt_tokens": 4, "total_tokens": 4}
    assert executions(server, "encoder") == before + 1
    _, answer = ask(server, "/v1/embeddings", {"model": "encoder", "input": [4, 5]})
    assert [row["embedding"] for row in answer["data"]] == [[9, 2]]


def test_vectors_come_as_base64_where_the_client_wants_that(server: RunningServer) -> None:
    request = {"model": "embed", "input": "aca", "encoding_format": "base64", "dimensions": 2}
    _, answer = ask(server, "/v1/embeddings", request)
    assert struct.unpack("<2f", base64.b64decode(answer["data"][0]["embedding"])) == (3, 2)


def test_documents_are_ranked_by_a_model_of_pairs_and_by_vectors(server: RunningServer) -> None:
    request = {"query": "abc", "documents": ["xyz", "abx", {"text": "cab"}], "top_n": 2}
    _, answer = ask(server, "/v1/rerank", {"model": "score", **request})
    assert [(row["index"], row["relevance_score"]) for row in answer["results"]] == [(2, 3), (1, 2)]
    assert answer["results"][0]["document"] == {"text": "cab"}
    _, answer = ask(server, "/rerank", {"model": "embed", **request, "return_documents": False})
    assert answer["results"][0]["index"] in (1, 2)
    assert "document" not in answer["results"][0]


def test_texts_are_scored_in_pairs_or_against_one(server: RunningServer) -> None:
    before = executions(server, "score")
    _, answer = ask(server, "/v1/score", {"model": "score", "text_1": "ab", "text_2": ["a", "ab", "x"]})
    assert [row["score"] for row in answer["data"]] == [1, 2, 0]
    assert executions(server, "score") == before + 1
    _, answer = ask(server, "/score", {"model": "embed", "text_1": ["aa", "b"], "text_2": ["aaaa", "cc"]})
    assert [row["score"] for row in answer["data"]] == pytest.approx([1.0, 1.0])


def test_all_models_that_can_be_used_are_listed(server: RunningServer) -> None:
    assert [row["id"] for row in ask(server, "/v1/models")[1]["data"]] == sorted(MODELS)


WRONG = (None, True, 7, -1.5, "x", [], [1], ["end"], {}, {"a": 1}, [[]], 1e300, "\x00")
ROUTES = {
    "/v1/chat/completions": {"model": "vllm", "messages": CHAT},
    "/v1/completions": {"model": "vllm", "prompt": "a", "max_tokens": 2},
    "/v1/responses": {"model": "vllm", "input": "a"},
    "/v1/embeddings": {"model": "embed", "input": "a"},
    "/v1/score": {"model": "score", "text_1": "a", "text_2": "b"},
    "/v1/rerank": {"model": "score", "query": "a", "documents": ["b"]},
    "/tokenize": {"model": "vllm", "prompt": "a"},
    "/detokenize": {"model": "vllm", "tokens": [1]},
    "/models/embed": {"TEXT": "a"},
    "/v2/models/embed/release": {"action": "start", "version": 1, "weight": 1, "steps": [1], "rules": {"least": 1}},
}


@pytest.mark.parametrize("path", ROUTES)
def test_a_body_of_wrong_types_is_the_clients_mistake(server: RunningServer, path: str) -> None:
    good = ROUTES[path]
    bodies: list[Any] = [*WRONG]
    for name in good:
        bodies += [{**good, name: value} for value in WRONG]
    for body in bodies:
        with closing(http.client.HTTPConnection("127.0.0.1", server.http, timeout=PATIENCE_S)) as connection:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status == 200:
                continue  # such as a text for a member that may be one; the rest of a stream is left unread
            assert 400 <= answer.status < 500, (body, answer.status, answer.read())


@pytest.mark.parametrize("body", ["", "{", "[]", '"x"', "[" * 100_000, '{"action": ["end"]}', '{"action": null}', "7"])
def test_a_release_without_an_action_is_the_clients_mistake(server: RunningServer, body: str) -> None:
    with closing(http.client.HTTPConnection("127.0.0.1", server.http, timeout=PATIENCE_S)) as connection:
        connection.request("POST", "/v2/models/embed/release", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert (answer.status, b"error" in answer.read()) == (400, True)
