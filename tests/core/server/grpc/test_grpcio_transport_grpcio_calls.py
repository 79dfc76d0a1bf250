"""Which calls of gRPC are under way: what waits for a thread, what runs, what has not sent its answer yet."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from remora.server.grpc.grpcio_transport import CallContext, GrpcioCalls

WAIT_S = 60.0


class Call:
    """A call whose end the test decides; ``over`` when it had ended before it was begun."""

    def __init__(self, *, over: bool = False) -> None:
        self.over = over
        self.ends: list[Callable[[], None]] = []

    def add_callback(self, act: Callable[[], None]) -> bool:
        if not self.over:
            self.ends.append(act)
        return not self.over


def test_what_runs_and_what_waits_for_a_thread_is_under_way() -> None:
    calls, gate = GrpcioCalls(), threading.Event()
    pool = calls.pool(1, "test")
    assert calls.wait(0)
    running, waiting = pool.submit(gate.wait, WAIT_S), pool.submit(int, "no number")
    assert not calls.wait(0)
    gate.set()
    assert calls.wait(WAIT_S)
    assert running.result(0)
    assert isinstance(waiting.exception(0), ValueError)
    calls.close()
    with pytest.raises(RuntimeError):
        pool.submit(int)
    assert calls.wait(0)


def test_what_is_dropped_at_the_end_is_no_longer_under_way() -> None:
    calls, gate = GrpcioCalls(), threading.Event()
    pool = calls.pool(1, "test")
    pool.submit(gate.wait, WAIT_S)
    dropped = pool.submit(int)
    calls.close()
    assert dropped.cancelled()
    gate.set()
    assert calls.wait(WAIT_S)


def test_a_call_is_under_way_until_its_answer_is_sent() -> None:
    calls = GrpcioCalls()

    def echo(message: bytes, _context: CallContext) -> bytes:
        return message

    behaviour, call = calls.unary(echo).unary_unary, Call()
    assert behaviour(b"x", call) == b"x"
    assert not calls.wait(0)
    call.ends[0]()
    assert calls.wait(0)
    behaviour(b"x", Call(over=True))
    assert calls.wait(0)
