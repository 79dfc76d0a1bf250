"""Images built and run for the tests, without a container engine's daemon: buildah builds, bubblewrap runs.

The published base images cannot be had everywhere; Debian's own Python, unpacked by mmdebstrap, stands for them.
Building takes minutes, so it happens only under `make test-containers`; what is missing is skipped with its name.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
KEPT = ROOT / ".images"
IMAGES = ("cpu", "sagemaker", "azureml", "lambda")
BUILT_HERE = "the images are built by make test-containers"
TOOLS = ("buildah", "mmdebstrap", "bwrap", "setpriv")
_BASE = "localhost/python-base:test"
_FIGURES: list[str] = []


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The measured sizes and times, below the tests."""
    if _FIGURES:
        terminalreporter.section("images")
        for line in _FIGURES:
            terminalreporter.line(line)


class Image(NamedTuple):
    """A built image: its configuration (OCI) and its root file system."""

    name: str
    config: dict[str, Any]
    root: Path

    @contextmanager
    def running(
        self, arguments: list[str], *, uid: int, mounts: dict[str, Path], environment: dict[str, str]
    ) -> Iterator[Container]:
        """The image's entrypoint with these arguments instead of CMD: read-only root, only /tmp to write, one uid."""
        for target in mounts:  # an engine makes mount points as well
            (self.root / target.lstrip("/")).mkdir(parents=True, exist_ok=True)
        told = dict(pair.split("=", 1) for pair in self.config["Env"]) | environment
        box = ["bwrap", "--die-with-parent", "--unshare-pid", "--as-pid-1", "--unshare-ipc", "--clearenv"]
        box += [
            "--ro-bind",
            str(self.root),
            "/",
            "--proc",
            "/proc",
            "--dev",
            "/dev",
            "--perms",
            "1777",
            "--tmpfs",
            "/tmp",
        ]
        for target, source in mounts.items():
            box += ["--ro-bind", str(source), target]
        for name, value in told.items():
            box += ["--setenv", name, value]
        box += ["--chdir", self.config.get("WorkingDir", "/")]
        become = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--no-new-privs"]
        become += ["--bounding-set=-all"] if uid else []
        command = [*box, *become, *self.config["Entrypoint"], *arguments]
        log = KEPT / f"{self.name}-{uid}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield Container(process, log, time.monotonic())
        finally:
            process.kill()
            process.wait()


class Container(NamedTuple):
    """A running image: bubblewrap's process, what it printed, and when it was started."""

    process: subprocess.Popen[bytes]
    log: Path
    started_s: float

    def answer(self, url: str, body: bytes | None = None, content_type: str = "application/json") -> bytes:
        """What a URL answers, once something listens there. Fails the test with the log when nothing does."""
        request = urllib.request.Request(url, body, {"Content-Type": content_type} if body else {})
        for _ in range(1200):
            try:
                with urllib.request.urlopen(request, timeout=10) as response:
                    return bytes(response.read())
            except urllib.error.HTTPError as error:
                if error.code != 503:
                    pytest.fail(f"{url}: {error.code} {error.read()!r}\n{self.said()}")
            except OSError:
                pass
            try:
                self.process.wait(0.025)
            except subprocess.TimeoutExpired:
                continue
            break
        pytest.fail(f"{url} never answered (exit status {self.process.poll()}):\n{self.said()}")

    def stop(self) -> int:
        """SIGTERM to the image's first process; its exit status, within the 30 s that the platforms leave."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGTERM)
        return self.process.wait(30)

    def said(self) -> str:
        return self.log.read_text(errors="replace")


@pytest.fixture(scope="session")
def figures() -> list[str]:
    """Lines for the summary."""
    return _FIGURES


@pytest.fixture(scope="session")
def models(digits: Any) -> Path:
    """The digits example where every user may read it."""
    digits.models.parent.chmod(0o755)
    for parent in digits.models.parents:
        if parent.stat().st_uid == 0 and "pytest" in parent.name:
            parent.chmod(0o755)
    return Path(digits.models)


@pytest.fixture(scope="session")
def context() -> Path:
    """A build context as an air-gapped builder has it: every wheel that the small images need, remora's among them."""
    return _context("context", "onnx,grpc,otel,s3,sagemaker,azureml,lambda", "containers/lambda/requirements.txt")


