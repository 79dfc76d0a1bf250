"""Capture of inference requests with their answers, for `remora replay`.

Tensors are copied when a request is submitted and answered; a thread prints and writes them as lines of JSON, or as
Parquet. What does not fit its queue or the file is dropped and counted.
"""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from remora.api.models import DroppedError, TraceWriter
from remora.api.system import TemporaryFolder
from remora.errors import ConfigError, RemoraError, UnsupportedError
from remora.messages import Data, InferForm, Outcome, Reply, Response, Ticket, split_outcome
from remora.options import EngineOptions
from remora.system.clock import Clock
from remora.system.install_advice import install_command
from remora.system.url_secrets import shown_place
from remora_tools.traffic.captured import CapturedTensor, Exchange, line_of
from remora_tools.traffic.line_file import (
    LineFile,
    Redactions,
    bytes_of,
    content_of,
    hidden_in,
    hides_all,
    parameters_of,
    redactions_of,
    utc,
)

_ROOM_BYTES = 64 << 20
_END_S = 3.0
_OVERHEAD_BYTES = 512
_PARQUET_BYTES = 16_384
"""Room for the description that is in each Parquet file."""
PART_BYTES = 16 << 20
"""Size of a part in an object store or in a folder of Parquet files."""
PART_NS = 60_000_000_000
"""Age beyond which a part is written with the next request."""
RETRY_NS = 10_000_000_000
"""Wait between two tries to upload a part."""
Upload = Callable[[str, Path], None]
"""Writes a local file to an object store or a folder under a name."""


class CaptureSettings(NamedTuple):
    """What is captured.

    Attributes:
        path: the file, to which lines are appended, or the folder of Parquet files; only its suffix counts for an
            object store.
        share: share of the requests, at most 1.
        most_bytes: size of the file at which capturing ends.
        redacted: tensors whose values are left out; with all tensors of a model, its custom parameters are too.
    """

    path: Path
    share: float
    most_bytes: int
    redacted: Redactions

    @property
    def is_parquet(self) -> bool:
        """True for Parquet files instead of JSON lines."""
        return self.path.suffix == ".parquet"


def capture_settings(path: str, share: str, most_bytes: int, redact: Sequence[str]) -> CaptureSettings:
    """Return the settings of the options. Raises ConfigError."""
    try:
        part = float(share)
    except ValueError:
        part = 0.0
    if not 0 < part <= 1:
        raise ConfigError(f"--capture-share={share}: expected a number above 0 and at most 1")
    return CaptureSettings(Path(path), part, most_bytes, redactions_of(redact))


def open_capture(options: EngineOptions, clock: Clock) -> Capture:
    """Return the capture that the options ask for. Raises RemoraError."""
    settings = capture_settings(
        options.capture, options.capture_share, options.capture_max_bytes, options.capture_redact
    )
    if "://" not in options.capture:
        return Capture(settings, clock)
    from remora.api.storage import open_storage  # imported here, because most captures are local

    if open_storage(options.capture)[1].cloud == "http":  # raises for any other URL
        raise ConfigError(
            f"--capture={shown_place(options.capture)}: expected a file or a bucket (s3://, gs://, az://)"
        )
    root = options.capture.rstrip("/")
    return Capture(settings, clock, lambda name, file: open_storage(f"{root}/{name}")[0].upload(file))


class QueuedExchange(NamedTuple):
    """Exchange in the writer's queue."""

    exchange: Exchange
    size: int


class _Part(NamedTuple):
    """File of a part that is not uploaded yet."""

    name: str
    exchanges: int
    size: int
    folder: TemporaryFolder


class _PartNames:
    """Names of the parts of one server, in the order of time."""

    def __init__(self, suffix: str) -> None:
        self._suffix = suffix
        self._series = os.urandom(4).hex()
        self._count = 0

    def name_at(self, wall_ms: int) -> str:
        """Return the name of the next part."""
        time = utc(wall_ms).partition("+")[0].replace(":", "")
        return f"{time}-{self._series}-{self._count:06d}{self._suffix}"

    def advance(self) -> None:
        """Use the next number from now on."""
        self._count += 1


class _OpenPart:
    """Exchanges in memory, as lines or, for Parquet, as they are.

    ``begin_ns`` is the time of the first one.
    """

    def __init__(self) -> None:
        self.begin_ns = 0
        self.size = 0
        self.lines: list[bytes] = []
        self.exchanges: list[Exchange] = []

    @property
    def count(self) -> int:
        """Number of exchanges."""
        return len(self.exchanges) + len(self.lines)


