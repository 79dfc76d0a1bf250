"""What scheduling adds: throughput of full batches, the wait at light load, and what a busy neighbour costs.

    PYTHONPATH=core python bench/scheduling.py [--seconds 3]

The models are Python models in threads that sleep 4 ms + 0.5 ms for each row of a batch, at most 8 rows, as a device
would: what is measured is the scheduler, not the processors. Prints figures; asserts nothing.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from models import EACH_S, FIXED_S, ROWS, sleeper
from remora.calls import ModelExplain
from remora.engine import Engine
from remora.messages import InferForm, InputSpec, Outcome, Ticket

FORM = InferForm((InputSpec("IN", "INT32", (1, 1)),))
DATA = [np.ones((1, 1), np.int32)]


def send(engine: Engine, model: str, per_s: float, seconds: float, seed: int = 1) -> list[float]:
    """Requests at random times; how long each took, from when it was due, in seconds."""
    served = engine.resolve(model)
    chance, took = random.Random(seed), list[float]()
    left = threading.Semaphore(0)
    begin = due = time.perf_counter()
    count = 0
    while due < begin + seconds:
        due += chance.expovariate(per_s)
        if (ahead := due - time.perf_counter()) > 0:
            time.sleep(ahead)

        def reply(_ticket: Ticket, _outcome: Outcome, due: float = due) -> None:
            took.append(time.perf_counter() - due)
            left.release()

        served.submit(FORM, DATA, reply)
        count += 1
    for _ in range(count):
        left.acquire()
    return took


def saturated(engine: Engine, seconds: float) -> tuple[float, float]:
    """Requests a second of a queue that is never empty, and of full batches by hand."""
    begin = time.perf_counter()
    rounds = 0
    while time.perf_counter() < begin + seconds:
        time.sleep(FIXED_S + EACH_S * ROWS)
        rounds += 1
    raw = rounds * ROWS / (time.perf_counter() - begin)
    served = engine.resolve("large")
    count = int(raw * seconds) // ROWS * ROWS
    left = threading.Semaphore(0)
    begin = time.perf_counter()
    for _ in range(count):
        served.submit(FORM, DATA, lambda _ticket, _outcome: left.release())
    for _ in range(count):
        left.acquire()
    return count / (time.perf_counter() - begin), raw


def p99_ms(took: list[float]) -> float:
    return statistics.quantiles(took, n=100)[98] * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3.0)
    seconds = parser.parse_args().seconds
    most = ROWS / (FIXED_S + EACH_S * ROWS)
    with tempfile.TemporaryDirectory() as folder, Engine(sleeper(Path(folder), "small", "large")) as engine:
        found = [saturated(engine, seconds) for _ in range(3)]
        ratio = statistics.median(here / raw for here, raw in found)
        here = statistics.median(here for here, _ in found)
        print(f"saturated: {here:.0f} req/s, {ratio:.3f} of full batches by hand, {here / most:.3f} of {most:.0f}")
        for _ in range(int(seconds * 20)):
            engine.infer("small", {"IN": DATA[0]})
            time.sleep(0.02)
        measured = engine.perform(ModelExplain("small")).measured
        print(f"light load, delay 0: mean wait {measured.mean_wait_us if measured else 0:.0f} us")
        ratios = []
        for seed in range(3):
            alone = p99_ms(send(engine, "small", 40, seconds, seed))
            neighbour = threading.Thread(target=send, args=(engine, "large", 400, seconds, seed + 10))
            neighbour.start()
            beside = p99_ms(send(engine, "small", 40, seconds, seed))
            neighbour.join()
            ratios.append(beside / alone)
            print(f"40 req/s: p99 {alone:.1f} ms alone, {beside:.1f} ms beside 400 req/s to another model")
        print(f"ten times the load next door: p99 {statistics.median(ratios):.2f} times that alone")


if __name__ == "__main__":
    main()
