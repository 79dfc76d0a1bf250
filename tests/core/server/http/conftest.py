"""Fixtures of the HTTP tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from remora.engine import Engine
from support.wire.http1_bench import Bench, benches


@pytest.fixture
def bench() -> Iterator[Bench]:
    """A service that answers at once."""
    with benches() as made:
        yield made


@pytest.fixture
def waiting() -> Iterator[Bench]:
    """A service that answers on command."""
    with benches(wait=True) as made:
        yield made


@pytest.fixture
def usual() -> Iterator[int]:
    """Threshold of the oldest generation, which is restored. No collection runs by chance."""
    thresholds = gc.get_threshold()
    gc.disable()
    yield thresholds[2]
    gc.enable()
    gc.set_threshold(*thresholds)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One model for each thing an example request must get right, and two whose names mean harm."""
    # Imported here, because the module skips its importer if onnx or httpx is not installed.
    from support.wire.page_requests import (
        FP16,
        FP32,
        HOSTILE,
        HOSTILE_FOLDER,
        INT64,
        QUOTING_FOLDER,
        STRING,
        write_onnx,
    )

    folder = tmp_path_factory.mktemp("models")
    write_onnx(folder / "rows", FP32, ["n", 4], versions=("1", "2"))
    write_onnx(folder / "fixed", INT64, [2, 2])
    write_onnx(folder / "half", FP16, ["n", 3])
    write_onnx(folder / "words", STRING, ["n"])
    write_onnx(folder / "image", FP32, [3, 64, 64])
    write_onnx(folder / HOSTILE_FOLDER, FP32, [1])
    write_onnx(folder / QUOTING_FOLDER, FP32, [1], name=HOSTILE)
    (folder / "rows" / "config.pbtxt").write_text("max_batch_size: 8 version_policy { all {} } dynamic_batching {}")
    return folder


@pytest.fixture(scope="module")
def engine(repository: Path) -> Iterator[Engine]:
    with Engine(repository) as running:
        yield running
