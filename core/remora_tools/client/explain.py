"""Command `remora explain`: why batches have their size, and where an answer's time went."""

from __future__ import annotations

import argparse
import json
from typing import Any

from remora.cli.client import call_json, model_path, open_client
from remora.cli.output import columns
from remora.errors import MalformedError

MEANINGS = {
    "full": "max_batch_size rows were queued, or the next request did not fit",
    "preferred_size": "a preferred size was reached",
    "delay_expired": "the oldest request had waited max_queue_delay_microseconds",
    "shape_mismatch": "the next request had another shape",
    "instance_idle": "an instance was idle and no rule delayed the batch",
    "no_batching": "the model has no dynamic_batching: each request runs alone",
    "waited_for_resources": "the batch waited for resources of the rate limiter",
    "warmup": "the batch was a model_warmup sample",
}
"""Descriptions of the dispatch reasons."""


def explain(options: argparse.Namespace) -> int:
    """Print the explanation of a model. Raises RemoraError with the server's reason."""
    client = open_client(options)
    try:
        path = f"{model_path(options.model, options.model_version)}/explain"
        document = call_json(client, "GET", f"{path}/{options.request}" if options.request else path)
    finally:
        client.close()
    if not isinstance(document, dict) or not {"measured", "predicted", "advice", "notes"} <= document.keys():
        raise MalformedError(f"{client.name} has no /explain endpoint: is it a remora server?")
    print(json.dumps(document, indent=2, ensure_ascii=False) if options.json_out else text_of(document))
    return 0


def text_of(document: dict[str, Any]) -> str:
    """Return the explanation document ``document`` as text."""
    parts = [f"{document['model']} version {document['version']}"]
    if document["measured"]:
        parts.append(_measured(document["measured"]))
    if document.get("answers"):
        parts.append(_answers(document["answers"]))
        if document["advice"]:
            parts.append("\n".join(["worth trying:", *(f"  {line}" for line in document["advice"])]))
    if document["predicted"]:
        parts.append(_predicted(document["predicted"]))
        parts.append("\n".join(["worth trying:", *(f"  {line}" for line in document["advice"])]))
    if document["notes"]:
        parts.append("\n".join(f"note: {note}" for note in document["notes"]))
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
        (f"  {reason}", f"{count / batches:.0%}", MEANINGS.get(reason, ""))
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


def _answers(answers: dict[str, Any]) -> str:
    whole = answers["whole_ms"]
    saved = answers["cached_tokens"]
    rows = [
        ("  answers", f"{answers['answers']} ({', '.join(f'{n} {why}' for why, n in answers['reasons'].items())})"),
        ("  first token", _milliseconds(answers["first_token_ms"])),
        ("  between tokens", _milliseconds(answers["between_tokens_ms"])),
        ("  prompt tokens", f"{answers['prompt_tokens']}, of which the prefix cache saved {saved}"),
        ("  answer tokens", str(answers["generated_tokens"])),
        ("  steps", f"{answers['steps']}, with {answers['rows_beside']:g} other rows each"),
        ("  put back", f"{answers['preemptions']} times"),
        (
            "  now",
            f"{answers['running']} running, {answers['waiting']} waiting, {answers['cache_used']:.0%} of the cache",
        ),
    ]
    parts = [
        (f"  {name}", f"{ms:.3f} ms", f"{ms / whole:.1%}" if whole else "") for name, ms in answers["parts_ms"].items()
    ]
    parts.append(("  sum of the parts", f"{sum(answers['parts_ms'].values()):.3f} ms", ""))
    parts.append(("  measured from arrival to end", f"{whole:.3f} ms", ""))
    title = f"request {answers['request']}:" if answers["request"] else "last answers:"
    return title + "\n" + columns(rows) + "\n\nwhere the time went (mean):\n" + columns(parts)


def _milliseconds(ms: float | None) -> str:
    return "none" if ms is None else f"{ms:.3f} ms"


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
