"""`remora explain`: why a running server's batches had the size they had, and what would change it."""

from __future__ import annotations

import argparse
import json
from typing import Any

from remora.cli.client import ask, model_path, server_of
from remora.cli.output import columns
from remora.errors import MalformedError

_MEANING = {
    "full": "max_batch_size rows waited, or the next request did not fit",
    "preferred_size": "a preferred size was reached",
    "delay_expired": "the oldest request had waited for max_queue_delay_microseconds",
    "shape_mismatch": "the next request had another shape",
    "instance_idle": "an instance was idle and nothing was worth waiting for",
    "no_batching": "the model has no dynamic_batching: each request runs alone",
    "waited_for_resources": "it had to wait for resources of the rate limiter",
    "warmup": "it was a sample of model_warmup",
}
"""What the reasons of dispatches mean, for people."""


def explain(options: argparse.Namespace) -> int:
    """Print the explanation of a model. Raises RemoraError with the server's reason."""
    door = server_of(options)
    try:
        found = ask(door, "GET", f"{model_path(options.model, options.model_version)}/explain")
    finally:
        door.close()
    if not isinstance(found, dict) or not {"measured", "predicted", "advice", "notes"} <= found.keys():
        raise MalformedError(f"{door.name} explains nothing: is it remora?")
    print(json.dumps(found, indent=2, ensure_ascii=False) if options.json_out else text_of(found))
    return 0


def text_of(found: dict[str, Any]) -> str:
    """An explanation for people; ``found`` is its document."""
    parts = [f"{found['model']} version {found['version']}"]
    if found["measured"]:
        parts.append(_measured(found["measured"]))
    if found["predicted"]:
        parts.append(_predicted(found["predicted"]))
        parts.append("\n".join(["worth trying:", *(f"  {line}" for line in found["advice"])]))
    if found["notes"]:
        parts.append("\n".join(f"note: {note}" for note in found["notes"]))
    return "\n\n".join(parts)


def _measured(measured: dict[str, Any]) -> str:
    batches = max(measured["batches"], 1)
    rows = [
        ("  requests", f"{measured['requests']} in {measured['seconds']:g} s, {measured['seconds_ago']:g} s ago"),
        ("  arrival rate", f"{measured['arrivals_per_s']:g}/s, {measured['rows_per_request']:g} rows each"),
        ("  mean wait", f"{measured['mean_wait_us']:g} us"),
        ("  mean batch", f"{measured['mean_batch_rows']:g} rows, {measured['batches']} batches"),
        ("  instances busy", f"{measured['busy']:.0%}"),
    ]
    reasons = [
        (f"  {reason}", f"{count / batches:.0%}", _MEANING.get(reason, ""))
        for reason, count in measured["reasons"].items()
    ]
    sizes = [("  rows", "batches", "us each")] + [
        (f"  {size}", str(count), f"{measured['batch_us'].get(size, 0):g}")
        for size, count in measured["batch_sizes"].items()
    ]
    return "\n\n".join(
        [
            "measured:\n" + columns(rows),
            "why batches went:\n" + columns(reasons),
            "batches by size:\n" + columns(sizes),
        ]
    )


def _predicted(predicted: list[dict[str, Any]]) -> str:
    rows = [("  setting", "model alone, req/s", "mean wait us", "p99 wait us", "mean batch", "")]
    rows += [
        (
            f"  {row['change']}",
            f"{row['throughput_per_s']:g}",
            _wait(row["mean_wait_us"]),
            _wait(row["p99_wait_us"]),
            f"{row['mean_batch_rows']:g}",
            _guesses(row),
        )
        for row in predicted
    ]
    return "predicted:\n" + columns(rows)


def _guesses(row: dict[str, Any]) -> str:
    guessed = [what for what in ("throughput", "waits") if row[f"{what}_extrapolated"]]
    return f"{' and '.join(guessed)} extrapolated" if guessed else ""


def _wait(us: float | None) -> str:
    return "grows" if us is None else f"{us:g}"