class PartFiles:
    """Destination with a file for each part of the exchanges: JSON lines, or Parquet.

    A part is kept in memory until it is large or old. If it cannot be uploaded, its file is kept for the next try, and
    further exchanges are dropped once the next part is full.
    """

    def __init__(self, settings: CaptureSettings, upload: Upload, clock: Clock, full: Callable[[], None]) -> None:
        self._most = settings.most_bytes
        self._parquet = settings.is_parquet
        self._upload = upload
        self._clock = clock
        self._full = full
        self._names = _PartNames(".parquet" if self._parquet else ".jsonl")
        self._part = _OpenPart()
        self._uploaded = 0
        self._finished: _Part | None = None
        self._error: Exception | None = None  # of the last try
        self._retry_ns = 0
        self._lock = threading.Lock()

    def write(self, lines: Sequence[QueuedExchange]) -> None:
        """Add exchanges, and upload the part that is large or old.

        Raises DroppedError while an upload fails.
        """
        with self._lock:
            lost = 0
            for each in lines:
                line = b"" if self._parquet else line_of(each.exchange)
                size = each.size if self._parquet else len(line)
                room = self._room() - self._part.size - (_PARQUET_BYTES if self._parquet else 0)
                if size > room:
                    self._full()
                    break
                now_ns = self._clock.monotonic_ns()
                if self._finished is not None or self._is_full(size) or now_ns - self._part.begin_ns > PART_NS:
                    lost += self._deliver(now_ns)
                    if self._error is None and self._is_full(size):  # an earlier part has been delivered
                        lost += self._deliver(now_ns)
                if self._is_full(size):
                    lost += 1
                    continue
                if not self._part.size:
                    self._part.begin_ns = now_ns
                if self._parquet:
                    self._part.exchanges.append(each.exchange)
                else:
                    self._part.lines.append(line)
                self._part.size += size
            self._report(lost)

    def close(self) -> None:
        """Upload the last part. Raises DroppedError."""
        with self._lock:
            self._retry_ns = 0
            lost = self._deliver(self._clock.monotonic_ns())
            if self._error is None and self._part.size:
                lost += self._deliver(self._clock.monotonic_ns())
            if self._finished is not None:
                lost += self._finished.exchanges
                self._finished.folder.remove()
                self._finished = None
            self._report(lost + self._clear())

    def _is_full(self, size: int) -> bool:
        return self._part.size > 0 and self._part.size + size > PART_BYTES

    def _room(self) -> int:
        """Return the bytes that further parts may have."""
        return self._most - self._uploaded - (self._finished.size if self._finished is not None else 0)

    def _report(self, lost: int) -> None:
        if self._error is not None:
            raise DroppedError(lost, self._error)
        if lost:
            raise DroppedError(lost, "a part would exceed --capture-max-bytes")

    def _deliver(self, now_ns: int) -> int:
        """Finish the part in memory, unless one is finished, and upload it.

        Waits for some time after an error. Returns the number of exchanges that were dropped, because their part has
        more bytes than are left.
        """
        if now_ns < self._retry_ns:
            return 0
        try:
            if self._finished is None and self._part.size:
                finished = self._finish()
                lost = self._clear()
                if finished.size > self._room():
                    finished.folder.remove()
                    self._error = None
                    self._full()
                    return lost
                self._finished = finished
            if (part := self._finished) is not None:
                self._upload(part.name, part.folder.path / part.name)
                self._finished = None
                self._uploaded += part.size
                part.folder.remove()
        except Exception as error:  # such as a full disk or an unreachable bucket
            self._error, self._retry_ns = error, self._clock.monotonic_ns() + RETRY_NS
        else:
            self._error = None
        return 0

    def _finish(self) -> _Part:
        """Return the file of the part in memory. Raises OSError."""
        name = self._names.name_at(self._clock.wall_ms())
        folder = TemporaryFolder("capture")
        try:
            path = folder.path / name
            if self._parquet:
                # imported here, because it is usually off
                from remora_tools.traffic.captured_parquet import write_parquet

                write_parquet(self._part.exchanges, path)
            else:
                path.write_bytes(b"".join(self._part.lines))
            part = _Part(name, self._part.count, path.stat().st_size, folder)
        except BaseException:
            folder.remove()
            raise
        self._names.advance()
        return part

    def _clear(self) -> int:
        """Forget the part in memory, and return the number of its exchanges."""
        count = self._part.count
        self._part = _OpenPart()
        return count


def folder_upload(path: Path) -> Upload:
    """Return the function that moves parts to a folder.

    Raises ConfigError if the folder cannot be made.
    """
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--capture={path}: cannot be written: {error.strerror}") from error

    def upload(name: str, part: Path) -> None:
        partial = path / f".{name}"
        try:
            partial.touch(0o600)  # so that other users never read it
            shutil.copyfile(part, partial)
            partial.replace(path / name)  # so that readers never see a partial file
        except OSError:
            partial.unlink(missing_ok=True)  # because a full disk needs the room
            raise

    return upload


def _check_pyarrow(settings: CaptureSettings) -> None:
    """Raise UnsupportedError for Parquet without the package that writes it."""
    if settings.is_parquet and importlib.util.find_spec("pyarrow") is None:
        raise UnsupportedError(
            f"--capture={settings.path}: Parquet needs pyarrow, which is not installed. Install it with: "
            f"{install_command('parquet')}"
        )


