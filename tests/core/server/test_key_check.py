"""Changes of the file of keys, and what is remembered with a head."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import needs
from remora.messages import Buffer
from remora.protocols.api_keys import Caller, KeyEntry, Keys, Limits, caller_of, caller_of_token, print_entries
from remora.protocols.http1 import Head, HeadNote
from remora.protocols.http2.frames import Fields
from remora.protocols.http2.stream import Stream
from remora.protocols.rest.answer import HttpAnswer
from remora.protocols.tokens import TokenError
from remora.server import key_check
from remora.server.host_routes import HostRoute
from remora.server.http.exchange import Exchange, binder_of
from remora.server.http.http2_requests import Requests
from remora.server.key_check import KeyCheck
from remora.server.key_limits import Usage
from support.engine.fakes import FakeExchange, FakeService
from support.process.eventually import eventually_in_loop
from support.wire.http1_bench import answers_of, benches


class Echo:
    """Service that answers with the caller's name and roles, which it notes on the head as services do."""

    def __init__(self) -> None:
        self._names = HeadNote[str]()

    def handle(self, head: Head, body: Buffer, exchange: Exchange) -> None:
        caller = head.caller
        seen = "none" if caller is None else f"{caller.name}:{','.join(caller.roles)}"
        name = self._names.get(head) or self._names.put(head, seen)
        exchange.respond(HttpAnswer(200, (), [name.encode(), b" ", head.query.encode()]))


def entry(name: str, *roles: str) -> KeyEntry:
    """An entry whose key is the name."""
    return KeyEntry(name, roles or ("infer",), hashlib.sha256(name.encode()).hexdigest())


def write(path: Path, *entries: KeyEntry) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(print_entries(entries))
    os.replace(draft, path)


def send(answer: Callable[[Buffer, Exchange], object]) -> tuple[int, bytes]:
    exchange = FakeExchange()
    answer(b"", exchange)
    (found,) = exchange.answers
    return found.status, b"".join(found.body)


def head_of(key: str, path: str = "/v2") -> Head:
    return Head("GET", path, ((b"host", b"x"), (b"x-api-key", key.encode())))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "keys.json"
    write(path, entry("ann"), entry("bob"))
    return path


def access_of(path: Path) -> KeyCheck:
    return KeyCheck((), str(path), lambda: 0.0)


def test_a_head_that_is_remembered_loses_a_revoked_key_and_gains_a_new_one(path: Path) -> None:
    access = access_of(path)
    service = access.over(Echo())
    ann, eve = binder_of(service)(head_of("ann")), binder_of(service)(head_of("eve"))
    assert (send(ann), send(eve)[0]) == ((200, b"ann:infer "), 401)
    write(path, entry("bob"), entry("eve"))
    access.reread()
    assert (send(ann)[0], send(eve)) == (401, (200, b"eve:infer "))


def test_what_a_service_noted_about_a_key_is_forgotten_when_its_roles_change(path: Path) -> None:
    access = access_of(path)
    answer = binder_of(access.over(Echo()))(head_of("ann"))
    assert send(answer) == send(answer) == (200, b"ann:infer ")
    write(path, entry("ann", "all"))
    access.reread()
    assert send(answer) == (200, b"ann:all ")


def test_each_new_head_is_decided_by_its_own_path_and_key(path: Path) -> None:
    write(path, entry("ann"), entry("bob", "read"))
    check = KeyCheck((), str(path), lambda: 0.0)
    service = check.over(Echo())
    wanted = {("ann", "/v2"): 200, ("bob", "/v2"): 200, ("ann", "/v2/logging"): 403, ("bob", "/v2/logging"): 200,
              ("eve", "/v2"): 401, ("eve", "/v2/logging"): 401}  # fmt: skip
    for _ in range(2):
        got = {(key, path): send(binder_of(service)(head_of(key, path)))[0] for key, path in wanted}
        assert got == wanted
    write(path, entry("ann", "read"))
    check.reread()
    got = {(key, path): send(binder_of(service)(head_of(key, path)))[0] for key, path in wanted}
    assert got == {(key, path): 200 if key == "ann" else 401 for key, path in wanted}


