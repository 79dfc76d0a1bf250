"""What the access log of all requests costs per request: processor time of the loop and of the writer, in pairs.

Each pair runs the same requests without and with the log, whose lines go to a file. The figures are microseconds: the
median of the differences with the quartiles, and the least of each side, which a busy machine disturbs less. The loop
sleeps while it waits, as in a server, because the time of a thread that polls is that of the threads it waits for.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
from in_process import WakingMailbox, Wire, grpc, http
from models import mlp
from remora.engine import Engine
from remora.server.access_log import AccessLog, AccessWriter
from remora.server.loop import LoopMailbox
from remora.system import logs
from remora.system.clock import SystemClock
from remora.system.tuning import Tuning, apply, freeze

PAIRS, REQUESTS = 45, 1_600
RATE = 30_000
"""Requests per second of the paced cases."""
Opened = Callable[[LoopMailbox, AccessLog | None], AbstractContextManager[Wire]]


class Case(NamedTuple):
    """Clients: how many requests they send at a time, and per second, 0 for no bound."""

    name: str
    requests: int
    rate: int
    opened: Opened


def writer_ns(writer: AccessWriter) -> int:
    """Return the processor time of the writer's thread so far."""
    thread = writer._thread
    return 0 if thread is None else time.clock_gettime_ns(time.pthread_getcpuclockid(thread.ident or 0))


async def spent_us(mailbox: WakingMailbox, case: Case, wire: Wire, writer: AccessWriter) -> float:
    """Return the processor time of one request in both threads, from its receipt to its line on disk."""
    loop = asyncio.get_running_loop()
    begin, start, rounds = time.thread_time_ns() + writer_ns(writer), loop.time(), REQUESTS // case.requests
    for number in range(rounds):
        if case.rate:
            await asyncio.sleep(start + number * case.requests / case.rate - loop.time())
        wire.send()
        await mailbox.until(lambda: wire.answered() >= case.requests)
    writer.pass_on()
    spent = time.thread_time_ns()
    while writer.waiting:
        await asyncio.sleep(0.01)
    return (spent + writer_ns(writer) - begin) / REQUESTS / 1e3


class Found(NamedTuple):
    """Least times without and with the log, sorted differences of the pairs, dropped entries, requests per second."""

    off_us: float
    on_us: float
    differences_us: list[float]
    dropped: int
    rate: float


async def measured(case: Case, path: Path) -> Found:
    """Return the times of the pairs."""
    loop = asyncio.get_running_loop()
    mailbox = WakingMailbox(loop)
    mailbox.alone = lambda: case.requests == 1
    with path.open("w") as file:
        writer = AccessWriter(loop, lambda lines: (file.write(lines), file.flush()), SystemClock())
        with case.opened(mailbox, None) as off, case.opened(mailbox, AccessLog(writer, 1.0)) as on:
            await asyncio.sleep(0.2)  # the first calls are answered
            for wire in (on, off, on):
                await spent_us(mailbox, case, wire, writer)
            begin = loop.time()
            pairs = [
                (await spent_us(mailbox, case, off, writer), await spent_us(mailbox, case, on, writer))
                for _ in range(PAIRS)
            ]
            rate = 2 * PAIRS * REQUESTS / (loop.time() - begin)
        writer.close(10.0)
    befores, afters = zip(*pairs, strict=True)
    return Found(min(befores), min(afters), sorted(after - before for before, after in pairs), writer.dropped, rate)


def main() -> None:
    loop = asyncio.new_event_loop()
    apply(Tuning(), {})
    with tempfile.TemporaryDirectory() as folder, Engine(mlp(Path(folder))) as engine:
        freeze(Tuning())  # as in a server, whose collector does not visit the engine either
        path = Path(folder) / "access.log"
        for form in ("json", "default"):
            logs.OURS.change({"log_format": form})
            for case in (
                Case("HTTP, alone", 1, 0, lambda box, log: http(engine, box, "mlp", 1, log=log)),
                Case("HTTP, batch of 32", 32, 0, lambda box, log: http(engine, box, "mlp", 32, log=log)),
                Case("gRPC, 8 x 4", 32, 0, lambda box, log: grpc(engine, box, "mlp", 8, 4, log=log)),
                Case("HTTP, 30,000/s", 32, RATE, lambda box, log: http(engine, box, "mlp", 32, log=log)),
                Case("gRPC, 30,000/s", 32, RATE, lambda box, log: grpc(engine, box, "mlp", 8, 4, log=log)),
            ):
                found = loop.run_until_complete(measured(case, path))
                low, middle, high = statistics.quantiles(found.differences_us, n=4)
                print(
                    f"{form:8} {case.name:18} {middle:5.2f} us ({low:.2f} to {high:.2f}); least {found.off_us:.2f} and "
                    f"{found.on_us:.2f} us; {found.rate:.0f} requests/s, {found.dropped} dropped",
                    flush=True,
                )


if __name__ == "__main__":
    main()
