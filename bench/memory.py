"""Resident memory of an idle server beside that of a bare process with the same onnxruntime sessions."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from coldstart import REMORA, free_port
from models import add, mlp

BARE = """
import sys, numpy, onnxruntime, time
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = options.inter_op_num_threads = 1
sessions = [onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"]) for path in sys.argv[1:]]
print("up", flush=True)
time.sleep(60)
"""
PEERS = Path.home() / ".cache" / "remora-peers" / "models"


def rss_mib(pid: int) -> float:
    """Of the process and its children."""
    pids = [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
    return sum(int(Path(f"/proc/{each}/statm").read_text().split()[1]) for each in pids) * 4096 / 2**20


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        repository = mlp(Path(folder) / "models")
        for name in ("cnn", "identity"):
            if (PEERS / f"{name}.onnx").exists():
                add(repository, name, PEERS / f"{name}.onnx")
        files = [str(path) for path in sorted(repository.glob("*/1/model.onnx"))]
        bare = subprocess.Popen([sys.executable, "-c", BARE, *files], stdout=subprocess.PIPE)
        assert bare.stdout is not None
        bare.stdout.readline()
        base = rss_mib(bare.pid)
        bare.kill()
        print(f"bare process with {len(files)} sessions: {base:.0f} MiB")
        for kind, flags in (
            ("HTTP, gRPC, metrics", [f"--grpc-port={free_port()}"]),
            ("HTTP, metrics", ["--allow-grpc=false"]),
        ):
            port = free_port()
            server = subprocess.Popen(
                [REMORA, "serve", str(repository), f"--http-port={port}", f"--metrics-port={free_port()}", *flags],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            wait(f"http://127.0.0.1:{port}/v2/health/ready")
            time.sleep(2)  # idle means idle
            mine = rss_mib(server.pid)
            server.terminate()
            server.wait()
            print(f"remora serve, {kind}: {mine:.0f} MiB, {mine - base:+.0f} MiB")


def wait(url: str) -> None:
    for _ in range(300):
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise SystemExit("the server did not become ready")


if __name__ == "__main__":
    main()
