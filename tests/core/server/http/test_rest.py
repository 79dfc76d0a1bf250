"""What the service of V2 refuses: requests of web pages, on every way to it, and long ones about shared memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from conftest import needs
from remora.engine import Engine
from remora.errors import NotFoundError
from remora.models.readiness import Readiness
from remora.models.served_model import LoadRecord
from remora.options import EngineOptions, ServerOptions
from remora.protocols.http1 import Head
from remora.protocols.rest.infer import InferCodec
from remora.server.host import Host
from remora.server.http.rest import RestService
from remora.server.main import Ports
from support.engine.fakes import UNTRACED, FakeExchange, FakeMailbox, write_model
from support.servers.hosting import PATIENCE_S, ask, running

PAGE = {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site", "Content-Type": "text/plain"}
CURL = {"Content-Type": "application/x-www-form-urlencoded"}  # what `curl -d` sends
CHANGES = (
    ("/v2/repository/models/m/load", b""),
    ("/v2/repository/models/m/unload", b""),
    ("/v2/repository/index", b""),
    ("/v2/logging", b'{"log_verbose_level": 1}'),
    ("/v2/trace/setting", b'{"trace_rate": "9"}'),
    ("/v2/models/m/trace/setting", b'{"trace_rate": "9"}'),
    ("/v2/systemsharedmemory/region/a/register", b'{"key": "/a", "offset": 0, "byte_size": 8}'),
    ("/v2/systemsharedmemory/unregister", b""),
    ("/v2/cudasharedmemory/unregister", b""),
)


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ports]:
    repository = tmp_path_factory.mktemp("models")
    write_model(repository, "m", config=None)
    options = ServerOptions(grpc_on_http_port=True, allow_client_shm=True, allowed_host=("models.example",))
    engine = Engine(model_control_mode="explicit", model_repository=(repository,))
    with running(Host(server=options), engine) as found:
        yield found


@pytest.mark.parametrize(("path", "body"), CHANGES)
def test_a_page_of_another_site_changes_nothing(ports: Ports, path: str, body: bytes) -> None:
    got = ask(ports.http, "POST", path, body, PAGE)
    assert (got.status, "another site" in got.json["error"]) == (403, True)
    for headers in ({}, CURL, {"Origin": "https://models.example", "Content-Type": "text/plain"}):
        assert ask(ports.http, "POST", path, body, headers).status != 403, headers


def test_a_long_request_about_shared_memory_is_refused_unread(ports: Ports) -> None:
    got = ask(ports.http, "POST", "/v2/systemsharedmemory/region/a/register", b"[" + b"NaN," * 3_000)
    assert (got.status, got.json["error"]) == (
        400,
        "a request about shared memory may have 8192 bytes, this one has 12001",
    )


def test_a_page_may_send_inferences_whose_answers_its_browser_keeps_from_it(ports: Ports) -> None:
    got = ask(ports.http, "POST", "/v2/models/none/infer", b"{}", PAGE)
    assert got.status == 404  # there is no such model
    assert not [name for name in got.headers if name.startswith("access-control")]


@pytest.mark.parametrize("path", ["/v2", "/livez", "/v2/metrics", "/v2/status", "/nowhere"])
def test_a_port_of_loopback_refuses_names_that_were_rebound_to_it(ports: Ports, path: str) -> None:
    for host in (f"evil.example:{ports.http}", "evil.example"):
        got = ask(ports.http, "GET", path, headers={"Host": host})
        assert (got.status, "--allowed-host=evil.example" in got.json["error"]) == (403, True)
    for host in (f"127.0.0.1:{ports.http}", "localhost", "models.example"):
        assert ask(ports.http, "GET", path, headers={"Host": host}).status == (404 if path == "/nowhere" else 200)


def test_the_metrics_port_of_loopback_refuses_them_too(ports: Ports) -> None:
    assert ask(ports.metrics, "GET", "/metrics", headers={"Host": "evil.example"}).status == 403
    assert ask(ports.metrics, "GET", "/metrics").status == 200


def test_http_2_refuses_what_http_1_refuses(ports: Ports) -> None:
    pytest.importorskip("h2", reason="h2 is not installed: pip install -e '.[dev]'")
    httpx = pytest.importorskip("httpx", reason="httpx is not installed: pip install -e '.[dev]'")
    url = f"http://127.0.0.1:{ports.http}/v2"
    with httpx.Client(http1=False, http2=True, timeout=PATIENCE_S) as client:
        assert client.post(f"{url}/logging", content=b"{}", headers=PAGE).status_code == 403
        assert client.post(f"{url}/logging", content=b"{}", headers=CURL).status_code == 200
        assert client.get(url, headers={"Host": "evil.example"}).status_code == 403


class Turns(FakeMailbox):
    """Mailbox in a loop that is turned by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.next: list[Callable[[], None]] = []
        self.watcher = self  # type: ignore[assignment]

    def is_current(self) -> bool:
        return True

    def call_next(self, work: Callable[[], None]) -> None:
        self.next.append(work)


def test_all_scrapes_of_a_turn_get_one_text_and_those_of_the_next_turn_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mailbox, texts = Turns(), iter(("first", "second"))
    with Engine(model_repository=(tmp_path,)) as engine:
        rest = RestService(engine, InferCodec(), mailbox, lambda work, exchange, **_: exchange.respond(work()))
        monkeypatch.setattr(engine, "perform", lambda _call: next(texts))
        assert [rest.metrics().body, rest.metrics().body] == [[b"first"], [b"first"]]
        mailbox.next.pop()()
        assert rest.metrics().body == [b"second"]


class StartingEngine:
    """Engine of a language model whose startup ends when its state is read."""

    options = EngineOptions(wait_for_models=False)
    traces = UNTRACED
    capture = None
    submit_to = None

    def __init__(self) -> None:
        facts = SimpleNamespace(adapters=(), context=100)
        generation = SimpleNamespace(served_names=("alias",), engine=SimpleNamespace(facts=facts))
        self._model = SimpleNamespace(name="m", load_record=LoadRecord(), generation=generation)
        self._served: list[SimpleNamespace] = []

    def models(self) -> list[SimpleNamespace]:
        return [*self._served]

    def resolve(self, name: str, version: int = -1) -> SimpleNamespace:
        raise NotFoundError(f"model {name} is not there yet")

    def readiness(self) -> Readiness:
        self._served = [self._model]
        return Readiness(True, True, False, ())


def status_during_start(body: bytes, *, openai: bool) -> int:
    """Return the status of a request of OpenAI's protocol during which the startup ends."""
    service = RestService(StartingEngine(), InferCodec(), None, cast(Any, None), ServerOptions(openai=openai))  # type: ignore[arg-type]
    exchange = FakeExchange()
    service.handle(Head("POST", "/v1/completions", ()), body, exchange)
    return exchange.answers[0].status


@needs("remora_llm")
def test_a_request_for_a_language_model_is_not_for_an_unknown_path_because_the_startup_ends() -> None:
    assert status_during_start(b"{", openai=False) == 400


@needs("remora_llm")
@pytest.mark.parametrize(("name", "status"), [("m", 503), ("alias", 503), ("other", 404)])
def test_a_language_model_that_becomes_ready_during_its_look_up_is_not_unknown(name: str, status: int) -> None:
    assert status_during_start(b'{"model": "%b", "prompt": "a"}' % name.encode(), openai=True) == status
