"""Work in daemon threads."""

from __future__ import annotations

import threading

import pytest

from remora.system.threads import run_in_daemon

PATIENCE_S = 30.0


def test_work_continues_when_its_waiters_are_gone() -> None:
    gate = threading.Event()

    def work() -> str:
        assert gate.wait(PATIENCE_S)
        return threading.current_thread().name

    future = run_in_daemon(work, "remora work")
    assert not future.cancel()
    gate.set()
    assert future.result(PATIENCE_S) == "remora work"


def test_the_thread_does_not_keep_the_process_alive() -> None:
    assert run_in_daemon(threading.current_thread, "remora work").result(PATIENCE_S).daemon


def test_an_error_reaches_the_waiter_even_one_that_ends_a_thread() -> None:
    def work() -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        run_in_daemon(work, "remora work").result(PATIENCE_S)
