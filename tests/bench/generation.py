"""Language models: tokens per second, TTFT and ITL of the bare step loop, in process and over HTTP.

Also: decode steps of 16 rows against one, the first token of a prompt that was seen before, and the time until a
cancelled row is free.

python -m tests.bench generation [FOLDER]: with a repository's folder of models (`make llm`), else with `tiny`. Rounds
alternate between the ways, and the ratio of each round counts, because others use the machine, too.
"""

from __future__ import annotations

import http.client
import json
import sys
import tempfile
import threading
import time
from os import getloadavg
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from generation_models import tiny
from hosting import running
from remora.engine import Engine
from remora.generation import Extension, Generation
from remora.generation.step_loop import StepLoop
from remora.generation.tasks import Sampling, Task
from remora.server.host import Host
from remora.testing.generation import Collector

ROUNDS, STREAMS, TOKENS = 5, 16, 64
PROMPT_TOKENS, DECODE_STEPS, PREFIX_TOKENS = 64, 24, 1000
PROMPT = "The quick brown fox jumps over the lazy dog and runs into the forest, where"


class Times(NamedTuple):
    """Of one round: tokens per second, and the medians of first tokens and intervals in milliseconds."""

    per_s: float
    first_ms: float
    between_ms: float


def in_process(generation: Generation, streams: int) -> Times:
    prompt = generation.tokens.encode(PROMPT)
    tasks = [
        Task(prompt, TOKENS, Sampling(temperature=0), ignore_end=True, user=f"{place}") for place in range(streams)
    ]
    sink = Collector()
    begin = time.perf_counter()
    for task in tasks:
        generation.engine.begin(task, sink)
    for task in tasks:
        sink.wait(task, 600)
    spent = time.perf_counter() - begin
    usages = [sink.ends(task)[0].usage for task in tasks]
    first = [(usage.queue_ns + usage.prefill_ns) / 1e6 for usage in usages]
    between = [usage.decode_ns / 1e6 / (TOKENS - 1) for usage in usages]
    return Times(streams * TOKENS / spent, median(first), median(between))


