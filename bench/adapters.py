"""What a platform's adapter costs over plain serving: per request on one kept connection, and at the start; in pairs.

    python bench/adapters.py [NAME ...]

An adapter and plain serving run at the same time and get requests in turns, so that other load on the machine falls
on both; several pairs of processes, for where a process happens to lie in memory is worth more than an adapter. Prints,
for each, the medians of the rounds' differences; then what their routes cost in one process, without sockets. AWS
Lambda has no server: of it, what an event costs.
"""

from __future__ import annotations

import asyncio
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
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from coldstart import first_answer_ms, free_port, request
from models import mlp
from remora.engine import Engine
from remora.options import ServerOptions
from remora.protocols.rest.infer import InferCodec
from remora.server.host import ServerContext, find_adapter, v2_alone
from remora.server.http.asgi import answer_in_thread
from remora.server.http.http1 import Connection
from remora.server.http.http1_listener import Listener
from remora.server.http.rest import RestService
from remora.server.loop import LoopMailbox

PAIRS, ROUNDS, REQUESTS = 9, 15, 200
STARTS = 15
EVENTS = 2_000
TURNS, A_TURN, WARM_UP = 400, 40, 20
V2_LENGTH = b"Inference-Header-Content-Length: "
SAGEMAKER = b"Content-Type: application/vnd.sagemaker-triton.binary+json;json-header-size="
VERTEX = b"Content-Type: application/vnd.vertex-ai-triton.binary+json;json-header-size="
V2 = b"/v2/models/mlp/infer"
Pair = tuple[int, int]
"""Plain serving's port and the adapter's."""


class Adapter(NamedTuple):
    """Where its requests go and how they say the length of their JSON, and how it learns its port and its models."""

    path: bytes = V2
    length: bytes = V2_LENGTH
    port: str = ""
    models: str = "REMORA_MODEL_REPOSITORY"
    flags: tuple[str, ...] = ()

    def request(self) -> bytes:
        """The request that plain serving gets, as the platform's clients send it."""
        return request().replace(V2, self.path).replace(V2_LENGTH, self.length)


ALONE = ("--allow-grpc=false", "--allow-metrics=false")
ADAPTERS = {
    "container": Adapter(flags=ALONE),
    "knative": Adapter(port="PORT"),
    "cloud_run": Adapter(port="PORT"),
    "kserve": Adapter(flags=ALONE),
    "azureml": Adapter(path=b"/score", port="SERVER_PORT", models="AZUREML_MODEL_DIR"),
    "vertex": Adapter(path=b"/predict", length=VERTEX, port="AIP_HTTP_PORT", models="AIP_STORAGE_URI"),
    "sagemaker": Adapter(
        path=b"/invocations", length=SAGEMAKER, port="SAGEMAKER_BIND_TO_PORT", models="SAGEMAKER_BASE_DIR"
    ),
}


def commands(name: str, base: Path, ports: Pair) -> tuple[tuple[list[str], dict[str, str]], ...]:
    """Plain serving and the adapter over one folder: the command, and variables for it."""
    adapter, models = ADAPTERS[name], base / "model"
    plain = [sys.executable, "-m", "remora", "serve", str(models), f"--http-port={ports[0]}", *ALONE]
    words = [
        sys.executable,
        "-m",
        f"remora_adapters.{name}",
        *(["serve"] if name == "sagemaker" else []),
        *adapter.flags,
    ]
    variables = {adapter.models: str(base if name == "sagemaker" else models)}
    if adapter.port:
        variables[adapter.port] = str(ports[1])
    else:
        words.append(f"--http-port={ports[1]}")
    return (plain, {}), (words, variables)


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


def per_request(name: str, base: Path, ports: Pair) -> tuple[float, float]:
    """What the adapter adds to a request, in microseconds: by the clock, and of the server's processor."""
    clock: list[float] = []
    spent: list[float] = []
    for _ in range(PAIRS):
        rounds_of_a_pair(name, base, ports, clock, spent)
    return statistics.median(clock), statistics.median(spent)


def rounds_of_a_pair(name: str, base: Path, ports: Pair, clock: list[float], spent: list[float]) -> None:
    """Add what each round of one pair of processes differs by."""
    bodies = (request(), ADAPTERS[name].request())
    with ExitStack() as stack:
        pids, clients = [], []
        for (words, variables), port, body in zip(commands(name, base, ports), ports, bodies, strict=True):
            server = subprocess.Popen(words, stderr=subprocess.DEVNULL, env=os.environ | variables)
            stack.callback(server.wait)
            stack.callback(server.send_signal, signal.SIGKILL)
            pids.append(server.pid)
            clients.append(stack.enter_context(until_answered(port, body)))
        lengths = [answer_length(client, body) for client, body in zip(clients, bodies, strict=True)]
        for number in range(ROUNDS):
            took, used = [0.0, 0.0], [0.0, 0.0]
            for side in (0, 1) if number % 2 else (1, 0):
                before = cpu_us(pids[side])
                took[side] = round_us(clients[side], bodies[side], lengths[side])
                used[side] = (cpu_us(pids[side]) - before) / REQUESTS
            if number:  # the first round warms up
                clock.append(took[1] - took[0])
                spent.append(used[1] - used[0])


def until_answered(port: int, body: bytes) -> socket.socket:
    """A connection to a server that answers by now."""
    for _ in range(3000):
        try:
            client = socket.create_connection(("127.0.0.1", port), timeout=30)
        except OSError:
            time.sleep(0.01)
            continue
        client.sendall(body)
        if b" 200 " in client.recv(65_536)[:16]:
            return client
        client.close()
        time.sleep(0.01)
    raise SystemExit(f"nothing answers on port {port}")