class Capture:
    """Captured requests of one engine. Thread-safe.

    Args:
        settings: what is captured, and where.
        clock: the engine's.
        upload: writes a file to the object store; None for a local file.

    Raises ConfigError if the file cannot be written, UnsupportedError without the package for Parquet.
    """

    def __init__(self, settings: CaptureSettings, clock: Clock, upload: Upload | None = None) -> None:
        self._settings = settings
        self._clock = clock
        self._full = False
        _check_pyarrow(settings)
        if upload is None and settings.is_parquet:
            upload = folder_upload(settings.path)
        sink = self._file() if upload is None else PartFiles(settings, upload, clock, self._end)
        self._writer = TraceWriter[QueuedExchange](sink, room=_ROOM_BYTES, what="captured requests")

    def _file(self) -> LineFile[QueuedExchange]:
        path, most = self._settings.path, self._settings.most_bytes
        return LineFile(path, most, lambda each: line_of(each.exchange), self._end, "--capture")

    def wrap_model(self, model: Any) -> Any:
        """Return the model for the next request, wrapped if that request is captured."""
        if self._full or random.random() >= self._settings.share:
            return model
        return _CapturedModel(model, self)

    def flush(self, timeout_s: float) -> bool:
        """Write what waits, and return False on timeout."""
        return self._writer.flush(timeout_s)

    def close(self) -> None:
        """Write what waits and end."""
        self._full = True
        self._writer.close(_END_S)

    def _end(self) -> None:
        if not self._full:
            self._full = True
            self._writer.log.warning("the captured requests have reached --capture-max-bytes: none are added")

    # -- for wrapped models -----------------------------------------------------------------------------------------

    def begin(self, model: Any, form: InferForm, data: Sequence[Data]) -> _Kept:
        """Return a request with copies of its inputs."""
        hidden = hidden_in(self._settings.redacted, model.name)
        inputs = [
            CapturedTensor(
                spec.name,
                spec.datatype,
                tuple(spec.shape),
                None if hidden(spec.name) else content_of(spec.datatype, part),
            )
            for spec, part in zip(form.inputs, data, strict=True)
        ]
        return _Kept(self, model, form, inputs, hidden, self._clock.wall_ms(), self._clock.monotonic_ns())

    def put(self, kept: _Kept, error: str) -> None:
        """Queue a request that has ended."""
        form = kept.form
        exchange = Exchange(
            model=kept.model.name,
            version=kept.model.version_text,
            time=utc(kept.wall_ms),
            id=form.id,
            parameters=parameters_of(form, custom=not hides_all(self._settings.redacted, kept.model.name)),
            inputs=kept.inputs,
            outputs=[each.name for each in form.outputs],
            answers=kept.answers,
            error=error,
            duration_us=(self._clock.monotonic_ns() - kept.begin_ns) // 1000,
        )
        tensors = [*kept.inputs, *(tensor for answer in kept.answers for tensor in answer)]
        self._writer.put(QueuedExchange(exchange, _OVERHEAD_BYTES + sum(len(each.content or b"") for each in tensors)))


class _CapturedModel:
    """Model version that captures the one request submitted to it."""

    __slots__ = ("_capture", "_model")

    def __init__(self, model: Any, capture: Capture) -> None:
        self._model = model
        self._capture = capture

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def submit(self, form: InferForm, data: Sequence[Data], reply: Reply, **how: Any) -> Ticket:
        """Submit as ``ServedModel.submit`` does."""
        if form.raw or any(part is None for part in data):  # the bytes of an only input, or a shape that is refused
            ticket: Ticket = self._model.submit(form, data, reply, **how)
            return ticket
        kept = self._capture.begin(self._model, form, data)
        captured: Ticket = self._model.submit(form, data, kept.over(reply), **how)
        return captured


class _Kept:
    """Captured request that is not answered yet."""

    def __init__(
        self,
        capture: Capture,
        model: Any,
        form: InferForm,
        inputs: list[CapturedTensor],
        hidden: Callable[[str], bool],
        wall_ms: int,
        begin_ns: int,
    ) -> None:
        self._capture = capture
        self.model = model
        self.form = form
        self.inputs = inputs
        self.hidden = hidden
        self.wall_ms = wall_ms
        self.begin_ns = begin_ns
        self.answers: list[list[CapturedTensor]] = []

    def over(self, reply: Reply) -> Reply:
        """Return ``reply`` with a copy of each answer kept."""

        def kept(ticket: Ticket, outcome: Outcome) -> None:
            final, content = split_outcome(outcome)
            if isinstance(content, Response):
                self.answers.append(
                    [
                        CapturedTensor(name, datatype, tuple(data.shape), None if self.hidden(name) else bytes_of(data))
                        for name, datatype, data in content.outputs
                    ]
                )
            if final:
                self._capture.put(self, content.message if isinstance(content, RemoraError) else "")
            reply(ticket, outcome)

        return kept
