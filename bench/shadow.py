"""The tail of a model's latency with a shadow beside the tail without one, within one server.

Requests come by a fixed schedule at a part of the server's capacity (open loop, corrected for coordinated omission).
The shadow begins and ends every second by the control route; the order within each pair of seconds alternates. The
result is the median of the pairs' ratios with a confidence interval of 95 %, and the ratio of the percentiles of all
seconds with an interval from 1,000 resamplings of the pairs.

python bench/shadow.py [SECONDS [SHADOW ...]]: of each of the three shadows and of none, or of the named ones:
none, version, server, silent. An interval of 95 % below 1.02 is conclusive; the one without a shadow shows the noise.
"""

from __future__ import annotations

import http.client
import json
import math
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from coldstart import REMORA, free_port
from models import mlp
from remora_tools.deciders.latencies import Histogram, merge
from remora_tools.load import HTTP, Plan, Results, results_from_json

SECONDS, WINDOW_S, SETTLE_S, CONNECTIONS, PART = 90.0, 0.9, 0.1, 16, 0.3
BODY = json.dumps({"inputs": [{"name": "input", "shape": [1, 64], "datatype": "FP32", "data": [0.5] * 64}]}).encode()
REQUEST = (
    b"POST /v2/models/mlp/infer HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n" % len(BODY)
) + BODY
SHADOWS: dict[str, tuple[str, dict[str, object] | None]] = {
    "none": ("no shadow at all", None),
    "version": ("another version", {"version": 1}),
    "server": ("another server", {"url": "other"}),
    "silent": ("a server that never answers", {"url": "silent"}),
}
Pair = tuple[Histogram, Histogram]
"""Latencies of a second without and of one with a shadow."""


@contextmanager
def load(port: int, rate: float, window_s: float) -> Iterator[Iterator[Results]]:
    """Send requests at a rate, 0 for as many as possible, and yield the results of each window."""
    window_ns = int(window_s * 1e9)
    plan = Plan(HTTP, "127.0.0.1", port, False, (REQUEST,), CONNECTIONS, rate, "poisson", 7, 0, 1, 0, window_ns, 10.0)
    words = [sys.executable, "-m", "remora_tools.load.generator"]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        print(json.dumps(plan.to_json()), file=process.stdin, flush=True)
        process.stdout.readline()
        print(time.monotonic_ns() + 100_000_000, file=process.stdin, flush=True)
        yield (results_from_json(json.loads(line)) for line in process.stdout)
    finally:
        process.kill()
        process.communicate()


def release(port: int, **members: object) -> dict[str, Any]:
    """Perform an action on the release, or none, and return its state."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST" if members else "GET", "/v2/models/mlp/release", json.dumps(members))
    reply = connection.getresponse()
    document: dict[str, Any] = json.loads(reply.read())
    assert reply.status == 200, document
    connection.close()
    return document


def serve(repository: Path, *flags: str) -> tuple[subprocess.Popen[str], int]:
    port = free_port()
    words = [f"--http-port={port}", "--allow-grpc=false", "--allow-metrics=false", *flags]
    server = subprocess.Popen([REMORA, "serve", str(repository), *words], stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    next(line for line in server.stderr if line.startswith("READY"))
    return server, port


def capacity(port: int) -> float:
    """Return the requests per second of a closed loop: the median of three seconds."""
    with load(port, 0.0, 1.0) as windows:
        next(windows)
        return statistics.median(next(windows).rate_per_s for _ in range(3))


def measure(
    port: int, rate: float, shadow: dict[str, object] | None, seconds: float
) -> tuple[list[Pair], dict[str, int]]:
    """Return the latencies of pairs of seconds, and the shadow's counts over all of them.

    Each second begins with a window in which the shadow changes and which does not count. Without a shadow, the ratio
    shows the noise.
    """
    pairs: list[Pair] = []
    counts = {"compared": 0, "failed": 0, "dropped": 0}
    with load(port, rate, SETTLE_S) as windows:
        for _ in range(10):
            next(windows)
        for number in range(int(seconds / 2 / (SETTLE_S + WINDOW_S))):
            found = {}
            for with_shadow in (number % 2 == 0, number % 2 == 1):
                if with_shadow and shadow is not None:
                    release(port, action="shadow", **shadow)
                next(windows)
                taken = [next(windows) for _ in range(round(WINDOW_S / SETTLE_S))]
                assert not any(window.failures for window in taken)
                found[with_shadow] = merge(window.latency for window in taken)
                if with_shadow and shadow is not None:
                    state = release(port)["shadow"]
                    counts = {name: value + int(state[name]) for name, value in counts.items()}
                    release(port, action="shadow")  # ends it
            pairs.append((found[False], found[True]))
    return pairs, counts


def median_with_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the median and its confidence interval of 95 %, from the order statistics."""
    ordered = sorted(values)
    reach = 0.98 * math.sqrt(len(ordered))
    low = max(int(len(ordered) / 2 - reach), 0)
    high = min(math.ceil(len(ordered) / 2 + reach), len(ordered) - 1)
    return statistics.median(ordered), ordered[low], ordered[high]


