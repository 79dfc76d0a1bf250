"""The tail of one model's latency while another model of 50 MB is loaded and unloaded, beside its quiet tail."""

from __future__ import annotations

import http.client
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper

sys.path.insert(0, str(Path(__file__).resolve().parent))
from coldstart import REMORA, free_port
from load import p99_ms
from models import add, mlp

ROUNDS, SECONDS, RATE, CONNECTIONS = 5, 3.0, 300, 4
WIDTH = 1810  # four square matrices of it in FP32 are 50 MB


def big(repository: Path) -> None:
    """A model of four large matrices."""
    random = np.random.default_rng(0)
    weights = [numpy_helper.from_array(random.standard_normal((WIDTH, WIDTH), np.float32), f"w{i}") for i in range(4)]
    nodes = [helper.make_node("MatMul", [f"h{i}", f"w{i}"], [f"h{i + 1}"]) for i in range(4)]
    ends = [helper.make_tensor_value_info(end, TensorProto.FLOAT, ["batch", WIDTH]) for end in ("h0", "h4")]
    graph = helper.make_graph(nodes, "big", ends[:1], ends[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    add(repository, "big", model.SerializeToString())


def call(port: int, action: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", f"/v2/repository/models/big/{action}")
    assert connection.getresponse().status == 200
    connection.close()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        repository = mlp(Path(folder) / "models")
        big(repository)
        port = free_port()
        explicit = ["--model-control-mode=explicit", "--load-model=mlp"]
        flags = [f"--http-port={port}", "--allow-grpc=false", "--allow-metrics=false", *explicit]
        server = subprocess.Popen([REMORA, "serve", str(repository), *flags], stderr=subprocess.PIPE, text=True)
        try:
            assert server.stderr is not None
            next(line for line in server.stderr if line.startswith("READY"))
            ratios, quiet, busy, loads = [], [], [], 0
            for _ in range(ROUNDS):
                quiet.append(p99_ms(port, "mlp", RATE, CONNECTIONS, SECONDS))
                over = threading.Event()

                def keep_loading(over: threading.Event = over) -> None:
                    nonlocal loads
                    while not over.is_set():
                        call(port, "load")
                        call(port, "unload")
                        loads += 1

                loader = threading.Thread(target=keep_loading)
                loader.start()
                busy.append(p99_ms(port, "mlp", RATE, CONNECTIONS, SECONDS))
                over.set()
                loader.join()
                ratios.append(busy[-1] / quiet[-1])
            print(
                f"p99 quiet {statistics.median(quiet):.2f} ms, while loading {statistics.median(busy):.2f} ms "
                f"({loads} loads): ratio {statistics.median(ratios):.2f} (median of {ROUNDS} pairs)"
            )
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
