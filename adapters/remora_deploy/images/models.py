"""Command `remora build`, which writes the build context of an image with a model.

The context has what this image needs and nothing else, and a Dockerfile that needs no build arguments, so any builder
builds it. The same files give the same context.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from remora.api.storage import Found, recognise
from remora.cli.output import UsageError
from remora.environments.installed import UnknownLineError, files_of, specifications
from remora.errors import UnavailableError
from remora.model_files import REQUIREMENTS
from remora_deploy.images import CONSTRAINTS, ENGINES, IMAGES, INSTALL, Image, context_folder
from remora_deploy.images.building import STDERR, arguments_of, assemble, without_comments
from remora_deploy.images.extras import extras_of
from remora_deploy.images.sources import files_in, files_of_file, is_app, split_source
from remora_deploy.images.wheel import WheelError

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_WRITTEN = "# Written by `remora build`."
_ALL = "requirements/all.txt"
_FIRST_STAGE = "# Install remora, and the packages of the model, into /opt/remora.\n"
_LAST_STAGE = "# The image: the base, /opt/remora and the model.\n"
_COPY_ALL = "COPY . .\n"
_INSTALL = f"RUN ./{INSTALL}"
_EPOCH = 315_532_800
"""Time of all files of a context, the first that zip archives hold, because builders put it into the layers."""
_IGNORE = "# The whole context belongs to the image's build.\n"


class Place(NamedTuple):
    """Folder of the models in a platform's images, and the variable that names it."""

    folder: str
    variable: str


PLACES: Mapping[str, Place] = {
    "container": Place("/models/{name}", "REMORA_MODEL_REPOSITORY"),
    "lambda": Place("/models/{name}", "REMORA_MODEL_REPOSITORY"),
    "sagemaker": Place("/opt/ml/model", ""),
    # Azure's folders end with a version.
    "azureml": Place("/models/{name}/1", "AZUREML_MODEL_DIR"),
}


def build(options: argparse.Namespace) -> int:
    """Run `remora build` and return the exit code. Raises UsageError, UnavailableError, OSError."""
    source, names = split_source(options.source)
    image = IMAGES[options.image]
    if not source.exists():
        raise UsageError(f"no such file or folder: '{source}'")
    name = options.name or _name_of(source)
    if not _NAME.fullmatch(name):
        raise UsageError(f"'{name}' is not a name for an image: pass --name with letters, digits, '_', '.' and '-'")
    target: Path = options.output or Path(f"{name}-image")
    files = _files(source, options.include, target)
    kind = recognise(source)
    _check(source, names, image, files, options, kind)
    _check_target(target)
    options.extra = [*options.extra, *(each for each in extras_of(files, kind) if not _has(image, each))]
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".remora-build-", dir=target.parent) as folder:
        context = Path(folder) / "context"  # below the temporary folder, which only this user can read
        context.mkdir()
        version = _write(context, image, name, files, options)
        if target.exists():
            shutil.rmtree(target)
        context.replace(target)
    packages = (target / _ALL).is_file()
    extras = f" with {', '.join(options.extra)}" if options.extra else ""
    print(f"wrote {target}: {len(files)} files of {source}, remora {version}{extras}" + ", packages" * packages)
    words = [options.engine or ENGINES[0], "build", "--tag", options.tag or name.lower(), str(target)]
    if options.engine is None:
        print(f"build it: {' '.join(words)}")
        return 0
    if shutil.which(options.engine) is None:
        raise UsageError(f"{options.engine} is not on PATH: install it, or build {target} with another builder")
    if subprocess.run(words, stdout=STDERR, check=False).returncode:
        raise UnavailableError(f"failed: {' '.join(words)}")
    print(words[3])
    return 0


def _write(folder: Path, image: Image, name: str, files: Mapping[str, Path], options: argparse.Namespace) -> str:
    """Write the context into an empty folder and return the version of remora in it.

    Raises UsageError, OSError.
    """
    try:
        version = assemble(folder, context_folder(), image.files, options.wheel, options.wheels)
    except WheelError as error:
        raise UsageError(str(error)) from error
    models = folder / "models" / name
    for path, original in files.items():
        copy = models / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(original, copy)
    packages = _write_requirements(folder, models)
    arguments = {"VERSION": version, **arguments_of(image, options)}
    source, names = split_source(options.source)
    place = f"{{place}}/{source.name}{names and f':{names}'}" if _needs_file(source, names) else "{place}"
    command = ["--trust-pickle"] if options.trust_pickle else []
    text = dockerfile(image, name, place, arguments, packages=packages, command=command)
    (folder / "Dockerfile").write_text(text, encoding="utf-8")
    (folder / ".dockerignore").write_text(_IGNORE, encoding="utf-8")
    _settle(folder)
    return version


