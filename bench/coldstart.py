"""From exec to the first right answer, beside the floor: a process that imports numpy and onnxruntime and runs once.

Prints medians in milliseconds and their ratio. Bytecode is cached, as it is for an installed package.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from models import mlp

ROUNDS = 11
REMORA = str(Path(sys.executable).parent / "remora")
FLOOR = """
import os, sys, numpy, onnxruntime
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = options.inter_op_num_threads = 1
session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
session.run(None, {"input": numpy.zeros((1, 64), "f4")})
os._exit(0)
"""


def request() -> bytes:
    tensor = np.zeros((1, 64), np.float32)
    inputs = [
        {"name": "input", "shape": [1, 64], "datatype": "FP32", "parameters": {"binary_data_size": tensor.nbytes}}
    ]
    header = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
    return b"POST /v2/models/mlp/infer HTTP/1.1\r\nHost: localhost\r\n%b: %d\r\nContent-Length: %d\r\n\r\n%b%b" % (
        b"Inference-Header-Content-Length",
        len(header),
        len(header) + tensor.nbytes,
        header,
        tensor.tobytes(),
    )


def first_answer_ms(
    command: list[str],
    port: int,
    environment: dict[str, str],
    asked: bytes = b"",
    answered: Callable[[int], object] = lambda pid: None,
) -> float:
    """Start a server and ask until it answers 200; ``answered`` is then called with its process id."""
    body, begin = asked or request(), time.perf_counter()
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    try:
        while time.perf_counter() - begin < 30:
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
                    client.sendall(body)
                    if b" 200 " in client.recv(4096)[:16]:
                        spent_ms = (time.perf_counter() - begin) * 1e3
                        answered(server.pid)
                        return spent_ms
            except OSError:
                pass
            time.sleep(0.001)
        raise SystemExit("the server did not answer")
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()


def floor_ms(model: Path, environment: dict[str, str]) -> float:
    begin = time.perf_counter()
    subprocess.run([sys.executable, "-c", FLOOR, str(model)], check=True, env=environment)
    return (time.perf_counter() - begin) * 1e3


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        repository = mlp(Path(folder) / "models")
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPYCACHEPREFIX"] = str(Path(folder) / "bytecode")
        port = free_port()
        command = [REMORA, "serve", str(repository), f"--http-port={port}"]
        kinds = {
            "HTTP, gRPC, metrics": [*command, f"--grpc-port={free_port()}", f"--metrics-port={free_port()}"],
            "HTTP alone": [*command, "--allow-grpc=false", "--allow-metrics=false"],
        }
        floors: list[float] = []
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        for number in range(ROUNDS + 1):  # the first round fills the caches and does not count
            floor = floor_ms(repository / "mlp" / "1" / "model.onnx", environment)
            starts = {kind: first_answer_ms(words, port, environment) for kind, words in kinds.items()}
            if number:
                floors.append(floor)
                for kind, ms in starts.items():
                    times[kind].append(ms)
        base = statistics.median(floors)
        print(f"floor (numpy + onnxruntime + session + run): {base:.0f} ms")
        for kind, values in times.items():
            middle = statistics.median(values)
            print(f"remora serve, {kind}: {middle:.0f} ms, {middle / base:.2f} x floor")


if __name__ == "__main__":
    main()
