"""How far a reader follows one request through the code: calls, modules, moves between modules, and returns.

A move is a call in another module than the call before it, a return one into a module that was left before. All threads
of one server process are counted, in the order of their calls; worker processes are not. Counts are exact, but for what
timers do meanwhile: the least of some requests to a warm server is shown.

python -m bench walks [TREE]: TREE is a checkout to measure, this one if none is given.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from conftest import ROOT, free_ports
from models import mlp
from support.models.generation_models import tiny

ROUNDS = 15
PAUSE_S = 0.05
"""Seconds until the process has taken a signal."""
COUNTER = """
import json, os, signal, sys, threading
seen, tree = None, sys.argv.pop(1)
packages = os.path.join(tree, "core", ""), os.path.join(tree, "adapters", "")
def note(frame, event, argument):
    if event == "call" and seen is not None and frame.f_code.co_filename.startswith(packages):
        seen.append(frame.f_code.co_filename)
def begin(*_):
    global seen
    seen = []
def end(*_):
    global seen
    found, seen = seen, None
    print("walk", json.dumps(found), file=sys.stderr, flush=True)
signal.signal(signal.SIGUSR1, begin)
signal.signal(signal.SIGUSR2, end)
threading.setprofile(note)
sys.setprofile(note)
"""
SERVE = "from remora.cli import main\nsys.exit(main())\n"
LOAD = """
from remora import Engine
for _ in range(3):
    os.kill(os.getpid(), signal.SIGUSR1)
    engine = Engine(sys.argv[1])
    engine.start()
    os.kill(os.getpid(), signal.SIGUSR2)
    engine.stop()
"""
FUNCTION = "import remora\n\n@remora.model\ndef double(x: int) -> int:\n    return 2 * x\n"


def counts(files: list[str]) -> tuple[int, int, int, int]:
    """Return the calls, the modules, the moves and the returns of a walk."""
    moves = returns = 0
    left: set[str] = set()
    for before, now in itertools.pairwise(files):
        if before != now:
            moves += 1
            returns += now in left
            left.add(before)
    return len(files), len(set(files)), moves, returns


def post(url: str, value: object) -> Callable[[], object]:
    """Return a function that posts JSON and reads the answer."""
    request = urllib.request.Request(url, json.dumps(value).encode(), {"Content-Type": "application/json"})
    return lambda: urllib.request.urlopen(request, timeout=60).read()


def grpc_call(address: str) -> Callable[[], object]:
    """Return a function that sends one inference over gRPC."""
    import numpy as np
    from tritonclient import grpc

    client = grpc.InferenceServerClient(address)
    value = grpc.InferInput("x", [1], "INT64")
    value.set_data_from_numpy(np.array([3]))
    return lambda: client.infer("double", [value])


class Counted:
    """Process of a checkout whose calls are counted."""

    def __init__(self, tree: Path, code: str, *arguments: str) -> None:
        paths = os.pathsep.join(str(tree / each) for each in ("core", "adapters"))
        command = [sys.executable, "-c", COUNTER + code, str(tree), *arguments]
        self.process = subprocess.Popen(
            command, env={**os.environ, "PYTHONPATH": paths}, stderr=subprocess.PIPE, text=True
        )

    def walk(self) -> list[str]:
        """Return the files of the next walk that the process prints."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if line.startswith("walk "):
                found: list[str] = json.loads(line.removeprefix("walk "))
                return found
        raise AssertionError("the process ended without a walk")

    def shortest(self, ask: Callable[[], object]) -> tuple[int, int, int, int]:
        """Return the counts of the shortest walk of a repeated request."""
        found = []
        for _ in range(ROUNDS):
            ask()
            self.process.send_signal(signal.SIGUSR1)
            time.sleep(PAUSE_S)
            ask()
            time.sleep(PAUSE_S)
            self.process.send_signal(signal.SIGUSR2)
            found.append(counts(self.walk()))
        return min(found)


def ready(port: int) -> None:
    """Wait until a server is ready."""
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=5).close()
            return
        except OSError:
            time.sleep(0.1)
    raise AssertionError("the server is not ready after 60 s")


def main() -> None:
    tree = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT
    found: dict[str, tuple[int, int, int, int]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "app.py").write_text(FUNCTION)
        tiny(folder / "chat")
        network = mlp(folder / "network")
        http_port, grpc_port = free_ports(2)
        ports = (f"--http-port={http_port}", f"--grpc-port={grpc_port}", "--allow-metrics=false")
        for model, journeys in ((folder / "app.py", ("HTTP", "gRPC")), (folder / "chat", ("chat",))):
            server = Counted(tree, SERVE, "serve", str(model), *ports)
            try:
                ready(http_port)
                url = f"http://127.0.0.1:{http_port}"
                tensor = {"name": "x", "shape": [1], "datatype": "INT64", "data": [3]}
                chat = {"model": "tiny", "max_tokens": 3, "messages": [{"role": "user", "content": "Hi"}]}
                asked: dict[str, Callable[[], Callable[[], object]]] = {
                    "HTTP": lambda url=url, tensor=tensor: post(f"{url}/v2/models/double/infer", {"inputs": [tensor]}),
                    "gRPC": lambda: grpc_call(f"127.0.0.1:{grpc_port}"),
                    "chat": lambda url=url, chat=chat: post(f"{url}/v1/chat/completions", chat),
                }
                for journey in journeys:
                    found[journey] = server.shortest(asked[journey]())
            finally:
                server.process.terminate()
                server.process.communicate()
        load = Counted(tree, LOAD, str(network))
        found["config.pbtxt to a ready model"] = min(counts(load.walk()) for _ in range(3))
        load.process.communicate()
    print(f"{'':32}{'calls':>8}{'modules':>9}{'moves':>7}{'returns':>9}")
    for journey, numbers in found.items():
        print(f"{journey:32}{numbers[0]:8}{numbers[1]:9}{numbers[2]:7}{numbers[3]:9}")


if __name__ == "__main__":
    main()
