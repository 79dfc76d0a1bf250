"""Command `remora replay`, which sends captured requests again and compares the answers."""

from __future__ import annotations

import argparse
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from remora.cli.client import HttpClient, model_path, open_client
from remora.cli.output import UsageError
from remora.errors import NotFoundError
from remora.traffic.captured import CapturedError, Exchange, answer_of, difference, exchange_of, request_of

SAME, DIFFERS, FAILED, SKIPPED = "same", "differs", "failed", "skipped"


def replay(options: argparse.Namespace) -> int:
    """Run `remora replay`; return 1 if an answer differs or a request fails.

    Raises UsageError for a file that cannot be read, RemoraError without a server.
    """
    client = open_client(options)
    counts: Counter[str] = Counter()
    try:
        for number, exchange in _exchanges(options.file):
            if options.model and exchange.model != options.model:
                continue
            outcome, why = _sent(client, exchange, options.relative, options.absolute)
            counts[outcome] += 1
            if outcome in (DIFFERS, FAILED) and counts[DIFFERS] + counts[FAILED] <= options.show:
                print(f"{options.file}:{number}: {exchange.model}: {outcome}: {why}")
            if sum(counts.values()) == options.most:
                break
    finally:
        client.close()
    if options.json_out:
        print(json.dumps({name: counts[name] for name in (SAME, DIFFERS, FAILED, SKIPPED)}))
    else:
        print(
            f"{counts[SAME]} answers are the same, {counts[DIFFERS]} differ, {counts[FAILED]} requests failed, "
            f"{counts[SKIPPED]} skipped (redacted inputs, streams)"
        )
    return int(counts[DIFFERS] + counts[FAILED] > 0)


def _exchanges(path: Path) -> Iterator[tuple[int, Exchange]]:
    """Yield the exchanges that the file holds now.

    A server may capture the replayed requests in it.
    """
    try:
        with path.open("rb") as file:
            end = os.fstat(file.fileno()).st_size
            for number, line in enumerate(file, 1):
                if file.tell() > end:
                    return
                try:
                    yield number, exchange_of(line)
                except CapturedError as error:
                    raise UsageError(
                        f"{path}:{number}: {error}; such files are written by 'serve --capture'"
                    ) from error
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error


def _sent(client: HttpClient, exchange: Exchange, relative: float, absolute: float) -> tuple[str, str]:
    """Return what became of a request, and why."""
    request = request_of(exchange)
    if request is None or (not exchange.error and len(exchange.answers) != 1):
        return SKIPPED, ""
    try:
        path = f"{model_path(exchange.model)}/infer"
    except NotFoundError as error:
        return FAILED, str(error)
    answer = client.exchange("POST", path, request.body, request.header_length)
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
