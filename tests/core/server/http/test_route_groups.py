"""Groups of routes: which paths they have, and that no path of theirs is served without the rules of access."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from conftest import needs
from remora.engine import Engine
from remora.messages import Buffer
from remora.options import ServerOptions
from remora.protocols.api_keys import digest_of
from remora.protocols.http1 import Head
from remora.protocols.rest.answer import JSON, HttpAnswer
from remora.protocols.rest.infer import InferCodec
from remora.protocols.restriction import Restrictions
from remora.server.http.access_rules import Denied
from remora.server.http.asgi import answer_in_thread
from remora.server.http.exchange import Answerer, Exchange
from remora.server.http.rest import RestService
from remora.server.http.route_groups import RouteParts, find_group, installed_rows, row_of
from remora.server.key_check import KeyCheck
from remora.server.loop import LoopMailbox
from support.engine.fakes import FakeExchange

SECRET = "s3cret-of-the-test"


class Greetings:
    """Group of another package: one path, and a handler that would answer all."""

    prefixes = ("/greetings/",)

    def action_of(self, method: str, path: str) -> str | None:
        return "infer" if path == "/greetings/hello" else None

    def refuse(self, denied: Denied, path: str) -> HttpAnswer:
        return denied.answer._replace(headers=(JSON,), body=[b'{"greeting": "no"}'])

    def task_of(self, model: object) -> str:
        return ""

    def serve(self, parts: RouteParts) -> Greetings:
        return self

    def bind(self, head: Head) -> Answerer:
        return partial(self._greet, head)

    def unknown(self, _head: Head) -> None:
        return None

    def _greet(self, head: Head, _body: Buffer, exchange: Exchange) -> None:
        exchange.respond(HttpAnswer(200, (JSON,), [json.dumps({"greeting": head.path}).encode()]))


class Greedy(Greetings):
    prefixes = ("/v2/models/",)


GREETINGS, GREEDY = Greetings(), Greedy()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[EntryPoint]]:
    found = [EntryPoint("greetings", f"{__name__}:GREETINGS", "remora.routes")]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: found if group == "remora.routes" else [])
    installed_rows.cache_clear()
    yield found
    installed_rows.cache_clear()


def answers(
    engine: Engine, head: Head, *, keyed: bool = False, locks: tuple[str, ...] = ()
) -> tuple[int, dict[str, str]]:
    """Return the status and the body of the answer of a port."""

    async def main() -> tuple[int, dict[str, str]]:
        loop = asyncio.get_running_loop()
        keys = KeyCheck((f"alice:infer=sha256:{digest_of(SECRET.encode()).hex()}",), "", loop.time)
        rest = RestService(
            engine,
            InferCodec(),
            LoopMailbox(loop),
            answer_in_thread(loop),
            ServerOptions(),
            restrictions=Restrictions(locks, "--http-restricted-api"),
            deny=keys.deny_action if keyed else None,
        )
        exchange = FakeExchange()
        (keys.over(rest) if keyed else rest).handle(head, b"", exchange)
        (answer,) = exchange.answers
        return answer.status, json.loads(b"".join(bytes(piece) for piece in answer.body))

    return asyncio.run(main())


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with Engine(model_repository=(tmp_path,)) as engine:
        yield engine


@pytest.mark.usefixtures("installed")
def test_a_group_of_another_package_answers_its_paths(engine: Engine) -> None:
    assert answers(engine, Head("GET", "/greetings/hello", ())) == (200, {"greeting": "/greetings/hello"})


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("keyed", [False, True])
def test_a_path_without_an_action_is_not_served_even_if_the_group_would(engine: Engine, keyed: bool) -> None:
    head = Head("GET", "/greetings/other", ((b"x-api-key", SECRET.encode()),))
    assert answers(engine, head, keyed=keyed)[0] == 404


@pytest.mark.usefixtures("installed")
def test_a_group_is_closed_without_a_key_and_open_with_one(engine: Engine) -> None:
    assert answers(engine, Head("GET", "/greetings/hello", ()), keyed=True) == (401, {"greeting": "no"})
    assert answers(engine, Head("GET", "/greetings/hello", ((b"x-api-key", SECRET.encode()),)), keyed=True)[0] == 200


@pytest.mark.usefixtures("installed")
def test_the_restriction_of_an_action_holds_for_a_group_in_its_own_form(engine: Engine) -> None:
    locks = ("inference:door=secret",)
    assert answers(engine, Head("GET", "/greetings/hello", ()), locks=locks) == (403, {"greeting": "no"})
    assert answers(engine, Head("GET", "/greetings/hello", ((b"door", b"secret"),)), locks=locks)[0] == 200


def test_a_group_that_takes_a_path_of_the_server_is_left_out(
    installed: list[EntryPoint], caplog: pytest.LogCaptureFixture
) -> None:
    installed.append(EntryPoint("greedy", f"{__name__}:GREEDY", "remora.routes"))
    assert [row.prefixes for row in installed_rows()] == [("/greetings/",)]
    assert "the routes 'greedy' are left out: /v2/models/ is a path of the server" in caplog.text


def test_a_group_that_cannot_be_loaded_is_left_out(
    installed: list[EntryPoint], caplog: pytest.LogCaptureFixture
) -> None:
    installed.insert(0, EntryPoint("broken", "no_such_module_here:GROUP", "remora.routes"))
    assert [row.prefixes for row in installed_rows()] == [("/greetings/",)]
    assert "the routes 'broken' cannot be loaded" in caplog.text


@needs("remora_llm")
def test_no_entry_point_is_read_for_a_path_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def entry_points(**_: object) -> list[EntryPoint]:
        raise AssertionError("entry points are read")

    monkeypatch.setattr("importlib.metadata.entry_points", entry_points)
    paths = ("/", "/v2", "/v2/models/m/infer", "/metrics", "/livez", "/v1/models", "/models/m")
    assert [row is not None for row in map(row_of, paths)] == [False] * 5 + [True] * 2


@pytest.mark.parametrize(
    ("path", "action"),
    [
        pytest.param("/v1/chat/completions", "generate", marks=needs("remora_llm")),
        pytest.param("/v1/models", "server_metadata", marks=needs("remora_llm")),
        pytest.param("/v1/models/m/load", "load", marks=needs("remora_llm")),
        pytest.param("/v1/nothing", None, marks=needs("remora_llm")),
        ("/models/m", "infer"),
        ("/models/m/versions/1", "infer"),
        ("/models/m/other", None),
    ],
)
def test_each_path_of_a_group_has_the_action_whose_permission_it_needs(path: str, action: str | None) -> None:
    group = find_group(path)
    assert group is not None
    assert group.action_of("POST", path) == action
