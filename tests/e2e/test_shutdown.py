"""How a server process ends: in time whatever hangs, and without losing a request that it could still answer."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from live_server import PATIENCE_S, client, free_port, process, status_of, until, write_version

HANGS = "open({gate!r}).read()"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    path = tmp_path / "models"
    path.mkdir()
    return path


def write_hanging(repository: Path, name: str) -> Path:
    """A model whose load waits for the pipe that this returns; opening it waits for the load to begin."""
    gate = repository.parent / f"{name}.gate"
    os.mkfifo(gate)
    write_version(repository, 1, name=name, initialize=HANGS.format(gate=str(gate)))
    return gate


def test_more_hung_loads_than_the_loop_has_threads_hold_up_neither_calls_nor_the_end(
    repository: Path, child_environment: dict[str, str]
) -> None:
    names = [f"m{index}" for index in range((os.cpu_count() or 1) + 4 + 2)]
    gates = {name: write_hanging(repository, name) for name in names}
    port = free_port()
    flags = ("--model-control-mode=explicit", "--exit-timeout-secs=2")
    with process(repository, port, child_environment, *flags) as server, ExitStack() as stack:
        until(port, "/readyz", server)
        for name in names:
            connection = stack.enter_context(client(port))
            connection.request("POST", f"/v2/repository/models/{name}/load")
        for gate in gates.values():
            stack.enter_context(gate.open("w"))  # each load is under way
        assert status_of(port, "/v2/repository/index", "POST") == 200
        assert status_of(port, "/v2/status") == 200
        assert status_of(port, "/v2/docs") == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE_S) == 1
