"""Between our connections and ASGI: what an ASGI host is answered, what it may do to us, and when pages are opened."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from remora.engine import Engine
from remora.errors import RetiredError
from remora.messages import Ticket
from remora.models import loader as loading
from remora.models.served_model import ServedModel
from remora.models.table import LoadingError
from remora.options import EngineOptions, ServerOptions
from remora.protocols.rest.answer import HttpAnswer
from remora.server.http.asgi import V2App, answer_in_thread, target_of
from remora.server.http.asgi_transfers import Message, Scope
from support.engine.fakes import UNTRACED, FakeBackend, write_model
from support.wire.asgi_host import Spoken, messages_of, scope_of, speak

PATIENCE_S = 60.0
INFER = "/v2/models/m/infer"
BODY = b'{"inputs":[{"name":"IN","datatype":"INT32","shape":[1,1],"data":[21]}]}'
ANSWER = (
    b'{"model_name":"m","model_version":"1","outputs":[{"name":"OUT","datatype":"INT32","shape":[1,1],"data":[42]}]}'
)
LEFT: Message = {"type": "http.disconnect"}


def run(coroutine: Any) -> Any:
    """Return what a coroutine returns, run in a new loop."""
    return asyncio.run(asyncio.wait_for(coroutine, PATIENCE_S))


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> FakeBackend:
    made = FakeBackend()
    monkeypatch.setattr(loading, "find_backend", made.find)
    return made


@pytest.fixture
def engine(tmp_path: Path, backend: FakeBackend) -> Iterator[Engine]:
    """An engine with the doubler m."""
    write_model(tmp_path, "m")
    with Engine(tmp_path) as running:
        yield running


def infer(app: V2App, *headers: tuple[bytes, bytes], body: tuple[bytes, ...] = (BODY,)) -> Spoken:
    """One inference through an app."""
    spoken = run(speak(app, scope_of("POST", INFER, *headers), messages_of(*body)))
    assert isinstance(spoken, Spoken)
    return spoken


# -- an ASGI host asks us -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pieces", [(BODY,), (BODY[:7], BODY[7:]), (b"", BODY, b"")])
def test_a_body_is_read_whole_however_the_host_cuts_it(engine: Engine, pieces: tuple[bytes, ...]) -> None:
    spoken = infer(V2App(engine, ServerOptions()), body=pieces)
    assert (spoken.status, spoken.body) == (200, ANSWER)
    assert spoken.headers == {b"content-type": b"application/json", b"content-length": b"%d" % len(ANSWER)}


def test_one_app_serves_one_loop_after_the_other(engine: Engine) -> None:
    app = V2App(engine, ServerOptions())
    assert [infer(app).body for _ in range(3)] == [ANSWER] * 3


def test_a_body_that_says_it_is_too_long_is_refused_before_it_is_read(engine: Engine) -> None:
    app = V2App(engine, ServerOptions(http_max_input_size=10))
    spoken = infer(app, (b"content-length", b"11"))
    assert (spoken.status, spoken.received) == (400, 0)
    assert b"request JSON size of 11 bytes exceeds the maximum allowed input size of 10 bytes" in spoken.body
    assert spoken.headers[b"connection"] == b"close"


def test_a_body_that_does_not_say_its_length_is_refused_where_it_becomes_too_long(engine: Engine) -> None:
    app = V2App(engine, ServerOptions(http_max_input_size=10))
    spoken = infer(app, body=(b"x" * 6, b"x" * 6, b"x" * 6))
    assert (spoken.status, spoken.received) == (400, 2)


@pytest.mark.parametrize("length", [b"-1", b"ten", b"", b"9" * 5000])
def test_a_content_length_that_is_not_a_number_is_refused(engine: Engine, length: bytes) -> None:
    assert infer(V2App(engine, ServerOptions()), (b"content-length", length)).status == 400


def test_a_key_is_decided_once_for_the_requests_of_a_loop(engine: Engine) -> None:
    words = (f"ann:infer=sha256:{hashlib.sha256(b'ann').hexdigest()}",)
    app, decided = V2App(engine, ServerOptions(api_key=words)), []
    assert app._keys is not None
    plain = app._keys.caller
    app._keys.caller = lambda headers: decided.append(1) or plain(headers)  # type: ignore[method-assign,func-returns-value]

    async def ask() -> list[int]:
        keys = [b"ann", b"ann", b"eve", b"ann"]
        return [
            (await speak(app, scope_of("POST", INFER, (b"x-api-key", key)), messages_of(BODY))).status for key in keys
        ]

    assert run(ask()) == [200, 200, 401, 200]
    assert len(decided) == 6, "once for each body, then once for ann and once for eve"


def test_forwarded_headers_become_parameters(engine: Engine, backend: FakeBackend) -> None:
    app = V2App(engine, ServerOptions(http_header_forward_pattern="^X-Trace"))
    infer(app, (b"x-trace-id", b"7"), (b"x-other", b"8"))
    ((request,),) = backend.opened[0].instances[0].batches
    assert request.form.parameters == {"x-trace-id": "7"}


@pytest.mark.parametrize("has_keys", [True, False])
def test_keys_are_forwarded_only_if_the_server_checks_none(
    engine: Engine, backend: FakeBackend, has_keys: bool
) -> None:
    words = (f"ann:infer=sha256:{hashlib.sha256(b'ann').hexdigest()}",)
    app = V2App(engine, ServerOptions(http_header_forward_pattern="^x-|auth", api_key=words if has_keys else ()))
    infer(app, (b"x-api-key", b"ann"), (b"authorization", b"Bearer ann"), (b"x-other", b"8"))
    ((request,),) = backend.opened[0].instances[0].batches
    keys = {} if has_keys else {"x-api-key": "ann", "authorization": "Bearer ann"}
    assert request.form.parameters == {**keys, "x-other": "8"}


def test_a_forward_pattern_that_is_none_is_refused_when_the_app_is_made(engine: Engine) -> None:
    with pytest.raises(ValueError, match="is not a regular expression"):
        V2App(engine, ServerOptions(http_header_forward_pattern="("))


def test_a_client_that_leaves_while_it_sends_is_not_answered(engine: Engine, backend: FakeBackend) -> None:
    messages = [*messages_of(BODY, b"")[:1], LEFT]
    assert run(speak(V2App(engine, ServerOptions()), scope_of("POST", INFER), messages)).sent == []
    assert backend.opened[0].instances[0].batches == []


@pytest.mark.parametrize("how", ["disconnect", "cancel"])
def test_a_request_whose_client_leaves_before_its_turn_never_runs(
    engine: Engine, backend: FakeBackend, how: str
) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def during() -> None:
        begun.set()
        assert may_end.wait(PATIENCE_S)

    instance = backend.opened[0].instances[0]
    instance.during = during
    app = V2App(engine, ServerOptions())

    async def talk() -> None:
        loop = asyncio.get_running_loop()
        first = loop.create_task(speak(app, scope_of("POST", INFER), messages_of(BODY)))
        await loop.run_in_executor(None, begun.wait, PATIENCE_S)
        messages = [*messages_of(BODY), LEFT] if how == "disconnect" else messages_of(BODY)
        second = loop.create_task(speak(app, scope_of("POST", INFER), messages))
        if how == "cancel":
            while not engine.running > 1:
                await asyncio.sleep(0)
            second.cancel()
            with pytest.raises(asyncio.CancelledError):
                await second
        else:
            assert (await second).sent == []
        may_end.set()
        assert (await first).body == ANSWER

    run(talk())
    engine.stop()
    assert [len(batch) for batch in instance.batches] == [1]


class BrokenEngine:
    """Fails in ways that no engine should."""

    traces = UNTRACED

    def resolve(self, model: str, version: int = -1) -> Any:
        raise RuntimeError("broken")

    submit_to = Engine.submit_to
    capture = None

    def measure_load(self, load: object) -> None:
        """Measure nothing."""

    def perform(self, call: object) -> Any:
        raise RuntimeError("broken")


@pytest.mark.parametrize(("method", "path"), [("POST", INFER), ("GET", "/v2/models/m")])
def test_a_failure_of_our_own_is_answered_without_its_text(method: str, path: str) -> None:
    app = V2App(BrokenEngine(), ServerOptions())  # type: ignore[arg-type]
    spoken = run(speak(app, scope_of(method, path), messages_of(BODY)))
    assert (spoken.status, spoken.body) == (500, b'{"error":"internal error: see the server\'s log"}')


def test_a_compressed_request_is_inflated_anew_for_the_version_that_took_over(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit = ServedModel.submit
    retired = [RetiredError("replaced")]

    def once_too_late(self: ServedModel, *args: Any, **more: Any) -> Ticket:
        if retired:
            raise retired.pop()
        return submit(self, *args, **more)

    monkeypatch.setattr(ServedModel, "submit", once_too_late)
    body = gzip.compress(BODY, mtime=0)
    assert infer(V2App(engine, ServerOptions()), (b"content-encoding", b"gzip"), body=(body,)).body == ANSWER
    assert not retired


class LoadingEngine:
    """Has a model that is not there yet."""

    options = EngineOptions()
    traces = UNTRACED

    def measure_load(self, load: object) -> None:
        """Measure nothing."""

    def perform(self, call: object) -> Any:
        raise LoadingError("'m' is being loaded", Future())

    resolve = perform
    submit_to = Engine.submit_to
    capture = None


def test_an_explanation_of_a_model_that_is_being_loaded_is_refused_with_the_reason() -> None:
    app = V2App(LoadingEngine(), ServerOptions())  # type: ignore[arg-type]
    spoken = run(speak(app, scope_of("GET", "/v2/models/m/explain"), messages_of(b"")))
    assert (spoken.status, spoken.body) == (503, b'{"error":"\'m\' is being loaded"}')


def test_the_answer_to_head_has_the_length_and_no_body(engine: Engine) -> None:
    spoken = run(speak(V2App(engine, ServerOptions()), scope_of("HEAD", "/v2/metrics"), messages_of(b"")))
    assert spoken.status == 200
    assert int(spoken.headers[b"content-length"]) > 0
    assert spoken.body == b""


def test_metrics_that_are_off_are_off_here_too(engine: Engine) -> None:
    app = V2App(engine, ServerOptions(allow_metrics=False))
    assert run(speak(app, scope_of("GET", "/v2/metrics"), messages_of(b""))).status == 404


def test_a_websocket_is_closed_and_a_lifespan_left_to_the_app_around(engine: Engine) -> None:
    app = V2App(engine, ServerOptions())
    assert run(speak(app, {"type": "websocket"}, [])).sent == [{"type": "websocket.close", "code": 1000, "reason": ""}]
    with pytest.raises(ValueError, match="'lifespan' cannot be answered"):
        run(speak(app, {"type": "lifespan"}, []))


@pytest.mark.parametrize(
    ("scope", "target"),
    [
        (scope_of("GET", "/v2/models/a%20b"), "/v2/models/a%20b"),
        (scope_of("GET", "/v2?x=%20&y"), "/v2?x=%20&y"),
        (scope_of("GET", "/v2/models/a b", raw_path=None), "/v2/models/a%20b"),
        (scope_of("GET", "/v2/models/é", raw_path=None), "/v2/models/%C3%A9"),
        (scope_of("GET", "/api/v2", root_path="/api"), "/v2"),
        (scope_of("GET", "/api/v2", root_path="/api/"), "/v2"),
        (scope_of("GET", "/apis/v2", root_path="/api"), "/apis/v2"),
        (scope_of("GET", "/v2", root_path="/api"), "/v2"),
    ],
)
def test_the_target_is_what_the_client_sent_below_the_mount(scope: Scope, target: str) -> None:
    assert target_of(scope) == target


# -- slow work ------------------------------------------------------------------------------------------------------


class _Awaited:
    """An exchange whose answer, and the thread that brought it, can be waited for."""

    receiving_since = 0.0
    peer = ""
    flow = None

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.answer: asyncio.Future[HttpAnswer] = loop.create_future()
        self.thread = 0

    def respond(self, answer: HttpAnswer) -> None:
        self.thread = threading.get_ident()
        self.answer.set_result(answer)


def fails() -> HttpAnswer:
    raise KeyError("secret")


def test_slow_work_runs_elsewhere_and_is_answered_in_the_loop() -> None:
    async def talk() -> None:
        loop = asyncio.get_running_loop()
        exchange, threads = _Awaited(loop), []

        def work() -> HttpAnswer:
            threads.append(threading.get_ident())
            return HttpAnswer(200, (), [])

        answer_in_thread(loop)(work, exchange)
        assert (await exchange.answer).status == 200
        assert exchange.thread == threading.get_ident() != threads[0]

    run(talk())


def test_slow_work_that_fails_is_answered_all_the_same() -> None:
    async def talk() -> HttpAnswer:
        loop = asyncio.get_running_loop()
        exchange = _Awaited(loop)
        answer_in_thread(loop)(fails, exchange)
        return await exchange.answer

    answer = run(talk())
    assert answer.status == 500
    assert json.loads(bytes(answer.body[0])) == {"error": "internal error: see the server's log"}
