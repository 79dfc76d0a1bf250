"""Fixtures of the backend tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from python_models import Models


@pytest.fixture
def models(tmp_path: Path) -> Any:
    opened = Models(tmp_path)
    yield opened
    for each in reversed(opened.open_ones):
        each.close()