class Routed(Echo):
    """Service of a platform with a route, and one whose redirect decides."""

    routes = (HostRoute("POST", "/score", "infer"), HostRoute("POST", "/predict", "infer", "x-redirect"))


def test_a_decision_on_a_platforms_route_is_remembered_unless_a_redirect_decides(path: Path) -> None:
    service = access_of(path).over(Routed())

    def status(path: str, *more: tuple[bytes, bytes]) -> int:
        return send(binder_of(service)(Head("POST", path, ((b"x-api-key", b"ann"), *more))))[0]

    assert (status("/score"), status("/predict")) == (200, 200)
    assert [request[1] for request in service._permitted] == ["/score"]  # type: ignore[attr-defined]
    assert status("/predict", (b"X-Redirect", b"v2/models/m/config")) == 403
    assert status("/predict") == 200


def fields_of(rpc: str, *more: tuple[bytes, bytes]) -> Fields:
    return ((b":path", f"/inference.GRPCInferenceService/{rpc}".encode()), *more)


def test_each_new_call_is_decided_by_its_own_path_and_credential(path: Path) -> None:
    write(path, entry("ann"))
    check = KeyCheck((), str(path), lambda: 0.0)
    good, basic = (b"authorization", b"Bearer ann"), (b"authorization", b"Basic eDp5")
    opened = check.over_calls(lambda _fields: lambda _link: None)

    def permitted(fields: Fields) -> bool:
        link = Refusals()
        opened(fields)(link)  # type: ignore[arg-type]  # as much of a stream as a refusal needs
        return not link.refused

    for _ in range(2):
        assert permitted(fields_of("ModelInfer", good))
        assert permitted(fields_of("ModelInfer", good, basic))
        assert not permitted(fields_of("ModelInfer", basic))
        assert not permitted(fields_of("ModelInfer", (b"x-api-key", b"eve"), good))
        assert not permitted(fields_of("RepositoryIndex", good))
        assert permitted(fields_of("ServerLive"))
    call = opened(fields_of("ModelInfer", good))
    write(path, entry("bob"))
    check.reread()
    link = Refusals()
    call(link)  # type: ignore[arg-type]
    assert link.refused
    assert not permitted(fields_of("ModelInfer", good))


def test_an_open_call_with_a_wrong_key_is_not_remembered(path: Path) -> None:
    check = access_of(path)
    opened, link = check.over_calls(lambda _fields: lambda _link: None), Refusals()
    for number in range(20):
        opened(fields_of("ServerLive", (b"x-api-key", b"%d" % number)))(link)  # type: ignore[arg-type]
        opened(fields_of("ServerLive"))(link)  # type: ignore[arg-type]
    assert not link.refused
    assert not check._decided_calls
    opened(fields_of("ServerLive", (b"x-api-key", b"ann")))
    assert len(check._decided_calls) == 1


def test_long_paths_of_a_valid_key_are_not_remembered(path: Path) -> None:
    check = access_of(path)
    opened, service = check.over_calls(lambda _fields: lambda _link: None), check.over(Echo())
    opened(fields_of("x" * 5000, (b"x-api-key", b"ann")))
    assert send(binder_of(service)(head_of("ann", "/v2/" + "x" * 5000)))[0] == 200
    assert not check._decided_calls
    assert not service._permitted  # type: ignore[attr-defined]


def test_many_paths_of_one_key_do_not_keep_other_callers_from_being_remembered(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_check, "_MOST_DECIDED", 8)
    check = access_of(path)
    opened = check.over_calls(lambda _fields: lambda _link: None)
    for number in range(20):
        opened(fields_of(f"No{number}", (b"x-api-key", b"ann")))
    opened(fields_of("ModelInfer", (b"x-api-key", b"bob")))
    assert (fields_of("ModelInfer")[0][1], b"bob") in check._decided_calls
    assert len(check._decided_calls) <= 8


class Refusals:
    """Stream that notes whether its call was refused."""

    peer = "10.0.0.1"
    refused = False

    def headers(self, block: bytes, *, end: bool) -> None:
        self.refused = end


