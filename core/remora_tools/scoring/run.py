"""One run of `remora score`: batches in flight, bad rows, segments and progress."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

import numpy as np

from remora.calls import TensorInfo
from remora.errors import InvalidArgumentError, RemoraError, UnavailableError
from remora.messages import Array, Tensor
from remora.system.clock import Clock
from remora_tools.deciders.batch_size import BatchSearch
from remora_tools.scoring import CHUNK_BYTES, Chunk, Refusal, Source, Values
from remora_tools.scoring.columns import InputColumns, convert_chunk
from remora_tools.scoring.journal import Journal, explain_write_error
from remora_tools.scoring.sinks import Sink, make_sink

if TYPE_CHECKING:
    from remora.engine import Engine, InferResult

SEARCH_NS = 2_000_000_000
_USUAL_BYTES = 16 << 20
_BATCH_BYTES = 64 << 20
_CHUNK_ROWS = 16_384
_MEASURED_ROWS = 16


@dataclass(frozen=True, slots=True)
class Work:
    """What a run does.

    Attributes:
        model: name of the model.
        inputs: the columns of its inputs.
        outputs: the outputs to write, with the shape of one row, -1 for variable sizes.
        kept: columns that are copied to the output.
        form: format of the output.
        batches: True if the first dimension of a tensor counts rows.
        most_rows: largest batch that the model accepts.
        most_bad: number of bad rows above which the run stops.
        segment_ns: time after which a segment is finished, at the next end of a batch.
    """

    model: str
    inputs: Sequence[InputColumns]
    outputs: Sequence[TensorInfo]
    kept: Sequence[str]
    form: str
    batches: bool
    most_rows: int
    most_bad: int
    segment_ns: int

    @property
    def wanted(self) -> list[str]:
        """The columns to read."""
        return list(dict.fromkeys((*self.kept, *(name for each in self.inputs for name in each.columns))))

    @property
    def output_names(self) -> list[str]:
        """The names of the outputs to write."""
        return [tensor.name for tensor in self.outputs]


class Progress(NamedTuple):
    """State of a run.

    ``rows`` counts from the start of the file, ``scored`` from the start of this process.
    """

    rows: int
    scored: int
    bad: int
    elapsed_ns: int
    fraction: float


class _Rows(NamedTuple):
    """Rows of the file that convert, with their numbers and kept columns."""

    inputs: dict[str, Array]
    numbers: Array
    kept: Mapping[str, Values]

    def part(self, place: slice) -> _Rows:
        return _Rows(
            {name: array[place] for name, array in self.inputs.items()},
            self.numbers[place],
            {name: values[place] for name, values in self.kept.items()},
        )

    def joined(self, later: _Rows) -> _Rows | None:
        """Return both, None if a variable dimension differs."""
        if any(array.shape[1:] != later.inputs[name].shape[1:] for name, array in self.inputs.items()):
            return None
        return _Rows(
            {name: np.concatenate([array, later.inputs[name]]) for name, array in self.inputs.items()},
            np.concatenate([self.numbers, later.numbers]),
            {name: _joined(values, later.kept[name]) for name, values in self.kept.items()},
        )


def _joined(values: Values, later: Values) -> Values:
    if isinstance(values, np.ndarray) and isinstance(later, np.ndarray) and values.dtype == later.dtype:
        return np.concatenate([values, later])
    return [*values, *later]


class _Batch(NamedTuple):
    inputs: dict[str, Array]
    rows: Array
    kept: Mapping[str, Values]
    answer: Future[InferResult]


class _Segment:
    """Segment of the journal that is being written; its sink is made with the first rows."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.sink: Sink | None = None
        self.rows = 0


