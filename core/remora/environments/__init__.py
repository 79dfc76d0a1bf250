"""Virtual environments with the packages of requirements files.

Created environments are stored in a cache directory under the hash of their sources, once for all processes of the
machine. An environment also finds the server's packages; those of the requirements take precedence.
"""

from __future__ import annotations

import hashlib
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

from remora.environments.cache import EnvironmentCache
from remora.environments.installed import files_of, is_met
from remora.errors import ConfigError, InternalError
from remora.model_files import REQUIREMENTS
from remora.system.environment import server_paths

_log = logging.getLogger("remora.models")

CACHE_SETTING = "environment-cache-directory"
LIMIT_SETTING = "environment-cache-byte-size"

_DEFAULT_LIMIT_BYTES = 20 << 30
_REQUIREMENTS_AT_MOST_BYTES = 1 << 20
_INSTALL_AT_MOST_S = 1800
_PIP_WITH_PYTHON = (22, 3)
"""First version of pip that installs into another environment."""
_FOUND = re.compile(r"(?:Collecting|Processing) (?:\S*/)?([A-Za-z0-9._-]+)")
"""Line of pip with a package's name, or with the path of its wheel."""
_PLAN = re.compile(r"Installing collected packages: (.+)")
"""Line of pip with the names of all packages that it is about to install."""


def read_requirements_of(folder: Path, owner: str) -> str | None:
    """Return the text of a folder's requirements file, or None if there is none.

    Raises ConfigError for a file that cannot be read; ``owner``, such as "model 'm'", names it.
    """
    file = folder / REQUIREMENTS
    try:
        if file.stat().st_size > _REQUIREMENTS_AT_MOST_BYTES:
            raise ConfigError(
                f"{REQUIREMENTS} of {owner} is longer than {_REQUIREMENTS_AT_MOST_BYTES} bytes: is it a requirements "
                "file?"
            )
        return file.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"cannot read {REQUIREMENTS} of {owner}: {reason}") from error


def interpreter_with(requirements: Path, owner: str, settings: Mapping[str, str]) -> Path:
    """Return an interpreter that has the packages of a requirements file.

    It is the server's if that has all of them, else that of an environment, which is created if necessary. This may
    take minutes; the log names each package. Any thread of any process may call it, because environments are created
    under a lock.

    Args:
        requirements: the file. Its relative paths start at its folder, also if the file is a link.
        owner: what needs the packages, for logs and errors, such as "model 'm'".
        settings: settings of the python backend, with the cache's directory and size.

    Raises:
        ConfigError: the settings are invalid.
        InternalError: the environment cannot be created; the text holds the installer's last lines.
    """
    file = requirements.resolve()
    parts = [text.encode() for text in files_of(file).values()]
    key = hash_of(*parts, sys.version.encode(), sys.executable.encode(), str(server_paths()).encode())
    cache = cache_of(settings)
    if not cache.has(key) and is_met(file):
        return Path(sys.executable)
    return interpreter_in(cache.folder_for(key, lambda folder: _install(file, folder, owner)), owner)


def cache_of(settings: Mapping[str, str]) -> EnvironmentCache:
    """Return the cache of environments by the settings of the python backend.

    Raises ConfigError.
    """
    folder = settings.get(CACHE_SETTING, "")
    limit = settings.get(LIMIT_SETTING, "")
    if limit and not limit.isdecimal():
        raise ConfigError(f"--backend-config=python,{LIMIT_SETTING}={limit}: expected a number of bytes")
    return EnvironmentCache(
        Path(folder).absolute() if folder else Path.home() / ".cache" / "remora" / "environments",
        int(limit) if limit else _DEFAULT_LIMIT_BYTES,
    )


def _install(requirements: Path, folder: Path, owner: str) -> None:
    """Create a virtual environment with the requirements.

    It also finds the server's packages.
    """
    _log.info("%s: making an environment for %s", owner, requirements)
    make, install = install_commands(folder, requirements, _pip_version())
    run(make, f"make a virtual environment for {owner}")
    _install_packages(install, requirements, _Progress(owner, folder))
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


class _Progress:
    """Log of the packages that pip finds, and then of those that it has installed.

    It is there because an installation may take minutes.
    """

    def __init__(self, owner: str, folder: Path) -> None:
        self.owner = owner
        self._folder = folder
        self._before = self._count()
        self._total = 0
        self._logged = 0

    def read(self, line: str) -> None:
        """Log what a line of pip's output says."""
        if found := _FOUND.match(line):
            _log.info("%s: installing %s", self.owner, found[1])
        elif plan := _PLAN.match(line):
            self._total = plan[1].count(",") + 1

    def update(self) -> None:
        """Log the number of installed packages of pip's plan, if it has grown."""
        installed = min(self._count() - self._before, self._total)
        if installed > self._logged:
            self._logged = installed
            _log.info("%s: installed %d of %d packages", self.owner, installed, self._total)

    def _count(self) -> int:
        return sum(1 for _ in self._folder.glob("lib/python*/site-packages/*.dist-info"))


def _install_packages(command: Iterable[str], requirements: Path, progress: _Progress) -> None:
    """Run pip with a log of its progress. Raises InternalError if it fails."""
    what = f"install {requirements} of {progress.owner}"
    last = deque[str](maxlen=6)
    with tempfile.NamedTemporaryFile("r", encoding="utf-8", errors="replace") as output:
        with open(output.name, "w") as written:  # a second offset, for the child alone
            try:
                pip = subprocess.Popen(list(command), stdout=written, stderr=subprocess.STDOUT, cwd=requirements.parent)
            except OSError as error:
                raise InternalError(f"cannot {what}: {error}") from error
        for _ in range(_INSTALL_AT_MOST_S):
            with suppress(subprocess.TimeoutExpired):
                pip.wait(1)
            for line in output:
                last.append(line.strip())
                progress.read(line)
            progress.update()
            if pip.returncode is not None:
                break
        else:
            pip.kill()
            pip.wait()
            raise InternalError(f"cannot {what}: it took more than {_INSTALL_AT_MOST_S} s")
    if pip.returncode:
        raise InternalError(f"cannot {what}: {' | '.join(last) or f'exit status {pip.returncode}'}")


def run(command: Iterable[str], what: str) -> str:
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


def interpreter_in(folder: Path, owner: str) -> Path:
    """Return the interpreter of an environment. Raises ConfigError if it has none."""
    for name in ("python3", "python"):
        python = folder / "bin" / name
        if python.is_file() and os.access(python, os.X_OK):
            return python
    raise ConfigError(
        f"the environment of {owner} has no interpreter at '{folder}/bin/python3': pack an environment with "
        "its interpreter, for example with conda-pack"
    )


def hash_of(*parts: bytes) -> str:
    """Return a digest of byte strings and their lengths."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
