"""Command `remora score`, which runs the rows of a file through a model without a server."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO

from remora.api.http import with_workers
from remora.api.storage import Location, is_url, open_stored, parse_location
from remora.cli.interrupts import exit_on_interrupt, open_models
from remora.cli.output import UsageError, check_writable, columns, warnings_shown, write_whole
from remora.errors import InvalidArgumentError, NotFoundError, UnavailableError
from remora.storage import Secret
from remora.system.clock import SystemClock
from remora.system.url_secrets import shown_place
from remora_tools.scoring import Source, format_of
from remora_tools.scoring.columns import map_columns, tensor_rows
from remora_tools.scoring.identity import digest_of_input, digest_of_models
from remora_tools.scoring.image_files import LocalImages, StoredImages
from remora_tools.scoring.images import IMAGE_COLUMN, ImageSource, pixels_of
from remora_tools.scoring.journal import Journal, excluding_runs, explain_write_error, journal_path
from remora_tools.scoring.run import Progress, ScoringRun, Work
from remora_tools.scoring.sinks import join_segments, write_empty
from remora_tools.scoring.sources import import_parquet, open_source

if TYPE_CHECKING:
    from remora.engine import Engine
    from remora.models.served_model import ServedModel

_MOST_ROWS = 4096
"""Largest batch of a model whose configuration sets none."""


def score(options: argparse.Namespace) -> int:
    """Run the command. Raises RemoraError, UsageError, OSError."""
    form, name = format_of(options.output), options.output.rpartition("/")[2]
    if not _is_folder(options.input):
        format_of(options.input, ", or a folder of images, whose URL ends in / if its name has a dot")
    if form == "parquet":
        import_parquet(options.output)  # before the work, not after it
    bad_place = _bad_place(options.output)
    if _is_same(options.input, options.output):
        raise UsageError("INPUT and OUTPUT are the same file")
    if _is_same(options.input, bad_place):
        raise UsageError(
            f"INPUT is the file '{bad_place}' that OUTPUT's bad rows are written to: choose another OUTPUT"
        )
    folder = options.work_directory or Path(f"{name if is_url(options.output) else options.output}.unfinished")
    for word, place in (("INPUT", options.input), ("OUTPUT", options.output)):
        if _is_same(place, str(journal_path(folder))):
            raise UsageError(f"{word} is the journal of the unfinished results in '{folder}': choose another folder")
    clock = SystemClock()
    with exit_on_interrupt(), ExitStack() as stack:
        stack.enter_context(warnings_shown("remora score"))
        engine = stack.enter_context(open_models(_engine(options)))
        model = engine.resolve(options.model or engine.only_model() or _choose(engine))
        images = stack.enter_context(closing(_images(options, model))) if _is_folder(options.input) else None
        source = stack.enter_context(_reading(options.input, images))
        etag = _identity_of(options.input, images)
        work = _plan(options, model, source, form, images)
        identity = {
            "input": etag,
            "model": digest_of_models(engine.models()),
            "inputs": [list(each) for each in work.inputs],
            "outputs": {tensor.name: tensor.datatype for tensor in work.outputs},
            "keep": list(work.kept),
            "format": form,
            "backend settings": sorted(map(str, options.backend_config)),
            "batch size": options.batch or None,
        }
        try:
            journal = Journal(folder, identity, restart=options.restart)
        except OSError as error:
            raise explain_write_error(error, folder, 0) from error
        stack.callback(journal.close)
        if not is_url(options.output):
            _claim(Path(options.output), journal, stack)
        run = ScoringRun(engine, work, source, journal, clock)
        batch = _batch_size(options, run, journal, images)
        progress = _Line(options.quiet)
        if journal.next_row:
            progress.note(f"continuing after {journal.next_row} rows of an earlier run")
        run.score(batch, progress.report)
        _finish(journal, options.output, work)
        progress.note(_summary(journal, progress.last, options.output))
        journal.remove()
    return 0


# -- the model --------------------------------------------------------------------------------------------------------


def _engine(options: argparse.Namespace) -> Engine:
    from remora.engine import Engine
    from remora.options import EngineOptions

    settings: dict[str, Any] = {}
    if options.model:
        settings = {"model_control_mode": "explicit", "load_model": (options.model,)}
    # The option comes first, so that the user's value of the same key overrides it.
    backend_config = (f"default-max-batch-size={_MOST_ROWS}", *options.backend_config)
    chosen = EngineOptions(paths=(options.models,), backend_config=backend_config, **settings)
    return Engine(options=with_workers(chosen))


def _choose(engine: Engine) -> str:
    names = sorted({model.name for model in engine.models()})
    raise UsageError(f"the repository holds {len(names)} models: choose one with --model: {', '.join(names)}")


def _plan(
    options: argparse.Namespace, model: ServedModel, source: Source, form: str, images: ImageSource | None
) -> Work:
    if model.decoupled or model.config.HasField("sequence_batching"):
        raise InvalidArgumentError(
            f"model '{model.name}' does not answer each row by itself: it is decoupled or keeps sequences"
        )
    info = model.metadata([model.version_text])
    batches = model.signature.max_batch_size > 0
    given = {name: text.split(",") for name, text in options.column}
    if images is not None:
        given.setdefault(images.pixels.input, [IMAGE_COLUMN])
    inputs = map_columns(info, source.columns, given, options.keep, batches=batches)
    outputs = tensor_rows(info, list(dict.fromkeys(options.outputs)))
    if form == "npy" and (len(outputs) != 1 or options.keep or outputs[0].datatype == "BYTES"):
        names = ", ".join(tensor.name for tensor in outputs)
        raise UsageError(f"an .npy file holds the numbers of one output: choose it with --output; {names}")
    if batches:
        outputs = [tensor._replace(shape=tensor.shape[1:]) for tensor in outputs]
    most = model.signature.max_batch_size
    if options.batch > max(most, 1):
        raise UsageError(f"--batch {options.batch}: model '{model.name}' accepts at most {max(most, 1)} rows")
    segment_ns = options.segment_secs * 1_000_000_000
    return Work(model.name, inputs, outputs, options.keep, form, batches, most, options.most_bad_rows, segment_ns)


def _is_folder(place: str) -> bool:
    """Return True for a local folder, and for a URL in a bucket that ends in / or has no suffix."""
    if not is_url(place):
        return Path(place).is_dir()
    # A web server has no listing.
    has_suffix = bool(PurePosixPath(place).suffix) and not place.endswith("/")
    return not has_suffix and parse_location(place).cloud != "http"


def _images(options: argparse.Namespace, model: ServedModel) -> ImageSource:
    """Return the reader of the images for the model. Raises RemoraError."""
    chosen = [name for name, text in options.column if IMAGE_COLUMN in text.split(",")]
    pixels = pixels_of(
        model.metadata([model.version_text]),
        chosen[0] if chosen else "",
        batches=model.signature.max_batch_size > 0,
        scale=options.pixel_scale,
        mean=options.pixel_mean,
        deviation=options.pixel_std,
    )
    if not is_url(options.input):
        return ImageSource(LocalImages(Path(options.input)), pixels)
    from remora.api.storage import open_storage

    storage, _ = open_storage(options.input)
    return ImageSource(StoredImages(storage, storage.listing()), pixels)


def _batch_size(options: argparse.Namespace, run: ScoringRun, journal: Journal, images: ImageSource | None) -> int:
    """Return the batch size of the option, of the run that goes on, or the best one of a search."""
    with _reading(options.input, images) as sample:
        run.measure_row(sample)
    settled = journal.identity["batch size"]
    if settled:
        return int(settled)
    with _reading(options.input, images) as sample:
        search = run.find_batch_size(sample)
    journal.settle("batch size", search.best)
    if not options.quiet and search.rows_per_s:
        rates = ", ".join(f"{size}: {rate:,.0f}" for size, rate in search.rows_per_s.items())
        print(f"batch size {search.best} (rows/s by size: {rates})", file=sys.stderr)
    return search.best


# -- files ------------------------------------------------------------------------------------------------------------


def _identity_of(place: str, images: ImageSource | None) -> str:
    """Return a digest of the input's content, or the ETag of its store."""
    if images is not None:
        return images.etag
    if is_url(place):
        from remora.api.storage import open_storage

        item = open_storage(place)[0].find()
        return f"{item.size} {item.etag}"
    with Path(place).open("rb") as file:
        status = os.fstat(file.fileno())
        return digest_of_input(file, status.st_size, status.st_mtime_ns)