@pytest.fixture(scope="session")
def gpu_context() -> Iterator[Path]:
    """The same for the gpu image. It is large, so it goes when the tests are over."""
    if not os.environ.get("TEST_GPU_IMAGE"):
        pytest.skip("the gpu image takes gigabytes of wheels: make test-gpu-image builds it")
    place = _context("gpu-context", "gpu,grpc,otel,s3", "containers/gpu/requirements.txt")
    yield place
    shutil.rmtree(place, ignore_errors=True)


def _context(name: str, extras: str, requirements: str) -> Path:
    if not os.environ.get("TEST_IMAGES"):
        pytest.skip(BUILT_HERE)
    place = KEPT / name
    shutil.rmtree(place, ignore_errors=True)
    (place / "dist").mkdir(parents=True)
    shutil.copytree(ROOT / "containers", place / "containers")
    for file in ("constraints.txt", ".dockerignore"):
        shutil.copy(ROOT / file, place / file)
    python = [sys.executable, "-m"]
    _run([*python, "hatchling", "build", "-t", "wheel", "-d", str(place / "dist")], ROOT)
    wheel = next((place / "dist").glob("remora-*.whl"))
    pip = [*python, "pip", "download", "--quiet", "--only-binary=:all:", "-d", "dist", "-c", "constraints.txt"]
    command = [*pip, f"{wheel}[{extras}]", "-r", requirements]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=600)
    if done.returncode:
        pytest.skip(f"the wheels cannot be fetched: {done.stderr.strip().splitlines()[-1]}")
    return place


@pytest.fixture(scope="session")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The buildah command on a storage of its own, emptied afterwards."""
    if not os.environ.get("TEST_IMAGES"):
        pytest.skip(BUILT_HERE)
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        pytest.skip(
            f"not installed: {', '.join(missing)} (on Debian: apt-get install buildah crun mmdebstrap bubblewrap)"
        )
    if os.geteuid():
        pytest.skip("unpacking a base system needs root")
    storage = tmp_path_factory.mktemp("storage")
    command = ["buildah", f"--root={storage}/root", f"--runroot={storage}/run"]
    yield command
    subprocess.run([*command, "rm", "--all"], capture_output=True)
    subprocess.run([*command, "rmi", "--all", "--force"], capture_output=True)


@pytest.fixture(scope="session")
def system() -> Path:
    """An archive of the system that stands for the published base images."""
    base = KEPT / "base.tar"
    if not base.exists():
        base.parent.mkdir(exist_ok=True)
        packages = "--include=python3,python3-venv,python3-pip"
        unpack = ["mmdebstrap", "--quiet", "--variant=minbase", packages, "bookworm", f"{base}.part"]
        done = subprocess.run([*unpack, "--format=tar"], capture_output=True, text=True, timeout=600)
        if done.returncode:
            pytest.skip(f"no base system: {done.stderr.strip().splitlines()[-1]}")
        Path(f"{base}.part").rename(base)
    return base


@pytest.fixture(scope="session")
def base(buildah: list[str], system: Path) -> str:
    """The base image that all are built from."""
    return _from(buildah, system)


def _from(buildah: list[str], system: Path) -> str:
    container = _run([*buildah, "from", "scratch"])
    _run([*buildah, "add", "--quiet", container, str(system), "/"])
    _run([*buildah, "commit", "--quiet", "--rm", container, _BASE])
    return _BASE


@pytest.fixture(scope="session")
def images(buildah: list[str], base: str, context: Path) -> dict[str, Image]:
    """All images but the gpu one, which is as large as all others together."""
    return {name: _build(buildah, name, context) for name in IMAGES}


@pytest.fixture(scope="session")
def gpu_image(buildah: list[str], gpu_context: Path, base: str) -> Image:
    return _build(buildah, "gpu", gpu_context)


def _build(buildah: list[str], name: str, context: Path) -> Image:
    tag = f"localhost/remora:{name}"
    arguments = [f"--build-arg={pair}" for pair in (f"BASE_IMAGE={_BASE}", "OFFLINE=1", "VERSION=test")]
    file = str(context / "containers" / name / "Dockerfile")
    _run([*buildah, "bud", "--quiet", "--isolation=chroot", *arguments, "--file", file, "--tag", tag, str(context)])
    config = json.loads(_run([*buildah, "inspect", "--type=image", tag]))["OCIv1"]["config"]
    container = _run([*buildah, "from", tag])
    return Image(name, config, Path(_run([*buildah, "mount", container])))


def _run(command: list[str], folder: Path | None = None) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout.strip()
