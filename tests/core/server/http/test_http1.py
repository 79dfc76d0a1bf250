"""One HTTP/1 connection: order, framing and refusals; with fakes, and once over a real socket."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remora.messages import Buffer, Ticket
from remora.protocols.http1 import HEAD_LIMIT, Head
from remora.protocols.http2.frames import PREFACE
from remora.protocols.rest.answer import HttpAnswer
from remora.server.http.exchange import Exchange
from remora.server.http.http1 import AHEAD_LIMIT
from remora.server.http.http1_listener import Listener
from support.engine.fakes import FakeService
from support.wire.http1_bench import Bench, answers_of, benches, get, post

PATIENCE_S = 60.0


# -- requests and their bodies --------------------------------------------------------------------------------------


def test_a_request_is_answered_and_the_connection_kept(bench: Bench) -> None:
    bench.receive(get("/a"))
    assert bench.written == b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: 3\r\n\r\n/a "
    assert not bench.transport.ends
    bench.receive(get("/b"))
    assert bench.bodies == [b"/a ", b"/b "]


@pytest.mark.parametrize("step", [1, 2, 7, 40, 10**6])
@pytest.mark.parametrize("size", [0, 1, 100, 300_000])
def test_a_body_arrives_whole_however_it_is_cut(size: int, step: int) -> None:
    if size > 100_000 and step < 7:
        step *= 1000
    body = bytes(index % 251 for index in range(size))
    wire = post("/a", body)
    with benches() as bench:
        for at in range(0, len(wire), step):
            bench.receive(wire[at : at + step], turn=False)
        assert bench.service.requests == [("POST", "/a", body)]


@pytest.mark.parametrize("step", [1, 3, 10**6])
def test_a_chunked_body_arrives_whole_and_the_next_request_after_it(step: int) -> None:
    wire = b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n" + get(
        "/b"
    )
    with benches() as bench:
        for at in range(0, len(wire), step):
            bench.receive(wire[at : at + step])
        assert bench.service.requests == [("POST", "/a", b"abcde"), ("GET", "/b", b"")]
        assert bench.bodies == [b"/a abcde", b"/b "]


def test_the_tensors_of_a_long_body_lie_at_an_aligned_address() -> None:
    import numpy as np

    class Addresses:
        def __init__(self) -> None:
            self.found: list[int] = []

        def handle(self, head: Head, body: Buffer, exchange: Exchange) -> Ticket | None:
            self.found.append(np.frombuffer(body, np.uint8).ctypes.data)
            exchange.respond(HttpAnswer(200, (), []))
            return None

    service = Addresses()
    with benches(over=lambda _: service) as bench:
        bench.receive(post("/a", b"x" * 1000, "Inference-Header-Content-Length: 77")[:200])
        bench.receive(b"x" * 1000)
        assert (service.found[0] + 77) % 64 == 0


requests = st.lists(
    st.one_of(
        st.builds(lambda n: (get(f"/{n}"), b""), st.integers(0, 9)),
        st.builds(lambda n, body: (post(f"/{n}", body), body), st.integers(0, 9), st.binary(max_size=30)),
    ),
    max_size=5,
)


@settings(max_examples=60)
@given(requests, st.lists(st.integers(0, 400), max_size=6), st.booleans())
def test_pipelined_requests_are_answered_in_order_in_any_split(
    sent: list[tuple[bytes, bytes]], cuts: list[int], wait: bool
) -> None:
    wire = b"".join(request for request, _ in sent)
    edges = sorted({0, len(wire), *(min(cut, len(wire)) for cut in cuts)})
    with benches(wait=wait) as bench:
        for begin, end in itertools.pairwise(edges):
            bench.receive(wire[begin:end])
        while bench.service.waiting:
            assert len(bench.service.waiting) == 1, "two requests of one connection are under way"
            bench.answer()
        expected = [(request.split(b" ")[1] + b" " + body) for request, body in sent]
        assert bench.bodies == expected


# -- order ----------------------------------------------------------------------------------------------------------


def test_a_request_sent_ahead_waits_for_the_one_before_it(waiting: Bench) -> None:
    waiting.receive(get("/a") + get("/b"))
    waiting.receive(get("/c"))
    assert [path for _, path, _ in waiting.service.requests] == ["/a"]
    waiting.answer()
    assert [path for _, path, _ in waiting.service.requests] == ["/a", "/b"]
    waiting.answer()
    waiting.answer()
    assert waiting.bodies == [b"/a ", b"/b ", b"/c "]


def test_a_client_that_sends_far_ahead_is_not_read_until_it_is_its_turn(waiting: Bench) -> None:
    waiting.receive(get("/a"))
    waiting.receive(post("/b", b"x" * AHEAD_LIMIT)[: AHEAD_LIMIT + 10])
    assert not waiting.transport.reading
    waiting.answer()
    assert waiting.transport.reading
    waiting.receive(post("/b", b"x" * AHEAD_LIMIT)[AHEAD_LIMIT + 10 :])
    waiting.answer()
    assert len(waiting.bodies[1]) == AHEAD_LIMIT + 3


def test_a_client_that_does_not_read_its_answers_gets_no_more_of_them(bench: Bench) -> None:
    bench.connection.pause_writing()
    for _ in range(100):
        bench.receive(get("/a"))
    assert bench.service.requests == []
    bench.connection.resume_writing()
    bench.turn()
    assert len(bench.bodies) == 100


def test_a_client_that_neither_reads_nor_stops_sending_is_not_read(bench: Bench) -> None:
    bench.connection.pause_writing()
    wire = get("/a") * (AHEAD_LIMIT // len(get("/a")) + 1)
    bench.receive(wire)
    assert not bench.transport.reading
    bench.connection.resume_writing()
    while not bench.transport.reading:  # a few requests each turn
        bench.turn()
    assert len(bench.service.requests) == wire.count(b"GET")


# -- expectations, methods, versions --------------------------------------------------------------------------------


def test_a_client_that_expects_100_continue_gets_it(bench: Bench) -> None:
    wire = post("/a", b"abc", "Expect: 100-continue")
    bench.receive(wire[:-3])
    assert bench.written == b"HTTP/1.1 100 Continue\r\n\r\n"
    bench.receive(wire[-3:])
    assert bench.written.endswith(b"/a abc")


@pytest.mark.parametrize("wire", [post("/a", b"abc", "Expect: 100-continue"), post("/a", b"", "Expect: 100-continue")])
def test_a_client_whose_body_has_arrived_gets_no_100_continue(bench: Bench, wire: bytes) -> None:
    bench.receive(wire)
    assert b"100 Continue" not in bench.written
    assert b"200 OK" in bench.written


def test_a_chunked_client_that_expects_100_continue_gets_it(bench: Bench) -> None:
    bench.receive(b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n")
    assert bench.written == b"HTTP/1.1 100 Continue\r\n\r\n"
    bench.receive(b"0\r\n\r\n")
    assert b"200 OK" in bench.written


def test_a_client_that_expects_100_continue_for_too_long_a_body_is_refused_at_once() -> None:
    with benches(limit=10) as bench:
        bench.receive(post("/a", b"x" * 11, "Expect: 100-continue")[:-11])
        assert bench.written.startswith(b"HTTP/1.1 400 ")
        assert b"100 Continue" not in bench.written
        assert bench.transport.ends


def test_the_answer_to_head_has_the_length_and_no_body(bench: Bench) -> None:
    bench.receive(b"HEAD /abc HTTP/1.1\r\nHost: h\r\n\r\n" + get("/d"))
    head, _, rest = bench.written.partition(b"\r\n\r\n")
    assert head.endswith(b"Content-Length: 5")
    assert rest.startswith(b"HTTP/1.1 200 ")
    assert answers_of(rest)[0][1] == b"/d "


@pytest.mark.parametrize(
    ("request_wire", "kept"),
    [
        (get("/a"), True),
        (get("/a", "Connection: close"), False),
        (get("/a", version="1.0"), False),
        (get("/a", "Connection: keep-alive", version="1.0"), True),
    ],
)
def test_the_connection_is_kept_or_closed_as_the_client_says(bench: Bench, request_wire: bytes, kept: bool) -> None:
    bench.receive(request_wire)
    assert bench.transport.ends is not kept
    assert (b"Connection: close" in bench.written) is not kept
    assert (b"Connection: keep-alive" in bench.written) is (kept and b"HTTP/1.0" in request_wire)


@pytest.mark.parametrize("wait", [False, True])
def test_what_comes_after_the_last_request_is_not_done(wait: bool) -> None:
    with benches(wait=wait) as bench:
        bench.receive(get("/a", "Connection: close") + get("/b"))
        if wait:
            bench.answer()
        assert [path for _, path, _ in bench.service.requests] == ["/a"]
        assert bench.transport.ends


# -- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wire", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400),
        (b"nonsense\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
        (b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", 400),
        (b"GET /" + b"a" * HEAD_LIMIT, 431),
        (b"GET /" + b"a" * HEAD_LIMIT + b" HTTP/1.1\r\nHost: h\r\n\r\n", 431),
    ],
)
def test_bytes_that_are_not_a_request_are_answered_and_end_the_connection(
    bench: Bench, wire: bytes, status: int
) -> None:
    bench.receive(wire + get("/after"))
    ((head, body),) = answers_of(bench.written)
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"Connection: close" in head
    assert body.startswith(b'{"error":"')
    assert bench.transport.ends
    assert bench.service.requests == []


def test_nonsense_sent_ahead_is_refused_after_the_answer_before_it(waiting: Bench) -> None:
    waiting.receive(get("/a") + b"nonsense\r\n\r\n")
    waiting.answer()
    (first, _), (second, _) = answers_of(waiting.written)
    assert first.startswith(b"HTTP/1.1 200 ")
    assert second.startswith(b"HTTP/1.1 400 ")
    assert waiting.transport.ends


@pytest.mark.parametrize("again", [False, True], ids=["new-head", "known-head"])
@pytest.mark.parametrize("with_body", [False, True])
def test_a_body_beyond_the_limit_is_refused_before_it_is_read(again: bool, with_body: bool) -> None:
    with benches(limit=100) as bench:
        wire = post("/a", b"x" * 101)
        if again:
            bench.listener.heads.parse(wire[:-101])
        bench.receive(wire if with_body else wire[:-101])
        assert bench.written.startswith(b"HTTP/1.1 400 ")
        assert b"request JSON size of 101 bytes exceeds the maximum allowed input size of 100 bytes" in bench.written
        assert bench.transport.ends
        assert bench.service.requests == []


def test_a_gigantic_length_takes_no_memory(bench: Bench) -> None:
    bench.receive(b"POST /a HTTP/1.1\r\nHost: h\r\nContent-Length: 18446744073709551615\r\n\r\n")
    assert bench.written.startswith(b"HTTP/1.1 400 ")


def test_a_chunked_body_beyond_the_limit_is_refused() -> None:
    with benches(limit=100) as bench:
        bench.receive(b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n65\r\n")
        assert bench.written.startswith(b"HTTP/1.1 400 ")


def test_a_chunked_body_of_too_many_chunks_is_refused_with_tritons_text_and_the_connection_ends() -> None:
    with benches() as bench:
        bench.listener.max_chunks = 2
        bench.receive(b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 3)
        assert b"\r\nContent-Type: application/json\r\n" in bench.written
        assert b"Chunked request body exceeds maximum of 2 non-empty chunks." in bench.written
        assert bench.transport.ends
        assert not bench.service.requests


def test_a_service_that_fails_is_a_500_without_details(bench: Bench) -> None:
    bench.service.failure = RuntimeError("secret")
    bench.receive(get("/a"))
    assert bench.written.startswith(b"HTTP/1.1 500 ")
    assert b"secret" not in bench.written


@settings(max_examples=60)
@given(
    st.lists(
        st.sampled_from([get("/a"), post("/b", b"xyz"), b"\r\n", b"x", b"GET ", b"\r\n\r\n", b"0\r\n\r\n", b"\x00"]),
        max_size=8,
    )
)
def test_no_bytes_break_a_connection(pieces: list[bytes]) -> None:
    with benches() as bench:
        for piece in pieces:
            bench.receive(piece)
        assert all(head.startswith(b"HTTP/1.1 ") for head, _ in answers_of(bench.written))


# -- a real socket --------------------------------------------------------------------------------------------------


def test_over_a_real_socket() -> None:
    async def talk() -> None:
        loop = asyncio.get_running_loop()
        listener = Listener(FakeService(), max_body_bytes=8 << 20)
        server = await loop.create_server(listener.connection, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = b"0123456789" * 300_000
        writer.write(get("/a") + post("/b", body) + get("/c"))
        await writer.drain()
        for path, expected in ((b"/a", b""), (b"/b", body), (b"/c", b"")):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 OK\r\n")
            length = int(head.split(b"Content-Length: ")[1].split(b"\r\n")[0])
            assert await reader.readexactly(length) == path + b" " + expected
        assert listener.close_idle() == 1
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
        server.close()
        await server.wait_closed()
        assert not listener.connections

    asyncio.run(asyncio.wait_for(talk(), PATIENCE_S))


@pytest.mark.parametrize("cut", [1, 4, 17, 18, 20])
def test_a_connection_of_http2_is_handed_over_however_its_preface_is_cut(cut: int) -> None:
    taken: list[bytes] = []
    with benches(http2=lambda _transport, received: taken.append(received)) as bench:
        bench.receive(PREFACE[:cut])
        if not taken:
            bench.receive(PREFACE[cut:])
        (received,) = taken
        assert PREFACE.startswith(received)
        assert len(received) >= 18
        assert not bench.written
        assert not bench.listener.connections


@pytest.mark.parametrize("pipelined", [True, False])
def test_http2_after_a_request_of_http1_is_a_version_that_is_not_spoken(pipelined: bool) -> None:
    taken: list[bytes] = []
    request = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    with benches(http2=lambda _transport, received: taken.append(received)) as bench:
        for piece in [request + PREFACE] if pipelined else [request, PREFACE]:
            bench.receive(piece)
        assert [head.split(b" ")[1] for head, _ in answers_of(bench.written)] == [b"200", b"505"]
        assert not taken