def test_a_probe_needs_no_key_and_then_shows_no_details(path: Path) -> None:
    service = access_of(path).over(Echo())
    probe = Head("GET", "/readyz?verbose", ((b"host", b"x"),))
    assert send(binder_of(service)(probe)) == (200, b"none ")
    assert send(binder_of(service)(head_of("ann", "/readyz?verbose"))) == (200, b"ann:infer verbose")
    assert send(binder_of(service)(Head("POST", "/readyz", ())))[0] == 401


@pytest.mark.parametrize("text", ["", '{"keys": 3}', None])
def test_a_damaged_or_missing_file_leaves_the_keys_and_is_logged_once(
    path: Path, text: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    access = access_of(path)
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    for _ in range(3):
        access.reread()
    assert send(binder_of(access.over(Echo()))(head_of("ann"))) == (200, b"ann:infer ")
    (record,) = [each for each in caplog.records if each.name == "remora.keys" and each.levelno == logging.ERROR]
    assert "the API keys stay as they were" in record.getMessage()
    write(path, entry("eve"))
    access.reread()
    assert send(binder_of(access.over(Echo()))(head_of("eve"))) == (200, b"eve:infer ")


def test_a_process_that_leaves_the_log_to_another_one_follows_the_keys_silently(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    access = access_of(path)
    access.log_no_changes()
    write(path, entry("eve"))
    access.reread()
    assert send(binder_of(access.over(Echo()))(head_of("eve"))) == (200, b"eve:infer ")
    path.write_text("")
    access.reread()
    assert [each for each in caplog.records if each.name == "remora.keys" and each.levelno > logging.DEBUG] == []


def test_an_error_of_one_refresh_does_not_end_them(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_check, "_LOOK_S", 0.001)
    errors = [RuntimeError("first"), RuntimeError("second")]

    class Failing(KeyCheck):
        def refresh(self) -> None:
            if errors:
                raise errors.pop(0)
            super().refresh()

    async def main() -> None:
        access, reported = Failing((), str(path), lambda: 0.0), list[Any]()
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: reported.append(context["exception"]))
        with pytest.raises(RuntimeError, match="first"):
            access.follow()
        write(path, entry("eve"))
        await eventually_in_loop(lambda: access.caller(((b"x-api-key", b"eve"),)) is not None)
        assert [str(each) for each in reported] == ["second"]
        access.close()

    asyncio.run(main())


def test_an_unchanged_file_is_not_read_again(path: Path) -> None:
    access = access_of(path)
    keys = access.keys
    access.reread()
    assert access.keys is keys


@pytest.mark.parametrize("text", ["{}", None])
def test_a_file_that_cannot_be_read_at_the_start_ends_it(path: Path, text: str | None) -> None:
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
    with pytest.raises(ValueError, match=f"--api-keys-file={path}: "):
        access_of(path)


def test_wrong_keys_are_limited_per_peer_and_their_counts_do_not_touch_others(path: Path) -> None:
    now = 0.0
    access = KeyCheck((), str(path), lambda: now)
    wrong = head_of("eve").headers
    denials = [access.deny(wrong, "192.0.2.1") for _ in range(12)]
    assert [each.answer().status for each in denials] == [401] * 10 + [429] * 2
    assert dict(denials[-1].answer().headers)[b"Retry-After"] == b"7"
    assert access.deny(wrong, "192.0.2.2").answer().status == 401
    assert access.deny((), "192.0.2.1").answer().status == 401
    assert access.denied == {"no key": 1, "wrong key": 11, "too many wrong keys": 2}
    now = 6.0
    assert access.deny(wrong, "192.0.2.1").answer().status == 401
    assert send(binder_of(access.over(Echo()))(head_of("ann")))[0] == 200


def limited(access: KeyCheck, **limits: Any) -> Usage:
    usage = access.usage_of(caller_of("ann", ["infer"], Limits(**limits)))
    assert usage is not None
    return usage


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/openai/v1/chat/completions", "/tokenize", "/rerank"])
@needs("remora_llm")
def test_openais_clients_get_openais_error_object(path: str, tmp_path: Path) -> None:
    write(tmp_path / "keys.json", entry("ann")._replace(requests_per_second=1.0, burst=1))
    service = access_of(tmp_path / "keys.json").over(Echo())

    def refusal(head: Head) -> tuple[int, Any, bytes | None]:
        exchange = FakeExchange()
        binder_of(service)(head)(b"", exchange)
        (found,) = exchange.answers
        return found.status, orjson.loads(b"".join(found.body))["error"], dict(found.headers).get(b"Retry-After")

    status, error, _ = refusal(Head("POST", path, ((b"host", b"x"),)))
    assert (status, error["type"], error["code"]) == (401, "authentication_error", "invalid_api_key")
    assert "requires an API key" in error["message"]
    assert send(binder_of(service)(head_of("ann", path)))[0] == 200
    status, error, retry = refusal(head_of("ann", path))
    assert (status, error["type"], error["code"], retry) == (429, "rate_limit_error", "rate_limit_exceeded", b"2")
    assert isinstance(refusal(head_of("ann", "/v2"))[1], str)


def test_a_key_without_limits_is_not_counted(path: Path) -> None:
    assert access_of(path).usage_of(caller_of("ann", ["infer"])) is None


def test_a_key_is_limited_to_its_rate_and_burst(path: Path) -> None:
    now = 0.0
    usage = limited(KeyCheck((), str(path), lambda: now), requests_per_second=2.0, burst=3)
    denials = [usage.begin() for _ in range(4)]
    assert [each is None for each in denials] == [True, True, True, False]
    assert denials[3] is not None
    answer = denials[3].answer()
    assert (answer.status, dict(answer.headers)[b"Retry-After"]) == (429, b"1")
    assert b"'ann' has its limit of 2 requests a second" in b"".join(answer.body)
    now = 0.5
    assert usage.begin() is None
    assert usage.begin() is not None


def test_a_key_keeps_its_count_when_the_file_changes_and_its_limits_do_not(path: Path) -> None:
    access = access_of(path)
    first = limited(access, concurrent=1)
    assert limited(access, concurrent=1) is first
    assert limited(access, concurrent=2) is not first


class Open:
    """Service that keeps the exchanges of its requests."""

    def __init__(self) -> None:
        self.exchanges: list[Exchange] = []

    def handle(self, _head: Head, _body: Buffer, exchange: Exchange) -> None:
        self.exchanges.append(exchange)


@pytest.mark.parametrize("end", ["respond", "finish", "drop"])
def test_a_request_in_flight_counts_until_it_is_answered_or_dropped(path: Path, end: str) -> None:
    write(path, entry("ann")._replace(concurrent=1))
    service = Open()
    answer = binder_of(access_of(path).over(service))(head_of("ann"))
    answer(b"", FakeExchange())
    status, body = send(answer)
    assert status == 429
    assert b"1 requests in flight" in body
    exchange = service.exchanges.pop()
    if end == "respond":
        exchange.respond(HttpAnswer(200, (), []))
    elif end == "finish":
        exchange.begin(200, ())
        exchange.finish()
    del exchange
    answer(b"", FakeExchange())
    assert len(service.exchanges) == 1
    assert send(answer)[0] == 429


# -- bodies that are not read ---------------------------------------------------------------------------------------

LOAD = "/v2/repository/models/m/load"
TOKEN = b"eyJ.b.c"


class ExpiringTokens:
    """Check of tokens that finds each token valid until it expires."""

    def __init__(self) -> None:
        self.expired = False
        self.errors: list[Exception] = []
        self.changed: Callable[[], None] = lambda: None

    def find(self, _token: bytes) -> Caller | None:
        if self.errors:
            raise self.errors.pop()
        return None if self.expired else caller_of_token("ann", ["all"])

    def verify(self, _token: bytes) -> Caller:
        if self.expired:
            raise TokenError("has expired")
        return caller_of_token("ann", ["all"])


def expiring() -> tuple[KeyCheck, ExpiringTokens]:
    tokens = ExpiringTokens()
    return KeyCheck((), "", lambda: 0.0, tokens), tokens  # type: ignore[arg-type]


def test_an_expired_token_does_not_run_a_request_without_its_body_over_http1() -> None:
    check, tokens = expiring()
    head = f"POST {LOAD} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN.decode()}\r\nContent-Length: 9\r\n\r\n"
    with benches(over=check.over) as bench:
        bench.receive(head.encode() + b"parameter")
        tokens.expired = True
        bench.receive(head.encode() + b"par")
        (first, _), (second, text) = answers_of(bench.written)
    assert (first[:12], second[:12]) == (b"HTTP/1.1 200", b"HTTP/1.1 401")
    assert b"the token has expired" in text
    assert bench.service.requests == [("POST", LOAD, b"parameter")]


class Respondable(Stream):
    """Stream whose body has not arrived, which keeps the answer."""

    peer = ""

    def __init__(self) -> None:
        self.ended = False
        self.blocks: list[bytes] = []

    def has_room(self, _size: int) -> bool:
        return True

    def respond(self, head: bytes, _data: bytes | memoryview, _trailers: bytes = b"") -> None:
        self.blocks.append(head)


def test_an_expired_token_does_not_run_a_request_without_its_body_over_http2() -> None:
    check, tokens = expiring()
    service, link = FakeService(), Respondable()
    opener = Requests(check.over(service), 1000).open(
        ((b":method", b"POST"), (b":path", LOAD.encode()), (b"authorization", b"Bearer " + TOKEN))
    )
    tokens.expired = True
    opener(link)
    assert b"401" in link.blocks[0]
    assert not service.requests


def test_a_request_whose_body_was_not_read_is_refused_although_it_is_permitted_meanwhile(path: Path) -> None:
    service = access_of(path).over(Echo())
    head = head_of("ann")
    assert send(binder_of(service)(head))[0] == 200
    status, text = send(binder_of(service)(head.without_body()))
    assert status == 503
    assert b"have changed just now" in text
    assert send(binder_of(service)(head_of("ann", "/v2/logging").without_body()))[0] == 403
    assert send(binder_of(service)(head_of("eve", "/readyz").without_body())) == (200, b"none ")


# -- errors, and decisions that are remembered -------------------------------------------------------------------------


def test_an_error_of_a_new_decision_leaves_no_older_one_in_force() -> None:
    check, tokens = expiring()
    bearer = (b"authorization", b"Bearer " + TOKEN)
    link = Refusals()
    answer = binder_of(check.over(Echo()))(Head("GET", "/v2", (bearer,)))
    call = check.over_calls(lambda _fields: lambda _link: None)(fields_of("ModelInfer", bearer))
    renewed = check.renewed(lambda headers: partial(str, check.name_of(headers)), (bearer,))
    assert (send(answer)[0], renewed()) == (200, "ann")
    call(link)  # type: ignore[arg-type]
    assert not link.refused
    tokens.expired = True
    tokens.changed()
    for ask in (partial(send, answer), partial(call, link), renewed):
        tokens.errors = [MemoryError()]
        with pytest.raises(MemoryError):
            ask()
    assert (send(answer)[0], renewed()) == (401, "")
    call(link)  # type: ignore[arg-type]
    assert link.refused


def test_the_key_of_one_header_is_not_remembered_for_another_header_of_that_name(path: Path) -> None:
    service = access_of(path).over(Echo())
    basic, bearer = (b"authorization", b"Basic ann"), (b"Authorization", b"Bearer bob")

    def answer(*headers: tuple[bytes, bytes]) -> tuple[int, bytes]:
        return send(binder_of(service)(Head("GET", "/v2", headers)))

    for _ in range(2):
        assert answer(basic, bearer) == (200, b"bob:infer ")
        assert answer(basic)[0] == 401
        assert answer((b"x-api-key", b"ann"), bearer) == (200, b"ann:infer ")
        assert answer((b"x-api-key", b"ann"), (b"X-API-Key", b"eve"), bearer) == (200, b"ann:infer ")
        assert answer((b"x-api-key", b"eve"), (b"X-API-Key", b"ann"), bearer)[0] == 401


class Asked(NamedTuple):
    """Request of a property."""

    method: str
    path: str
    headers: tuple[tuple[bytes, bytes], ...]
    unread: bool

    def head(self) -> Head:
        head = Head(self.method, self.path, self.headers)
        return head.without_body() if self.unread else head


class Callers(NamedTuple):
    """Change of the valid keys and tokens."""

    names: frozenset[str]
    is_expired: bool


HOLDERS = st.just((b"x-api-key", b" bob")) | st.tuples(
    st.sampled_from((b"authorization", b"Authorization")),
    st.sampled_from((b"bearer  bob ", b"Bearer ann", b"Bearer " + TOKEN)),
)
OTHERS = st.tuples(st.just(b"X-API-Key"), st.sampled_from((b"ann", b"eve", b"", b" ", b"Bearer eve"))) | st.tuples(
    st.just(b"authorization"), st.sampled_from((b"Bearer eve", b"Bearer ", b"Basic ann", b"Bearer\tann", b"ann"))
)
REDIRECT = (b"X-Redirect", b"v2/models/m/config")
PATHS = ("/v2/logging", "/v2/models/m/infer", "/readyz?verbose", "/predict")


@st.composite
def alike(draw: st.DrawFn) -> list[Asked]:
    """Draw requests with one path, of which most differ in few respects."""
    path, headers = draw(st.sampled_from(PATHS)), (draw(HOLDERS), draw(OTHERS), REDIRECT)
    asked = st.builds(
        Asked,
        st.sampled_from(("POST", "GET")),
        st.just(path),
        st.lists(st.sampled_from(headers), min_size=1, max_size=3).map(tuple),
        st.sampled_from((False, False, False, True)),
    )
    return draw(st.lists(asked, min_size=5, max_size=8))


ALL = Callers(frozenset(("ann", "bob", "eve")), False)
CALLERS = st.just(ALL) | st.builds(Callers, st.frozensets(st.sampled_from(sorted(ALL.names))), st.booleans())
ENTRIES = (entry("ann"), entry("bob", "read")._replace(concurrent=1), entry("eve", "all"))


def check_of(callers: Callers) -> tuple[KeyCheck, ExpiringTokens]:
    tokens = ExpiringTokens()
    hours = itertools.count(0.0, 3600.0)  # so that no peer sends too many wrong keys
    check = KeyCheck((), "", lambda: next(hours), tokens)  # type: ignore[arg-type]
    change(check, tokens, callers)
    return check, tokens


def change(check: KeyCheck, tokens: ExpiringTokens, callers: Callers) -> None:
    check.keys = Keys([each for each in ENTRIES if each.name in callers.names])
    tokens.expired = callers.is_expired
    check.renew()


@settings(max_examples=300)
@given(CALLERS, alike(), st.lists(CALLERS | st.integers(0, 7), max_size=6))
def test_a_remembered_decision_is_what_would_be_decided_now(
    callers: Callers, requests: list[Asked], steps: list[Callers | int]
) -> None:
    check, tokens = check_of(callers)
    service = check.over(Routed())
    bound = [binder_of(service)(asked.head()) for asked in requests]

    def compare(asked: Asked, *answers: Callable[[Buffer, Exchange], object]) -> None:
        fresh, _ = check_of(callers)
        wanted = send(binder_of(fresh.over(Routed()))(asked.head()))
        assert [send(answer) for answer in answers] == [wanted] * len(answers)
        holder = fresh.caller(asked.headers)
        if wanted[0] == 200:
            name = "none" if holder is None else f"{holder.name}:{','.join(holder.roles)}"
            assert wanted[1].startswith(name.encode())

    for asked, answer in zip(requests, bound, strict=True):
        compare(asked, answer, partial(service.handle, asked.head()))
    for step in steps:
        if isinstance(step, Callers):
            change(check, tokens, callers := step)
            continue
        place = step % len(requests)
        compare(requests[place], partial(service.handle, requests[place].head()), bound[place])
