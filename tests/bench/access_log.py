"""What the access log of all requests costs per request: processor time of the loop and of the writer, in pairs.

Each pair runs the same requests without and with the log, whose lines go to a file. The figures are microseconds: the
median of the differences with the quartiles, and the least of each side, which a busy machine disturbs less.
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
from in_process import Wire, grpc, http
from models import mlp

from remora.engine import Engine
from remora.server.access_log import AccessLog, AccessWriter
from remora.server.loop import LoopMailbox
from remora.system import logs
from remora.system.clock import SystemClock
from remora.system.tuning import Tuning, apply, freeze

PAIRS, REQUESTS = 45, 1_600
Opened = Callable[[LoopMailbox, AccessLog | None], AbstractContextManager[Wire]]


def writer_ns(writer: AccessWriter) -> int:
    """Return the processor time of the writer's thread so far."""
    thread = writer._thread
    return 0 if thread is None else time.clock_gettime_ns(time.pthread_getcpuclockid(thread.ident or 0))


async def spent_us(wire: Wire, requests: int, writer: AccessWriter) -> float:
    """Return the processor time of one request in both threads, from its receipt to its line on disk."""
    begin = time.thread_time_ns() + writer_ns(writer)
    for _ in range(REQUESTS // requests):
        await wire.round(requests)
    writer.pass_on()
    spent = time.thread_time_ns()
    while writer.waiting:
        await asyncio.sleep(0.01)
    return (spent + writer_ns(writer) - begin) / REQUESTS / 1e3


class Found(NamedTuple):
    """Least times without and with the log, sorted differences of the pairs, number of dropped entries."""

    off_us: float
    on_us: float
    differences_us: list[float]
    dropped: int


async def measured(requests: int, opened: Opened, path: Path) -> Found:
    """Return the times of the pairs."""
    loop = asyncio.get_running_loop()
    mailbox = LoopMailbox(loop)
    mailbox.alone = lambda: requests == 1
    with path.open("w") as file:
        writer = AccessWriter(loop, lambda lines: (file.write(lines), file.flush()), SystemClock())
        with opened(mailbox, None) as off, opened(mailbox, AccessLog(writer, 1.0)) as on:
            await asyncio.sleep(0.2)  # the first calls are answered
            for wire in (on, off, on):
                await spent_us(wire, requests, writer)
            pairs = [
                (await spent_us(off, requests, writer), await spent_us(on, requests, writer)) for _ in range(PAIRS)
            ]
        writer.close(10.0)
    befores, afters = zip(*pairs, strict=True)
    return Found(min(befores), min(afters), sorted(after - before for before, after in pairs), writer.dropped)


def main() -> None:
    loop = asyncio.new_event_loop()
    apply(Tuning(), {})
    with tempfile.TemporaryDirectory() as folder, Engine(mlp(Path(folder))) as engine:
        freeze(Tuning())  # as in a server, whose collector does not visit the engine either
        path = Path(folder) / "access.log"
        for form in ("json", "default"):
            logs.OURS.change({"log_format": form})
            cases: list[tuple[str, int, Opened]] = [
                ("HTTP, alone", 1, lambda box, log: http(engine, box, "mlp", 1, log=log)),
                ("HTTP, batch of 32", 32, lambda box, log: http(engine, box, "mlp", 32, log=log)),
                ("gRPC, 8 x 4", 32, lambda box, log: grpc(engine, box, "mlp", 8, 4, log=log)),
            ]
            for name, requests, opened in cases:
                found = loop.run_until_complete(measured(requests, opened, path))
                low, middle, high = statistics.quantiles(found.differences_us, n=4)
                print(
                    f"{form:8} {name:18} {middle:5.2f} us ({low:.2f} to {high:.2f}); least {found.off_us:.2f} and "
                    f"{found.on_us:.2f} us; {found.dropped} dropped",
                    flush=True,
                )


if __name__ == "__main__":
    main()
