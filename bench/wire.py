"""What an inference costs on each wire without sockets: Python frames, and processor time of the process.

Frames are exact on any machine. Times are the minimum and the median over rounds, in microseconds per request.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from in_process import Wire, frames, grpc, http, streaming
from models import mlp
from remora.engine import Engine
from remora.server.loop import LoopMailbox

WARMUP, ROUNDS = 200, 1_000
Opened = Callable[[LoopMailbox], AbstractContextManager[Wire]]


async def times_us(wire: Wire, requests: int) -> list[float]:
    spent = []
    for _ in range(ROUNDS):
        begin = time.process_time_ns()
        await wire.round(requests)
        spent.append((time.process_time_ns() - begin) / requests / 1e3)
    return sorted(spent)


async def measured(requests: int, opened: Opened) -> tuple[float, list[float]]:
    """Frames and sorted times; a lone request runs at once, as in a server with one connection."""
    mailbox = LoopMailbox(asyncio.get_running_loop())
    mailbox.alone = lambda: requests == 1
    with opened(mailbox) as wire:
        for _ in range(WARMUP):
            await wire.round(requests)
        return await frames(wire, requests), await times_us(wire, requests)


def main() -> None:
    loop = asyncio.new_event_loop()
    with tempfile.TemporaryDirectory() as folder, Engine(mlp(Path(folder))) as engine:
        cases: list[tuple[str, int, Opened]] = [
            ("HTTP, alone", 1, lambda box: http(engine, box, "mlp", 1)),
            ("HTTP, batch of 8", 8, lambda box: http(engine, box, "mlp", 8)),
            ("HTTP, batch of 32", 32, lambda box: http(engine, box, "mlp", 32)),
            ("gRPC, alone", 1, lambda box: grpc(engine, box, "mlp", 1)),
            ("gRPC, 1 connection x 8 streams", 8, lambda box: grpc(engine, box, "mlp", 1, 8)),
            ("gRPC, 8 x 1", 8, lambda box: grpc(engine, box, "mlp", 8)),
            ("gRPC, 8 x 4", 32, lambda box: grpc(engine, box, "mlp", 8, 4)),
            ("gRPC stream, alone", 1, lambda box: streaming(engine, box, "mlp", 1)),
            ("gRPC stream, 8 streams x 1", 8, lambda box: streaming(engine, box, "mlp", 8)),
            ("gRPC stream, 8 streams x 4", 32, lambda box: streaming(engine, box, "mlp", 8, 4)),
        ]
        for name, requests, opened in cases:
            counted, spent = loop.run_until_complete(measured(requests, opened))
            print(
                f"{name:32} {counted:6.1f} frames, {spent[0]:6.2f} us (median {spent[len(spent) // 2]:.2f})", flush=True
            )


if __name__ == "__main__":
    main()
