"""Tests that need an NVIDIA GPU: collected everywhere, run where there is one (`make test-gpu`)."""

from __future__ import annotations

import pytest

from remora.system.gpus import Gpus

GPUS = Gpus().visible()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is below this folder where there is no GPU, with the reason."""
    if not GPUS:
        reason = pytest.mark.skip(reason="no NVIDIA GPU is at hand")
        for item in items:
            if item.path.parent.name == "gpu":
                item.add_marker(reason)
