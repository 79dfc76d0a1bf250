"""The end of a process whose event loop hangs, and work that the end does not wait for."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading

import pytest

from remora.server.shutdown import in_own_thread, shut_down

PATIENCE_S = 60.0

HANGS = """
import asyncio, signal, sys, threading
from remora.server import shutdown
from remora.server.shutdown import force_exit_after, on_signals

shutdown._HELD_S = 3600  # so that the thread of the timeout ends the process, however late it comes

async def main():
    on_signals((signal.SIGTERM,), lambda: force_exit_after(SECONDS))
    print("up", flush=True)
    threading.Event().wait()  # the loop gets its thread back never again

asyncio.run(main())
"""


def start(script: str, *arguments: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    return process


def test_a_loop_that_hangs_does_not_hold_up_the_end() -> None:
    with start(HANGS.replace("SECONDS", "0")) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 1
        assert process.stderr is not None
        assert "Exit timeout expired. Exiting immediately." in process.stderr.read()


def test_a_second_signal_ends_a_process_whose_loop_hangs_at_once() -> None:
    with start(HANGS.replace("SECONDS", "3600").replace("lambda:", "lambda: print('first', flush=True) or")) as process:
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        assert process.stdout.readline() == "first\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 1


def test_native_code_that_holds_the_interpreter_does_not_hold_up_the_end() -> None:
    holds = """
import asyncio, ctypes, signal
from remora.server.shutdown import force_exit_after, on_signals

def stop():
    force_exit_after(0)
    ctypes.PyDLL(None).pause()  # never gives the interpreter's lock back

async def main():
    on_signals((signal.SIGTERM,), stop)
    print("up", flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""
    with start(holds) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 1


def test_work_in_a_separate_thread_gives_its_result_and_its_error() -> None:
    def fails() -> None:
        raise KeyError("x")

    async def run() -> None:
        assert await in_own_thread(max, 1, 2) == 2
        with pytest.raises(KeyError):
            await in_own_thread(fails)

    asyncio.run(run())


def test_a_loop_ends_while_work_in_a_separate_thread_goes_on() -> None:
    gate, ended = threading.Event(), threading.Event()

    def work() -> None:
        assert gate.wait(PATIENCE_S)
        ended.set()

    async def run() -> None:
        in_own_thread(work)

    asyncio.run(run())
    gate.set()
    assert ended.wait(PATIENCE_S)


class Part:
    """Part that records its steps."""

    def __init__(self, name: str, steps: list[str], drained: bool = True, closed: bool = True) -> None:
        self.name, self.steps, self.drained, self.closed = name, steps, drained, closed

    def announce(self) -> None:
        self.steps.append(f"{self.name} announces")

    def stop_accepting(self) -> None:
        self.steps.append(f"{self.name} stops accepting")

    async def drain(self, end: float) -> bool:
        self.steps.append(f"{self.name} drains until {end:.0f}")
        return self.drained

    def close(self) -> bool:
        self.steps.append(f"{self.name} closes")
        return self.closed


def test_all_parts_stop_accepting_before_the_first_drains_and_close_in_reverse() -> None:
    steps: list[str] = []
    assert asyncio.run(shut_down([Part("front", steps), Part("engine", steps)], 7.0))
    assert steps == [
        "front stops accepting",
        "engine stops accepting",
        "front drains until 7",
        "engine drains until 7",
        "engine closes",
        "front closes",
    ]


@pytest.mark.parametrize(("drained", "closed"), [(False, True), (True, False)])
def test_one_part_that_abandons_work_makes_the_shutdown_incomplete_and_the_others_still_end(
    drained: bool, closed: bool
) -> None:
    steps: list[str] = []
    parts = [Part("first", steps, drained, closed), Part("second", steps)]
    assert not asyncio.run(shut_down(parts, 7.0))
    assert len(steps) == 6
