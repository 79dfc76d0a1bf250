"""Where checks find the server: its address, its process if we started it, and how its start was seen."""

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

from remora_adapters.emulate import EmulateSettings, Platform, Skipped
from remora_adapters.emulate.asking import Address, HttpReply, ask
from remora_adapters.emulate.process import Process, free_port

_LOOK_S = 0.02


class Seen(NamedTuple):
    """One probe during the start: seconds since the start when it was sent, and its answer."""

    at_s: float
    answer: HttpReply


class Stage:
    """A server under the eyes of a platform. Used in a ``with``: a process that we started ends with it.

    ``address`` is where requests go; ``launch`` how the process was started; ``boot`` holds the probes of its start,
    and ``ready`` says whether one was answered well.
    ``mounts`` is the folder that was given to `launch`. ``facts`` is for checks that tell later ones what they found.
    ``environ`` is the process's whole environment, ``callee`` what the platform plays for it to call.

    Raises OSError when the command cannot be started, ValueError for a URL where the platform needs a command.
    """

    def __init__(self, platform: Platform, settings: EmulateSettings) -> None:
        self.platform = platform
        self.settings = settings
        self.boot: list[Seen] = []
        self.ready = False
        self.facts: dict[str, object] = {}
        self.callee: object = None
        self._held = ExitStack()
        self._folder = self._held.enter_context(tempfile.TemporaryDirectory(prefix="remora-emulate-"))
        self._process: Process | None = None
        self._model_at_first = _fingerprint(settings.model)
        try:
            self._start()
        except BaseException:
            self._held.close()
            raise

    def _start(self) -> None:
        folder, settings = Path(self._folder), self.settings
        self.mounts = folder / "mounts"
        self.mounts.mkdir()
        self.launch = self.platform.launch(settings, free_port(), self.mounts)
        self.environ = {**os.environ, **self.launch.environ, **settings.environ}
        if self.platform.callee is not None:
            self.callee = self._held.enter_context(self.platform.callee(self.launch))
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
        self._held.close()

    @property
    def process(self) -> Process:
        """The process that we started. Raises Skipped when there is none."""
        if self._process is None:
            raise Skipped("needs a command to start instead of a URL")
        return self._process

    @property
    def body(self) -> bytes:
        """The inference request that was given. Raises Skipped when none was."""
        if not self.settings.body:
            raise Skipped("needs an inference request: --body FILE")
        return self.settings.body

    def limit_s(self, seconds: float) -> float:
        """How long may take here what the platform gives so many seconds."""
        return seconds * self.settings.patience

    @property
    def probe_s(self) -> float:
        """How long the answer to a probe may take."""
        return self.limit_s(self.platform.probe.timeout_s)

    @property
    def grace_s(self) -> float:
        """How long its end may take after SIGTERM."""
        return self.limit_s(self.platform.grace_s)

    def wait_until_ready(self) -> None:
        """Probe as the platform does until the server is ready, its time is over, or its process ends."""
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
            if probe.passes(answer.status):
                self.ready = True
                return
            time.sleep(_LOOK_S)

    def _find_port(self) -> None:
        """Follow a server that listens elsewhere than it was told to: one check fails for that, and not all."""
        if self.callee is not None:  # which is what is probed
            return
        ports = [row.port for row in self.process.listening()]
        if ports:  # it may open others first
            self.address = Address("127.0.0.1", self.launch.port if self.launch.port in ports else ports[0])

    def model_changed(self) -> bool:
        """Whether anything under the model's folder was written since the start."""
        return _fingerprint(self.settings.model) != self._model_at_first

    def ask(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> HttpReply:
        """One request on a connection of its own."""
        return ask(self.address, method, path, body=body, headers=headers, timeout_s=timeout_s)


def _fingerprint(folder: Path | None) -> str:
    """Names, sizes and times of all files under a folder."""
    rows = sorted(
        (str(path), path.stat().st_size, path.stat().st_mtime_ns)
        for path in (folder.rglob("*") if folder is not None else ())
        if path.is_file()
    )
    return hashlib.sha256(repr(rows).encode()).hexdigest()
