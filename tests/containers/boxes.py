"""Runs of an image without an engine, by bubblewrap: a read-only root, a writable /tmp, one user.

As root setpriv changes the user; a plain user gets the number in a new namespace.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

KEPT = Path(__file__).resolve().parents[2] / ".images"
# The number of the unprivileged user that every system names: buildah looks the name up.
PLAIN_USER = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")


class Image(NamedTuple):
    """What can be run: its configuration (OCI), the arguments that make its root, and as whom bubblewrap is started."""

    name: str
    config: dict[str, Any]
    root: Path
    binds: tuple[str, ...] = ()
    started_by: tuple[str, ...] = ()

    @contextmanager
    def running(
        self, arguments: list[str], *, uid: int, mounts: dict[str, Path], environment: dict[str, str]
    ) -> Iterator[Container]:
        """The image's entrypoint with these arguments instead of CMD."""
        if not self.binds:
            for target in mounts:  # an engine makes mount points as well
                (self.root / target.lstrip("/")).mkdir(parents=True, exist_ok=True)
        told = dict(pair.split("=", 1) for pair in self.config["Env"]) | environment
        box = ["bwrap", "--die-with-parent", "--unshare-pid", "--as-pid-1", "--unshare-ipc", "--clearenv"]
        box += self.binds or ("--ro-bind", str(self.root), "/")
        box += ["--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--tmpfs", "/tmp"]
        for target, source in mounts.items():
            box += bound(source, target) if self.binds else ["--ro-bind", str(source), target]
        if self.binds:  # bubblewrap made this root: read-only now that all binds are in place
            box += ["--remount-ro", "/"]
        for name, value in told.items():
            box += ["--setenv", name, value]
        box += ["--chdir", self.config.get("WorkingDir", "/")]
        if self.started_by or os.geteuid():
            become = []
            box += ["--unshare-user", "--uid", str(uid), "--gid", str(uid)]
        else:
            become = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--no-new-privs"]
            become += ["--bounding-set=-all"] if uid else []
        command = [*self.started_by, *box, *become, *self.config["Entrypoint"], *arguments]
        KEPT.mkdir(exist_ok=True)
        log = KEPT / f"{self.name}-{uid}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield Container(process, log, time.monotonic())
        finally:
            process.kill()
            process.wait()


def bound(source: str | Path, target: str) -> list[str]:
    """Return bubblewrap's arguments for a folder in a root that it makes, with its parents open to every user."""
    way = [str(parent) for parent in reversed(Path(target).parents) if str(parent) != "/"]
    return [word for parent in way for word in ("--perms", "0755", "--dir", parent)] + [
        "--ro-bind",
        str(source),
        target,
    ]


class Container(NamedTuple):
    """A running image: bubblewrap's process, what it printed, and when it was started."""

    process: subprocess.Popen[bytes]
    log: Path
    started_s: float

    def answer(self, url: str, body: bytes | None = None, content_type: str = "application/json") -> bytes:
        """What a URL answers, once something listens there. Fails the test with the log when nothing does."""
        request = urllib.request.Request(url, body, {"Content-Type": content_type} if body else {})
        for _ in range(4800):
            try:
                with urllib.request.urlopen(request, timeout=60) as response:
                    return bytes(response.read())
            except urllib.error.HTTPError as error:
                # Triton's readiness is a 400 until it is there.
                if error.code != (400 if url.endswith("/v2/health/ready") else 503):
                    pytest.fail(f"{url}: {error.code} {error.read()!r}\n{self.said()}")
            except OSError:
                pass
            try:
                self.process.wait(0.025)
            except subprocess.TimeoutExpired:
                continue
            break
        pytest.fail(f"{url} never answered (exit status {self.process.poll()}):\n{self.said()}")

    def stop(self) -> int:
        """SIGTERM to the image's first process; its exit status, within the 30 s that the platforms leave."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGTERM)
        return self.process.wait(30)

    def said(self) -> str:
        return self.log.read_text(errors="replace")
