"""Real server process and client, for tests of a server's lifetime."""

from __future__ import annotations

import fcntl
import http.client
import json
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from conftest import EXTRA_FLAGS, free_ports
from support.process.eventually import eventually

PATIENCE_S = 60.0
THREADS = ("--backend-config=python,isolation=thread", "--allow-grpc=false")

CONFIG = """
backend: "python" max_batch_size: 8
input { name: "IN" data_type: TYPE_INT32 dims: 1 }
output { name: "OUT" data_type: TYPE_INT32 dims: 1 }
"""
SEQUENCES = CONFIG + "sequence_batching { max_sequence_idle_microseconds: 600000000 }\n"
"""Configuration of a model for sequences with these tensors."""
STREAM = CONFIG + "model_transaction_policy { decoupled: true }\n"
"""Configuration of a decoupled model with these tensors."""
MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        {initialize}
        self.factor = {factor}

    def execute(self, requests):
        arrays = [pb_utils.get_input_tensor_by_name(request, "IN").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array * self.factor)]) for array in arrays]
"""


BODY = '{"inputs": [{"name": "IN", "shape": [1, 1], "datatype": "INT32", "data": [0]}]}'


def write_version(repository: Path, number: int, *, name: str = "m", initialize: str = "pass") -> None:
    """Write version N of a model, which multiplies by N, atomically into the repository."""
    folder = repository / name
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "config.pbtxt"
    if not config.exists() or config.read_text() != CONFIG:
        replace(config, CONFIG)
    making = repository.parent / f"making-{name}-{number}"
    making.mkdir()
    (making / "model.py").write_text(MODEL.format(factor=number, initialize=initialize))
    making.rename(folder / str(number))


def replace(file: Path, text: str) -> None:
    """Replace a file atomically, because a poll may read it amid a write."""
    made = file.with_name(f".{file.name}.new")
    made.write_text(text)
    made.replace(file)


def ask(connection: http.client.HTTPConnection, value: int, name: str = "m") -> tuple[int, Any]:
    connection.request("POST", f"/v2/models/{name}/infer", BODY.replace("[0]", f"[{value}]"))
    reply = connection.getresponse()
    return reply.status, json.loads(reply.read() or b"null")


def client(port: int) -> AbstractContextManager[http.client.HTTPConnection]:
    """Open a connection to the server, closed at the end."""
    return closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S))


def reset_at_close(connection: socket.socket) -> None:
    """Let the close of a connection reset it, because a mere end of the requests does not cancel them."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def status_of(port: int, path: str, method: str = "GET") -> int:
    with client(port) as connection:
        connection.request(method, path)
        with connection.getresponse() as reply:
            reply.read()
            return reply.status


def free_port() -> int:
    """Return a currently free loopback port; see `conftest.free_ports` for several."""
    return free_ports(1)[0]


@contextmanager
def process(
    repository: Path,
    port: int,
    environment: dict[str, str],
    *flags: str,
    descriptors: int = 0,
    group: Path | None = None,
) -> Iterator[subprocess.Popen[str]]:
    """Start a server without waiting for it, and kill it at the end.

    ``descriptors`` limits its open files, ``group`` is the folder of the cgroup that it joins.
    """
    command = [sys.executable, "-m", "remora", "serve", str(repository), f"--http-port={port}", "--metrics-port=0"]
    more = ("--allow-metrics=false", *THREADS, *EXTRA_FLAGS, *flags)
    limited = ["prlimit", f"--nofile={descriptors}:"] if descriptors else []
    if group is not None:
        limited += ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group / "cgroup.procs")]
    with child([*limited, *command, *more], environment) as server:
        yield server


@contextmanager
def child(
    command: Sequence[str], environment: dict[str, str] | None = None, cwd: Path | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Start a command whose log may grow to 1 MiB before it is read, and kill it at the end."""
    server = subprocess.Popen(command, cwd=cwd, stderr=subprocess.PIPE, text=True, env=environment)
    assert server.stderr is not None
    fcntl.fcntl(server.stderr, fcntl.F_SETPIPE_SZ, 1 << 20)  # a full pipe would stop a server whose log is not read
    try:
        yield server
    finally:
        server.kill()
        server.communicate()


def until(port: int, path: str, server: subprocess.Popen[str], wanted: int = 200) -> None:
    """Wait until a path has the status. Fails with the server's output if it exits first."""
    try:
        eventually(lambda: status_of(port, path) == wanted, process=server)
    except pytest.fail.Exception as failure:
        server.kill()
        raise AssertionError(server.communicate()[1]) from failure
