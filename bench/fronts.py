"""Front processes: CPU per request of the engine's process and of the fronts, latency of one client, and rates.

Pairs of servers with and without fronts, alternating, over HTTP with binary tensors of the mlp model. h2load does the
load of many clients, because `remora bench load` would take the processors of the fronts. The latency of one client is
measured over a plain socket, whose cost is the same for both servers and less than the difference.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from coldstart import REMORA, free_port
from memory import wait
from models import mlp

ROUNDS = int(os.environ.get("ROUNDS", "5"))
SECONDS = int(os.environ.get("SECONDS", "3"))
ALONE = 2000
"""Requests of one client in a round."""
FRONTS = os.environ.get("FRONTS", "2")


def request_parts(rows: int = 1) -> tuple[bytes, int]:
    """The body of a request and the length of its JSON header."""
    tensor = np.random.default_rng(0).standard_normal((rows, 64), dtype=np.float32).tobytes()
    row = {"name": "input", "shape": [rows, 64], "datatype": "FP32", "parameters": {"binary_data_size": len(tensor)}}
    output = {"name": "output", "parameters": {"binary_data": True}}
    header = json.dumps({"inputs": [row], "outputs": [output]}).encode()
    return header + tensor, len(header)


class Server:
    """A running server with the processes that belong to it."""

    def __init__(self, repository: Path, frontends: str) -> None:
        self.port = free_port()
        ports = (f"--http-port={self.port}", "--allow-grpc=false", "--allow-metrics=false", f"--frontends={frontends}")
        self.process = subprocess.Popen([REMORA, "serve", str(repository), *ports], stderr=subprocess.DEVNULL)
        wait(f"http://127.0.0.1:{self.port}/v2/health/ready")
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        self.fronts = [int(pid) for pid in children]

    def cpu_s(self) -> tuple[float, float]:
        """Processor time of the engine's process and of all fronts so far."""
        return cpu_s(self.process.pid), sum(map(cpu_s, self.fronts))

    def end(self) -> None:
        self.process.terminate()
        self.process.wait()


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Load(NamedTuple):
    rate: float
    engine_us: float
    fronts_us: float


def load(server: Server, body: Path, length: int, clients: int) -> Load:
    """A round of h2load with this many clients."""
    before = server.cpu_s()
    done = subprocess.run(
        ["h2load", "--h1", f"-c{clients}", "-t1", f"-D{SECONDS}", "-d", str(body), "-H",
         f"inference-header-content-length: {length}", f"http://127.0.0.1:{server.port}/v2/models/mlp/infer"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    after = server.cpu_s()
    found = re.search(r"(\d+) done, (\d+) succeeded", done.stdout)
    rate = re.search(r"([\d.]+) req/s", done.stdout)
    assert found is not None, done.stdout
    assert rate is not None, done.stdout
    assert found[1] == found[2], done.stdout
    count = int(found[2])
    return Load(float(rate[1]), *((end - begin) / count * 1e6 for begin, end in zip(before, after, strict=True)))


def alone_us(server: Server, body: bytes, length: int) -> float:
    """The median latency of one client."""
    head = f"POST /v2/models/mlp/infer HTTP/1.1\r\nHost: a\r\nInference-Header-Content-Length: {length}\r\n"
    request = head.encode() + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    took = []
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(ALONE):
            begin = time.perf_counter()
            client.sendall(request)
            assert client.recv(65_536).startswith(b"HTTP/1.1 200")
            took.append(time.perf_counter() - begin)
    return statistics.median(took) * 1e6


def main() -> None:
    if shutil.which("h2load") is None:
        print("h2load is not installed: apt install nghttp2-client")
        return
    body, length = request_parts()
    with tempfile.TemporaryDirectory() as folder:
        sent = Path(folder) / "body"
        sent.write_bytes(body)
        servers = {"none": Server(mlp(Path(folder) / "models"), "0")}
        servers[FRONTS] = Server(Path(folder) / "models", FRONTS)
        try:
            loads: dict[str, list[Load]] = {name: [] for name in servers}
            alone: dict[str, list[float]] = {name: [] for name in servers}
            for _ in range(ROUNDS):
                for name, server in servers.items():
                    alone[name].append(alone_us(server, body, length))
                    loads[name].append(load(server, sent, length, 64))
            print("| Fronts | Clients | req/s | engine, CPU us | fronts, CPU us | p50 of one client, us |")
            print("|---|---:|---:|---:|---:|---:|")
            for name, found in loads.items():
                rate, engine, fronts = (statistics.median(column) for column in zip(*found, strict=True))
                one = statistics.median(alone[name])
                print(f"| {name} | 64 | {rate:.0f} | {engine:.1f} | {fronts:.1f} | {one:.0f} |")
        finally:
            for server in servers.values():
                server.end()


if __name__ == "__main__":
    main()
