"""Fixtures of the worker tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from remora.backends.worker import connection, supervisor
from support.models.process_models import SHARED, Models

PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait longer for processes than the server does, because a loaded machine starts them slowly."""
    for module, name in (
        (supervisor, "START_WAIT_S"),
        (supervisor, "RESTART_WAIT_S"),
        (connection, "_EXIT_REASON_WAIT_S"),
    ):
        monkeypatch.setattr(module, name, PATIENCE_S)


@pytest.fixture(params=["memory", "pipe"] if SHARED else ["pipe"])
def models(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Models]:
    opened = Models(tmp_path, request.param)
    yield opened
    for each in reversed(opened.opened):
        each.close()


@pytest.fixture
def fast(tmp_path: Path) -> Iterator[Models]:
    """As ``models``, over the transport that the system prefers."""
    opened = Models(tmp_path, "auto")
    yield opened
    for each in reversed(opened.opened):
        each.close()
