"""Fixtures of the worker tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from process_models import SHARED, Models


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
