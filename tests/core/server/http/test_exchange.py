"""Binding of services to heads: a service that decides once for a head answers like one that decides each time."""

from __future__ import annotations

from contextlib import AbstractContextManager

from hypothesis import given
from hypothesis import strategies as st

from remora.messages import Buffer
from remora.protocols.http1 import Head
from remora.protocols.rest.answer import HttpAnswer
from remora.server.http.exchange import Answerer, Exchange, binder_of
from remora.server.http.port_services import port_service
from support.engine.fakes import FakeExchange
from support.wire.http1_bench import Bench, benches

OPEN = HttpAnswer(200, (), [b"open"])


class Plain:
    """Service that answers with the path."""

    def handle(self, head: Head, body: Buffer, exchange: Exchange) -> None:
        exchange.respond(HttpAnswer(200, (), [head.path.encode()]))


class Failing(Plain):
    """Service whose binding fails."""

    def bind(self, head: Head) -> Answerer:
        raise ZeroDivisionError


def test_a_service_whose_binding_fails_answers_all_the_same() -> None:
    recorder = FakeExchange()
    binder_of(Failing())(Head("GET", "/x", ()))(b"", recorder)
    assert recorder.answers == [HttpAnswer(200, (), [b"/x"])]


heads = st.builds(
    lambda path, host, origin: Head("GET", path, ((b"Host", host), *(((b"Origin", b"x"),) if origin else ()))),
    st.sampled_from(("/a", "/b")),
    st.sampled_from((b"", b"localhost", b"127.0.0.1:1", b"evil.example", b"upstream", b"models.example")),
    st.booleans(),
)


@given(st.lists(heads, min_size=1, max_size=8))
def test_a_port_of_loopback_decides_about_a_repeated_head_as_about_a_new_one(seen: list[Head]) -> None:
    allowed = ("models.example",)
    port = port_service("127.0.0.1", Plain(), allowed)
    for head in seen * 2:
        bound, handled, fresh = FakeExchange(), FakeExchange(), FakeExchange()
        binder_of(port)(head)(b"", bound)
        port.handle(head, b"", handled)
        port_service("127.0.0.1", Plain(), allowed).handle(Head("GET", head.path, head.headers), b"", fresh)
        assert bound.answers == handled.answers == fresh.answers


def request(host: str, path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()


@given(st.lists(st.tuples(st.sampled_from(("localhost", "evil.example")), st.sampled_from(("/a", "/b"))), max_size=8))
def test_a_memoized_head_on_a_connection_is_answered_as_on_a_new_connection(sent: list[tuple[str, str]]) -> None:
    def loopback() -> AbstractContextManager[Bench]:
        return benches(over=lambda _: port_service("127.0.0.1", Plain(), ()))

    together, apart = b"", b""
    with loopback() as bench:
        for each in sent:
            bench.receive(request(*each))
        together = bench.written
    for each in sent:
        with loopback() as bench:
            bench.receive(request(*each))
            apart += bench.written
    assert together == apart
