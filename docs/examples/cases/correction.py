"""Text correction with a deadline: each answer within 200 ms, or none.

    python docs/examples/cases/correction.py --seconds 10 --users 8

Users send sentences of twelve words with two misspelt ones, each user one after another. The header
``X-Request-Timeout-Ms`` makes the server drop a request that it cannot answer in time.
"""

from __future__ import annotations

import argparse
import random
import threading
import time
from contextlib import closing
from pathlib import Path

from correction_app import known_words
from serving import connect, percentile, post, report, serving

LIMIT_MS = 200
WORDS, MISSPELT = 12, 2


def misspelt(word: str, chance: random.Random) -> str:
    """Return a word with two neighbouring letters swapped, or one letter left out."""
    at = chance.randrange(1, len(word) - 1)
    if chance.random() < 0.5:
        return word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    return word[:at] + word[at + 1 :]


def measure(port: int, seconds: float, users: int) -> None:
    """Let users send sentences, and print the latencies and how many words were found again."""
    words = sorted(word for word in known_words() if len(word) > 5)
    times: list[float] = []
    late, right, wrong = [0], [0], [0]
    lock = threading.Lock()
    end = time.perf_counter() + seconds

    def use(number: int) -> None:
        chance = random.Random(number)
        with closing(connect(port)) as connection:
            while time.perf_counter() < end or not times:
                meant = chance.sample(words, WORDS)
                sent = [misspelt(each, chance) if at < MISSPELT else each for at, each in enumerate(meant)]
                status, answer, took_ms = post(
                    connection,
                    "/models/Corrector",
                    {"text": " ".join(sent)},
                    {"X-Request-Timeout-Ms": str(LIMIT_MS)},
                )
                with lock:
                    if status != 200:
                        late[0] += 1
                        continue
                    times.append(took_ms)
                    for one, other in zip(meant[:MISSPELT], answer["output"].split(), strict=False):
                        (right if one == other else wrong)[0] += 1

    threads = [threading.Thread(target=use, args=(number,)) for number in range(users)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    report(
        sentences=len(times),
        sentences_per_second=len(times) / seconds,
        p50_ms=percentile(times, 0.5),
        p99_ms=percentile(times, 0.99),
        within_limit=f"{sum(each <= LIMIT_MS for each in times) / max(len(times) + late[0], 1):.2%}",
        dropped_as_late=late[0],
        misspelt_words_found_again=f"{right[0] / max(right[0] + wrong[0], 1):.1%}",
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--users", type=int, default=8)
    options = parser.parse_args()
    with serving(Path(__file__).with_name("correction_app.py")) as port:
        measure(port, options.seconds, options.users)
