"""Command `remora image build`, which builds a container image from this installation.

The build context is assembled in a temporary folder from the files of the package, one wheel of remora and, without a
network, the wheels of its dependencies. docker, podman or buildah builds it: for one architecture, with Docker's media
types and without attestations, because Lambda and SageMaker refuse everything else.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from remora.cli.output import UsageError
from remora.errors import UnavailableError
from remora.system.json_text import read_json
from remora_deploy.images import ENGINES, IMAGES, NO_CUDA, Image, context_folder, problem_of
from remora_deploy.images.wheel import WheelError, make_wheel

STDERR = 2
"""File descriptor for the output of engines, because standard output has the result."""
_EXTRA = re.compile(r"[a-z0-9][a-z0-9-]*")
_TAG = re.compile(r"[a-z0-9][A-Za-z0-9._:/-]*")
_COMMENT = re.compile(r"^[ \t]*#(?!!).*\n", re.MULTILINE)
"""Line that is a comment, in a Dockerfile, a script or requirements: all but the first line of a script."""


class Build(NamedTuple):
    """Image to build, with the folder of the assembled context and the build arguments."""

    image: Image
    tag: str
    architecture: str
    context: str
    arguments: Mapping[str, str]


def build_command(engine: str, build: Build) -> list[str]:
    """Return the engine's command. Times are fixed, so that the same files give the same digest."""
    platform = f"--platform=linux/{build.architecture}"
    arguments = [f"--build-arg={name}={value}" for name, value in sorted(build.arguments.items())]
    file = ["--file", f"{build.context}/{build.image.dockerfile}"]
    if engine == "docker":
        # The builder `default` stores the image in the engine; others would keep it in a cache.
        output = f"type=image,name={build.tag},oci-mediatypes=false,rewrite-timestamp=true"
        plain = ["--builder=default", "--provenance=false", "--sbom=false", "--output", output]
        epoch = ["--build-arg=SOURCE_DATE_EPOCH=0"]
        return ["docker", "buildx", "build", platform, *plain, *epoch, *arguments, *file, build.context]
    # Docker's own format would record the name of the build's container, which differs each time.
    fixed = ["--format=oci", "--timestamp=0"]
    return [engine, "build", platform, *fixed, *arguments, *file, "--tag", build.tag, build.context]


def convert_command(engine: str, tag: str) -> list[str]:
    """Return the engine's command that gives an image Docker's media types, or none."""
    if engine == "docker":
        return []
    first, slash, _ = tag.partition("/")
    named = slash and (first == "localhost" or {".", ":"} & {*first})
    # The engines store names without a registry below localhost.
    return [engine, "push", "--format=v2s2", tag, f"containers-storage:{tag if named else f'localhost/{tag}'}"]


def push_command(engine: str, tag: str) -> list[str]:
    """Return the engine's command that pushes an image, with Docker's media types."""
    return [engine, "push", *([] if engine == "docker" else ["--format=v2s2"]), tag]


def inspect_command(engine: str, tag: str) -> list[str]:
    """Return the engine's command that prints an image's description as JSON."""
    return [engine, "inspect", "--type=image", tag]


def described(engine: str, text: str) -> tuple[str, str, dict[str, str]]:
    """Return media type, architecture and labels from the output of `inspect_command`.

    An unknown media type is "".
    """
    found: Any = read_json(text)
    if engine == "buildah":
        manifest, config = read_json(found["Manifest"]), found["Docker"]
        return str(manifest.get("mediaType", "")), config["architecture"], (config["config"].get("Labels") or {})
    found = found[0]
    media = found.get("ManifestType") or (found.get("Descriptor") or {}).get("mediaType") or ""
    return str(media), str(found.get("Architecture", "")), (found.get("Config") or {}).get("Labels") or {}


