"""Server process and figures for the cases of docs/cases.md."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

START_S = 120.0


@contextmanager
def serving(source: Path, *flags: str) -> Iterator[int]:
    """Serve models on a free port of loopback until the end of the block, and yield the port once they are ready."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    command = [sys.executable, "-m", "remora", "serve", str(source), f"--http-port={port}"]
    server = subprocess.Popen([*command, "--allow-grpc=false", "--allow-metrics=false", "--log-info=false", *flags])
    try:
        _wait(port, server)
        yield port
    finally:
        server.terminate()
        server.wait()


def _wait(port: int, server: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_S
    while server.poll() is None and time.monotonic() < end:
        try:
            with closing(connect(port)) as connection:
                connection.request("GET", "/v2/health/ready")
                if connection.getresponse().status == 200:
                    return
        except OSError:
            pass
        time.sleep(0.05)
    raise SystemExit("the server did not get ready: see its output")


def connect(port: int) -> http.client.HTTPConnection:
    """Return a connection that stays open between requests."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.connect()
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def post(
    connection: http.client.HTTPConnection, path: str, value: Any, headers: dict[str, str] | None = None
) -> tuple[int, Any, float]:
    """Send JSON and return the status, the answer, and the time to its last byte in milliseconds."""
    body = json.dumps(value)
    begin = time.perf_counter()
    connection.request("POST", path, body, headers or {})
    answer = connection.getresponse()
    content = answer.read()
    took_ms = (time.perf_counter() - begin) * 1e3
    return answer.status, json.loads(content or b"null"), took_ms


def percentile(values: Sequence[float], share: float) -> float:
    """Return the least value that the part ``share`` of the values does not exceed."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def report(**figures: float | int | str) -> None:
    """Print figures, with the load of the machine."""
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    width = max(map(len, figures))
    for name, value in figures.items():
        shown = f"{value:,.2f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
        print(f"{name.replace('_', ' '):{width}}  {shown}")
    print(f"{'load average':{width}}  {load} on {os.cpu_count()} cores")
