"""Selection and creation of the Python environment of a model's worker [Y14].

There are three kinds: the server's own interpreter; a virtual environment with the packages that the
``requirements.txt`` beside the model names and the server lacks; and the environment, a directory or an archive, at
EXECUTION_ENV_PATH. Created environments are stored in a cache directory under the hash of their sources, once for all
processes of the machine.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from remora.backends import Source
from remora.backends.python.environment_cache import EnvironmentCache
from remora.backends.python.failures import REQUIREMENTS
from remora.backends.python.requirements import asks_for_anything, read_requirements, unmet
from remora.backends.worker.process import server_paths
from remora.errors import ConfigError, InternalError
from remora.proto.model_config_pb2 import ModelConfig
from remora.storage.archive import unpack

_log = logging.getLogger("remora.models")

PATH_PARAMETER = "EXECUTION_ENV_PATH"
CACHE_SETTING = "environment-cache-directory"
LIMIT_SETTING = "environment-cache-byte-size"
MODEL_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"

_DEFAULT_LIMIT_BYTES = 20 << 30
_REQUIREMENTS_AT_MOST_BYTES = 1 << 20
_INSTALL_AT_MOST_S = 1800
_PIP_WITH_PYTHON = (22, 3)
"""First version of pip that installs into another environment."""
_FOUND = re.compile(r"(?:Collecting|Processing) (?:\S*/)?([A-Za-z0-9._-]+)")
"""Line of pip with a package's name, or with the path of its wheel."""
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
    return model_dir / written.replace(MODEL_DIRECTORY, str(model_dir)) if written else None


def interpreter_for(source: Source, config: ModelConfig) -> Path:
    """Return the interpreter for a model's workers, creating its environment if necessary.

    This may take minutes. Any thread of any process may call it, because environments are created under a lock.

    Raises:
        ConfigError: EXECUTION_ENV_PATH or the requirements are invalid.
        InternalError: the environment cannot be created; the text holds the installer's last lines.
    """
    plan = _plan_of(source, config)
    match plan:
        case Own():
            return Path(sys.executable)
        case Folder(path):
            return _checked(_interpreter_in(path, source.name), path, source.name)
        case Archive(path):
            made = _cache_of(source).folder_for(
                _hash_of_file(path), lambda folder: unpack(path, folder, what="environment archive")
            )
            return _checked(_interpreter_in(made, source.name), path, source.name)
        case Virtual(file, text):
            key = _hash_of(text.encode(), sys.version.encode(), sys.executable.encode(), str(server_paths()).encode())
            cache = _cache_of(source)
            if not cache.has(key) and is_met(file):
                return Path(sys.executable)
            made = cache.folder_for(key, lambda folder: _install(file, folder, source.name))
            return _interpreter_in(made, source.name)


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
    return plan_environment(
        parameters, source.model_dir, _requirements_of(source), folder=path is not None and path.is_dir()
    )


def _requirements_of(source: Source) -> str | None:
    file = source.model_dir / REQUIREMENTS
    try:
        if file.stat().st_size > _REQUIREMENTS_AT_MOST_BYTES:
            raise ConfigError(
                f"{REQUIREMENTS} of model '{source.name}' is longer than {_REQUIREMENTS_AT_MOST_BYTES} bytes: is it a "
                "requirements file?"
            )
        return file.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"cannot read {REQUIREMENTS} of model '{source.name}': {reason}") from error


# -- making them ----------------------------------------------------------------------------------------------------


def _cache_of(source: Source) -> EnvironmentCache:
    folder = source.settings.get(CACHE_SETTING, "")
    limit = source.settings.get(LIMIT_SETTING, "")
    if limit and not limit.isdecimal():
        raise ConfigError(f"--backend-config=python,{LIMIT_SETTING}={limit}: expected a number of bytes")
    return EnvironmentCache(
        Path(folder) if folder else Path.home() / ".cache" / "remora" / "environments",
        int(limit) if limit else _DEFAULT_LIMIT_BYTES,
    )


def is_met(requirements: Path) -> bool:
    """Return True if nothing must be installed, as in an image with all packages.

    pip decides without an index, because it handles extras, markers, versions and transitive requirements.
    """
    words = ["--dry-run", "--no-index", "--no-input", "--disable-pip-version-check", "--quiet", "--report", "-"]
    try:
        report = _run(
            [sys.executable, "-m", "pip", "install", *words, "--requirement", str(requirements)], "look for packages"
        )
        return not json.loads(report)["install"]
    except (InternalError, ValueError, KeyError):  # pip is old or absent, or a package is missing
        return False