def pooled_with_interval(pairs: Sequence[Pair], percent: float) -> tuple[float, float, float]:
    """Return the ratio of the percentiles of all seconds, and its interval of 95 % by resampling the pairs."""

    def ratio(chosen: Sequence[Pair]) -> float:
        plain, shadowed = (merge(pair[side] for pair in chosen).percentile(percent) for side in (0, 1))
        return shadowed / plain

    generator = random.Random(0)
    drawn = sorted(ratio(generator.choices(pairs, k=len(pairs))) for _ in range(1000))
    return ratio(pairs), drawn[25], drawn[974]


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else SECONDS
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        repository = mlp(Path(folder) / "models")
        (repository / "mlp" / "2").mkdir()
        for file in (repository / "mlp" / "1").iterdir():
            (repository / "mlp" / "2" / file.name).write_bytes(file.read_bytes())
        # Version 1 stays loaded, so that a shadow begins without a load.
        config = repository / "mlp" / "config.pbtxt"
        config.write_text(config.read_text() + "version_policy { all { } }\n")
        other, other_port = serve(repository)
        urls = {"other": f"http://127.0.0.1:{other_port}", "silent": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        server, port = serve(repository, *(f"--shadow-url={name}={url}" for name, url in urls.items()))
        try:
            capable = capacity(port)
            rate = PART * capable
            print(
                f"capacity {capable:.0f} requests per second over {CONNECTIONS} connections, measured at {rate:.0f} "
                f"({PART:.0%}), {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}",
                flush=True,
            )
            for title, shadow in (SHADOWS[name] for name in sys.argv[2:] or SHADOWS):
                _report(title, *measure(port, rate, shadow, seconds))
        finally:
            for process in (server, other):
                process.terminate()
                process.wait()


def _report(title: str, pairs: list[Pair], counts: dict[str, int]) -> None:
    print(f"{title}: {len(pairs)} pairs of seconds, {', '.join(f'{value} {name}' for name, value in counts.items())}")
    for percent in (50.0, 99.0):
        plain, shadowed = ([pair[side].percentile(percent) for pair in pairs] for side in (0, 1))
        ratios = [mine / theirs for mine, theirs in zip(shadowed, plain, strict=True)]
        middle, low, high = median_with_interval(ratios)
        whole, least, most = pooled_with_interval(pairs, percent)
        print(
            f"  p{percent:g}: {statistics.median(plain) / 1e6:.3f} ms without, {statistics.median(shadowed) / 1e6:.3f} "
            f"ms with; median of the pairs' ratios {middle:.3f} ({low:.3f} to {high:.3f}), ratio of all seconds "
            f"{whole:.3f} ({least:.3f} to {most:.3f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
