"""Fixtures for the whole tree and the real server of the documentation blocks.

Rules: no test sleeps (`eventually` waits); no test reaches beyond this machine; a test that cannot run reports the
reason, and pytest prints it (-ra).
"""

from __future__ import annotations

import atexit
import gc
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, settings

from remora.plugins import is_present
from support.models.python_models import Models
from support.process.eventually import eventually

EXTRA_FLAGS = tuple(os.environ.get("SERVER_FLAGS", "").split())
"""Flags for every server of the tests, such as --frontends=2 (`make test-fronts`)."""
ROOT = Path(__file__).resolve().parent.parent
DIGITS = ROOT / "docs" / "examples" / "digits"
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 60.0
HELD_PORTS = 64
_HOLDERS: deque[socket.socket] = deque()

# The same examples on every run: a red test stays red, and a slow machine fails no test.
settings.register_profile(
    "remora", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("remora")


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name bytes by their argument, because a message may differ between the processes of a run, its name must not."""
    return argname if isinstance(val, bytes | bytearray) else None


LONG_FILES = (
    "deploy/images/test_models.py",
    "test_docs.py",
    "test_project.py",
    "deploy/emulate/test_container.py",
    "core/backends/worker/test_worker_models.py",
    "infra/test_install.py",
    "core/backends/worker/test_worker_faults.py",
    "e2e/test_under_load.py",
    "security/test_bystander.py",
    "deploy/emulate/test_sagemaker.py",
    "core/backends/worker/test_worker_in_a_loop.py",
    "e2e/test_shadows.py",
    "tools/test_bench_load.py",
    "deploy/images/test_wheel.py",
    "deploy/emulate/test_aws_lambda.py",
    "tools/test_score_long_files.py",
    "tools/test_score.py",
    "core/backends/python/test_python_endings.py",
    "e2e/test_release_arms.py",
    "e2e/test_tutorials.py",
    "e2e/test_fronts.py",
    "e2e/test_access_log.py",
    "e2e/test_clouds.py",
    "deploy/emulate/test_sagemaker_mme.py",
    "adapters/sagemaker/test_bodies.py",
    "core/backends/python/test_environment.py",
    "adapters/test_container.py",
    "deploy/test_deploy_pages.py",
    "core/scheduling/sequences/test_sequences_races.py",
    "core/server/grpc/test_listener.py",
    "e2e/test_keys.py",
    "e2e/test_shutdown.py",
    "e2e/test_load_cycles.py",
    "test_language.py",
    "test_digits_example.py",
    "test_packaging.py",
)
"""Files that take longest, the longest first: processes that run files side by side begin with them."""


def pytest_collection_finish() -> None:
    """Exempt the collected tests from garbage collection, because a pass over them takes a third of a second."""
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the long files first, because one that begins last keeps a single process busy at the end."""
    if hasattr(config, "workerinput"):
        ranks = {ROOT / "tests" / name: rank for rank, name in enumerate(LONG_FILES)}
        items.sort(key=lambda item: ranks.get(item.path, len(ranks)))


class Digits(NamedTuple):
    """Built example with its model repository and a directory of one request per digit."""

    models: Path
    requests: Path


class RunningServer(NamedTuple):
    """``remora serve`` process with its loopback ports and its log file."""

    http: int
    grpc: int
    metrics: int
    log: Path


Serving = Callable[..., AbstractContextManager[RunningServer]]


def needs(package: str) -> pytest.MarkDecorator:
    """Return the mark of a test that runs only beside another package of the project (`make test-alone`)."""
    return pytest.mark.skipif(not is_present(package), reason=f"{package} is not installed")


def free_ports(count: int) -> list[int]:
    """Reserve different loopback ports until a server listens on them.

    Each is held by a bound socket that does not listen: a server may bind the port too, but no connection and no other
    socket gets it. A port that was only tested to be free may be taken a moment later.
    """
    ports = []
    for _ in range(count):
        holder = socket.socket()
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        _HOLDERS.append(holder)
        ports.append(holder.getsockname()[1])
    _let_go(HELD_PORTS)
    return ports


def _let_go(but: int = 0) -> None:
    """Release all ports except the last ones."""
    while len(_HOLDERS) > but:
        _HOLDERS.popleft().close()


atexit.register(_let_go)


def wait_until_ready(server: subprocess.Popen[bytes], port: int, log: Path, path: str = "/v2/health/ready") -> None:
    """Wait until the server is ready, or another probe succeeds. Fails the test with the log on exit or timeout."""

    def ready() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5):
                return True
        except urllib.error.HTTPError as refusal:
            refusal.close()  # it holds the connection
            return False

    eventually(ready, process=server, log=log, within_s=START_TIMEOUT_S)


@pytest.fixture(scope="session")
def child_environment() -> dict[str, str]:
    """Return this process's environment with the source roots on a child's path."""
    roots = os.pathsep.join([str(ROOT / "core"), str(ROOT / "adapters")])
    inherited = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{roots}{os.pathsep}{inherited}" if inherited else roots}


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Digits:
    """Build the digits example once, or use the repository's build if it is current."""
    for name in ("sklearn", "skl2onnx", "onnx"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"the digits example needs {name}: pip install '.[demo]'")
    models = tmp_path_factory.mktemp("digits") / "models"
    built, source = DIGITS / "models" / "digits" / "1" / "model.onnx", DIGITS / "build.py"
    if built.exists() and built.stat().st_mtime > source.stat().st_mtime:
        shutil.copytree(DIGITS / "models", models)
        shutil.copytree(DIGITS / "requests", models.parent / "requests")
    else:
        subprocess.run([sys.executable, str(source), "--models", str(models)], check=True, capture_output=True)
    return Digits(models, models.parent / "requests")


@pytest.fixture(scope="session")
def serving(child_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Serving:
    """Start real server processes.

    Use as ``with serving(models, "--allow-grpc=false") as server: ...``. A server listens on free loopback ports, gets
    SIGTERM at the end and must then exit with 0. Its output is in ``server.log``.
    """

    @contextmanager
    def start(models: Path, *flags: str, **environment: str) -> Iterator[RunningServer]:
        ports = dict(zip(("http", "grpc", "metrics"), free_ports(3), strict=True))
        server = RunningServer(**ports, log=tmp_path_factory.mktemp("server") / "log.txt")
        flags = (*(f"--{name}-port={port}" for name, port in ports.items()), *EXTRA_FLAGS, *flags)
        with server.log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "remora", "serve", str(models), *flags],
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=child_environment | environment,
            )
        try:
            wait_until_ready(process, server.http, server.log)
            yield server
        finally:
            status = end(process)
        assert status == 0, f"the server ended with status {status}:\n{server.log.read_text(errors='replace')}"

    return start


@pytest.fixture(scope="session")
def digits_server(digits: Digits, serving: Serving) -> Iterator[RunningServer]:
    """Start a real server process with the digits example."""
    with serving(digits.models) as server:
        yield server


def end(process: subprocess.Popen[bytes]) -> int:
    """Return the exit status after SIGTERM, or after SIGKILL on a timeout."""
    process.send_signal(signal.SIGTERM)
    try:
        return process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


@pytest.fixture(scope="session")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a CUDA runtime over host memory; see `cuda_stand_in`."""
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler (cc) for the stand-in of the CUDA runtime")
    from support.models.cuda_stand_in import StandIn

    return StandIn(tmp_path_factory.mktemp("cuda"))


@pytest.fixture
def models(tmp_path: Path) -> Any:
    """Opens models of backends, and closes them at the end."""
    opened = Models(tmp_path)
    yield opened
    for each in reversed(opened.open_ones):
        each.close()