@contextmanager
def _reading(place: str, images: ImageSource | None) -> Iterator[Source]:
    """Yield the images, or the reader of a file or URL that is opened."""
    if images is not None:
        yield images
        return
    if is_url(place):
        from remora.api.storage import open_storage

        storage, _ = open_storage(place)
        item = storage.find()
        file: BinaryIO = open_stored(storage, item)
        size = item.size
    else:
        if not Path(place).is_file():
            raise NotFoundError(f"there is no file '{shown_place(str(place))}'")
        file = Path(place).open("rb")  # noqa: SIM115
        size = os.fstat(file.fileno()).st_size
    with closing(file), closing(open_source(file, place, size)) as source:
        yield source


def _claim(output: Path, journal: Journal, stack: ExitStack) -> None:
    """Exclude other runs with this OUTPUT, and check that it can be written.

    Raises RemoraError. The journal comes before this, because it creates the folder that OUTPUT may be in.
    """
    try:
        stack.enter_context(excluding_runs(output))
    except UnavailableError:
        if not journal.segments:
            journal.remove()
        raise
    try:
        check_writable(output)  # which would remove the unfinished file of another run
    except OSError as error:
        raise explain_write_error(error, output, journal.next_row) from error


def _finish(journal: Journal, output: str, work: Work) -> None:
    """Join the segments to the output and the bad rows to the file beside it.

    Raises RemoraError.
    """
    remote = is_url(output)
    bad = _bad_place(output)
    whole, bad_rows = (journal.joined_path, journal.joined_bad_path) if remote else (Path(output), Path(bad))
    place = whole
    try:
        _join(work, journal.rows(), whole)
        place = bad_rows
        if parts := journal.bad_rows():
            write_whole(bad_rows, lambda file: join_segments("jsonl", parts, file))
        elif not remote:
            bad_rows.unlink(missing_ok=True)  # of an earlier run with the same OUTPUT
    except OSError as error:
        raise explain_write_error(error, place, journal.next_row) from error
    if remote:
        from remora.api.storage import open_storage

        if journal.bad_rows():
            open_storage(bad)[0].upload(bad_rows)
        open_storage(output)[0].upload(whole)


