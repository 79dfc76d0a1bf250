"""Images built and run for the tests, without a container engine's daemon: buildah builds, bubblewrap runs.

The published base images cannot be had everywhere; Debian's own Python, unpacked by mmdebstrap, stands for them.
Building takes minutes, so it happens only under `make test-containers`; what is missing is skipped with its name.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from containers.boxes import KEPT, PLAIN_USER, Image, bound
from containers.dockerfiles import configuration
from remora_deploy.images import IMAGES as ALL_IMAGES
from remora_deploy.images import NO_CUDA
from remora_deploy.images.building import Build, assemble, build_command, convert_command

ROOT = Path(__file__).resolve().parent.parent.parent
IMAGES = tuple(name for name, image in ALL_IMAGES.items() if image.cuda == NO_CUDA)
PACKAGES = {"buildah": "buildah crun", "bwrap": "bubblewrap", "newuidmap": "uidmap", "setpriv": "util-linux"}
"""Debian's, of the tools that are called otherwise."""
_BASE = "localhost/python-base:test"
ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]
_FIGURES: list[str] = []


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The measured sizes and times, below the tests."""
    if _FIGURES:
        terminalreporter.section("images")
        for line in _FIGURES:
            terminalreporter.line(line)


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
    return _context("context", "onnx,grpc,otel,s3,sagemaker,azureml,lambda", "containers/requirements/lambda.txt")


@pytest.fixture(scope="session", params=["cuda12", "cuda13"])
def gpu_context(request: pytest.FixtureRequest) -> Iterator[tuple[str, Path]]:
    """The same for an image with CUDA, with its name. It is large, so it goes when the tests are over."""
    if not os.environ.get("TEST_GPU_IMAGE"):
        pytest.skip("the images with CUDA take gigabytes of wheels: make test-gpu-image builds them")
    name = request.param
    try:
        yield name, _context(f"{name}-context", "gpu,grpc,otel,s3", f"containers/requirements/{name}.txt")
    finally:
        shutil.rmtree(KEPT / f"{name}-context", ignore_errors=True)


def _needs(*tools: str) -> None:
    """Skip, with the name of what is missing, where images are not to be built or cannot be."""
    if not os.environ.get("TEST_IMAGES"):
        pytest.skip("the images are built by make test-containers")
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        packages = " ".join(PACKAGES.get(tool, tool) for tool in missing)
        pytest.skip(f"not installed: {', '.join(missing)} (on Debian: apt-get install {packages})")
    if tools and os.geteuid():
        pytest.skip("unpacking a base system, and becoming a plain user that has ranges of users, needs root")


def _context(name: str, extras: str, requirements: str) -> Path:
    _needs()
    place = KEPT / name
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    files = {file for each in ALL_IMAGES.values() for file in (each.dockerfile, *each.files)}
    assemble(place, ROOT, files, None, None)
    python = [sys.executable, "-m"]
    wheel = next((place / "dist").glob("remora-*.whl"))
    pip = [*python, "pip", "download", "--quiet", "--only-binary=:all:", "-d", "dist", "-c", "constraints.txt"]
    command = [*pip, f"{wheel}[{extras}]", "-r", requirements]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=600)
    if done.returncode:
        pytest.skip(f"the wheels cannot be fetched: {done.stderr.strip().splitlines()[-1]}")
    return place


@pytest.fixture(scope="session")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The buildah command on a separate storage, emptied afterwards."""
    _needs("buildah", "mmdebstrap", "bwrap", "setpriv")
    storage = tmp_path_factory.mktemp("storage")
    command = ["buildah", f"--root={storage}/root", f"--runroot={storage}/run"]
    yield command
    subprocess.run([*command, "rm", "--all"], capture_output=True)
    subprocess.run([*command, "rmi", "--all", "--force"], capture_output=True)


@pytest.fixture(scope="session")
def system() -> Path:
    """An archive of the system that stands for the published base images."""
    _needs("mmdebstrap")
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
def gpu_image(buildah: list[str], base: str, gpu_context: tuple[str, Path]) -> Iterator[Image]:
    """An image with CUDA, removed afterwards, because the next one needs the room."""
    name, context = gpu_context
    yield _build(buildah, name, context)
    subprocess.run([*buildah, "rm", "--all"], capture_output=True)
    subprocess.run([*buildah, "rmi", "--force", f"localhost/remora:{name}"], capture_output=True)


