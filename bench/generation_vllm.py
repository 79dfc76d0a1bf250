"""Language model served by remora and by vLLM over HTTP, with the same fp32 weights on the same CPU.

python -m bench generation_vllm [MODELS WEIGHTS VLLM [ROUNDS [TOKENS]]]: the repository with the model `smollm2`
and its Hugging Face folder (both from `make llm`), and vLLM's command (from `make .venv-vllm/stamp`). Both servers run
all the time, and rounds alternate; the idle one is stopped by a signal meanwhile.
"""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from conftest import ROOT, free_ports
from generation import ROUNDS, TOKENS, compare
from generation_client import Times, over_http

NAME = "smollm2"
CHAT = ROOT / "docs" / "examples" / "chat"
CONTEXT = 1024
START_S = 300.0
VLLM_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "OMP_NUM_THREADS": str(os.cpu_count()),
}  # fmt: skip


@contextmanager
def served(command: list[str], port: int, path: str, **environment: str) -> Iterator[int]:
    """Start a server in a new process group, and yield its process id when it is ready."""
    log = Path(f"/tmp/bench-{Path(command[0]).name}-{port}.log")
    with log.open("wb") as written:
        process = subprocess.Popen(
            command, stdout=written, stderr=written, start_new_session=True, env={**os.environ, **environment}
        )
    try:
        end = time.monotonic() + START_S
        while not is_ready(port, path):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"{command[0]} is not ready: see {log}")
            time.sleep(0.5)
        yield process.pid
    finally:
        os.killpg(process.pid, signal.SIGCONT)
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def is_ready(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def alone(pid: int, port: int, tokens: int) -> Callable[[int, int], Times]:
    """Return a way of `compare` that lets this server run during its rounds only."""

    def way(streams: int, turn: int) -> Times:
        os.killpg(pid, signal.SIGCONT)
        try:
            return over_http(port, NAME, streams, tokens, turn)
        finally:
            os.killpg(pid, signal.SIGSTOP)

    os.killpg(pid, signal.SIGSTOP)
    return way


def main(
    models: str = str(CHAT / "models"),
    weights: str = str(CHAT / "others" / "vllm" / NAME / "1" / "weights"),
    vllm: str = str(ROOT / ".venv-vllm" / "bin" / "vllm"),
    rounds: str = str(ROUNDS),
    tokens: str = str(TOKENS),
    *more: str,
) -> None:
    missing = [each for each in (f"{models}/{NAME}", weights, vllm) if not Path(each).exists()]
    if missing:
        print(f"SKIPPED: {missing[0]} is missing; make llm .venv-vllm/stamp")
        return
    own, theirs = free_ports(2)
    flags = ["--model-control-mode=explicit", f"--load-model={NAME}", "--allow-grpc=false", "--allow-metrics=false"]
    remora = [str(Path(sys.executable).parent / "remora"), "serve", models, "--http-port", str(own), *flags]
    limits = ["--dtype", "float32", "--max-num-seqs", "16", "--max-model-len", str(CONTEXT)]
    other = [vllm, "serve", weights, "--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(theirs)]
    path = f"{Path(vllm).parent}{os.pathsep}{os.environ['PATH']}"
    with ExitStack() as stack:
        second = stack.enter_context(served([*other, *limits, *more], theirs, "/health", PATH=path, **VLLM_ENVIRONMENT))
        ways = {"vLLM": alone(second, theirs, int(tokens))}
        first = stack.enter_context(served(remora, own, "/v2/health/ready"))
        ways["remora"] = alone(first, own, int(tokens))
        print(f"load {os.getloadavg()[0]:.1f}; vLLM {' '.join([*limits, *more])}", flush=True)
        compare(ways, int(rounds))


if __name__ == "__main__":
    main(*sys.argv[1:])