def stream(port: int, name: str, place: int, seen: list[list[float]]) -> None:
    body = {"model": name, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    times = [time.perf_counter()]
    headers = {"Content-Type": "application/json"}
    document: dict[str, Any] = {**body, "stream": True, "user": f"{place}"}
    connection.request("POST", "/v1/completions", json.dumps(document), headers)
    answer = connection.getresponse()
    while line := answer.readline():
        if line.startswith(b"data: {"):
            times.append(time.perf_counter())
    answer.close()
    connection.close()
    seen.append(times)


def over_http(port: int, name: str, streams: int) -> Times:
    seen: list[list[float]] = []
    threads = [threading.Thread(target=stream, args=(port, name, place, seen)) for place in range(streams)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spent = time.perf_counter() - begin
    first = [(times[1] - times[0]) * 1e3 for times in seen]
    between = [(times[-1] - times[1]) * 1e3 / max(len(times) - 2, 1) for times in seen]
    return Times(streams * TOKENS / spent, median(first), median(between))


def decode_ratio(stepper: Any) -> float:
    """Tokens per second of decode steps of 16 rows over those of one row; medians of alternating pairs."""
    for row in range(STREAMS):
        stepper.step([Extension(row, 0, range(20 + row, 20 + row + PROMPT_TOKENS))])

    def seconds(rows: int) -> float:
        begin = time.perf_counter()
        for position in range(PROMPT_TOKENS, PROMPT_TOKENS + DECODE_STEPS):
            stepper.step([Extension(row, position, [30 + row]) for row in range(rows)])
        return time.perf_counter() - begin

    seconds(STREAMS)
    return median(seconds(1) / seconds(STREAMS) * STREAMS for _ in range(2 * ROUNDS + 1))


def prefix_ratio(generation: Generation) -> tuple[float, float]:
    """Time to the first token of a long prompt in milliseconds, and its part when most of the prompt was seen."""
    length = min(PREFIX_TOKENS, generation.engine.facts.context - 40)

    def first_ms(seed: int, tail: int) -> float:
        prompt = tuple(20 + (place * (seed + 3)) % 400 for place in range(length)) + (20 + tail,) * 8
        task, sink = Task(prompt, 2, Sampling(temperature=0), ignore_end=True), Collector()
        generation.engine.begin(task, sink)
        sink.wait(task, 600)
        usage = sink.ends(task)[0].usage
        return (usage.queue_ns + usage.prefill_ns) / 1e6

    pairs = [(first_ms(seed, 1), first_ms(seed, 2)) for seed in range(ROUNDS)]
    return median(first for first, _ in pairs), median(second / first for first, second in pairs)


def cancel_ms(generation: Generation) -> tuple[float, float]:
    """Time from a cancellation to the end of its task beside 15 others, and of a step, in milliseconds."""
    prompt = generation.tokens.encode(PROMPT)
    spent, steps = [], []
    for _ in range(3 * ROUNDS):
        sink = Collector()
        tasks = [Task(prompt, 400, Sampling(temperature=0), ignore_end=True) for _ in range(STREAMS)]
        for task in tasks:
            generation.engine.begin(task, sink)
        while not all(sink.tokens(task) for task in tasks):
            time.sleep(0.001)
        before = generation.engine.stats()
        begin = time.perf_counter()
        generation.engine.cancel(tasks[3])
        sink.wait(tasks[3], 600)
        spent.append((time.perf_counter() - begin) * 1e3)
        for task in tasks:
            generation.engine.cancel(task)
            sink.wait(task, 600)
        after = generation.engine.stats()
        steps.append((after.step_ns - before.step_ns) / max(after.steps - before.steps, 1) / 1e6)
    return median(spent), median(steps)


def shown(name: str, rounds: list[Times]) -> str:
    low, high = min(each.per_s for each in rounds), max(each.per_s for each in rounds)
    middle = [median(values) for values in zip(*rounds, strict=True)]
    return f"{name:>28} {middle[0]:9.0f} ({low:.0f} to {high:.0f}) {middle[1]:10.1f} {middle[2]:10.2f}"


def measure(engine: Engine, port: int, name: str) -> None:
    generation = engine.resolve(name).generation
    assert generation is not None
    print(f"{name:>28} {'tokens/s':>9} (lowest to highest) {'TTFT ms':>7} {'ITL ms':>9}   load {getloadavg()[0]:.1f}")
    if isinstance(generation.engine, StepLoop):
        # nothing else uses the stepper, because no task runs
        print(f"{'16 rows over one':>28} {decode_ratio(generation.engine._stepper):9.2f}")
    first_ms, part = prefix_ratio(generation)
    print(f"{'first token of 1000':>28} {first_ms:9.1f} ms, {part:.3f} of it when the prompt was seen")
    freed_ms, step_ms = cancel_ms(generation)
    print(f"{'cancelled row is free after':>28} {freed_ms:9.2f} ms; a step takes {step_ms:.2f} ms")
    for streams in (1, STREAMS):
        bare: list[Times] = []
        wire: list[Times] = []
        over_http(port, name, streams)
        for _ in range(ROUNDS):
            bare.append(in_process(generation, streams))
            wire.append(over_http(port, name, streams))
        print(shown(f"step loop, {streams} streams", bare))
        print(shown(f"HTTP events, {streams} streams", wire))
        ratio = median(two.per_s / one.per_s for one, two in zip(bare, wire, strict=True))
        print(f"{'HTTP over the step loop':>28} {ratio:9.2f}")


def main() -> None:
    with tempfile.TemporaryDirectory() as made:
        if len(sys.argv) < 2:
            tiny(Path(made))
        engine = Engine(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(made))
        with running(Host(), engine) as ports:
            for model in engine.models():
                measure(engine, ports.http, model.name)


if __name__ == "__main__":
    main()
