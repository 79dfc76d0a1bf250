"""Share of a turn of the loop that one connection gets for pipelined requests."""

from __future__ import annotations

import itertools

from remora.server.http.http1_state import TURN_NS, TURN_REQUESTS
from support.wire.http1_bench import Bench, answers_of, benches, get, post


def test_a_turn_answers_a_bounded_number_of_pipelined_requests_and_the_next_turns_the_others() -> None:
    wanted = 3 * TURN_REQUESTS + 1
    with benches() as bench:
        bench.listener.now = itertools.repeat(0).__next__  # no time passes
        bench.receive(b"".join(get(f"/{number}") for number in range(wanted)), turn=False)
        assert len(answers_of(bench.written)) in (TURN_REQUESTS, 2 * TURN_REQUESTS)  # one turn, perhaps two
        assert not bench.transport.reading  # or what the socket has would be handled in the same turn
        while len(bench.bodies) < wanted:
            before = len(bench.bodies)
            bench.turn()
            assert before < len(bench.bodies) <= before + 3 * TURN_REQUESTS  # the bench turns three times
        assert bench.bodies == [b"/%d " % number for number in range(wanted)]
        assert bench.transport.reading


def test_a_client_that_leaves_amid_its_pipelined_requests_is_closed_after_their_answers() -> None:
    with benches() as bench:
        bench.receive(b"".join(get(f"/{number}") for number in range(70)), turn=False)
        bench.connection.eof_received()
        for _ in range(5):
            bench.turn()
        assert len(bench.bodies) == 70
        assert bench.transport.ends


def test_a_body_of_tiny_chunks_takes_several_turns_and_arrives_whole() -> None:
    count = 20_000
    head = b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    with benches() as bench:
        bench.receive(head + b"1\r\nx\r\n" * count + b"0\r\n\r\n" + get("/b"), turn=False)
        assert not bench.service.requests
        assert not bench.transport.reading
        while not bench.transport.reading:
            bench.turn()
        assert bench.service.requests == [("POST", "/a", b"x" * count), ("GET", "/b", b"")]


def test_after_some_time_the_further_requests_wait_for_the_next_turn() -> None:
    with benches() as bench:
        bench.listener.now = itertools.count(0, TURN_NS // 4).__next__  # a quarter of a turn for each request
        bench.receive(b"".join(get(f"/{number}") for number in range(20)), turn=False)
        assert not bench.transport.reading
        assert len(bench.bodies) <= 10  # one turn, perhaps two
        while len(bench.bodies) < 20:
            before = len(bench.bodies)
            bench.turn()
            assert before < len(bench.bodies) <= before + 3 * 5  # the bench turns three times
        assert bench.bodies == [b"/%d " % number for number in range(20)]
        assert bench.transport.reading


def test_a_request_that_takes_the_whole_time_is_alone_in_its_turn() -> None:
    with benches() as bench:
        bench.listener.now = itertools.count(0, 2 * TURN_NS).__next__
        bench.receive(b"".join(get(f"/{number}") for number in range(5)), turn=False)
        assert len(bench.bodies) <= 2
        for _ in range(5):
            bench.turn()
        assert len(bench.bodies) == 5


def is_reading_after(bench: Bench, data: bytes) -> bool:
    """Return True if the transport may read on in the turn of the loop in which it has read this data."""

    async def feed() -> bool:
        view = memoryview(data)
        while view:
            buffer = bench.connection.get_buffer(-1)
            count = min(len(buffer), len(view))
            buffer[:count] = view[:count]
            bench.connection.buffer_updated(count)
            view = view[count:]
        return bench.transport.reading

    return bench.loop.run_until_complete(feed())


def test_after_a_full_buffer_the_transport_reads_in_the_next_turn() -> None:
    with benches() as bench:
        bench.listener.now = itertools.repeat(0).__next__
        size = len(bench.listener.scratch)
        request = post("/a", b"x" * (size // 5 - 100))
        request = post("/a", b"x" * (size // 5 - 100 + (size - 10) // 5 - len(request)))
        data = request * 6  # of which a buffer holds five, and the beginning of a head
        assert is_reading_after(bench, request)
        assert not is_reading_after(bench, data[:size])
        bench.turn()
        assert is_reading_after(bench, data[size : size + 1000])
        bench.receive(data[size + 1000 :])
        assert len(bench.bodies) == 7


def test_after_a_long_body_that_is_answered_at_once_the_transport_reads_in_the_next_turn() -> None:
    with benches() as bench:
        bench.listener.now = itertools.repeat(0).__next__
        data = post("/a", b"x" * 300_000)
        assert is_reading_after(bench, data[:-1])
        assert not is_reading_after(bench, data[-1:])
        bench.turn()
        assert bench.transport.reading
        bench.receive(data + get("/b"))
        assert [path for _, path, _ in bench.service.requests] == ["/a", "/a", "/b"]
