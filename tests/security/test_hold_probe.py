"""The figures of `make test-security` are those of the server, whatever else the machine runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from support.process.eventually import eventually
from support.process.processor_time import Account, Look, caused_s
from support.servers.bystanders import Holds

SPIN = "while True: pass"
COMPETITORS = 3
HOLD = "began = time.process_time()\nwhile time.process_time() - began < 0.3: sum(range(10_000_000))"
RELEASE = "for _ in range(20): hashlib.pbkdf2_hmac('sha256', b'a', b'b', 100_000)"
SLEEP = "threading.Event().wait(0.5)"


@contextmanager
def pinned(*codes: str, environment: dict[str, str] | None = None) -> Iterator[list[subprocess.Popen[str]]]:
    """Run Python code in processes that share one processor."""
    processor = min(os.sched_getaffinity(0))
    pin = f"import hashlib, os, threading, time; os.sched_setaffinity(0, [{processor}])\n"
    with ExitStack() as ends:
        processes = []
        for code in codes:
            child = subprocess.Popen([sys.executable, "-c", pin + code], text=True, env=environment)
            ends.callback(child.wait)
            ends.callback(child.kill)
            processes.append(child)
        yield processes


@pytest.mark.parametrize(
    ("ended", "caused"),
    [
        (Look(2.0, 0.0, 9.0), 1.0),
        (Look(2.0, 0.75, 9.0), 0.25),
        (Look(2.0, 0.0, 5.5), 0.5),
        (Look(2.0, 3.0, 9.0), 0.0),
    ],
    ids=["all of it", "all but the unscheduled part", "no more than the processor time", "never less than nothing"],
)
def test_a_process_causes_the_part_of_a_wait_in_which_it_ran(ended: Look, caused: float) -> None:
    assert caused_s(Look(1.0, 0.0, 5.0), ended) == caused
    assert caused_s(Look(1.0, 0.0, 5.0), ended, pause_s=9.0) == 0.0


def test_time_in_which_other_programs_had_the_processor_is_not_caused_by_a_process() -> None:
    with ExitStack() as ends:
        child, *_ = ends.enter_context(pinned(*[SPIN] * (COMPETITORS + 1)))
        account = ends.enter_context(closing(Account(child.pid, [(child.pid, child.pid)])))
        began = eventually(lambda: look if (look := account.look()).processor_s > 0.1 else None)
        ended = eventually(lambda: look if (look := account.look()).processor_s > began.processor_s + 0.2 else None)
    caused = caused_s(began, ended)
    assert caused <= ended.processor_s - began.processor_s
    assert ended.at_s - began.at_s > 1.5 * caused


@pytest.mark.parametrize(
    ("work", "least", "most"),
    [(HOLD, 0.05, 9.0), (RELEASE, 0.0, 0.1), (SLEEP, 0.0, 0.1)],
    ids=["holds the lock", "releases the lock", "sleeps"],
)
def test_the_probe_finds_holds_of_the_interpreter_and_nothing_else_on_a_busy_machine(
    work: str, least: float, most: float, tmp_path: Path
) -> None:
    holds = Holds(tmp_path)
    with pinned(*[SPIN] * COMPETITORS), pinned(work, environment=holds.environment(dict(os.environ))) as (child,):
        assert child.wait(60) == 0
    assert least <= max(holds.of(child.pid), default=0.0) <= most