def assemble(folder: Path, source: Path, files: Iterable[str], wheel: Path | None, wheels: Path | None) -> str:
    """Write the build context into ``folder`` and return the version of remora in it.

    Args:
        folder: folder of the context.
        source: folder of the package or the checkout that has ``files``.
        files: paths of the files that the build needs. They are copied without their comments, which are for
            maintainers of this project.
        wheel: wheel of remora; None makes one.
        wheels: folder with the wheels of a build without a network.

    Raises WheelError, OSError.
    """
    for path in files:
        copy = folder / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(without_comments((source / path).read_text(encoding="utf-8")), encoding="utf-8")
        shutil.copymode(source / path, copy)
    (folder / "dist").mkdir(exist_ok=True)
    if wheels is not None:
        for each in sorted(wheels.glob("*.whl")):
            if not each.name.startswith("remora-"):
                shutil.copy(each, folder / "dist" / each.name)
    if wheel is not None:
        shutil.copy(wheel, folder / "dist" / wheel.name)
    else:
        make_wheel(folder / "dist", source)
    return next((folder / "dist").glob("remora-*.whl")).name.split("-")[1]


def without_comments(text: str) -> str:
    """Return a file of an image without its comments and without blank lines at its beginning."""
    return _COMMENT.sub("", text).lstrip("\n")


def build(options: argparse.Namespace, which: Callable[[str], str | None] = shutil.which) -> int:
    """Run `build` and return the exit code. Raises UsageError, UnavailableError, OSError."""
    image = IMAGES[options.name]
    arguments = arguments_of(image, options)
    files = (image.dockerfile, *image.files)
    tag = options.tag or f"remora:{image.name}"
    if not _TAG.fullmatch(tag):
        raise UsageError(f"--tag {tag!r}: expected a name such as REGISTRY/remora:{image.name}")
    if options.arch == "arm64" and image.cuda != NO_CUDA:
        raise UsageError(f"{image.name} --arch arm64: ONNX Runtime publishes no wheel with CUDA for arm64")
    engine = options.engine or next((each for each in ENGINES if which(each)), "")
    try:
        if options.context is not None:
            options.context.mkdir(parents=True, exist_ok=True)
            version = assemble(options.context, context_folder(), files, options.wheel, options.wheels)
            chosen = Build(image, tag, options.arch, str(options.context), {"VERSION": version, **arguments})
            print(" ".join(build_command(engine or ENGINES[0], chosen)))
            return 0
        if not engine or which(engine) is None:
            raise UsageError(f"{engine or ' or '.join(ENGINES)} is not on PATH: install it, or use --context DIR")
        with tempfile.TemporaryDirectory(prefix="remora-image-") as folder:
            version = assemble(Path(folder), context_folder(), files, options.wheel, options.wheels)
            chosen = Build(image, tag, options.arch, folder, {"VERSION": version, **arguments})
            return _run(engine, chosen, push=options.push)
    except WheelError as error:
        raise UsageError(str(error)) from error


def arguments_of(image: Image, options: argparse.Namespace) -> dict[str, str]:
    """Return the build arguments of an image with the given options. Raises UsageError."""
    for extra in options.extra:
        if not _EXTRA.fullmatch(extra):
            raise UsageError(f"--extra {extra!r}: expected the name of an extra, such as torch")
    found = image.build_arguments(options.extra)
    found |= {"BASE_IMAGE": options.base_image} if options.base_image else {}
    found |= {"OFFLINE": "1"} if options.wheels is not None else {}
    for pair in options.build_arg:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(f"--build-arg {pair!r}: expected NAME=VALUE")
        found[name] = value
    return found


def _run(engine: str, chosen: Build, *, push: bool) -> int:
    """Build, compare with the requested form, and push. Raises UnavailableError."""
    if engine == "docker" and subprocess.run(["docker", "buildx", "version"], capture_output=True).returncode:
        raise UnavailableError("docker has no buildx: install the package docker-buildx-plugin, or use --engine podman")
    _call(build_command(engine, chosen))
    if convert := convert_command(engine, chosen.tag):
        _call(convert)
    media, architecture, labels = described(engine, _output(inspect_command(engine, chosen.tag)))
    problem = problem_of(chosen.image, chosen.architecture, media, architecture, labels)
    if problem:
        raise UnavailableError(f"{chosen.tag} was built, but {problem}")
    print(f"{chosen.tag}: linux/{architecture}, platform {chosen.image.platform}, CUDA {chosen.image.cuda}")
    if push:
        _call(push_command(engine, chosen.tag))
    return 0


def _call(command: Sequence[str]) -> None:
    if subprocess.run(command, stdout=STDERR, check=False).returncode:
        raise UnavailableError(f"failed: {' '.join(command)}")


def _output(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UnavailableError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
