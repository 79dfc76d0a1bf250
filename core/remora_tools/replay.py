"""Command `remora replay`, which sends captured requests again and compares the answers."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

from remora.api.storage import is_url, open_stored
from remora.cli.client import HttpClient, model_path, open_client, raise_for_status
from remora.cli.output import UsageError
from remora.errors import NotFoundError
from remora.system.url_secrets import shown_place
from remora_tools.scoring.sources import import_parquet
from remora_tools.traffic.captured import CapturedError, Exchange, answer_of, difference, exchange_of, request_of

_SUFFIXES = (".jsonl", ".parquet")
SAME, DIFFERS, FAILED, SKIPPED = "same", "differs", "failed", "skipped"


def replay(options: argparse.Namespace) -> int:
    """Run `remora replay`; return 1 if an answer differs or a request fails.

    Raises UsageError for a file that cannot be read, RemoraError without a server or a valid key. The counts until then
    are printed.
    """
    client = open_client(options)
    counts: Counter[str] = Counter()
    finished = False
    try:
        for place, exchange in exchanges_of(options.file):
            if options.model and exchange.model != options.model:
                continue
            outcome, why = _sent(client, exchange, options.relative, options.absolute)
            counts[outcome] += 1
            if outcome in (DIFFERS, FAILED) and counts[DIFFERS] + counts[FAILED] <= options.show:
                print(f"{place}: {exchange.model}: {outcome}: {why}")
            if sum(counts.values()) == options.most:
                break
        finished = True
    finally:
        client.close()
        if finished or counts:
            _print_counts(counts, as_json=options.json_out)
    return int(counts[DIFFERS] + counts[FAILED] > 0)


def _print_counts(counts: Counter[str], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({name: counts[name] for name in (SAME, DIFFERS, FAILED, SKIPPED)}))
    else:
        print(
            f"{counts[SAME]} answers are the same, {counts[DIFFERS]} differ, {counts[FAILED]} requests failed, "
            f"{counts[SKIPPED]} skipped (redacted inputs, streams)"
        )


def exchanges_of(place: str) -> Iterator[tuple[str, Exchange]]:
    """Yield the exchanges of a file, a folder or a bucket with their places.

    Files are read in the order of their names.
    A server may capture the replayed requests in the same place: what it adds meanwhile is not read. Raises UsageError,
    RemoraError.
    """
    for name, opened, size in _remote_files(place) if is_url(place) else _local_files(Path(place)):
        try:
            with opened() as file:
                numbered = enumerate(_parquet(file) if name.endswith(".parquet") else _lines(file, size), 1)
                number = 0
                try:
                    for number, exchange in numbered:
                        yield f"{name}:{number}", exchange
                except CapturedError as error:
                    raise UsageError(
                        f"{name}:{number + 1}: {error}; such files are written by 'serve --capture'"
                    ) from error
        except OSError as error:
            raise UsageError(f"{name}: cannot be read: {error.strerror or error}") from error


class _File(NamedTuple):
    """File of captured requests, with its bytes before the first of them is sent again."""

    name: str
    open: Callable[[], BinaryIO]
    size: int


def _local_files(path: Path) -> list[_File]:
    names = [path]
    if path.is_dir():
        names = sorted(each for each in path.iterdir() if is_captured(each.name))
        if not names:
            raise UsageError(f"{path}: the folder has no files of captured requests ({', '.join(_SUFFIXES)})")
    try:
        return [_File(str(each), partial(_open, each), each.stat().st_size) for each in names]
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from error


def _open(path: Path) -> BinaryIO:
    return path.open("rb")


def _remote_files(url: str) -> list[_File]:
    from remora.api.storage import open_storage  # imported here, because most files are local

    storage, _ = open_storage(url)
    items = []
    if is_captured(url):
        with suppress(NotFoundError):
            items = [storage.find()]
    if items:
        return [_File(url, partial(open_stored, storage, items[0]), items[0].size)]
    items = sorted((each for each in storage.listing() if is_captured(each.path)), key=lambda each: each.path)
    if not items:
        raise NotFoundError(f"'{shown_place(url)}' has no files of captured requests ({', '.join(_SUFFIXES)})")
    return [_File(f"{url.rstrip('/')}/{each.path}", partial(open_stored, storage, each), each.size) for each in items]


def is_captured(name: str) -> bool:
    """Return True for the name of a file with captured requests."""
    return name.endswith(_SUFFIXES) and not name.rpartition("/")[2].startswith(".")


def _lines(file: BinaryIO, size: int) -> Iterator[Exchange]:
    """Yield the exchanges in the first ``size`` bytes of a file."""
    for line in file:
        if file.tell() > size:
            return
        yield exchange_of(line)


def _parquet(file: BinaryIO) -> Iterator[Exchange]:
    from remora_tools.traffic.captured_parquet import read_parquet

    import_parquet("--capture")
    return read_parquet(file)


def _sent(client: HttpClient, exchange: Exchange, relative: float, absolute: float) -> tuple[str, str]:
    """Return what became of a request, and why.

    Raises RemoraError if the server refuses it for want of a key, because it would refuse the others too.
    """
    request = request_of(exchange)
    if request is None or (not exchange.error and len(exchange.answers) != 1):
        return SKIPPED, ""
    try:
        path = f"{model_path(exchange.model)}/infer"
    except NotFoundError as error:
        return FAILED, str(error)
    answer = client.exchange("POST", path, request.body, request.header_length)
    if answer.status in (401, 403):
        raise_for_status(client, answer)
    if not 200 <= answer.status < 300:
        text = answer.body[:200].decode(errors="replace")
        return (SAME, "") if exchange.error else (FAILED, f"status {answer.status}: {text}")
    if exchange.error:
        return DIFFERS, f"an answer instead of the error '{exchange.error:.100}'"
    try:
        outputs = answer_of(answer.body, answer.header_length)
    except CapturedError as error:
        return FAILED, str(error)
    why = difference(exchange.answers[0], outputs, relative, absolute)
    return (DIFFERS, why) if why else (SAME, "")
