"""Goodput at twice the load a model can serve, with --refuse-late and without.

    PYTHONPATH=core python bench/admission.py [--seconds 6]

A Python model in a thread sleeps 4 ms + 0.5 ms for each row of a batch, at most 8 rows. Requests come at random, twice
as many as that can serve, each to be answered within 60 ms. Goodput: answered in time, over what full batches would
give. Prints figures; asserts nothing.
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
from remora.engine import Engine
from remora.errors import UnavailableError
from remora.messages import InferForm, InputSpec, Outcome, Response, Ticket

CAPACITY, TIMEOUT_S = ROWS / (FIXED_S + EACH_S * ROWS), 0.06


class Tally:
    """What became of the requests that were due to be sent at a time."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.good = self.late = self.refused = self.dropped = 0
        self.taken: list[float] = []

    def answered(self, due: float, outcome: Outcome) -> None:
        took = time.perf_counter() - due
        with self.lock:
            if not isinstance(outcome, Response):
                self.dropped += 1
            elif took <= TIMEOUT_S:
                self.good += 1
                self.taken.append(took)
            else:
                self.late += 1


def flood(engine: Engine, seconds: float) -> tuple[Tally, float]:
    """Send what comes at random, whether or not it is answered: the load does not give way."""
    model = engine.resolve("slow")
    form = InferForm((InputSpec("IN", "INT32", (1, 1)),))
    data = [np.ones((1, 1), np.int32)]
    tally, chance = Tally(), random.Random(1)
    begin = due = time.perf_counter()
    while due < begin + seconds:
        due += chance.expovariate(2 * CAPACITY)
        if (ahead := due - time.perf_counter()) > 0:
            time.sleep(ahead)

        def reply(_ticket: Ticket, outcome: Outcome, due: float = due) -> None:
            tally.answered(due, outcome)

        left_ns = int((TIMEOUT_S - (time.perf_counter() - due)) * 1e9)
        try:
            model.submit(form, data, reply, timeout_ns=max(left_ns, 1))
        except UnavailableError:
            tally.refused += 1
    while engine.running:
        time.sleep(0.01)
    return tally, time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=6.0)
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory() as root:
        sleeper(Path(root), "slow")
        print(
            f"capacity {CAPACITY:.0f}/s, offered {2 * CAPACITY:.0f}/s, to be answered within {TIMEOUT_S * 1e3:.0f} ms"
        )
        for refuses in (False, True):
            with Engine(root, refuse_late=refuses) as engine:
                flood(engine, 1.0)  # run times are learned
                tally, took = flood(engine, seconds)
            p50 = statistics.median(tally.taken or [0.0]) * 1e3
            print(
                f"{'on ' if refuses else 'off'} goodput {tally.good / took / CAPACITY:.2f} of the capacity; in time "
                f"{tally.good}, late {tally.late}, dropped {tally.dropped}, refused {tally.refused}; p50 {p50:.0f} ms"
            )


if __name__ == "__main__":
    main()
