"""OpenAI's routes of a real process, alone and with front processes: the same answers on every wire, and one key."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from conftest import RunningServer, Serving
from support.models.generation_models import tiny

PATIENCE_S = 60.0
KEY = "Bearer sk-test"
SEEDED = {"model": "tiny", "max_tokens": 24, "temperature": 0.9, "seed": 7, "ignore_eos": True}
CHAT = {**SEEDED, "messages": [{"role": "user", "content": "What is two plus two?"}]}


@pytest.fixture(scope="module", params=["--frontends=0", "--frontends=2"])
def server(request: Any, serving: Serving, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    models = tmp_path_factory.mktemp("models")
    tiny(models)
    restricted = f"--http-restricted-api=inference,metadata:authorization={KEY}"
    with serving(models, "--allow-grpc=false", restricted, request.param) as made:
        yield made


def ask(
    server: RunningServer, path: str, document: Any = None, *, key: str = KEY, method: str = ""
) -> tuple[int, str, bytes]:
    headers = {"Content-Type": "application/json", **({"Authorization": key} if key else {})}
    with closing(http.client.HTTPConnection("127.0.0.1", server.http, timeout=PATIENCE_S)) as connection:
        body = None if document is None else json.dumps(document)
        connection.request(method or ("GET" if body is None else "POST"), path, body, headers)
        reply = connection.getresponse()
        return reply.status, reply.getheader("Content-Type") or "", reply.read()


def rows(events: bytes) -> list[Any]:
    lines = events.decode().removesuffix("\n\n").split("\n\n")
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_an_answer_is_explained_by_its_id(server: RunningServer) -> None:
    _, _, body = ask(server, "/v1/chat/completions", CHAT)
    status, _, body = ask(server, f"/v2/models/tiny/explain/{json.loads(body)['id']}")
    assert status == 200
    assert json.loads(body)["answers"]["answers"] == 1
    assert ask(server, "/v2/models/tiny/explain/chatcmpl-other")[0] != 200


def test_a_stream_is_the_whole_answer_in_pieces(server: RunningServer) -> None:
    status, kind, body = ask(server, "/v1/chat/completions", CHAT)
    whole = json.loads(body)["choices"][0]
    assert (status, kind) == (200, "application/json")
    status, kind, body = ask(server, "/openai/v1/chat/completions", {**CHAT, "stream": True})
    assert (status, kind.split(";")[0]) == (200, "text/event-stream")
    choices = [row["choices"][0] for row in rows(body)]
    assert "".join(each["delta"].get("content", "") for each in choices) == whole["message"]["content"]
    assert choices[-1]["finish_reason"] == whole["finish_reason"] == "length"
    assert len(choices) > 5


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v2/models/tiny/generate_stream"])
def test_a_client_that_stops_sending_frees_its_row_and_its_connection_ends(server: RunningServer, path: str) -> None:
    long = {"sampling_parameters": json.dumps({"max_tokens": 490, "ignore_eos": True}), "text_input": "x"}
    body = json.dumps({**CHAT, "max_tokens": 490, "stream": True} if "chat" in path else {**long, "stream": True})
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nAuthorization: {KEY}\r\nContent-Length: {len(body)}\r\n\r\n"
    for begun in (False, True):
        with socket.create_connection(("127.0.0.1", server.http), timeout=PATIENCE_S) as client:
            client.sendall((head + body).encode())
            received = client.recv(1) if begun else b""
            client.shutdown(socket.SHUT_WR)
            while piece := client.recv(1 << 16):
                received += piece
        assert received.startswith(b"HTTP/1.1 200 ") or b"cancelled" in received, received[:200]
    assert ask(server, "/v1/chat/completions", CHAT)[0] == 200


def test_a_seed_gives_the_same_text_over_v2_and_over_openais_routes(server: RunningServer) -> None:
    _, _, body = ask(server, "/v1/completions", {**SEEDED, "prompt": "The baker opens"})
    parameters = {name: value for name, value in SEEDED.items() if name != "model"}
    document = {"text_input": "The baker opens", "exclude_input_in_output": True, "stream": False,
                "sampling_parameters": json.dumps(parameters)}  # fmt: skip
    _, _, over_v2 = ask(server, "/v2/models/tiny/generate", document)
    assert json.loads(body)["choices"][0]["text"] == json.loads(over_v2)["text_output"]


@pytest.mark.parametrize(
    ("path", "document"),
    [
        ("/v1/chat/completions", CHAT),
        ("/openai/v1/completions", {**SEEDED, "prompt": "x"}),
        ("/tokenize", {"model": "tiny", "prompt": "x"}),
        ("/v1/detokenize", {"model": "tiny", "tokens": [5]}),
        ("/v1/models", None),
        ("/v1/models/tiny", None),
    ],
)
def test_every_route_needs_the_key(server: RunningServer, path: str, document: Any) -> None:
    assert ask(server, path, document)[0] == 200
    for key in ("", "Bearer other"):
        status, kind, body = ask(server, path, document, key=key)
        assert (status, kind) == (401, "application/json")
        error = json.loads(body)["error"]
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")


LONG = "word " * 4000
OVERLONG = {
    "/v1/chat/completions": [
        ({"messages": [{"role": "user", "content": "word " * 400}]}, "messages"),
        ({"messages": [{"role": "user", "content": LONG}], "stream": True}, "messages"),
        ({"messages": [{"role": "user", "content": "a" * (1 << 20)}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a"}] * 1000}, "messages"),
        ({"messages": [{"role": "user", "content": "a"}], "max_tokens": 5000}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 5000}, "max_completion_tokens"),
    ],
    "/v1/completions": [
        ({"prompt": LONG}, "prompt"),
        ({"prompt": [5] * 600}, "prompt"),
        ({"prompt": ["a", "b" * (1 << 20)], "stream": True}, "prompt"),
        ({"prompt": "a", "max_tokens": 5000}, "max_tokens"),
    ],
    "/v1/responses": [
        ({"input": LONG}, "input"),
        ({"input": [{"role": "user", "content": LONG}], "stream": True}, "input"),
        ({"input": "a", "max_output_tokens": 5000}, "max_output_tokens"),
    ],
}


@pytest.mark.parametrize("path", OVERLONG)
def test_every_way_beyond_the_context_is_one_error(server: RunningServer, path: str) -> None:
    for document, parameter in OVERLONG[path]:
        status, kind, body = ask(server, path, {"model": "tiny", **document})
        error = json.loads(body)["error"]
        assert (status, kind) == (400, "application/json"), error
        found = (error["type"], error["code"], error["param"])
        assert found == ("invalid_request_error", "context_length_exceeded", parameter), error
        assert error["message"].startswith("This model's maximum context length is 512 tokens. However, you"), error


def test_tokenize_has_its_own_limit_in_plain_words(server: RunningServer) -> None:
    status, _, body = ask(server, "/tokenize", {"model": "tiny", "prompt": "a" * (1 << 24)})
    error = json.loads(body)["error"]
    assert (status, error["code"], error["param"]) == (400, None, "prompt")


@pytest.mark.parametrize(
    ("path", "document", "key"),
    [
        ("/v1/models", None, KEY),
        ("/v1/models", None, ""),
        ("/v1/unknown", {}, KEY),
        ("/v1/chat/completions", CHAT, KEY),
        ("/v1/chat/completions", {**CHAT, "stream": True}, KEY),
        ("/v1/chat/completions", {"model": "other", "messages": []}, KEY),
        ("/openai/v1/responses", {"model": "tiny", "input": "a", "max_output_tokens": 2}, KEY),
        ("/tokenize", {"model": "tiny", "prompt": "a"}, KEY),
    ],
)
def test_every_answer_has_one_request_id(server: RunningServer, path: str, document: Any, key: str) -> None:
    for given in ("", "my-id.7", "x" * 300):
        headers = {"Authorization": key, **({"X-Request-Id": given} if given else {})}
        with closing(http.client.HTTPConnection("127.0.0.1", server.http, timeout=PATIENCE_S)) as connection:
            body = None if document is None else json.dumps(document)
            connection.request("GET" if body is None else "POST", path, body, headers)
            reply = connection.getresponse()
            reply.read()
        found = [value for name, value in reply.getheaders() if name.lower() == "x-request-id"]
        assert len(found) == 1
        assert (found[0] == given) == (given == "my-id.7")


CITIES = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
NUMBER = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": CITIES}}


def calls_and_text(server: RunningServer, request: dict[str, Any]) -> tuple[str, str, str]:
    """Return the arguments of calls, the text and the reason of an answer, which is the same as a stream."""
    status, _, body = ask(server, "/v1/chat/completions", request)
    assert status == 200, body
    choice = json.loads(body)["choices"][0]
    message = choice["message"]
    calls = "".join(call["function"]["arguments"] for call in message.get("tool_calls", ()))
    _, _, events = ask(server, "/v1/chat/completions", {**request, "stream": True})
    deltas = [row["choices"][0]["delta"] for row in rows(events)]
    assert "".join(delta.get("content") or "" for delta in deltas) == (message["content"] or "")
    parts = [call["function"].get("arguments", "") for delta in deltas for call in delta.get("tool_calls", ())]
    assert "".join(parts) == calls
    return calls, message["content"] or "", choice["finish_reason"]


def test_an_answer_with_tools_and_a_form_is_a_call_or_has_the_form(server: RunningServer) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "number", "schema": NUMBER}}
    request = {**CHAT, "ignore_eos": False, "max_tokens": 200, "tools": [TOOL], "response_format": form}
    kinds = set()
    for seed in range(12):
        calls, text, reason = calls_and_text(server, {**request, "seed": seed})
        kinds.add("call" if calls else "text")
        if calls and reason != "length":
            assert (reason, text) == ("tool_calls", "")
        elif reason == "stop":
            assert json.loads(text)["n"] in (1, 2)
    assert kinds == {"call", "text"}


@pytest.mark.parametrize("choice", ["required", {"type": "allowed_tools", "allowed_tools": {
    "mode": "required", "tools": [{"type": "function", "function": {"name": "weather"}}]}}])  # fmt: skip
def test_a_required_call_that_is_cut_leaves_no_half_text(server: RunningServer, choice: Any) -> None:
    request = {**CHAT, "ignore_eos": False, "tools": [TOOL], "tool_choice": choice}
    for limit in range(1, 30, 2):
        _, text, _ = calls_and_text(server, {**request, "max_tokens": limit})
        assert text == ""


@pytest.mark.parametrize("given", ["What is two plus two?", [{"role": "user", "content": "What is two plus two?"}]])
def test_the_tokens_of_a_conversation_are_counted_as_its_response_counts_them(
    server: RunningServer, given: Any
) -> None:
    status, _, body = ask(server, "/v1/responses/input_tokens", {"model": "tiny", "input": given, "tools": []})
    _, _, response = ask(server, "/v1/responses", {"model": "tiny", "input": given, "max_output_tokens": 1})
    expected = {"object": "response.input_tokens", "input_tokens": json.loads(response)["usage"]["input_tokens"]}
    assert (status, json.loads(body)) == (200, expected)
    assert ask(server, "/v1/responses/input_tokens", {"model": "tiny", "input": given}, key="")[0] == 401


def test_models_are_loaded_and_unloaded_where_they_may_be(serving: Serving, tmp_path: Path) -> None:
    tiny(tmp_path)
    with serving(tmp_path, "--allow-grpc=false", "--model-control-mode=explicit", "--openai") as server:
        assert json.loads(ask(server, "/v1/models")[2])["data"] == []
        status, _, body = ask(server, "/v1/models/tiny/load", method="POST")
        assert (status, json.loads(body)) == (200, {"id": "tiny", "object": "model", "status": "loaded"})
        assert ask(server, "/v1/chat/completions", CHAT)[0] == 200
        assert ask(server, "/openai/v1/models/tiny/unload", {})[0] == 200
        status, _, body = ask(server, "/v1/models/none/load", {})
        assert (status >= 400, isinstance(json.loads(body)["error"]["message"], str)) == (True, True)
        assert ask(server, "/v1/models/tiny/load")[0] == 405


def test_models_are_not_loaded_where_the_server_chooses_them(server: RunningServer) -> None:
    status, _, body = ask(server, "/v1/models/tiny/unload", {})
    assert status == 400
    assert "start it with --model-control-mode=explicit" in json.loads(body)["error"]["message"]
    assert ask(server, "/v1/chat/completions", CHAT)[0] == 200


@pytest.mark.parametrize(
    ("path", "document"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/completions", {"prompt": "Hello there"}),
    ],
)
def test_prompt_logprobs_have_a_row_for_each_token_of_the_prompt(
    server: RunningServer, path: str, document: Any
) -> None:
    request = {"model": "tiny", "max_tokens": 1, "prompt_logprobs": 2, "return_token_ids": True, **document}
    status, _, body = ask(server, path, request)
    assert status == 200, body
    answer = json.loads(body)
    holder = answer if "messages" in document else answer["choices"][0]
    first, *rows = holder["prompt_logprobs"]
    ids = holder["prompt_token_ids"]
    assert first is None
    assert len(rows) == len(ids) - 1
    for token, row in zip(ids[1:], rows, strict=True):
        assert str(token) in row
        assert 2 <= len(row) <= 3
        assert {each["rank"] for each in row.values()} >= {1, 2}
    status, _, body = ask(server, path, {**request, "stream": True})
    assert (status, json.loads(body)["error"]["param"]) == (400, "prompt_logprobs")


def test_models_are_listed(server: RunningServer) -> None:
    document = json.loads(ask(server, "/v1/models")[2])
    assert [row["id"] for row in document["data"]] == ["tiny"]
    status, _, body = ask(server, "/v1/models/other")
    assert (status, json.loads(body)["error"]["code"]) == (404, "model_not_found")


def test_the_form_of_an_answer_is_enforced(server: RunningServer) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "number", "schema": schema}}
    status, _, body = ask(server, "/v1/chat/completions", {**CHAT, "ignore_eos": False, "response_format": form})
    assert status == 200
    assert json.loads(json.loads(body)["choices"][0]["message"]["content"])["n"] in (1, 2)
    wrong = {**CHAT, "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}}
    status, _, body = ask(server, "/v1/chat/completions", wrong)
    assert (status, json.loads(body)["error"]["param"]) == (400, "response_format")


def test_a_path_without_a_route_is_named(server: RunningServer) -> None:
    status, _, body = ask(server, "/v1/other")
    assert (status, json.loads(body)["error"]["code"]) == (404, "unknown_url")
    status, _, body = ask(server, "/v1/models/tiny:predict", {}, method="POST")
    assert status == 404
    assert "this is a route of KServe V1" in json.loads(body)["error"]


def test_without_a_language_model_there_are_no_such_routes(serving: Serving, tmp_path: Path) -> None:
    tmp_path.joinpath("models").mkdir()
    with serving(tmp_path / "models", "--allow-grpc=false") as empty:
        status, kind, body = ask(empty, "/v1/models", key="")
        assert (status, kind) == (404, "application/json")
        assert "served with a language model or --openai" in json.loads(body)["error"]
    with serving(tmp_path / "models", "--allow-grpc=false", "--openai") as empty:
        assert json.loads(ask(empty, "/v1/models", key="")[2]) == {"object": "list", "data": []}
