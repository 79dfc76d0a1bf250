"""Share of a turn of the loop that one connection gets for pipelined requests."""

from __future__ import annotations

from http1_bench import answers_of, benches, get
from remora.server.http.http1 import TURN_REQUESTS


def test_a_turn_answers_a_bounded_number_of_pipelined_requests_and_the_next_turns_the_others() -> None:
    wanted = 3 * TURN_REQUESTS + 1
    with benches() as bench:
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
        assert bench.transport.closing


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