def start(name: str, base: Path, ports: Pair) -> tuple[float, float]:
    """What the adapter adds to the time from exec to the first answer, in milliseconds: by the clock, of processors."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(base / "bytecode")
    bodies = (request(), ADAPTERS[name].request())
    clock: list[float] = []
    spent: list[float] = []
    for _ in range(STARTS + 1):  # the first round fills the caches and does not count
        took, used = [], []
        for (words, variables), port, body in zip(commands(name, base, ports), ports, bodies, strict=True):
            answered = lambda pid, used=used: used.append(cpu_us(pid) / 1e3)  # noqa: E731 - what this round used
            took.append(first_answer_ms(words, port, environment | variables, body, answered))
        clock.append(took[1] - took[0])
        spent.append(used[1] - used[0])
    return statistics.median(clock[1:]), statistics.median(spent[1:])


def events(base: Path) -> None:
    """Lambda: a direct invocation, and the same request by a function URL, in this process; and what is below both."""
    from remora_adapters.aws_lambda import Function, Settings

    class Context:
        def get_remaining_time_in_millis(self) -> int:
            return 60_000

    settings = Settings.of({"REMORA_MODEL_REPOSITORY": str(base / "model")})
    engine = Engine(options=settings.engine).start()
    function = Function(engine, settings)
    rows = np.zeros((1, 64), np.float32)
    body = {"inputs": [{"name": "input", "shape": [1, 64], "datatype": "FP32", "data": rows.ravel().tolist()}]}
    url = {
        "version": "2.0",
        "rawPath": V2.decode(),
        "rawQueryString": "",
        "headers": {"content-type": "application/json"},
        "requestContext": {"stage": "$default", "http": {"method": "POST", "path": V2.decode(), "sourceIp": "x"}},
        "body": json.dumps(body),
        "isBase64Encoded": False,
    }
    direct = {"model_name": "mlp", **body}
    kinds: dict[str, Callable[[], object]] = {
        "the engine alone": lambda: engine.infer("mlp", {"input": rows}),
        "a direct event": lambda: function(direct, Context()),
        "an event of a function URL": lambda: function(url, Context()),
    }
    rounds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(11):
        for kind, run in kinds.items():
            begin = time.thread_time()
            for _ in range(EVENTS // 10):
                run()
            rounds[kind].append((time.thread_time() - begin) / (EVENTS // 10) * 1e6)
    print(
        "lambda, of the caller's processor: "
        + ", ".join(f"{k} {statistics.median(v[1:]):.0f} us" for k, v in rounds.items())
    )
    function.close()


class Written:
    """A transport that counts what is written."""

    def __init__(self) -> None:
        self.answers = 0

    def write(self, data: bytes) -> None:
        self.answers += 1

    def writelines(self, pieces: list[bytes]) -> None:
        self.answers += 1

    def is_closing(self) -> bool:
        return False


class Side:
    """One front with one connection."""

    def __init__(self, engine: Engine, base: Path, name: str) -> None:
        loop = asyncio.get_running_loop()
        mailbox, later = LoopMailbox(loop), answer_in_thread(loop)
        rest = RestService(engine, InferCodec(), mailbox, later)
        context = ServerContext(engine, rest, mailbox, later, ServerOptions())
        front, self.body = v2_alone, request()
        if name != "V2":
            adapter = ADAPTERS[name]
            models = base if name == "sagemaker" else base / "model"
            front, self.body = find_adapter(name).host({adapter.models: str(models)}).front, adapter.request()
        self.listener = Listener(front(context), max_body_bytes=64 << 20)
        mailbox.alone = self.listener.is_alone
        self.connection: Connection = self.listener.connection()
        self.wire = Written()
        self.connection.connection_made(self.wire)  # type: ignore[arg-type]

    async def ask(self) -> None:
        """One request, and its answer."""
        before = self.wire.answers
        self.listener.scratch[: len(self.body)] = self.body
        self.connection.buffer_updated(len(self.body))
        while self.wire.answers == before:
            await asyncio.sleep(0)


async def measure() -> None:
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        mlp(base / "model")
        with Engine(base / "model") as engine:
            sides = {name: Side(engine, base, name) for name in ("V2", *ADAPTERS)}
            spent: dict[str, list[float]] = {name: [] for name in sides}
            for _ in range(TURNS):
                for name, side in sides.items():
                    begin = time.process_time_ns()
                    for _ in range(A_TURN):
                        await side.ask()
                    spent[name].append((time.process_time_ns() - begin) / A_TURN / 1e3)
    print("| Front | us of CPU, least | median | least above V2's | median above V2's |")
    print("|---|---:|---:|---:|---:|")
    plain = spent["V2"][WARM_UP:]
    for name, found in spent.items():
        each = found[WARM_UP:]
        above = statistics.median(a - b for a, b in zip(each, plain, strict=True))
        figures = (min(each), statistics.median(each), min(each) - min(plain), above)
        print(f"| {name} | " + " | ".join(f"{figure:.1f}" for figure in figures) + " |")


def in_one_process() -> None:
    """What the routes cost without sockets: two processes differ by more than an adapter does."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(measure())
    else:
        uvloop.run(measure())


def main() -> None:
    names = sys.argv[1:] or [*ADAPTERS, "lambda"]
    print("| Adapter | us a request | of CPU | ms at the start | of CPU |")
    print("|---|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        mlp(base / "model")
        for name in names:
            if name == "lambda":
                events(base)
                continue
            ports = (free_port(), free_port())
            figures = (*per_request(name, base, ports), *start(name, base, ports))
            print(f"| {name} | " + " | ".join(f"{figure:.1f}" for figure in figures) + " |", flush=True)
    in_one_process()


if __name__ == "__main__":
    main()
