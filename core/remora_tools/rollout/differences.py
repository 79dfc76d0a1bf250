"""Log of differences between a model's answers and its shadow's, as lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from remora.api.models import TraceWriter
from remora.errors import ConfigError
from remora.messages import Data, InferForm, Tensor
from remora.system.clock import Clock
from remora_tools.traffic.captured import CapturedTensor, printed
from remora_tools.traffic.line_file import LineFile, Redactions, bytes_of, content_of, hidden_in, utc

MOST_PER_SECOND = 10
MOST_TENSOR_BYTES = 64 << 10
_ROOM_BYTES = 16 << 20
_OVERHEAD_BYTES = 512
_END_S = 3.0
_SECOND_NS = 1_000_000_000


class Difference(NamedTuple):
    """Two answers to one request.

    ``shadow`` describes the destination of the copy. ``found`` is empty if it failed.
    """

    model: str
    version: str
    shadow: str
    form: InferForm
    data: Sequence[Data]
    expected: Sequence[Tensor]
    found: Sequence[Tensor]
    reason: str


class _Line(NamedTuple):
    """Document in the writer's queue."""

    document: dict[str, Any]
    size: int


class DifferenceLog:
    """File of differences, limited in rate and size. Thread-safe.

    At most `MOST_PER_SECOND` are kept, with the values of tensors up to `MOST_TENSOR_BYTES`.

    Args:
        path: the file, to which lines are appended.
        most_bytes: size of the file at which logging ends.
        redacted: tensors whose values are left out.
        clock: limits the rate and dates the lines.

    Raises ConfigError if the file cannot be written.
    """

    def __init__(self, path: Path, most_bytes: int, redacted: Redactions, clock: Clock) -> None:
        self._redacted = redacted
        self._clock = clock
        self._full = False
        self._second = -1
        self._count = 0
        file = LineFile[_Line](
            path, most_bytes, lambda each: json.dumps(each.document).encode() + b"\n", self._end, "--shadow-differences"
        )
        self._writer = TraceWriter[_Line](file, room=_ROOM_BYTES, what="differences of shadows")

    def put(self, found: Difference) -> None:
        """Queue a difference unless there were too many in this second. Never blocks."""
        second = self._clock.monotonic_ns() // _SECOND_NS
        if second != self._second:
            self._second, self._count = second, 0
        self._count += 1
        if self._full or self._count > MOST_PER_SECOND:
            return
        hidden = hidden_in(self._redacted, found.model)
        kept_bytes = 0

        def shown(tensor: CapturedTensor) -> dict[str, Any]:
            nonlocal kept_bytes
            size = len(tensor.content or b"")
            if hidden(tensor.name):
                return printed(tensor._replace(content=None))
            if size > MOST_TENSOR_BYTES:
                row = printed(tensor._replace(content=None))
                del row["redacted"]
                return row | {"left_out": size}
            kept_bytes += size
            return printed(tensor)

        document = {
            "time": utc(self._clock.wall_ms()),
            "model": found.model,
            "version": found.version,
            "shadow": found.shadow,
            "id": found.form.id,
            "reason": found.reason,
            "inputs": [
                shown(CapturedTensor(spec.name, spec.datatype, tuple(spec.shape), content_of(spec.datatype, part)))
                for spec, part in zip(found.form.inputs, found.data, strict=True)
            ],
            "expected": [shown(_output(each)) for each in found.expected],
            "found": [shown(_output(each)) for each in found.found],
        }
        # Objects of numbers take some times the bytes that they are read from.
        self._writer.put(_Line(document, _OVERHEAD_BYTES + 8 * kept_bytes))

    def close(self) -> None:
        """Write what waits and end."""
        self._writer.close(_END_S)

    def _end(self) -> None:
        if not self._full:
            self._full = True
            self._writer.log.warning(
                "the file of differences has reached --shadow-differences-max-bytes: none are added"
            )


def _output(tensor: Tensor) -> CapturedTensor:
    return CapturedTensor(tensor.name, tensor.datatype, tuple(tensor.data.shape), bytes_of(tensor.data))


def open_differences(path: str, most_bytes: int, redacted: Redactions, clock: Clock) -> DifferenceLog | None:
    """Return the log of an option, None for an empty path. Raises ConfigError."""
    if not path:
        return None
    if most_bytes < 1:
        raise ConfigError(f"--shadow-differences-max-bytes={most_bytes}: expected at least 1")
    return DifferenceLog(Path(path), most_bytes, redacted, clock)
