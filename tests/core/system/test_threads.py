"""Work in daemon threads."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from remora.system.threads import run_in_daemon, start_daemon

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


def test_a_stack_has_the_size_that_was_asked_for_and_later_threads_have_the_systems() -> None:
    before = threading.stack_size()
    started = start_daemon(lambda: None, "remora deep", stack_bytes=1 << 28)
    started.join(PATIENCE_S)
    assert threading.stack_size() == before
    mapped = run_in_daemon(lambda: Path("/proc/self/maps").read_text(), "remora deep", stack_bytes=1 << 28).result()
    assert any(_size(line) >= 1 << 28 for line in mapped.splitlines())


def _size(line: str) -> int:
    begin, end = line.split()[0].split("-")
    return int(end, 16) - int(begin, 16)
