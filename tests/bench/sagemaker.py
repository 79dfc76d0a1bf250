"""What SageMaker's routes cost over plain serving: per request on one kept connection, and at the start; in pairs.

Both servers run at the same time and are asked in turns, so that whatever else the machine does falls on both. Prints
the medians of the rounds, and of their differences.
"""

from __future__ import annotations

import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from coldstart import first_answer_ms, free_port, request
from memory import wait
from models import mlp

ROUNDS, REQUESTS = 41, 500
STARTS = 15
V2_LENGTH = b"Inference-Header-Content-Length: "
BINARY = b"Content-Type: application/vnd.sagemaker-triton.binary+json;json-header-size="


def invocation() -> bytes:
    """The same request as an invocation."""
    return request().replace(b"/v2/models/mlp/infer", b"/invocations").replace(V2_LENGTH, BINARY)


def commands(base: Path, ports: dict[str, int]) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Both servers over one folder: the command, and variables for it."""
    port = ports["plain"]
    alone = ["--allow-grpc=false", "--allow-metrics=false"]
    return {
        "plain": ([sys.executable, "-m", "remora", "serve", str(base / "model"), f"--http-port={port}", *alone], {}),
        "sagemaker": (
            [sys.executable, "-m", "remora_adapters.sagemaker", "serve"],
            {"SAGEMAKER_BASE_DIR": str(base), "SAGEMAKER_BIND_TO_PORT": str(ports["sagemaker"])},
        ),
    }


def round_us(client: socket.socket, body: bytes, length: int) -> float:
    """One request after the other; microseconds for each."""
    begin = time.perf_counter()
    for _ in range(REQUESTS):
        client.sendall(body)
        left = length
        while left > 0:
            left -= len(client.recv(65_536))
    return (time.perf_counter() - begin) / REQUESTS * 1e6


def answer_length(client: socket.socket, body: bytes) -> int:
    client.sendall(body)
    time.sleep(0.2)
    answer = client.recv(65_536)
    assert b" 200 " in answer[:16], answer
    return len(answer)


def cpu_us(pid: int) -> float:
    """What a process has had of the processors; unlike time by the clock, it leaves out what others took."""
    tasks = Path("/proc", str(pid), "task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e3


def per_request(base: Path, ports: dict[str, int]) -> None:
    bodies = {"plain": request(), "sagemaker": invocation()}
    pids: dict[str, int] = {}
    with ExitStack() as stack:
        for kind, (words, variables) in commands(base, ports).items():
            server = subprocess.Popen(words, stderr=subprocess.DEVNULL, env=os.environ | variables)
            pids[kind] = server.pid
            stack.callback(server.wait)
            stack.callback(server.send_signal, signal.SIGTERM)
        wait(f"http://127.0.0.1:{ports['plain']}/v2/health/ready")
        wait(f"http://127.0.0.1:{ports['sagemaker']}/ping")
        clients = {kind: stack.enter_context(socket.create_connection(("127.0.0.1", ports[kind]))) for kind in bodies}
        lengths = {kind: answer_length(clients[kind], body) for kind, body in bodies.items()}
        clock: list[dict[str, float]] = []
        spent: list[dict[str, float]] = []
        for number in range(ROUNDS):
            clock.append({})
            spent.append({})
            for kind in bodies if number % 2 else [*bodies][::-1]:
                before = cpu_us(pids[kind])
                clock[-1][kind] = round_us(clients[kind], bodies[kind], lengths[kind])
                spent[-1][kind] = (cpu_us(pids[kind]) - before) / REQUESTS
    show("a request, by the clock", "us", clock[1:])
    show("a request, of the server's processor", "us", spent[1:])


def starts(base: Path, ports: dict[str, int]) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(base / "bytecode")
    bodies = {"plain": request(), "sagemaker": invocation()}
    clock: list[dict[str, float]] = []
    spent: list[dict[str, float]] = []
    for _ in range(STARTS + 1):  # the first round fills the caches and does not count
        clock.append({})
        spent.append({})
        for kind, (words, variables) in commands(base, ports).items():

            def answered(pid: int, kind: str = kind) -> None:
                spent[-1][kind] = cpu_us(pid) / 1e3

            clock[-1][kind] = first_answer_ms(words, ports[kind], environment | variables, bodies[kind], answered)
    show("exec to first answer, by the clock", "ms", clock[1:])
    show("exec to first answer, of the processor", "ms", spent[1:])


def show(what: str, unit: str, rounds: list[dict[str, float]]) -> None:
    middle = {kind: statistics.median(each[kind] for each in rounds) for kind in ("plain", "sagemaker")}
    more = statistics.median(each["sagemaker"] - each["plain"] for each in rounds)
    figures = ", ".join(f"{kind} {value:.1f} {unit}" for kind, value in middle.items())
    print(f"{what}: {figures}; the routes add {more:.1f} {unit}", flush=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        mlp(base / "model")
        ports = {kind: free_port() for kind in ("plain", "sagemaker")}
        per_request(base, ports)
        starts(base, ports)


if __name__ == "__main__":
    main()
