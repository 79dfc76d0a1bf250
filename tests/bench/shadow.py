"""The tail of a model's latency with a shadow beside the tail without one, at a constant rate.

The shadow is another version on the server, another server, or an address that never answers. The order of the two
measurements alternates from pair to pair.
"""

from __future__ import annotations

import http.client
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from coldstart import REMORA, free_port
from models import mlp

PAIRS, SECONDS, RATE, CONNECTIONS = 12, 5.0, 200, 4
BODY = json.dumps({"inputs": [{"name": "input", "shape": [1, 64], "datatype": "FP32", "data": [0.5] * 64}]})


def p99_ms(port: int) -> float:
    """Return the 99th percentile of latencies from the scheduled times on."""
    taken: list[float] = []
    begin = time.perf_counter() + 0.05

    def ask(number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        for place in range(number, int(SECONDS * RATE), CONNECTIONS):
            due = begin + place / RATE
            time.sleep(max(due - time.perf_counter(), 0))
            connection.request("POST", "/v2/models/mlp/infer", BODY)
            reply = connection.getresponse()
            reply.read()
            assert reply.status == 200
            taken.append(time.perf_counter() - due)
        connection.close()

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return statistics.quantiles(taken, n=100)[98] * 1e3


def release(port: int, **members: object) -> dict[str, object]:
    """Perform an action on the release and return its state."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", "/v2/models/mlp/release", json.dumps(members))
    reply = connection.getresponse()
    document: dict[str, object] = json.loads(reply.read())
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


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        repository = mlp(Path(folder) / "models")
        (repository / "mlp" / "2").mkdir()
        for file in (repository / "mlp" / "1").iterdir():
            (repository / "mlp" / "2" / file.name).write_bytes(file.read_bytes())
        other, other_port = serve(repository)
        urls = {"other": f"http://127.0.0.1:{other_port}", "silent": f"http://127.0.0.1:{silent.getsockname()[1]}"}
        server, port = serve(repository, *(f"--shadow-url={name}={url}" for name, url in urls.items()))
        print(f"{RATE} requests per second over {CONNECTIONS} connections, {PAIRS} pairs of {SECONDS:g} s")
        try:
            for title, shadow in (
                ("another version", {"version": 1}),
                ("another server", {"url": "other"}),
                ("a server that never answers", {"url": "silent"}),
            ):
                plain, shadowed, state = [], [], {}
                for pair in range(PAIRS):
                    for with_shadow in (pair % 2 == 0, pair % 2 == 1):
                        if not with_shadow:
                            plain.append(p99_ms(port))
                            continue
                        release(port, action="shadow", **shadow)
                        shadowed.append(p99_ms(port))
                        state = release(port, action="shadow")  # ends it
                ratios = [mine / theirs for mine, theirs in zip(shadowed, plain, strict=True)]
                print(
                    f"{title}: p99 {statistics.median(plain):.2f} ms without, {statistics.median(shadowed):.2f} ms "
                    f"with: ratio {statistics.median(ratios):.3f} "
                    f"(median of pairs; {min(ratios):.2f} to {max(ratios):.2f})"
                )
                assert state["shadow"] is None
        finally:
            for process in (server, other):
                process.terminate()
                process.wait()


if __name__ == "__main__":
    main()
