"""Runs a script of ATTACKS whose bystander is judged by what the server caused of its waits.

The scripts judge the longest wait of another client, which grows with every program that runs beside them. Here that
figure is the larger of two: the longest part of a wait that the server caused (`processor_time`), and the longest hold
of its interpreter (`hold_probe`). The waits themselves are printed.

    python tests/security/attack.py SCRIPT PATH_TO_REMORA [CASE ...]
"""

from __future__ import annotations

import importlib
import os
import runpy
import statistics
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.servers.bystanders import Bystander, Holds


def main() -> None:
    script = Path(sys.argv[1]).resolve()
    sys.argv = [str(script), *sys.argv[2:]]
    sys.path.insert(0, str(script.parent))
    with tempfile.TemporaryDirectory(prefix="holds-") as folder:
        holds = Holds(Path(folder))
        os.environ.update(holds.environment(dict(os.environ)))
        replace_bystander(importlib.import_module("common"), holds)
        runpy.run_path(str(script), run_name="__main__")


def replace_bystander(common: Any, holds: Holds) -> None:
    """Give the scripts' module a bystander that knows the process behind its port."""
    processes: dict[int, int] = {}
    start = common.Server.__init__

    def started(server: Any, *arguments: Any, **options: Any) -> None:
        start(server, *arguments, **options)
        processes[server.http] = server.pid

    def bystander(port: int, path: str = "/v2/models/echo/infer", body: bytes | None = None) -> JudgedBystander:
        return JudgedBystander(port, processes[port], holds, path, common.echo_body() if body is None else body)

    common.Server.__init__ = started
    common.Bystander = bystander


class JudgedBystander:
    """Bystander in a thread, with the properties that the scripts read."""

    def __init__(self, port: int, process: int, holds: Holds, path: str, body: bytes) -> None:
        self._client = Bystander(port, process, path=path, body=body or None, every_s=0.02, timeout_s=30.0)
        self._process, self._holds, self._before = process, holds, 0
        self._ended, self._first = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._client.ask_until, args=(self._ended.wait, self._first))

    def __enter__(self) -> JudgedBystander:
        self._before = len(self._holds.of(self._process))
        self._thread.start()
        self._first.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    @property
    def failed(self) -> list[str]:
        return self._client.failed

    @property
    def worst(self) -> float:
        """Longest time for which the server is to blame, in seconds."""
        return max((*self._client.caused_s, *self._holds.of(self._process)[self._before :]), default=0.0)

    def words(self) -> str:
        waits_s = self._client.waits_s
        median_s, worst_s = statistics.median(waits_s or [0]), max(waits_s, default=0)
        return (
            f"bystander: {len(waits_s)} requests, {len(self.failed)} failed, median {median_s * 1e3:.1f} ms, "
            f"worst {worst_s * 1e3:.0f} ms; the server caused {self.worst * 1e3:.0f} ms at most"
        )


if __name__ == "__main__":
    main()