def _install(requirements: Path, folder: Path, model: str) -> None:
    """Create a virtual environment with the requirements.

    It also finds the server's packages.
    """
    _log.info("model '%s': making an environment for %s", model, requirements)
    make, install = install_commands(folder, requirements, _pip_version())
    _run(make, f"make a virtual environment for model '{model}'")
    _install_packages(install, requirements, model)
    # Written after the installation, because pip would otherwise count or change the server's packages. They come last
    # on the path, so that the packages of the requirements take precedence.
    for site in folder.glob("lib/python*/site-packages"):
        (site / "remora_server.pth").write_text("\n".join(server_paths()) + "\n", encoding="utf-8")


def install_commands(folder: Path, requirements: Path, pip: tuple[int, ...]) -> tuple[list[str], list[str]]:
    """Return the commands that create a virtual environment and install the requirements there.

    The server's pip installs into the environment as well, if its version ``pip`` can: setting up another one takes
    seconds.
    """
    python, words = str(folder / "bin" / "python"), ["--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    install = ["install", *words, "--requirement", str(requirements)]
    make = [sys.executable, "-m", "venv", str(folder)]
    if pip < _PIP_WITH_PYTHON:
        return make, [python, "-m", "pip", *install]
    return [*make, "--without-pip"], [sys.executable, "-m", "pip", "--python", python, *install]


def _pip_version() -> tuple[int, ...]:
    """Return the first two numbers of the version of the server's pip; none if it has no pip."""
    with suppress(PackageNotFoundError):
        return tuple(map(int, re.findall(r"\d+", version("pip"))[:2]))
    return ()


def _install_packages(command: Iterable[str], requirements: Path, model: str) -> None:
    """Run pip and log the name of each package that it finds, because this may take minutes.

    Raises InternalError if it fails.
    """
    what = f"install {requirements} of model '{model}'"
    last = deque[str](maxlen=6)
    with tempfile.NamedTemporaryFile("r", encoding="utf-8", errors="replace") as output:
        with open(output.name, "w") as written:  # a second offset, for the child alone
            try:
                pip = subprocess.Popen(list(command), stdout=written, stderr=subprocess.STDOUT)
            except OSError as error:
                raise InternalError(f"cannot {what}: {error}") from error
        for _ in range(_INSTALL_AT_MOST_S):
            with suppress(subprocess.TimeoutExpired):
                pip.wait(1)
            for line in output:
                last.append(line.strip())
                if found := _FOUND.match(line):
                    _log.info("model '%s': installing %s", model, found[1])
            if pip.returncode is not None:
                break
        else:
            pip.kill()
            pip.wait()
            raise InternalError(f"cannot {what}: it took more than {_INSTALL_AT_MOST_S} s")
    if pip.returncode:
        raise InternalError(f"cannot {what}: {' | '.join(last) or f'exit status {pip.returncode}'}")


def _run(command: Iterable[str], what: str) -> str:
    """Run a command and return its output. Raises InternalError if the command fails."""
    try:
        done = subprocess.run(
            list(command), capture_output=True, text=True, errors="replace", timeout=_INSTALL_AT_MOST_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise InternalError(f"cannot {what}: it took more than {_INSTALL_AT_MOST_S} s") from None
    except OSError as error:
        raise InternalError(f"cannot {what}: {error}") from error
    if done.returncode:
        output = (done.stderr.strip() or done.stdout.strip()).splitlines()[-6:]
        raise InternalError(f"cannot {what}: {' | '.join(output) or f'exit status {done.returncode}'}")
    return done.stdout


def _interpreter_in(folder: Path, model: str) -> Path:
    for name in ("python3", "python"):
        python = folder / "bin" / name
        if python.is_file() and os.access(python, os.X_OK):
            return python
    raise ConfigError(
        f"the environment of model '{model}' has no interpreter at '{folder}/bin/python3': pack an environment with "
        "its interpreter, for example with conda-pack"
    )


def _checked(python: Path, origin: Path, model: str) -> Path:
    """Return ``python`` if it starts and can run this engine's code.

    Raises InternalError otherwise.
    """
    _run([str(python), "-c", _TRIAL], f"run the interpreter of {PATH_PARAMETER} '{origin}' of model '{model}'")
    return python


def _hash_of(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _hash_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
