"""A process at its limit of threads."""

from __future__ import annotations

import threading

import pytest


def refuse_threads(monkeypatch: pytest.MonkeyPatch, name: str = "") -> None:
    """Let no thread start whose name begins with ``name``; any thread without one."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith(name):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
