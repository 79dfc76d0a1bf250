"""OpenAI's routes between codec and engine: what a client gets, and what becomes of its rows when it leaves."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import Future
from dataclasses import replace
from threading import get_ident
from typing import Any

import pytest

from remora.errors import RemoraError
from remora.protocols.http1 import Head
from remora.protocols.rest.answer import HttpAnswer, failure
from remora.protocols.restriction import Restrictions
from remora.server.http.access_rules import AccessRules
from remora_llm.generation import Sink
from remora_llm.generation.tasks import Task
from remora_llm.openai.routes import find_route
from support.engine.fakes import FakeExchange
from support.process.eventually import eventually_in_loop
from support.wire.openai_by_hand import TEXT, FakeModel, FakeRouted, Server, running


@running
async def test_a_completion_is_answered_whole() -> None:
    server = Server()
    _, exchange = server.ask(max_tokens=5)
    status, answer = await server.answer(exchange)
    assert status == 200
    assert answer["choices"][0]["text"] == TEXT[:5]
    assert server.model.users == 0


@running
async def test_a_stream_begins_with_its_first_token_and_ends_with_done() -> None:
    server = Server()
    _, exchange = server.ask(stream=True, max_tokens=50)
    assert exchange.begun == []
    await server.turn()
    assert exchange.begun[0][0] == 200
    assert dict(exchange.begun[0][1])[b"Content-Type"].startswith(b"text/event-stream")
    assert len(exchange.pieces) == 1
    await server.turn(30)
    assert exchange.finished == 1
    assert b"".join(exchange.pieces).endswith(b"data: [DONE]\n\n")
    assert server.model.users == 0


@running
async def test_a_client_that_leaves_frees_its_row_with_the_next_step() -> None:
    server = Server()
    call, exchange = server.ask(stream=True, max_tokens=900, ignore_eos=True)
    await server.turn(3)
    assert server.model.loop.stats().running == 1
    assert call is not None
    call.cancel()
    sent = len(exchange.pieces)
    await server.turn()
    assert server.model.loop.stats().running == 0
    assert server.model.users == 0
    assert len(exchange.pieces) == sent


@running
async def test_the_model_stays_open_until_the_last_choice_has_ended() -> None:
    server = Server()
    _, exchange = server.ask(prompt=["a", "b"], n=2, max_tokens=3)
    assert server.model.users == 1
    status, answer = await server.answer(exchange)
    assert (status, len(answer["choices"])) == (200, 4)
    assert server.model.users == 0


@running
async def test_no_prompt_runs_if_one_of_a_list_is_refused() -> None:
    server = Server()
    status, error = server.refusal(prompt=["a", "b" * 3000])
    assert (status, error["param"]) == (400, "prompt")
    await server.turn()
    assert server.model.loop.stats().running == 0
    assert server.model.users == 0


@running
async def test_a_failure_before_the_first_token_is_a_500() -> None:
    server = Server()
    server.model.broken = True
    _, exchange = server.ask(stream=True)
    status, answer = await server.answer(exchange)
    assert status == 500
    assert "the device is gone" in answer["error"]["message"]
    assert not exchange.begun
    assert server.model.users == 0


@running
async def test_a_failure_amid_a_stream_ends_it_with_an_error_event() -> None:
    server = Server()
    _, exchange = server.ask(stream=True, max_tokens=50)
    await server.turn(2)
    server.model.broken = True
    await server.turn()
    last = exchange.pieces[-1]
    assert "the device is gone" in json.loads(last.split(b"data: ")[-1])["error"]["message"]
    assert b"[DONE]" not in last
    assert exchange.finished == 1


@running
async def test_all_pieces_of_a_step_reach_the_event_loop_in_one_wake_up() -> None:
    server = Server()
    exchanges = [server.ask(stream=True, max_tokens=50)[1] for _ in range(4)]
    await server.turn(4)
    loop = asyncio.get_running_loop()
    posts: list[Any] = []
    post = loop.call_soon_threadsafe
    loop.call_soon_threadsafe = lambda *work: posts.append(work) or post(*work)  # type: ignore[method-assign]
    before = [len(exchange.pieces) for exchange in exchanges]
    await server.turn()
    assert [len(exchange.pieces) - count for exchange, count in zip(exchanges, before, strict=True)] == [1] * 4
    assert len(posts) == 1


@running
async def test_at_its_deadline_an_answer_is_what_there_is() -> None:
    server = Server()
    headers = ((b"x-request-timeout-ms", b"50"),)
    _, exchange = server.ask(headers=headers, max_tokens=50)
    await server.turn(3)
    server.model.clock_ns = 1 << 62
    status, answer = await server.answer(exchange)
    assert status == 200
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["text"] == TEXT[:3]
    assert (b"X-Request-Timed-Out", b"true") in exchange.answers[0].headers
    _, late = server.ask(headers=headers)
    assert (await server.answer(late))[0] == 504


@running
async def test_two_hundred_requests_at_their_deadline_leave_their_rows_to_one_that_is_answered_at_once() -> None:
    server = Server()
    timed = [
        server.ask(headers=((b"x-request-timeout-ms", b"50"),), max_tokens=900, ignore_eos=True) for _ in range(200)
    ]
    await server.turn(2)
    server.model.clock_ns = 1 << 62
    _, exchange = server.ask(max_tokens=1)
    await server.turn()
    assert exchange.answers[0].status == 200
    statuses = [each.answers[0].status for _, each in timed]
    assert statuses.count(200) > 0  # of those that had rows
    assert statuses.count(504) == 200 - statuses.count(200)
    assert (server.model.users, server.model.loop.stats().running) == (0, 0)


@running
async def test_with_refuse_late_a_request_whose_first_token_would_come_too_late_is_refused() -> None:
    canary = FakeModel("from the canary")
    server = Server(routed := FakeRouted(canary))
    server.engine.options = replace(server.engine.options, refuse_late=True)
    headers = ((b"x-request-timeout-ms", b"50"),)
    canary.step_ns = 20_000_000
    _, first = server.ask(max_tokens=4, headers=headers)  # nothing has been measured yet
    assert (await server.answer(first, canary))[0] == 200
    for _ in range(40):
        server.ask(max_tokens=900, ignore_eos=True)
    await server.turn(runs=canary)
    _, late = server.ask(headers=headers)
    (answer,) = late.answers
    assert answer.status == 429
    assert int(dict(answer.headers)[b"Retry-After"]) >= 1
    assert b"after the deadline of 50 ms" in answer.body[0]
    assert isinstance(routed.counted[-1], RemoraError)  # it counts against its version
    _, patient = server.ask()
    assert patient.answers == []


@running
async def test_unloading_amid_a_stream_ends_it_with_an_error_event_and_refuses_further_requests() -> None:
    server = Server()
    _, exchange = server.ask(stream=True, max_tokens=900, ignore_eos=True)
    await server.turn(2)
    server.model.loop.close()
    await asyncio.sleep(0)
    last = exchange.pieces[-1]
    assert json.loads(last.split(b"data: ")[-1])["error"]["type"] == "server_error"
    assert b"[DONE]" not in b"".join(exchange.pieces)
    assert exchange.finished == 1
    _, refused = server.ask()
    (answer,) = refused.answers
    assert answer.status == 503
    assert b"Retry-After" in dict(answer.headers)
    assert server.model.users == 0


@running
async def test_an_adapter_is_listed_and_chosen_by_the_field_model() -> None:
    model = FakeModel(adapters=("french", "legal"))
    server = Server(model)
    chosen: list[str] = []
    begin = model.loop.begin

    def watched(task: Task, sink: Sink) -> None:
        chosen.append(task.adapter)
        begin(task, sink)

    model.loop.begin = watched  # type: ignore[method-assign]
    _, listed = server.ask(path="/v1/models", method="GET")
    rows = {row["id"]: row["root"] for row in json.loads(listed.answers[0].body[0])["data"]}
    assert rows == dict.fromkeys(("m", "alias", "m:french", "m:legal"), "m")
    for name in ("m", "m:french", "alias:legal"):
        _, exchange = server.ask(model=name, max_tokens=1)
        assert (await server.answer(exchange))[1]["model"] == name
    assert chosen == ["", "french", "legal"]
    _, one = server.ask(path="/v1/models/m:french", method="GET")
    assert json.loads(one.answers[0].body[0])["id"] == "m:french"
    status, error = server.refusal(model="m:spanish")
    assert (status, error["code"]) == (404, "model_not_found")
    assert "'m:french'" in error["message"]


@running
async def test_an_answer_names_what_it_repeats_for() -> None:
    server = Server()
    _, exchange = server.ask(max_tokens=1)
    assert (await server.answer(exchange))[1]["system_fingerprint"] == "scripted"
    _, streamed = server.ask(max_tokens=1, stream=True)
    await server.turn(2)
    assert b'"system_fingerprint":"scripted"' in streamed.pieces[0]


@running
async def test_a_large_body_is_decoded_and_begun_in_another_thread() -> None:
    server, threads = Server(), list[int]()
    begin = server.model.loop.begin
    server.model.loop.begin = lambda *task: threads.append(get_ident()) or begin(*task)  # type: ignore[method-assign]
    _, exchange = server.ask(prompt="a", max_tokens=2, stop=["x" * 4000] * 4, user="u" * 5000)
    assert server.model.users == 0
    await eventually_in_loop(lambda: server.model.loop.stats().waiting == 1)
    assert get_ident() not in threads  # although the head has no length, as of a chunked body
    status, answer = await server.answer(exchange)
    assert (status, answer["choices"][0]["text"]) == (200, TEXT[:2])
    _, wrong = server.ask(body=b'{"prompt": "' + b"a" * 20_000)
    await eventually_in_loop(lambda: [each.status for each in wrong.answers] == [400])


@running
async def test_a_client_may_leave_while_its_body_is_decoded() -> None:
    server = Server()
    call, exchange = server.ask(prompt="a", user="u" * 20_000)
    assert call is not None
    call.cancel()
    await eventually_in_loop(lambda: bool(exchange.answers))
    await server.turn(2)
    assert server.model.users == 0
    (answer,) = exchange.answers  # ends an exchange whose client may only have ended its sending
    assert b"the request was cancelled" in answer.body[0]


@running
async def test_a_request_waits_for_its_model() -> None:
    server = Server()
    server.engine.loading = Future()
    _, exchange = server.ask(max_tokens=1)
    assert not exchange.answers
    server.engine.loading = None
    (again,) = server.waited
    again()
    assert (await server.answer(exchange))[0] == 200


@running
async def test_too_many_requests_are_a_429_with_the_time_of_the_next_attempt() -> None:
    server = Server(FakeModel(max_waiting=1))
    for _ in range(2):
        server.ask(max_tokens=5)
    _, exchange = server.ask(max_tokens=5)
    (answer,) = exchange.answers
    assert answer.status == 429
    assert b"Retry-After" in dict(answer.headers)


@running
async def test_requests_without_a_checked_key_are_one_caller_whatever_they_name() -> None:
    server = Server()
    callers: list[str] = []
    begin = server.model.loop.begin

    def watched(task: Task, sink: Sink) -> None:
        callers.append(task.caller)
        begin(task, sink)

    server.model.loop.begin = watched  # type: ignore[method-assign]
    for header in ((b"authorization", b"Bearer one"), (b"x-api-key", b"two")):
        server.ask(headers=(header,))
    server.ask(user="me", headers=((b"authorization", b"Bearer one"),))
    server.ask()
    assert callers == [""] * 4


@running
async def test_a_model_has_its_name_and_others() -> None:
    server = Server()
    _, exchange = server.ask(path="/v1/models", method="GET")
    rows = json.loads(exchange.answers[0].body[0])["data"]
    assert [(row["id"], row["created"], row["root"]) for row in rows] == [("m", 7, "m"), ("alias", 7, "m")]
    _, exchange = server.ask(model="alias", max_tokens=1)
    assert (await server.answer(exchange))[1]["model"] == "alias"


@running
async def test_the_schema_has_the_paths_of_the_prefix_under_which_it_is_read() -> None:
    server = Server()
    _, exchange = server.ask(path="/openai/v1/openapi.json", method="GET")
    document = json.loads(exchange.answers[0].body[0])
    assert "/openai/v1/chat/completions" in document["paths"]


@running
async def test_what_a_client_did_wrong_is_named() -> None:
    server = Server()
    status, error = server.refusal(model="other")
    assert (status, error["param"], error["code"]) == (404, "model", "model_not_found")
    assert "'m'" in error["message"]
    assert server.refusal(model=None)[1]["param"] == "model"
    assert server.refusal(path="/v1/models/other", method="GET")[0] == 404
    assert server.refusal(method="GET")[0] == 405
    assert server.refusal(path="/v1/chat/completions", body=b'{"model": "m", "messages": []}')[1]["param"] == "messages"
    assert server.refusal(temperature=-1)[1]["param"] == "temperature"
    assert server.refusal(headers=((b"content-encoding", b"br"),))[0] == 501
    assert server.refusal(headers=((b"x-request-timeout-ms", b"soon"),))[0] == 400
    server.model.generation = None
    assert server.refusal()[0] == 400


@pytest.mark.parametrize("form", ["schema", "tools", "messages", "parameters", "bias"])
def test_a_deep_body_is_the_clients_mistake(form: str) -> None:
    deep = b'{"properties": {"a": ' * 450 + b"{}" + b"}}" * 450
    parts = {
        "schema": b'"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": %b}}' % deep,
        "tools": b'"tools": [{"type": "function", "function": {"name": "f", "parameters": %b}}]' % deep,
        "messages": b'"messages": [{"role": "user", "content": [%b]}]' % deep,
        "parameters": b'"chat_template_kwargs": %b' % deep,
        "bias": b'"logit_bias": %b' % deep,
    }
    messages = b'"messages": [{"role": "user", "content": "x"}], ' if form != "messages" else b""
    body = b'{"model": "m", %b%b}' % (messages, parts[form])

    async def ask() -> None:
        server = Server(FakeModel(), chat=True)
        _, exchange = server.ask(path="/v1/chat/completions", body=body)
        await eventually_in_loop(lambda: bool(exchange.answers))
        assert exchange.answers[0].status == 400, exchange.answers[0].body
        assert server.model.users == 0

    asyncio.run(ask())


@running
async def test_another_content_type_is_a_415() -> None:
    server = Server()
    exchange = FakeExchange()
    where = find_route("/v1/completions")
    assert where is not None
    head = Head("POST", "/v1/completions", ((b"content-type", b"application/x-www-form-urlencoded"),))
    server.routes.handle(where, head, b"a=b", exchange)
    assert exchange.answers[0].status == 415


@running
async def test_while_models_are_loaded_an_unknown_one_may_still_come() -> None:
    server = Server()
    server.engine.started = False
    assert server.refusal(model="other")[0] == 503


@running
async def test_ignored_fields_are_named_in_a_header() -> None:
    server = Server(openai_unknown="ignore")
    _, exchange = server.ask(max_tokens=1, fancy=1)
    await server.answer(exchange)
    assert (b"X-Ignored-Parameters", b"fancy") in exchange.answers[0].headers


@running
async def test_a_host_may_have_a_default_model() -> None:
    server = Server()
    where = find_route("/v1/completions")
    assert where is not None
    exchange = FakeExchange()
    head = Head("POST", "/v1/completions", ())
    server.routes.handle(where, head, b'{"prompt": "Hi", "max_tokens": 1}', exchange, "m")
    assert (await server.answer(exchange))[0] == 200


@running
async def test_tokens_of_a_text_and_back() -> None:
    server = Server()
    _, exchange = server.ask(path="/tokenize", body=b'{"model": "m", "prompt": "Hi", "return_token_strs": true}')
    status, answer = await server.answer(exchange)
    assert (status, answer) == (200, {"count": 2, "max_model_len": 2000, "tokens": [72, 105], "token_strs": ["H", "i"]})
    _, exchange = server.ask(path="/detokenize", body=b'{"model": "m", "tokens": [72, 105]}')
    assert await server.answer(exchange) == (200, {"prompt": "Hi"})


@pytest.mark.parametrize("code", ["openai.decode", "tasks.tasks_of"])
def test_an_unexpected_fault_is_a_500_without_its_text(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: Any, **_options: Any) -> None:
        raise ZeroDivisionError("secret")

    async def ask() -> None:
        server = Server()
        monkeypatch.setattr(f"remora_llm.routes.{code}", fail)
        status, error = server.refusal()
        assert status == 500
        assert "secret" not in error["message"]
        assert server.model.users == 0

    asyncio.run(ask())


@running
async def test_one_version_of_a_release_writes_the_whole_answer() -> None:
    canary = FakeModel("from the canary")
    routed = FakeRouted(canary)
    server = Server(routed)
    _, exchange = server.ask()
    status, answer = await server.answer(exchange, canary)
    assert (status, answer["choices"][0]["text"]) == (200, "from the canary")
    assert (canary.users, server.model.users) == (0, 0)
    assert routed.counted == [None]


@running
async def test_a_release_counts_failures_and_no_cancelled_answers() -> None:
    canary = FakeModel("from the canary")
    routed = FakeRouted(canary)
    server = Server(routed)
    request, _ = server.ask()
    await asyncio.sleep(0)
    assert request is not None
    request.cancel()
    canary.loop.turn()
    await asyncio.sleep(0)
    assert (canary.users, routed.counted) == (0, [])
    canary.broken = True
    _, exchange = server.ask()
    await server.answer(exchange, canary)
    (error,) = routed.counted
    assert isinstance(error, RemoraError)


# -- Access -----------------------------------------------------------------------------------------------------------

SECRET = Restrictions(("inference,metadata:authorization=Bearer key",), "--http-restricted-api")
CHATS, MODELS = ("POST", "/v1/chat/completions"), ("GET", "/v1/models")


@pytest.mark.parametrize(("method", "path"), [CHATS, MODELS])
@pytest.mark.parametrize("headers", [(), ((b"authorization", b"Bearer other"),), ((b"authorization", b"key"),)])
def test_a_missing_or_wrong_secret_is_401_for_openais_clients(
    method: str, path: str, headers: tuple[tuple[bytes, bytes], ...]
) -> None:
    _, exchange = Server(access=AccessRules(SECRET, (), None)).ask(path, method, headers)
    (answer,) = exchange.answers
    error = json.loads(b"".join(map(bytes, answer.body)))["error"]
    assert (answer.status, error["code"]) == (401, "invalid_api_key")
    assert dict(answer.headers)[b"WWW-Authenticate"].startswith(b"Bearer")


@running
async def test_the_secret_opens_openais_routes() -> None:
    server = Server(access=AccessRules(SECRET, (), None))
    _, exchange = server.ask(headers=((b"authorization", b"Bearer key"),))
    assert (await server.answer(exchange))[0] == 200


def test_a_key_without_the_permission_is_403_in_openais_form_even_without_the_secret() -> None:
    def deny(_head: Head, action: str) -> HttpAnswer | None:
        return failure(403, "no role", plain=False) if action == "generate" else None

    _, exchange = Server(access=AccessRules(SECRET, (), deny)).ask()
    (answer,) = exchange.answers
    assert (answer.status, json.loads(bytes(answer.body[0]))["error"]["type"]) == (403, "permission_error")