def _join(work: Work, parts: list[Path], target: Path) -> None:
    if not parts:
        write_whole(target, lambda file: write_empty(work.form, work.kept, work.outputs, file))
    else:
        write_whole(target, lambda file: join_segments(work.form, parts, file))


def _bad_place(output: str) -> str:
    return f"{output}.bad.jsonl"  # with OUTPUT's suffix, because out.csv and out.npy have bad rows each


def _is_same(one: str, other: str) -> bool:
    """Return True for two spellings of one file or object."""
    if is_url(one) or is_url(other):
        return is_url(one) and is_url(other) and _object(one) == _object(other)
    if os.path.realpath(one) == os.path.realpath(other):
        return True
    return os.path.exists(one) and os.path.exists(other) and os.path.samefile(one, other)


def _object(url: str) -> Location:
    return parse_location(url)._replace(url="", sas=Secret(""))


# -- progress ---------------------------------------------------------------------------------------------------------


class _Line:
    """Progress on stderr: one line that is rewritten on a terminal, a line every 10 s otherwise."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._terminal = sys.stderr.isatty()
        self._shown_ns = 0
        self.last = Progress(0, 0, 0, 0, 0.0)

    def report(self, progress: Progress) -> None:
        self.last = progress
        if self._quiet or progress.elapsed_ns - self._shown_ns < (2 * 10**8 if self._terminal else 10**10):
            return
        self._shown_ns = progress.elapsed_ns
        print(describe(progress), end="\r" if self._terminal else "\n", file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        if not self._quiet:
            print(text, file=sys.stderr, flush=True)


def describe(progress: Progress) -> str:
    """Return a line with rows, speed, share and the time that is left."""
    seconds = max(progress.elapsed_ns / 1e9, 1e-9)
    done = progress.scored / progress.rows if progress.rows else 0.0  # the share that this process has read
    left_s = seconds * (1 - progress.fraction) / (progress.fraction * done) if progress.fraction * done else 0.0
    return (
        f"{progress.rows:,} rows, {progress.scored / seconds:,.0f} rows/s, {progress.fraction:.0%}, "
        f"{left_s:,.0f} s left, {progress.bad} bad rows"
    )


def _summary(journal: Journal, last: Progress, output: str) -> str:
    written = sum(segment.written for segment in journal.segments)
    bad = sum(segment.bad for segment in journal.segments)
    seconds = last.elapsed_ns / 1e9
    rows: list[tuple[str, str]] = [
        ("rows", f"{journal.next_row:,}"),
        ("written", f"{written:,} to {output}"),
        ("bad", f"{bad:,}" + (f", see {_bad_place(output)}" if bad else "")),
        ("time", f"{seconds:.2f} s" + (f", {last.scored / seconds:,.0f} rows/s" if seconds else "")),
    ]
    return columns(rows)
