"""A Python function in remora, LitServe and BentoML: start and throughput; and beside the same TritonPythonModel.

`make bench-functions` makes the environments of the others; without one its rows are left out by name. The servers run
in turn, one at a time, so that what else the machine does falls on all of them; figures are medians of the rounds, and
ratios medians of the rounds' ratios. wrk is the client, on the same processors, because the 56 us of a processor
that `remora bench load` takes for a request would limit the rates. On a machine with other work, processor
time for each request is the ratio to look at: it counts all processes of a server.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from coldstart import free_port

ROOT = Path(__file__).resolve().parents[1]
CLIENTS, SECONDS = 64, 3.0
BATCHES = 600
ROUNDS = int(os.environ.get("ROUNDS", "5"))
REMORA = """import numpy as np
import remora


@remora.model(batch=64, max_delay="1ms")
def distance(points: remora.Array[np.float32, -1, 2]) -> remora.Array[np.float32, -1]:
    return np.hypot(points[:, 0], points[:, 1])
"""
LITSERVE = """import litserve as ls
import numpy as np


class Distance(ls.LitAPI):
    def setup(self, device):
        pass

    def decode_request(self, request):
        return np.asarray(request["points"], np.float32)

    def batch(self, inputs):
        return np.stack(inputs)

    def predict(self, points):
        return np.hypot(points[:, 0], points[:, 1])

    def unbatch(self, output):
        return list(output)

    def encode_response(self, output):
        return {"output": float(output)}


if __name__ == "__main__":
    server = ls.LitServer(Distance(max_batch_size=64, batch_timeout=0.001), accelerator="cpu", workers_per_device=1)
    server.run(port={port}, host="127.0.0.1", generate_client_file=False, log_level="error")
"""
# The function alone, one request at a time: what a bare server has to start.
BARE = """import litserve as ls
import numpy as np


class Distance(ls.LitAPI):
    def setup(self, device):
        pass

    def predict(self, request):
        return {"output": float(np.hypot(*request["points"]))}


if __name__ == "__main__":
    server = ls.LitServer(Distance(), accelerator="cpu", workers_per_device=1)
    server.run(port={port}, host="127.0.0.1", generate_client_file=False, log_level="error")
"""
BENTOML = """import bentoml
import numpy as np


@bentoml.service(workers=1, traffic={"timeout": 30})
class Distance:
    @bentoml.api(batchable=True, max_batch_size=64, max_latency_ms=1000)
    def predict(self, points: np.ndarray) -> np.ndarray:
        return np.hypot(points[:, 0], points[:, 1])
"""
TRITON = """import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        rows = [pb_utils.get_input_tensor_by_name(each, "points").as_numpy() for each in requests]
        points = np.concatenate(rows)
        found = np.hypot(points[:, 0], points[:, 1])[:, np.newaxis]
        answers, begin = [], 0
        for each in rows:
            end = begin + len(each)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("output", found[begin:end])]))
            begin = end
        return answers
"""
TRITON_CONFIG = """backend: "python" max_batch_size: 64
input { name: "points" data_type: TYPE_FP32 dims: 2 } output { name: "output" data_type: TYPE_FP32 dims: 1 }
dynamic_batching { max_queue_delay_microseconds: 1000000 } instance_group { count: 1 kind: KIND_CPU }
parameters { key: "ISOLATION" value { string_value: "thread" } }
"""


class Peer(NamedTuple):
    """A server: its command, and the request that it answers."""

    name: str
    command: list[str]
    port: int
    path: str
    body: str
    folder: Path


def peers(folder: Path) -> Iterator[Peer]:
    """The servers that are installed."""
    row = json.dumps({"points": [3, 4]})
    for name, file, code in (
        ("remora", "app.py", REMORA),
        ("remora, thread", "app_in_thread.py", REMORA.replace('"1ms"', '"1ms", isolation="thread"')),
    ):
        port, grpc, metrics = free_port(), free_port(), free_port()
        (folder / file).write_text(code)
        command = [str(Path(sys.executable).parent / "remora"), "serve", str(folder / file), f"--http-port={port}"]
        command += [f"--grpc-port={grpc}", f"--metrics-port={metrics}"]
        yield Peer(name, command, port, "/models/distance", row, folder)
    python = ROOT / ".venv-litserve" / "bin" / "python"
    if python.exists():
        for name, code in (("LitServe", LITSERVE), ("LitServe, bare", BARE)):
            port, file = free_port(), folder / f"{'bare' if code is BARE else 'batched'}.py"
            file.write_text(code.replace("{port}", str(port)))
            yield Peer(name, [str(python), str(file)], port, "/predict", row, folder)
    else:
        print("LitServe is not installed: make bench-functions")
    program = ROOT / ".venv-bentoml" / "bin" / "bentoml"
    if program.exists():
        port = free_port()
        (folder / "bento.py").write_text(BENTOML)
        command = [str(program), "serve", "bento:Distance", "--port", str(port), "--host", "127.0.0.1"]
        yield Peer("BentoML", command, port, "/predict", json.dumps({"points": [[3, 4]]}), folder)
    else:
        print("BentoML is not installed: make bench-functions")


@contextmanager
def running(peer: Peer, environment: dict[str, str]) -> Iterator[int]:
    """A started server, and the id of the session of its processes, all of which end with it."""
    server = subprocess.Popen(
        peer.command,
        cwd=peer.folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield server.pid
    finally:
        server.terminate()
        with suppress(subprocess.TimeoutExpired):
            server.wait(10)
        for pid in processes_of(server.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        server.wait()


def processes_of(first: int) -> dict[int, float]:
    """The processes of a server with the seconds of processor time that each has used.

    They are those of the first one's session, and its descendants, which may have other sessions.
    """
    every: dict[int, tuple[int, int, float]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                ticks = int(fields[11]) + int(fields[12])
                every[int(entry.name)] = (int(fields[1]), int(fields[3]), ticks / os.sysconf("SC_CLK_TCK"))
    found = {pid for pid, (_, session, _) in every.items() if session == first}
    while more := {pid for pid, (parent, _, _) in every.items() if parent in found} - found:
        found |= more
    return {pid: every[pid][2] for pid in found}


def start_ms(peer: Peer, environment: dict[str, str]) -> float:
    begin = time.perf_counter()
    with running(peer, environment):
        wait_until_answered(peer)
        return (time.perf_counter() - begin) * 1e3


def wait_until_answered(peer: Peer) -> None:
    import http.client

    for _ in range(12_000):
        connection = http.client.HTTPConnection("127.0.0.1", peer.port, timeout=10)
        try:
            connection.request("POST", peer.path, peer.body, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            text = reply.read().decode()
            if reply.status == 200:
                assert "5.0" in text, text
                return
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(0.0025)
    raise SystemExit(f"{peer.name} did not answer")


class Rate(NamedTuple):
    """Requests per second, and requests per second of the processor time of a server's processes."""

    per_s: float
    per_cpu_s: float