class ScoringRun:
    """Scores the rows of a source into a journal's segments.

    Memory is bounded by one chunk, the batches in flight, and a row group of the output.
    """

    def __init__(self, engine: Engine, work: Work, source: Source, journal: Journal, clock: Clock) -> None:
        self._engine = engine
        self._work = work
        self._source = source
        self._journal = journal
        self._now = clock.monotonic_ns
        self._in_flight = 2 * max(engine.resolve(work.model).instance_count, 1)
        self._pending: deque[_Batch] = deque()
        self._held: _Rows | None = None
        self._refused: list[Refusal] = []
        self._row_bytes = 8 * sum(len(each.columns) for each in work.inputs)
        self._bad = sum(segment.bad for segment in journal.segments)
        self._segment: _Segment | None = None

    # -- the batch size ----------------------------------------------------------------------------------------------

    def measure_row(self, sample: Source) -> None:
        """Take the mean size of the first rows from a second reader of the file.

        It sets the number of rows in a chunk. Raises RemoraError.
        """
        chunk = next(iter(sample.chunks(0, self._work.wanted, _MEASURED_ROWS)), None)
        if chunk is not None:
            arrays, good, _ = convert_chunk(chunk, self._work.inputs)
            self._measure(arrays, len(good))

    def _measure(self, arrays: Mapping[str, Array], rows: int) -> None:
        held = sum(_bytes_of(array) for array in arrays.values())
        self._row_bytes = max(held // max(rows, 1), self._row_bytes)

    def find_batch_size(self, sample: Source) -> BatchSearch:
        """Measure batch sizes on the first rows of a second reader of the file. Raises RemoraError."""
        chunk = next(iter(sample.chunks(0, self._work.wanted, self._chunk_rows(1))), None)
        arrays, good, _ = convert_chunk(chunk, self._work.inputs) if chunk is not None else ({}, (), [])
        self._measure(arrays, len(good))  # again, because the first rows may be bad ones
        limit = min(self._work.most_rows, _BATCH_BYTES // self._row_bytes) if self._work.batches else 1
        search = BatchSearch(limit, SEARCH_NS)
        if not len(good) or not self._work.batches:
            return search
        while (size := search.next_size()) is not None:
            places = np.arange(size) % len(good)
            inputs = {name: array[places] for name, array in arrays.items()}
            begin = self._now()
            with suppress(RemoraError):  # of a bad row, which the run reports
                self._engine.infer(self._work.model, inputs, outputs=self._work.output_names)
            search.record(size, self._now() - begin)
        return search

    # -- rows --------------------------------------------------------------------------------------------------------

    def score(self, batch: int, report: Callable[[Progress], None]) -> None:
        """Score all rows that the journal lacks, ``batch`` at a time.

        Batches and segments end at multiples of ``batch``, counted from the start of the file, so that a run that was
        interrupted computes the same batches as any other.

        Raises RemoraError, also if the disk is full; the segments so far remain.
        """
        batch = batch if self._work.batches else 1
        begin = cut = self._now()
        first = self._journal.next_row
        end = first
        try:
            # Twice the mean size, because rows differ and a chunk should have whole batches.
            most_bytes = max(2 * batch * self._row_bytes, CHUNK_BYTES)
            for chunk in self._source.chunks(first, self._work.wanted, self._chunk_rows(batch), most_bytes):
                self._submit(chunk, batch)
                end = chunk.end
                whole = end - end % batch
                now = self._now()
                report(Progress(end, end - first, self._bad, now - begin, self._source.fraction()))
                if now - cut >= self._work.segment_ns and whole > self._journal.next_row:
                    self._close_segment(whole)
                    cut = now
            self._send_held()
            if end > self._journal.next_row:
                self._close_segment(end)
        except OSError as error:
            raise explain_write_error(error, self._journal.folder, self._journal.next_row) from error
        finally:
            for waiting in self._pending:
                waiting.answer.cancel()
            if self._segment is not None:
                with suppress(OSError):  # a full disk: the segment is lost in any case
                    self._segment.file.close()

    def _chunk_rows(self, batch: int) -> int:
        rows = max(min(_CHUNK_ROWS, _USUAL_BYTES // self._row_bytes), batch)
        return rows - rows % batch

    def _submit(self, chunk: Chunk, batch: int) -> None:
        """Send the batches that are complete with this chunk, and hold the rows of the last one."""
        self._refuse(chunk.refused)
        if len(chunk.rows):
            arrays, good, refused = convert_chunk(chunk, self._work.inputs)
            self._refuse(refused)
            if len(good):
                kept = {name: _selected(chunk.columns[name], good, len(chunk.rows)) for name in self._work.kept}
                self._cut(_Rows(arrays, chunk.rows[good], kept), batch, chunk.end)
        if self._held is not None and self._held.numbers[0] < chunk.end - chunk.end % batch:
            self._send_held()

    def _cut(self, rows: _Rows, batch: int, end: int) -> None:
        held, self._held = self._held, None
        if held is not None:
            joined = held.joined(rows)
            if joined is None:  # rows of different shapes cannot share a batch
                self._send(held)
            rows = joined or rows
        first, last = int(rows.numbers[0]) // batch, end // batch
        ends = np.searchsorted(rows.numbers, np.arange(first + 1, last + 1) * batch)
        begin = 0
        for place in ends.tolist():
            if place > begin:
                self._send(rows.part(slice(begin, place)))
                begin = place
        if begin < len(rows.numbers):
            self._held = rows.part(slice(begin, len(rows.numbers)))

    def _send_held(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            self._send(held)

    def _send(self, rows: _Rows) -> None:
        self._pending.append(_Batch(rows.inputs, rows.numbers, rows.kept, self._infer(rows.inputs)))
        while len(self._pending) > self._in_flight:
            self._write(self._pending.popleft())

    def _infer(self, inputs: Mapping[str, Array]) -> Future[InferResult]:
        if not self._work.batches:
            inputs = {name: array[0] for name, array in inputs.items()}
        return self._engine.infer_async(self._work.model, inputs, outputs=self._work.output_names)

    def _write(self, batch: _Batch) -> None:
        try:
            result = batch.answer.result()
        except UnavailableError:
            raise
        except RemoraError as error:
            self._split(batch, error)
            return
        outputs = []
        for tensor in self._work.outputs:
            array = result[tensor.name] if self._work.batches else result[tensor.name][None]
            if len(array) != len(batch.rows):
                raise InvalidArgumentError(
                    f"output '{tensor.name}' has {len(array)} rows for {len(batch.rows)} rows of input: remora score "
                    "needs a model that answers each row"
                )
            outputs.append(Tensor(tensor.name, tensor.datatype, array))
        segment = self._open_segment()
        if segment.sink is None:
            segment.sink = make_sink(self._work.form, segment.file)
        segment.sink.write(batch.rows, batch.kept, outputs)
        segment.rows += len(batch.rows)

    def _open_segment(self) -> _Segment:
        if self._segment is None:
            self._segment = _Segment(self._journal.open_segment())
        return self._segment

    def _split(self, batch: _Batch, error: RemoraError) -> None:
        """Run the halves of a failed batch, until the rows that fail are alone."""
        count = len(batch.rows)
        if count == 1:
            values = {name: array[0].tolist() for name, array in batch.inputs.items()}
            self._refuse([Refusal(int(batch.rows[0]), f"the model failed: {error}", values)])
            return
        for part in (slice(0, count // 2), slice(count // 2, count)):
            inputs = {name: array[part] for name, array in batch.inputs.items()}
            kept = {name: values[part] for name, values in batch.kept.items()}
            self._write(_Batch(inputs, batch.rows[part], kept, self._infer(inputs)))

    def _refuse(self, refused: Iterable[Refusal]) -> None:
        for each in refused:
            self._refused.append(each)
            self._bad += 1
            if self._bad > self._work.most_bad:
                raise InvalidArgumentError(
                    f"more than {self._work.most_bad} bad rows; the last one is row {each.row}: {each.reason}. Correct "
                    "the input or --column, or allow more with --most-bad-rows"
                )

    def _close_segment(self, end: int) -> None:
        while self._pending:
            self._write(self._pending.popleft())
        segment = self._open_segment()
        if segment.sink is not None:
            segment.sink.finish()
        # Refused rows beyond the end were read with a batch that is held.
        refused = [each for each in self._refused if each.row < end]
        self._journal.close_segment(segment.file, end, segment.rows, refused)
        self._refused = [each for each in self._refused if each.row >= end]
        self._segment = None


def _bytes_of(array: Array) -> int:
    """Return the bytes of an array with the texts that it refers to."""
    return array.nbytes + (sum(map(len, array.flat)) if array.dtype.hasobject else 0)


def _selected(values: Values, good: Array, count: int) -> Values:
    if len(good) == count:
        return values
    return values[good] if isinstance(values, np.ndarray) else [values[place] for place in good]
