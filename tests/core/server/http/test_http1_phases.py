"""Table of a connection's phases: which bytes lead where, and which part of an answer each phase accepts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remora.protocols.rest.answer import HttpAnswer
from remora.server.http.held_bytes import Account
from remora.server.http.http1_state import Phase
from support.wire.http1_bench import Bench, benches, get, post

ANSWER = HttpAnswer(200, (), [b"x"])
CHUNKED = b"POST /a HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
REACHED = {
    Phase.IDLE: b"",
    Phase.HEAD: b"GET /a HT",
    Phase.BODY: post("/a", b"x" * 10)[:-1],
    Phase.CHUNKS: CHUNKED + b"3\r\nab",
    Phase.ANSWERING: get("/a"),
    Phase.STREAMING: get("/a"),
    Phase.AHEAD: b"",
    Phase.WAITING: post("/a", b"x" * 20_000)[:-1],
    Phase.LINGERING: b"nonsense\r\n\r\n",
}
OWED = (Phase.ANSWERING, Phase.STREAMING)


def fill(bench: Bench) -> Account:
    """Have another connection hold all bytes that may be held."""
    held = bench.listener.held
    held.most = 1
    other = held.account()
    other.add(1)
    return other


def reach(bench: Bench, phase: Phase) -> None:
    """Bring a connection whose service does not answer into a phase."""
    if phase is Phase.AHEAD:
        bench.connection.pause_writing()
        bench.receive(get("/a"))
    else:
        if phase is Phase.WAITING:
            fill(bench)
        bench.receive(REACHED[phase])
    if phase is Phase.STREAMING:
        bench.connection.begin(200, ())
    assert bench.connection._phase is phase
    bench.transport.written.clear()


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize(
    ("part", "accepted_in", "next_phase"),
    [
        ("respond", Phase.ANSWERING, Phase.IDLE),
        ("begin", Phase.ANSWERING, Phase.STREAMING),
        ("send", Phase.STREAMING, Phase.STREAMING),
        ("finish", Phase.STREAMING, Phase.IDLE),
    ],
)
def test_a_part_of_an_answer_is_written_in_its_phase_alone(
    phase: Phase, part: str, accepted_in: Phase, next_phase: Phase
) -> None:
    with benches(wait=True) as bench:
        reach(bench, phase)
        connection = bench.connection
        parts = {
            "respond": lambda: connection.respond(ANSWER),
            "begin": lambda: connection.begin(200, ()),
            "send": lambda: connection.send(b"x"),
            "finish": connection.finish,
        }
        parts[part]()
        assert (bench.written != b"") == (phase is accepted_in)
        assert connection._phase is (next_phase if phase is accepted_in else phase)


@pytest.mark.parametrize("phase", Phase)
def test_the_rest_of_a_request_completes_it_in_every_phase_that_awaits_one(phase: Phase) -> None:
    whole = {Phase.CHUNKS: CHUNKED + b"3\r\nabc\r\n0\r\n\r\n", Phase.BODY: post("/a", b"x" * 10)}.get(phase, get("/a"))
    with benches(wait=True) as bench:
        reach(bench, phase)
        if phase in OWED or phase in (Phase.AHEAD, Phase.WAITING, Phase.LINGERING):
            bench.receive(get("/b"))
            expected = phase
        else:
            bench.receive(whole[len(REACHED[phase]) :])
            expected = Phase.ANSWERING
        assert bench.connection._phase is expected


@pytest.mark.parametrize("phase", Phase)
def test_only_an_idle_connection_may_be_given_up_for_another(phase: Phase) -> None:
    with benches(wait=True) as bench:
        reach(bench, phase)
        assert bench.connection.is_idle == (phase is Phase.IDLE)
        assert bench.connection.owes_an_answer == (phase in OWED)


@pytest.mark.parametrize("phase", Phase)
def test_a_shutdown_waits_for_what_has_begun(phase: Phase) -> None:
    with benches(wait=True) as bench:
        if phase is Phase.IDLE:
            bench.receive(get("/a"))
            bench.answer()
        reach(bench, phase)
        bench.listener.close_idle()
        assert bench.transport.closing == (phase is Phase.IDLE)


requests = st.lists(
    st.sampled_from((get("/a"), post("/b", b"body"), post("/b", b"x" * 300), CHUNKED + b"1\r\na\r\n0\r\n\r\n")),
    min_size=1,
    max_size=6,
)


@given(requests, st.booleans())
def test_a_request_in_one_piece_is_read_like_one_in_two(sent: list[bytes], together: bool) -> None:
    """The first piece of two ends within the head, so that the branch of the usual request is not taken."""
    seen = []
    for usual in (True, False):
        with benches() as bench:
            for request in [b"".join(sent)] if together else sent:
                for piece in (request,) if usual else (request[:5], request[5:]):
                    bench.receive(piece)
            seen.append((bench.service.requests, bench.written, bench.connection._phase))
    assert seen[0] == seen[1]
