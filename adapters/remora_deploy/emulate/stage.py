"""Stage that gives checks the server's address, process and startup probes."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import NamedTuple
from urllib.parse import urlsplit

from remora_deploy.emulate import EmulateSettings, Platform, Skipped
from remora_deploy.emulate.asking import Address, HttpReply, ask
from remora_deploy.emulate.process import Process, free_port

_LOOK_S = 0.02


class Seen(NamedTuple):
    """Startup probe, sent ``at_s`` seconds after the start, and its answer."""

    at_s: float
    answer: HttpReply


class Stage:
    """Server under test, used as a context manager that ends a started process.

    ``address`` is the target of requests, ``launch`` describes the started process, ``boot`` holds the startup probes,
    and ``ready`` is True if one passed. ``mounts`` is the folder given to `launch`. ``facts`` passes findings to later
    checks. ``environ`` is the process's whole environment, ``callee`` the API that the process calls.

    Raises OSError if the command cannot be started, ValueError for a URL on a platform that needs a command.
    """

    def __init__(self, platform: Platform, settings: EmulateSettings) -> None:
        self.platform = platform
        self.settings = settings
        self.boot: list[Seen] = []
        self.facts: dict[str, object] = {}
        self.callee: object = None
        self._resources = ExitStack()
        folder = self._resources.enter_context(tempfile.TemporaryDirectory(prefix="remora-emulate-"))
        self._process: Process | None = None
        self._model_at_first = _fingerprint(settings.model)
        try:
            self._start(Path(folder))
        except BaseException:
            self._resources.close()
            raise

    def _start(self, folder: Path) -> None:
        settings = self.settings
        self.mounts = folder / "mounts"
        self.mounts.mkdir()
        self.launch = self.platform.launch(settings, free_port(), self.mounts)
        self.environ = {**os.environ, **self.launch.environ, **settings.environ}
        if self.platform.callee is not None:
            self.callee = self._resources.enter_context(self.platform.callee(self.launch))
        if settings.command:
            self._process = Process((*settings.command, *self.launch.arguments), self.environ, folder / "log.txt")
            self.address = Address("127.0.0.1", self.launch.port)
        else:
            where = urlsplit(settings.url)
            self.address = Address(where.hostname or "127.0.0.1", where.port or 80)

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._process is not None:
            self._process.kill()
        self._resources.close()

    @property
    def ready(self) -> bool:
        """True if the last startup probe passed."""
        return bool(self.boot) and self.platform.probe.passes(self.boot[-1].answer.status)

    @property
    def process(self) -> Process:
        """The started process. Raises Skipped for a server at a URL."""
        if self._process is None:
            raise Skipped("needs a command to start instead of a URL")
        return self._process

    @property
    def body(self) -> bytes:
        """The user's inference request, or that of the only model. Raises Skipped without one."""
        found = self.settings.body or self.platform.example(self)
        if not found:
            raise Skipped("needs an inference request: --body FILE")
        return found

    def limit_s(self, seconds: float) -> float:
        """Return a time limit of the platform, scaled for this machine."""
        return seconds * self.settings.patience

    @property
    def probe_s(self) -> float:
        """Timeout of a probe."""
        return self.limit_s(self.platform.probe.timeout_s)

    @property
    def grace_s(self) -> float:
        """Limit of the shutdown after SIGTERM."""
        return self.limit_s(self.platform.grace_s)

    def wait_until_ready(self) -> None:
        """Probe as the platform does until the server is ready, times out or exits."""
        probe = self.platform.probe
        within_s = self.settings.startup_s or self.limit_s(probe.within_s)
        begin = time.monotonic()
        while (at_s := time.monotonic() - begin) < within_s:
            if self._process is not None:
                if not self._process.running:
                    return
                self._find_port()
            answer = self.ask("GET", probe.path, timeout_s=self.probe_s)
            self.boot.append(Seen(at_s, answer))
            if self.ready:
                return
            time.sleep(_LOOK_S)

    def _find_port(self) -> None:
        """Find the port of a server that ignores the given one, so that only one check fails."""
        if self.callee is not None:  # the probe then goes to the callee
            return
        ports = [row.port for row in self.process.listening()]
        if ports:  # other ports may open first
            self.address = Address("127.0.0.1", self.launch.port if self.launch.port in ports else ports[0])

    def model_changed(self) -> bool:
        """Return True if a file under the model's folder changed since the start."""
        return _fingerprint(self.settings.model) != self._model_at_first

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> HttpReply:
        """Send one request on a new connection."""
        return ask(self.address, method, path, body=body, headers=headers, timeout_s=timeout_s)


def _fingerprint(folder: Path | None) -> str:
    """Return a digest of the names, sizes and times of all files under a folder."""
    rows = sorted(
        (str(path), path.stat().st_size, path.stat().st_mtime_ns)
        for path in (folder.rglob("*") if folder is not None else ())
        if path.is_file()
    )
    return hashlib.sha256(repr(rows).encode()).hexdigest()
