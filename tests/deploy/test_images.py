"""The table of images: which there are, what their builds are given, and what a finished build has to be."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from remora.cli import main
from remora_deploy.images import DOCKER_MANIFEST, IMAGES, NO_CUDA, context_folder, problem_of

ROOT = Path(__file__).resolve().parents[2]
LABELS = {"remora.platform": "sagemaker", "remora.cuda": "12"}


def test_each_host_has_an_image_for_processors_and_one_for_each_cuda() -> None:
    names = {(each.platform, each.cuda): name for name, each in IMAGES.items()}
    for platform in ("container", "sagemaker", "azureml"):
        plain = "" if platform == "container" else f"{platform}-"
        assert names[platform, "12"] == f"{plain}cuda12"
        assert names[platform, "13"] == f"{plain}cuda13"
    assert names["container", NO_CUDA] == "cpu"
    assert [cuda for platform, cuda in names if platform == "lambda"] == [NO_CUDA]


@pytest.mark.parametrize("name", IMAGES)
def test_the_files_of_a_build_are_there(name: str) -> None:
    image = IMAGES[name]
    assert (context_folder() / image.dockerfile).is_file()
    assert not image.requirements or (context_folder() / image.requirements).is_file()


def test_the_runtimes_are_those_of_their_cuda() -> None:
    """The last ONNX Runtime for CUDA 12 is 1.26: with a newer one the image would need a driver for CUDA 13."""
    pins = {cuda: (ROOT / "containers" / "requirements" / f"cuda{cuda}.txt").read_text() for cuda in ("12", "13")}
    assert "onnxruntime-gpu[cuda,cudnn]==1.26.0\n" in pins["12"]
    assert "onnxruntime-gpu[cuda,cudnn]==1.31.1\n" in pins["13"]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["gpu"][0].startswith("onnxruntime-gpu>=1.20,")


def test_further_extras_are_added_once() -> None:
    arguments = IMAGES["cuda13"].build_arguments(("torch", "otel"))
    assert arguments["EXTRAS"] == "gpu,grpc,otel,s3,torch"
    assert arguments["DEVICES"] == "all"
    assert "DEVICES" not in IMAGES["cpu"].build_arguments()


@pytest.mark.parametrize(
    ("media", "architecture", "labels", "reason"),
    [
        (DOCKER_MANIFEST, "amd64", LABELS, ""),
        ("", "amd64", LABELS, ""),
        ("application/vnd.oci.image.index.v1+json", "amd64", LABELS, "which Lambda and SageMaker refuse"),
        (DOCKER_MANIFEST, "arm64", LABELS, "it is built for arm64, not for amd64"),
        (DOCKER_MANIFEST, "amd64", {**LABELS, "remora.cuda": "13"}, "its label remora.cuda is '13', not '12'"),
        (DOCKER_MANIFEST, "amd64", {}, "its label remora.platform is None, not 'sagemaker'"),
    ],
)
def test_a_build_that_a_platform_would_refuse_is_named(
    media: str, architecture: str, labels: dict[str, str], reason: str
) -> None:
    found = problem_of(IMAGES["sagemaker-cuda12"], "amd64", media, architecture, labels)
    assert reason in found
    assert bool(found) == bool(reason)


def test_the_list_shows_every_image(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["image", "list"]) == 0
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert rows == ["NAME", *IMAGES]