# For this command alone /etc/subuid and /etc/subgid say what an administrator would write there for a plain user.
_WITH_RANGES = 'mount --bind "$0" /etc/subuid && mount --bind "$0" /etc/subgid && exec "$@"'


@pytest.fixture(scope="session")
def rootless_image(request: pytest.FixtureRequest) -> Iterator[Image]:
    """The cpu image, built by a plain user: no daemon, and users only in a new namespace."""
    _needs("buildah", "mmdebstrap", "bwrap", "setpriv", "newuidmap")
    system, context = (request.getfixturevalue(name) for name in ("system", "context"))
    home = Path(tempfile.mkdtemp(prefix="rootless-"))
    try:
        yield _built_rootless(home, system, context)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _built_rootless(home: Path, system: Path, context: Path) -> Image:
    shutil.copytree(context, home / "context")
    (home / "ranges").write_text("nobody:100000:65536\n")
    subprocess.run(["chown", "-R", "65534:65534", str(home)], check=True)
    told = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": home, "XDG_RUNTIME_DIR": home, "STORAGE_DRIVER": "vfs"}
    environment = ["env", "--ignore-environment", f"--chdir={home}", *(f"{name}={told[name]}" for name in told)]
    ranges = ["unshare", "--mount", "sh", "-c", _WITH_RANGES, str(home / "ranges")]
    buildah = [*ranges, *PLAIN_USER, *environment, "buildah"]
    done = subprocess.run([*buildah, "unshare", "true"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no namespace of users for a plain user here: {done.stderr.strip().splitlines()[-1]}")
    _from(buildah, system)
    built = _build(buildah, "cpu", home / "context", ("unshare", "buildah", "mount"))
    return built._replace(name="cpu-rootless", started_by=PLAIN_USER)


@pytest.fixture(scope="session")
def installed(context: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Image]:
    """What stands for an image where nothing builds one: its wheels on this machine's system, otherwise the same."""
    if shutil.which("buildah") and not os.environ.get("TEST_WITHOUT_ENGINE"):
        pytest.skip("the images themselves are run here; TEST_WITHOUT_ENGINE=1 tries what stands for them elsewhere")
    if shutil.which("bwrap") is None:
        pytest.skip("not installed: bwrap (on Debian: apt-get install bubblewrap)")
    prefix = tmp_path_factory.mktemp("installed")
    prefix.chmod(0o755)
    environment = os.environ | {"PREFIX": str(prefix), "OFFLINE": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    extras = "onnx,grpc,otel,s3,sagemaker,azureml,lambda"
    install = ["sh", str(context / "containers" / "install.sh"), extras, "containers/requirements/lambda.txt"]
    done = subprocess.run(install, cwd=context, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    binds = []
    for place in ("/usr", "/bin", "/lib", "/lib64", "/etc"):
        binds += (
            ["--symlink", os.readlink(place), place] if Path(place).is_symlink() else ["--ro-bind-try", place, place]
        )
    binds += [*bound(sys.base_prefix, sys.base_prefix), *bound(prefix, "/opt/remora")]
    return lambda name: Image(f"{name}-installed", configuration(name), prefix, tuple(binds))


def _build(buildah: list[str], name: str, context: Path, mount: tuple[str, ...] = ("mount",)) -> Image:
    tag = f"localhost/remora:{name}"
    build_image(buildah, name, context, tag)
    return unpacked(buildah, name, tag, mount)


def unpacked(buildah: list[str], name: str, tag: str, mount: tuple[str, ...] = ("mount",)) -> Image:
    """What bubblewrap runs: the configuration and the root of a built image."""
    config = json.loads(_run([*buildah, "inspect", "--type=image", tag]))["OCIv1"]["config"]
    container = _run([*buildah, "from", tag])
    return Image(name, config, Path(_run([*buildah, *mount, container])))


def build_image(buildah: list[str], name: str, context: Path, tag: str) -> None:
    """Build by the command of `remora image build`, in this storage and without a container for each step."""
    image = ALL_IMAGES[name]
    arguments = {**image.build_arguments(), "BASE_IMAGE": _BASE, "OFFLINE": "1", "VERSION": "test"}
    _, *words = build_command("buildah", Build(image, tag, ARCHITECTURE, str(context), arguments))
    _run([*buildah, words[0], "--quiet", "--isolation=chroot", "--pull=never", *words[1:]])
    _, *words = convert_command("buildah", tag)
    _run([*buildah, words[0], "--quiet", *words[1:]])


def _run(command: list[str], folder: Path | None = None) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout.strip()
