"""What users install: the wheel and the sdist hold what they should, and nothing else."""

from __future__ import annotations

import configparser
import importlib.util
import os
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from support.process.makefiles import included

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONTEXT = "remora_deploy/images/context/"
SOURCES = {path.name: root for root in (ROOT / "core", ROOT / "adapters") for path in root.iterdir() if path.is_dir()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the wheel and the sdist, built without a network."""
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("hatchling is not installed: pip install '.[dev]'")
    directory = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(directory)], cwd=ROOT, check=True, capture_output=True
    )
    return directory


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return next(built.glob("*.whl"))


def test_the_wheel_holds_every_source_file_and_nothing_else(wheel: Path) -> None:
    packed = {
        name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name and not name.startswith(CONTEXT)
    }
    tree = {
        str(path.relative_to(source))
        for package, source in SOURCES.items()
        for path in (source / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed == tree


def test_the_wheel_holds_what_builds_its_images(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    packed = {name.removeprefix(CONTEXT): archive.read(name) for name in archive.namelist() if name.startswith(CONTEXT)}
    files = [path for path in (ROOT / "containers").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert packed == {str(path.relative_to(ROOT)): path.read_bytes() for path in [*files, ROOT / "constraints.txt"]}


def test_the_wheel_says_that_it_is_typed(wheel: Path) -> None:
    assert "remora/py.typed" in zipfile.ZipFile(wheel).namelist()


def test_the_wheel_declares_the_command_and_the_backends(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    points = configparser.ConfigParser()
    points.read_string(archive.read(next(name for name in archive.namelist() if "entry_points" in name)).decode())
    assert points["console_scripts"]["remora"] == "remora.cli:main"
    assert set(points["remora.backends"]) >= {"onnxruntime", "python"}


@pytest.mark.parametrize(
    "target", sorted({**PROJECT["scripts"], **PROJECT["entry-points"]["remora.backends"]}.values())
)
def test_an_entry_point_leads_somewhere(target: str, child_environment: dict[str, str]) -> None:
    module, _, attribute = target.partition(":")
    probe = f"import {module}; {module}.{attribute}"
    done = subprocess.run([sys.executable, "-c", probe], env=child_environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_unpacked_wheel_imports_without_the_source_tree(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    probe = "import remora, remora_adapters; print(remora.__path__[0])"
    done = subprocess.run(
        [sys.executable, "-c", probe], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert Path(done.stdout.strip()) == tmp_path / "remora"


def test_the_sdist_can_be_built_and_tested_from(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for needed in (
        "pyproject.toml",
        "constraints.txt",
        "Makefile",
        *(path.relative_to(ROOT).as_posix() for path in included()),
        "LICENSE",
        "tests/conftest.py",
        "docs/architecture.md",
    ):
        assert needed in names
    assert not [name for name in names if name.startswith((".venv", "docs/examples/digits/models/"))]


def test_the_extras_are_the_promised_ones() -> None:
    promised = {
        "onnx",
        "gpu",
        "torch",
        "tensorrt",
        "trees",
        "openvino",
        "openvino-genai",
        "vllm",
        "tensorflow",
        "generation",
        "grpc",
        "grpcio",
        "jwt",
        "otel",
        "s3",
        "gcs",
        "azure",
        "redis",
        "sagemaker",
        "deploy-sagemaker",
        "deploy-google",
        "deploy-azure",
        "sagemaker-sdk",
        "azureml",
        "lambda",
        "parquet",
        "images",
    }
    assert set(PROJECT["optional-dependencies"]) == promised | {"demo", "dev"}
