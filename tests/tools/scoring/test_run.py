"""Memory of a run by the sizes of its rows; test_score.py has whole runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from remora.errors import InvalidArgumentError
from remora.system.clock import SystemClock
from remora_tools.scoring import CHUNK_BYTES, Chunk, Refusal
from remora_tools.scoring.columns import InputColumns
from remora_tools.scoring.run import ScoringRun, Work

FILE = bytes(1 << 20)


class FakeEngine:
    """Engine that records the rows of each batch and fails it."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def resolve(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(instance_count=1)

    def infer(self, name: str, inputs: Mapping[str, Any], outputs: Sequence[str]) -> None:
        self.rows.append(len(inputs["x"]))
        raise InvalidArgumentError("this engine has no models")


class Files:
    """Source of files of a megabyte; the first ones cannot be read."""

    columns = ("image",)

    def __init__(self, bad: int) -> None:
        self._bad = bad
        self.calls: list[tuple[int, int]] = []

    def chunks(self, first: int, wanted: Sequence[str], size: int, most_bytes: int = CHUNK_BYTES) -> Iterator[Chunk]:
        self.calls.append((size, most_bytes))
        bad = min(self._bad, size)
        count = min(size - bad, most_bytes // len(FILE))
        refused = [Refusal(number, "it is gone") for number in range(bad)]
        yield Chunk(np.arange(bad, bad + count), {"image": [FILE] * count}, refused, bad + count)

    def fraction(self) -> float:
        return 1.0

    def close(self) -> None:
        pass


@pytest.mark.parametrize("bad", [0, 1, 100], ids="{} bad files".format)
@pytest.mark.parametrize("batch", [1, 8, 256])
def test_chunks_and_batches_of_files_are_bounded_by_their_bytes(bad: int, batch: int) -> None:
    engine = FakeEngine()
    work = Work(
        "m", [InputColumns("x", "BYTES", (1,), ("image",))], (), (), "csv", True, 4096, most_bad=200, segment_ns=1
    )
    journal = SimpleNamespace(segments=(), next_row=0)
    source = Files(bad)
    run = ScoringRun(engine, work, source, journal, SystemClock())  # type: ignore[arg-type]
    run.measure_row(Files(bad))
    run.find_batch_size(Files(bad))
    assert max(engine.rows) * len(FILE) <= 64 << 20
    with pytest.raises(AttributeError):  # of the engine, which cannot run the batches
        run.score(batch, lambda progress: None)
    ((rows, most_bytes),) = source.calls
    assert batch <= rows <= max(batch, 16)
    assert batch * len(FILE) <= most_bytes <= max(3 * batch * len(FILE), CHUNK_BYTES)
