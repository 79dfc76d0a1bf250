"""Requests per second and processor time beside peers, through the load harness in ../shared/bench; wrk does the load.

`remora bench load` takes 56 us of a processor or more for a request (docs/load.md), which would limit the rates here.
Peers that run already (see that harness's README) are measured in the same seconds; without the harness nothing runs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from coldstart import REMORA, free_port
from memory import wait
from models import add

ROOT = Path(__file__).resolve().parents[1]
HARNESS = ROOT.parent / "shared" / "bench"
PEERS = Path(os.environ.get("PEERS", Path.home() / ".cache" / "remora-peers"))
RUNNING = (
    ("triton-http=http://127.0.0.1:21000,proto=v2http-binary", "http://127.0.0.1:21000/v2/health/ready"),
    ("fastapi-raw=http://127.0.0.1:21300,proto=raw,path=/raw/{model}", "http://127.0.0.1:21300/health"),
)


def up(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=2).close()
    except OSError:
        return False
    return True


def measure(python: Path, targets: list[str], *words: str) -> None:
    """One interleaved run of the harness over targets; prints its table."""
    chosen = [word for target in targets for word in ("--target", target)]
    environment = {**os.environ, "PEERS": str(PEERS), "PEERS_MODELS": str(PEERS / "models")}
    found = subprocess.run(
        [str(python), "bench.py", *chosen, *words], cwd=HARNESS, env=environment, stdout=subprocess.PIPE, text=True
    )
    print("\n".join(line for line in found.stdout.splitlines() if line.startswith("|")), flush=True)


def serve(repository: Path, http: int, grpc: int) -> subprocess.Popen[bytes]:
    """A server of ours, ready."""
    server = subprocess.Popen(
        [REMORA, "serve", str(repository), f"--http-port={http}", f"--grpc-port={grpc}", "--allow-metrics=false"],
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PEERS": str(PEERS), "PEERS_MODELS": str(PEERS / "models"), "OMP_NUM_THREADS": "1"},
    )
    wait(f"http://127.0.0.1:{http}/v2/health/ready")
    return server


def main() -> None:
    python = PEERS / "venv-fastapi" / "bin" / "python"
    if not (HARNESS.is_dir() and python.exists() and (PEERS / "models" / "mlp.onnx").exists()):
        print(f"skipped: needs the harness in {HARNESS} and its peers (setup.sh) in {PEERS}")
        return
    with tempfile.TemporaryDirectory() as folder:
        repository = Path(folder)
        for name in ("mlp", "cnn", "identity"):
            add(repository, name, PEERS / "models" / f"{name}.onnx")
        peers = [target for target, health in RUNNING if up(health)]
        http, grpc = free_port(), free_port()
        ours = [f"remora=http://127.0.0.1:{http},proto=v2http-binary"]
        over_grpc = [f"remora-grpc=127.0.0.1:{grpc},proto=v2grpc"]
        often = ("--reps", "5", "--secs", "2", "--limits")
        server = serve(repository, http, grpc)
        try:
            measure(python, ours + over_grpc + peers, "--model", "mlp", "--conc", "1,64", *often)
            measure(python, ours + peers, "--model", "cnn", "--conc", "1,64", *often)
            measure(python, ours + peers, "--model", "identity", "--n", "262144", "--conc", "4", *often[:4])
        finally:
            server.terminate()
            server.wait()
        print("the model.py that runs onnxruntime inside Triton's Python backend, served by both", flush=True)
        server = serve(HARNESS / "serve" / "triton" / "repo", http, grpc)
        try:
            measure(python, ours + peers[:1], "--model", "mlp", "--conc", "1,64", *often)
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
