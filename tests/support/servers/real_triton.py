"""A real Triton server, for tests of what it must serve too."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from conftest import free_ports
from support.process.eventually import eventually
from support.servers.live_server import status_of

TRITON = os.environ.get("TRITON", "")
needs_triton = pytest.mark.skipif(not TRITON, reason="no Triton is installed: run make test-triton")


@contextmanager
def triton_server(repository: Path, log: Path, program: Path | str = TRITON) -> Iterator[list[int]]:
    """Run Triton with a repository, and yield its ports of HTTP, gRPC and metrics once it is ready."""
    ports = free_ports(3)
    with log.open("w") as sink:
        triton = subprocess.Popen([str(program), str(repository), *map(str, ports)], stdout=sink, stderr=sink)
    try:
        eventually(lambda: status_of(ports[0], "/v2/health/ready") == 200, process=triton, log=log)
        yield ports
    finally:
        triton.terminate()
        triton.wait()
