"""Selection and creation of the Python environment of a model's worker [Y14].

There are three kinds: the server's own interpreter; a virtual environment with the packages that the
``requirements.txt`` beside the model names and the server lacks; and the environment, a directory or an archive, at
EXECUTION_ENV_PATH. `remora.environments` creates and caches them.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from remora.backends import Source
from remora.environments import cache_of, interpreter_in, interpreter_with, read_requirements_of, run
from remora.environments.requirements import asks_for_anything, read_requirements, unmet
from remora.errors import ConfigError
from remora.model_files import MODEL_DIRECTORY, REQUIREMENTS, path_of_parameter
from remora.proto.model_config_pb2 import ModelConfig
from remora.storage.archive import unpack

PATH_PARAMETER = "EXECUTION_ENV_PATH"

_TRIAL = """
import sys
if sys.version_info < (3, 11):
    sys.exit("it is Python %d.%d, and models need 3.11 or later" % sys.version_info[:2])
try:
    import numpy
except ImportError as error:
    sys.exit("%s: pack numpy into the environment" % error)
"""


class Own(NamedTuple):
    """The interpreter of the server."""


class Virtual(NamedTuple):
    """A virtual environment with the packages in ``text``, the content of ``file``."""

    file: Path
    text: str


class Folder(NamedTuple):
    """An unpacked environment at ``path``."""

    path: Path


class Archive(NamedTuple):
    """An environment in a tar file, compressed or not."""

    path: Path


Plan = Own | Virtual | Folder | Archive


def plan_environment(parameters: Mapping[str, str], model_dir: Path, requirements: str | None, *, folder: bool) -> Plan:
    """Return the environment that a model's code needs. Pure.

    Args:
        parameters: the string parameters of its configuration.
        model_dir: its directory, which replaces ``$$TRITON_MODEL_DIRECTORY``.
        requirements: the text of its ``requirements.txt``, None if there is none.
        folder: True if EXECUTION_ENV_PATH, expanded, is a directory.
    """
    path = environment_path(parameters, model_dir)
    if path is not None:
        return Folder(path) if folder else Archive(path)
    if requirements is not None and asks_for_anything(requirements):
        return Virtual(model_dir / REQUIREMENTS, requirements)
    return Own()


def environment_path(parameters: Mapping[str, str], model_dir: Path) -> Path | None:
    """Return the expanded EXECUTION_ENV_PATH, or None if it is not set.

    Relative paths start at the model's directory.
    """
    written = parameters.get(PATH_PARAMETER, "")
    return path_of_parameter(written, model_dir) if written else None


def interpreter_for(source: Source, config: ModelConfig) -> Path:
    """Return the interpreter for a model's workers, creating its environment if necessary.

    This may take minutes. Any thread of any process may call it, because environments are created under a lock.

    Raises:
        ConfigError: EXECUTION_ENV_PATH or the requirements are invalid.
        InternalError: the environment cannot be created; the text holds the installer's last lines.
    """
    plan, owner = _plan_of(source, config), f"model '{source.name}'"
    match plan:
        case Own():
            return Path(sys.executable)
        case Folder(path):
            return _checked(interpreter_in(path, owner), path, owner)
        case Archive(path):
            made = cache_of(source.settings).folder_for(
                _hash_of_file(path),
                lambda folder: unpack(path, folder, what="environment archive", title=f"{path.name} of {owner}"),
            )
            return _checked(interpreter_in(made, owner), path, owner)
        case Virtual(file):
            return interpreter_with(file, owner, source.settings)


def check_in_thread(source: Source, config: ModelConfig) -> None:
    """Check that the server's environment meets the needs of a model in a thread.

    Raises:
        ConfigError: a requirement is not met; the text names each unmet line and the remedies.
    """
    plan = _plan_of(source, config)
    if isinstance(plan, Folder | Archive):
        raise ConfigError(
            f"model '{source.name}' has {PATH_PARAMETER} '{plan.path}', but runs in a thread of the server, which has "
            "one environment for all: remove the parameter, or run the model in a worker process "
            "(parameter ISOLATION: process)"
        )
    if not isinstance(plan, Virtual):
        return
    from importlib import metadata  # takes 40 ms, needed only with requirements

    def version_of(name: str) -> str | None:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    missing = unmet(read_requirements(plan.text), version_of)
    if missing:
        lines = "; ".join(
            f"line {row.requirement.line}: {row.requirement.text} ({f'{row.installed} is' if row.installed else 'not'} "
            "installed)"
            for row in missing
        )
        raise ConfigError(
            f"model '{source.name}' runs in the server's environment, which does not meet its {plan.file}: {lines}. "
            f"Install them with: {sys.executable} -m pip install -r {plan.file}; or run the model in a worker process "
            "(parameter ISOLATION: process), which gets a separate environment"
        )


def _plan_of(source: Source, config: ModelConfig) -> Plan:
    parameters = {key: value.string_value for key, value in config.parameters.items()}
    path = environment_path(parameters, source.model_dir)
    if path is not None and not path.exists():
        raise ConfigError(
            f"{PATH_PARAMETER} of model '{source.name}' names '{path}', which is not there: give a directory or a tar "
            f"archive; {MODEL_DIRECTORY} stands for the model's folder"
        )
    requirements = read_requirements_of(source.model_dir, f"model '{source.name}'")
    return plan_environment(parameters, source.model_dir, requirements, folder=path is not None and path.is_dir())


def _checked(python: Path, origin: Path, owner: str) -> Path:
    """Return ``python`` if it starts and can run this engine's code.

    Raises InternalError otherwise.
    """
    run([str(python), "-c", _TRIAL], f"run the interpreter of {PATH_PARAMETER} '{origin}' of {owner}")
    return python


def _hash_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
