"""Container images by name, and the arguments of their builds.

An image is a Dockerfile of a platform and a choice of CUDA. `building` runs the build, `wheel` provides the wheel of
remora that an image installs.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

INSTALL = "containers/install.sh"
"""Path of the installation's script in a build context."""
CONSTRAINTS = "constraints.txt"
ENGINES = ("docker", "podman", "buildah")
ARCHITECTURES = ("amd64", "arm64")
DOCKER_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
"""The only media type that all platforms accept: Lambda and SageMaker refuse an index, SageMaker also OCI's."""
NO_CUDA = "none"
_EXTRAS = {
    "container": "onnx,grpc,otel,s3",
    "sagemaker": "onnx,sagemaker,otel,s3",
    "azureml": "onnx,azureml,otel",
    "lambda": "onnx,lambda,s3",
}
_CUDAS = ("12", "13")


@dataclass(frozen=True, slots=True)
class Image:
    """Image of one platform with one choice of CUDA.

    Attributes:
        name: the name for `remora image build`.
        platform: folder of the Dockerfile, and the label ``remora.platform``; ``container`` serves several platforms.
        cuda: major version of CUDA, or ``none``.
        extras: extras of remora to install.
        requirements: file with further pinned packages, relative to the build context; "" for none.
    """

    name: str
    platform: str
    cuda: str
    extras: tuple[str, ...]
    requirements: str

    @property
    def dockerfile(self) -> str:
        """Path of the Dockerfile in the build context."""
        return f"containers/{self.platform}/Dockerfile"

    @property
    def files(self) -> tuple[str, ...]:
        """Paths of the files that the build reads besides the Dockerfile and the wheels."""
        return (CONSTRAINTS, INSTALL, *filter(None, [self.requirements]))

    def build_arguments(self, more: Sequence[str] = ()) -> dict[str, str]:
        """Return the build arguments, with additional extras."""
        found = {
            "EXTRAS": ",".join(dict.fromkeys((*self.extras, *more))),
            "REQUIREMENTS": self.requirements,
            "CUDA": self.cuda,
        }
        return found | ({} if self.cuda == NO_CUDA else {"DEVICES": "all"})


def _images() -> dict[str, Image]:
    found = {}
    for platform, extras in _EXTRAS.items():
        plain = platform == "container"
        lambda_client = "containers/requirements/lambda.txt" if platform == "lambda" else ""
        name = "cpu" if plain else platform
        found[name] = Image(name, platform, NO_CUDA, tuple(extras.split(",")), lambda_client)
        for cuda in _CUDAS if platform != "lambda" else ():
            name = f"cuda{cuda}" if plain else f"{platform}-cuda{cuda}"
            on_gpu = tuple(extras.replace("onnx", "gpu").split(","))
            found[name] = Image(name, platform, cuda, on_gpu, f"containers/requirements/cuda{cuda}.txt")
    return found


IMAGES: Mapping[str, Image] = _images()
"""All images by name."""


def context_folder() -> Path:
    """Return the package's or the checkout's folder with ``containers`` and its constraints."""
    packed = Path(__file__).parent / "context"
    return packed if packed.is_dir() else Path(__file__).resolve().parents[3]


def problem_of(image: Image, architecture: str, media_type: str, built_for: str, labels: Mapping[str, str]) -> str:
    """Return how a built image differs from the request, or "".

    An unknown ``media_type`` is "".
    """
    if media_type and media_type != DOCKER_MANIFEST:
        return f"its manifest is {media_type}, which Lambda and SageMaker refuse: expected {DOCKER_MANIFEST}"
    if built_for != architecture:
        return f"it is built for {built_for or 'an unknown architecture'}, not for {architecture}: is the base image?"
    for label, expected in (("remora.platform", image.platform), ("remora.cuda", image.cuda)):
        if labels.get(label) != expected:
            return f"its label {label} is {labels.get(label)!r}, not {expected!r}"
    return ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `remora image build`."""
    parser.add_argument("name", choices=sorted(IMAGES), metavar="NAME", help=", ".join(IMAGES))
    parser.add_argument("--tag", default="", metavar="TAG", help="name of the image (default: remora:NAME)")
    parser.add_argument("--engine", choices=ENGINES, help="container engine (default: the first one on PATH)")
    parser.add_argument(
        "--arch", choices=ARCHITECTURES, default="amd64", help="architecture of the machines (default %(default)s)"
    )
    parser.add_argument(
        "--extra", action="append", default=[], metavar="NAME", help="further extra, such as torch; repeatable"
    )
    parser.add_argument("--base-image", default="", metavar="IMAGE", help="base image (default: python:3.12-slim)")
    parser.add_argument(
        "--wheel", type=Path, metavar="FILE", help="wheel of remora to install (default: this installation's)"
    )
    parser.add_argument(
        "--wheels", type=Path, metavar="DIR", help="wheels of all dependencies, for a build without a network"
    )
    parser.add_argument(
        "--build-arg", action="append", default=[], metavar="NAME=VALUE", help="further build argument; repeatable"
    )
    parser.add_argument("--push", action="store_true", help="push the image after the build")
    parser.add_argument(
        "--context",
        type=Path,
        metavar="DIR",
        help="write the build context to DIR and print the command; build nothing",
    )


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `remora build`."""
    parser.add_argument(
        "source", metavar="SOURCE", help="app.py, app.py:NAME,NAME, a model file, a model folder or a repository"
    )
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder to write (default: NAME-image)")
    parser.add_argument("--name", default="", metavar="NAME", help="name of the model's folder (default: SOURCE's)")
    parser.add_argument(
        "--image", choices=sorted(IMAGES), default="cpu", metavar="IMAGE", help=f"{', '.join(IMAGES)} (default cpu)"
    )
    parser.add_argument(
        "--include",
        type=Path,
        action="append",
        default=[],
        metavar="PATH",
        help="further file or folder beside the Python file, such as data; repeatable",
    )
    parser.add_argument("--trust-pickle", action="store_true", help="start the server with --trust-pickle")
    parser.add_argument(
        "--run", choices=ENGINES, dest="engine", metavar="ENGINE", help=f"build the image: {', '.join(ENGINES)}"
    )
    parser.add_argument("--tag", default="", metavar="TAG", help="name of the image for --run (default: NAME)")
    parser.add_argument(
        "--extra",
        action="append",
        default=[],
        metavar="NAME",
        help="further extra of remora, such as torch; repeatable",
    )
    parser.add_argument("--base-image", default="", metavar="IMAGE", help="base image (default: python:3.12-slim)")
    parser.add_argument(
        "--wheel", type=Path, metavar="FILE", help="wheel of remora to install (default: this installation's)"
    )
    parser.add_argument(
        "--wheels", type=Path, metavar="DIR", help="wheels of all dependencies, for a build without a network"
    )
    parser.set_defaults(build_arg=[])
