"""Fixtures of the model tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from remora.models import loader as loading
from support.engine.fakes import FakeBackend
from support.engine.lifecycle_bench import Bench
from support.models.calling_models import WAIT_S, Repository


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """An empty repository whose models the fake backend serves."""
    backend = FakeBackend()
    monkeypatch.setattr(loading, "find_backend", backend.find)
    return Bench(tmp_path, backend)


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    made = Repository(tmp_path)
    yield made
    if made.engine is not None:
        assert made.engine.stop(WAIT_S)