def dockerfile(
    image: Image, name: str, served: str, arguments: Mapping[str, str], *, packages: bool, command: list[str]
) -> str:
    """Return the Dockerfile of a context.

    Args:
        image: the platform's image, whose Dockerfile is completed.
        name: the folder below ``models`` in the context.
        served: path of the models for the variable, with ``{place}`` for their folder.
        arguments: values of the build arguments.
        packages: the context has requirements of the model.
        command: flags of `remora serve` that the container starts with.
    """
    text = without_comments((context_folder() / image.dockerfile).read_text(encoding="utf-8"))
    first, build, final = text.split("FROM ")
    text = f"{first}{_FIRST_STAGE}FROM {build}{_LAST_STAGE}FROM {final}"
    for argument, value in arguments.items():
        text = re.sub(rf"^ARG {argument}(=.*)?$", f"ARG {argument}={value}", text, flags=re.MULTILINE)
    # `ARG BASE_IMAGE` of the last stage has the value of the first one, so it may be repeated there.
    copies = ["containers containers", "dist dist", f"{CONSTRAINTS} ."] + (["requirements requirements"] * packages)
    lines = "".join(f"COPY {each}\n" for each in copies)  # without the models, whose changes need no installation
    text = text.replace(_COPY_ALL, lines)
    if packages:
        text = text.replace(_INSTALL, f"RUN MODEL_REQUIREMENTS={_ALL} {_INSTALL.removeprefix('RUN ')}")
    place = PLACES[image.platform]
    folder = place.folder.format(name=name)
    text += f"# Every user may read the model.\nCOPY models/{name} {folder}\n"
    if place.variable:
        text += f"ENV {place.variable}={served.format(place=folder)}\n"
    if command:
        text += f"CMD {json.dumps(command)}\n"
    return f"{_WRITTEN}\n{text}"


def _name_of(source: Path) -> str:
    path = source.resolve()
    return path.name if path.is_dir() else path.parent.name if path.stem == "model" else path.stem


def _needs_file(source: Path, names: str) -> bool:
    """Return True if the folder alone would not lead the server to the models."""
    return source.suffix == ".py" and (bool(names) or not is_app(source))


def _files(source: Path, include: list[Path], target: Path) -> dict[str, Path]:
    """Return the files to copy by their path below the model's folder. Raises UsageError."""
    if source.is_dir():
        if include:
            raise UsageError("--include is for a Python file: a folder is copied whole")
        return files_in(source, target)
    found = files_of_file(source)
    for each in include:
        try:
            below = each.resolve().relative_to(source.parent.resolve()).as_posix()
        except ValueError:
            raise UsageError(f"--include {each}: it must be below '{source.parent.resolve()}'") from None
        if not each.exists():
            raise UsageError(f"--include {each}: no such file or folder")
        found |= {f"{below}/{path}": file for path, file in files_in(each).items()} if each.is_dir() else {below: each}
    return found


def _has(image: Image, extra: str) -> bool:
    """Return True if an image has an extra, or its variant for GPUs."""
    return extra in image.extras or (extra == "onnx" and "gpu" in image.extras)


def _check(
    source: Path,
    names: str,
    image: Image,
    files: Mapping[str, Path],
    options: argparse.Namespace,
    kind: Found | None,
) -> None:
    """Raise UsageError for models that the image could not serve."""
    if not files:
        raise UsageError(f"'{source}' has no files")
    if _needs_file(source, names) and image.platform != "container":
        raise UsageError(f"{image.name} serves all functions of an app.py: name the file so, without :NAME")
    if options.trust_pickle and image.platform != "container":
        raise UsageError(f"--trust-pickle: {image.name} takes its settings from the platform")
    if kind is not None and kind.refusal and not options.trust_pickle:
        raise UsageError(f"'{source}' is {kind.title}: {kind.refusal}")
    if kind is not None and kind.define and REQUIREMENTS not in files:
        raise UsageError(
            f"'{source}' is {kind.title}, and the image has no library that reads it: name the library, such as "
            f"scikit-learn or transformers, in a {REQUIREMENTS} beside the model"
        )
    originals = {file.resolve() for file in files.values()}
    for path, file in files.items():
        if path.rpartition("/")[2] == REQUIREMENTS:
            outside = next((each for each in files_of(file) if each.resolve() not in originals), None)
            if outside is not None:
                raise UsageError(f"'{file}' includes '{outside}', which is outside the model's folder")
            try:
                specifications(file)
            except UnknownLineError as error:
                raise UsageError(f"{error}: write NAME @ URL, or NAME==VERSION with --wheels DIR") from None


def _write_requirements(target: Path, models: Path) -> bool:
    """Copy the models' requirements to the part of the context that the installation reads.

    Returns False if there are none.
    """
    found = sorted(models.rglob(REQUIREMENTS))
    for file in found:
        for each in files_of(file):
            copy = target / "requirements" / each.resolve().relative_to(models.resolve())
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(each, copy)
    lines = [f"-r {file.relative_to(models).as_posix()}\n" for file in found]
    if found:
        (target / _ALL).write_text("".join(lines), encoding="utf-8")
    return bool(found)


def _check_target(target: Path) -> None:
    """Raise UsageError for a file, or a folder that this command did not write."""
    if target.is_dir() and not any(target.iterdir()):
        return
    file = target / "Dockerfile"
    if target.exists() and not (file.is_file() and file.read_text("utf-8", "replace").startswith(_WRITTEN)):
        raise UsageError(f"'{target}' is not empty and was not written by this command: pass --output DIR")


def _settle(target: Path) -> None:
    """Give all files of the context one time, and modes that every user of an image can read."""
    for root, folders, names in os.walk(target, topdown=False):
        for name in names:
            path = Path(root, name)
            path.chmod(0o755 if path.suffix == ".sh" else 0o644)
            os.utime(path, (_EPOCH, _EPOCH))
        for name in folders:
            Path(root, name).chmod(0o755)
            os.utime(Path(root, name), (_EPOCH, _EPOCH))
