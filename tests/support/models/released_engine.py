"""Engines with models in threads, for tests of releases and shadows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from remora.engine import Engine


@contextmanager
def released_engine(repository: Path, **settings: Any) -> Iterator[Engine]:
    """Return an engine that runs the repository's Python models in threads of this process, and copies at any time."""
    settings.setdefault("shadow_processors", 1.0)
    with Engine(
        options=None, model_repository=(repository,), backend_config=("python,isolation=thread",), **settings
    ) as engine:
        yield engine
