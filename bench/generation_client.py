"""Client of streamed completions in a separate process: tokens per second, TTFT and ITL.

    python generation_client.py PORT MODEL STREAMS TOKENS ROUND

prints the times of one round as JSON. The prompts of a round differ from each other from their first word on, so that
no prefix cache has them. Unlike `remora bench load` it begins all streams of a round together and ends with the last,
so that rounds of two servers can alternate.
"""

from __future__ import annotations

import http.client
import json
import random
import subprocess
import sys
import threading
import time
from statistics import median
from typing import NamedTuple

WORDS = (
    "time", "day", "way", "thing", "man", "world", "life", "hand", "part", "child", "eye", "woman", "place", "work",
    "week", "case", "point", "number", "group", "fact",
)  # fmt: skip
PROMPT_WORDS = 60


class Times(NamedTuple):
    """Of one round: tokens per second, and the medians of first tokens and intervals in milliseconds."""

    per_s: float
    first_ms: float
    between_ms: float


def prompt_of(turn: int, place: int) -> str:
    """Return the prompt of one stream, of about `PROMPT_WORDS` tokens."""
    choose = random.Random(f"{turn} {place}")
    return " ".join(choose.choice(WORDS) for _ in range(PROMPT_WORDS))


def over_http(port: int, model: str, streams: int, tokens: int, turn: int) -> Times:
    """Measure one round with this program in another process."""
    command = [sys.executable, __file__, *map(str, (port, model, streams, tokens, turn))]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(run.stderr)
    return Times(*json.loads(run.stdout))


def stream(connection: http.client.HTTPConnection, body: bytes, seen: list[list[float]]) -> None:
    """Append the time of the request and those of its events."""
    times = [time.perf_counter()]
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200:
        raise RuntimeError(answer.read().decode())
    while line := answer.readline():
        if line.startswith(b"data: {"):
            times.append(time.perf_counter())
    connection.close()
    seen.append(times)


def measure(port: int, model: str, streams: int, tokens: int, turn: int) -> Times:
    """Run the streams of one round at once."""
    seen: list[list[float]] = []
    threads = []
    for place in range(streams):
        document = {
            "model": model, "prompt": prompt_of(turn, place), "max_tokens": tokens, "temperature": 0,
            "ignore_eos": True, "stream": True, "user": f"{place}",
        }  # fmt: skip
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        threads.append(threading.Thread(target=stream, args=(connection, json.dumps(document).encode(), seen)))
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spent = time.perf_counter() - begin
    if len(seen) != streams:
        raise RuntimeError(f"{streams - len(seen)} of {streams} streams failed")
    first = [(times[1] - times[0]) * 1e3 for times in seen]
    between = [(times[-1] - times[1]) * 1e3 / (tokens - 1) for times in seen]
    return Times(streams * tokens / spent, median(first), median(between))


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))))