def rate_of(peer: Peer, session: int, folder: Path) -> Rate:
    """The rate that 64 clients get."""
    script = folder / "post.lua"
    script.write_text(
        f"wrk.method = 'POST'\nwrk.body = '{peer.body}'\nwrk.headers['Content-Type'] = 'application/json'\n"
    )
    url = f"http://127.0.0.1:{peer.port}{peer.path}"
    words = ["wrk", "-t1", f"-c{CLIENTS}", f"-d{SECONDS:g}s", "-s", str(script), url]
    before = sum(processes_of(session).values())
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    spent = sum(processes_of(session).values()) - before
    if "Non-2xx" in done.stdout:
        raise SystemExit(f"{peer.name}: {done.stdout}")
    requests = int(re.search(r"(\d+) requests in", done.stdout)[1])  # type: ignore[index]
    return Rate(float(re.search(r"Requests/sec:\s+([\d.]+)", done.stdout)[1]), requests / spent)  # type: ignore[index]


def beside_triton_class(folder: Path) -> None:
    """The function in a thread against the same as a TritonPythonModel, in one process."""
    from remora import Engine
    from remora.cli import main

    (folder / "thread.py").write_text(REMORA.replace('"1ms"', '"1s", isolation="thread"'))
    repository = folder / "models"
    assert main(["export", str(repository), str(folder / "thread.py")]) == 0
    (repository / "written" / "1").mkdir(parents=True)
    (repository / "written" / "config.pbtxt").write_text(TRITON_CONFIG)
    (repository / "written" / "1" / "model.py").write_text(TRITON)
    row = np.array([[3, 4]], np.float32)
    with Engine(repository) as engine:

        def batch_us(name: str) -> float:
            """Processor time of the whole process for one full batch, for which the queue waits."""
            cpu = time.process_time_ns()
            for each in [engine.infer_async(name, {"points": row}) for _ in range(CLIENTS)]:
                each.result()
            return (time.process_time_ns() - cpu) / 1e3

        found: dict[str, list[float]] = {"distance": [], "written": []}
        for number in range(BATCHES):
            for name in found if number % 2 else reversed(found):
                found[name].append(batch_us(name))
        # The lowest tenth, because other work on the processors only ever adds.
        ours, theirs = (statistics.quantiles(found[name], n=10)[0] for name in ("distance", "written"))
        print(
            f"{CLIENTS} requests as one batch, processor time: function in a thread {ours:.0f} us, "
            f"TritonPythonModel {theirs:.0f} us, ratio {ours / theirs:.3f}"
        )


def report(title: str, unit: str, values: dict[str, list[float]], *, less_is_better: bool) -> None:
    print(f"{title}:")
    for name, found in values.items():
        ratios = [a / b if less_is_better else b / a for a, b in zip(found, values["remora"], strict=True)]
        print(f"  {name:16} {statistics.median(found):8.0f} {unit}, remora is {statistics.median(ratios):.1f} x")


def main() -> None:
    print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} processors, {ROUNDS} rounds")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        environment |= {"BENTOML_DO_NOT_TRACK": "true", "PYTHONPATH": str(folder)}
        servers = list(peers(folder))
        starts: dict[str, list[float]] = {peer.name: [] for peer in servers}
        for number in range(ROUNDS + 1):  # the first round fills the caches and does not count
            for peer in servers:
                spent = start_ms(peer, environment)
                if number:
                    starts[peer.name].append(spent)
        report("command to first answer", "ms", starts, less_is_better=True)
        beside_triton_class(folder)
        if shutil.which("wrk") is None:
            print("wrk is not installed: no throughput")
            return
        rates: dict[str, list[Rate]] = {peer.name: [] for peer in servers if "bare" not in peer.name}
        for _ in range(ROUNDS):
            for peer in servers:
                if peer.name in rates:
                    with running(peer, environment) as session:
                        wait_until_answered(peer)
                        rate_of(peer, session, folder)  # warms
                        rates[peer.name].append(rate_of(peer, session, folder))
        for title, field in (("requests per second", "per_s"), ("requests per second of processor time", "per_cpu_s")):
            found = {name: [getattr(each, field) for each in rows] for name, rows in rates.items()}
            report(f"{title}, {CLIENTS} clients", "req/s", found, less_is_better=False)
        print(f"load average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
