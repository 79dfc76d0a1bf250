"""Trial load of a model's files in a child process.

A file that crashes its library then does not end the server. A child process opens the model as its backend would. If
it crashes or hangs, the load is refused; if it raises an error or succeeds, this process opens the model and reports
its own result. Files that passed are remembered by their digest.

Invariant: a child ends within its time limit, even if the server ends first.
"""

from __future__ import annotations

import base64
import json
import logging
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from hashlib import blake2b
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from remora._version import __version__
from remora.backends import Source
from remora.backends.registry import backend_in, find_backend
from remora.errors import InternalError
from remora.model_files import digest_files
from remora.proto.model_config_pb2 import ModelConfig

_log = logging.getLogger("remora.models")

UNTRIED = frozenset({"onnxruntime", "python", "ensemble"})
"""Backends without a trial: ONNX Runtime refuses damaged graphs with an error, and start time counts most there; Python
models have worker processes; ensembles have no files.
"""

_LIBRARIES = (
    "xgboost", "xgboost-cpu", "lightgbm", "treelite", "torch", "tensorrt", "openvino", "tensorflow", "tensorflow-cpu"
)  # fmt: skip
_LIMIT_S = 600.0
_PASSED, _RAISED = 4, 3
"""Exit status of a child whose backend opened the model, and of one whose backend raised an error.

They differ from 0, because a library may call exit.
"""
_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from remora.models.trial_load import main; main()"
_STDERR_LINES = 5


class Trials:
    """Trial loads and the memory of files that passed. Thread-safe.

    Args:
        folder: holds an empty file for each digest that passed.
        backend_directory: folder of custom backends, or "".
        limit_s: how long a trial may take.
    """

    def __init__(self, folder: Path, backend_directory: str = "", limit_s: float = _LIMIT_S) -> None:
        self._folder = folder
        self._backend_directory = backend_directory
        self._limit_s = limit_s

    def check(self, backend: str, source: Source, config: ModelConfig) -> None:
        """Load a version once in a child process, unless the same files have passed before.

        Raises InternalError if the child crashes or exceeds its time.
        """
        if backend in UNTRIED:
            return
        passed = self._folder / self._key(backend, source, config)
        if passed.exists():
            return
        status, stderr = self._run(source, config)
        if status == _PASSED:
            with suppress(OSError):  # a read-only file system: the next load is tried again
                self._folder.mkdir(parents=True, exist_ok=True)
                passed.touch()
        elif status != _RAISED:
            _log.warning("trial load of '%s' version %d: %s", source.name, source.version, stderr or "no output")
            raise InternalError(
                f"the files of model '{source.name}' version {source.version} at '{source.path}' {_reason(status)} in "
                f"a trial load by backend '{backend}': a file is damaged, or made for another version of its library; "
                "export the model again, or set --trial-load=false to load it without a trial"
            )

    def _key(self, backend: str, source: Source, config: ModelConfig) -> str:
        """Return the digest of everything that decides whether a load crashes."""
        digest = blake2b(config.SerializeToString(deterministic=True), digest_size=24)
        for text in (backend, __version__, sys.version, *sorted(map(str, source.settings.items())), *_versions()):
            digest.update(text.encode() + b"\0")
        digest_files(digest.update, source.path)
        return digest.hexdigest()

    def _run(self, source: Source, config: ModelConfig) -> tuple[int, str]:
        """Return the child's exit status, negative for a signal, and the first lines of its standard error."""
        trial = Trial(
            source.name,
            source.version,
            str(source.model_dir),
            str(source.path),
            str(source.repository),
            dict(source.settings),
            source.cpus,
            base64.b64encode(config.SerializeToString()).decode(),
            self._backend_directory,
            self._limit_s,
        )
        command = [sys.executable, "-X", "faulthandler", "-c", _BOOT, json.dumps(sys.path)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
        ) as child:
            try:
                _, stderr = child.communicate(json.dumps(trial).encode(), self._limit_s)
            except subprocess.TimeoutExpired:
                child.kill()
                return -signal.SIGALRM, ""
        lines = stderr.decode("utf-8", "replace").strip().splitlines()
        return child.returncode, " | ".join(lines[:_STDERR_LINES])


class Trial(NamedTuple):
    """Message to the child: a `Source`, its configuration, the folder of custom backends and the time limit."""

    name: str
    version: int
    model_dir: str
    path: str
    repository: str
    settings: Mapping[str, str]
    cpus: int
    config: str
    backend_directory: str
    limit_s: float


def main() -> None:
    """Open the model of the trial on standard input and exit."""
    trial = Trial(*json.load(sys.stdin))
    signal.setitimer(signal.ITIMER_REAL, trial.limit_s)  # its default action ends the process
    config = ModelConfig.FromString(base64.b64decode(trial.config))
    places = (Path(trial.model_dir), Path(trial.path), Path(trial.repository))
    try:
        found = backend_in(Path(trial.backend_directory), config.backend) if trial.backend_directory else None
        backend = found or find_backend(config.backend)
        backend.open(Source(trial.name, trial.version, *places, trial.settings, trial.cpus), config).close()
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(_RAISED)
    sys.exit(_PASSED)


def _versions() -> list[str]:
    found = []
    for name in _LIBRARIES:
        with suppress(metadata.PackageNotFoundError):
            found.append(f"{name} {metadata.version(name)}")
    return found


def _reason(status: int) -> str:
    """Return what happened to a child, as a predicate."""
    if status == -signal.SIGALRM:
        return "did not load within the time limit"
    if status < 0:
        with suppress(ValueError):
            return f"ended the process with {signal.Signals(-status).name}"
    return f"ended the process with exit status {status}"
