"""Language models: tokens per second, TTFT and ITL of the bare step loop, in process and over HTTP.

Also: decode steps of 16 rows against one, the first token of a prompt that was seen before, and the time until a
cancelled row is free.

python -m bench generation [FOLDER [ROUNDS [TOKENS]]]: with a repository's folder of models (`make llm`), else
with `tiny`. Rounds alternate between the ways, and the ratio of each round counts, because others use the machine, too.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from itertools import count
from os import getloadavg
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from generation_client import Times, over_http, prompt_of
from remora.engine import Engine
from remora.server.host import Host
from remora_llm.generation import Extension, Generation
from remora_llm.generation.step_loop import StepLoop
from remora_llm.generation.tasks import Sampling, Task
from remora_llm.testing import Collector
from support.models.generation_models import tiny
from support.servers.hosting import running

ROUNDS, STREAMS, TOKENS = 5, 16, 64
ROUND = count(1)
"""Numbers of the rounds, whose prompts differ, because no prefix cache may have seen them."""
PROMPT_TOKENS, DECODE_STEPS, PREFIX_TOKENS, STEPS_OF_ALL = 64, 24, 1000, 5
PROMPT = "The quick brown fox jumps over the lazy dog and runs into the forest, where"


def in_process(generation: Generation, streams: int, tokens: int, turn: int) -> Times:
    """Measure one round through the engine alone, without a server."""
    tasks = [
        Task(
            generation.tokens.encode(prompt_of(turn, place)),
            tokens,
            Sampling(temperature=0),
            ignore_end=True,
            user=f"{place}",
        )
        for place in range(streams)
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
    between = [usage.decode_ns / 1e6 / (tokens - 1) for usage in usages]
    return Times(streams * tokens / spent, median(first), median(between))


def decode_ratio(stepper: Any, rounds: int) -> float:
    """Tokens per second of decode steps of 16 rows over those of one row; medians of alternating pairs."""
    for row in range(STREAMS):
        stepper.step([Extension(row, 0, range(20 + row, 20 + row + PROMPT_TOKENS))])

    def seconds(rows: int) -> float:
        begin = time.perf_counter()
        for position in range(PROMPT_TOKENS, PROMPT_TOKENS + DECODE_STEPS):
            stepper.step([Extension(row, position, [30 + row]) for row in range(rows)])
        return time.perf_counter() - begin

    seconds(STREAMS)
    return median(seconds(1) / seconds(STREAMS) * STREAMS for _ in range(2 * rounds + 1))


def prefix_ratio(generation: Generation, rounds: int) -> tuple[float, float]:
    """Time to the first token of a long prompt in milliseconds, and its part when most of the prompt was seen."""
    length = min(PREFIX_TOKENS, generation.engine.facts.context - 40)

    def first_ms(seed: int, tail: int) -> float:
        prompt = tuple(20 + (place * (seed + 3)) % 400 for place in range(length)) + (20 + tail,) * 8
        task, sink = Task(prompt, 2, Sampling(temperature=0), ignore_end=True), Collector()
        generation.engine.begin(task, sink)
        sink.wait(task, 600)
        usage = sink.ends(task)[0].usage
        return (usage.queue_ns + usage.prefill_ns) / 1e6

    pairs = [(first_ms(seed, 1), first_ms(seed, 2)) for seed in range(rounds)]
    return median(first for first, _ in pairs), median(second / first for first, second in pairs)


def cancel_ms(generation: Generation, rounds: int) -> tuple[float, float]:
    """Time from a cancellation to the end of its task beside 15 others, and of a step of all 16, in milliseconds."""
    prompt = generation.tokens.encode(PROMPT)
    spent, steps = [], []
    for _ in range(3 * rounds):
        sink = Collector()
        tasks = [Task(prompt, 400, Sampling(temperature=0), ignore_end=True) for _ in range(STREAMS)]
        for task in tasks:
            generation.engine.begin(task, sink)
        while not all(sink.tokens(task) for task in tasks):
            time.sleep(0.001)
        before = generation.engine.stats()
        while (after := generation.engine.stats()).steps < before.steps + STEPS_OF_ALL:
            time.sleep(0.001)
        steps.append((after.step_ns - before.step_ns) / (after.steps - before.steps) / 1e6)
        begin = time.perf_counter()
        generation.engine.cancel(tasks[3])
        sink.wait(tasks[3], 600)
        spent.append((time.perf_counter() - begin) * 1e3)
        for task in tasks:
            generation.engine.cancel(task)
            sink.wait(task, 600)
    return median(spent), median(steps)


def shown(name: str, rounds: list[Times]) -> str:
    low, high = min(each.per_s for each in rounds), max(each.per_s for each in rounds)
    middle = [median(values) for values in zip(*rounds, strict=True)]
    return f"{name:>28} {middle[0]:9.1f} ({low:.0f} to {high:.0f}) {middle[1]:10.1f} {middle[2]:10.2f}"


def compare(ways: dict[str, Callable[[int, int], Times]], rounds: int) -> None:
    """Print the times of each way, and the ratio of each to the first one, in alternating rounds.

    A way takes the number of streams and that of the round.
    """
    for streams in (1, STREAMS):
        found: dict[str, list[Times]] = {name: [] for name in ways}
        for way in ways.values():
            way(streams, next(ROUND))
        for _ in range(rounds):
            for name, way in ways.items():
                found[name].append(way(streams, next(ROUND)))
        first, *others = ways
        for name in ways:
            print(shown(f"{name}, {streams}", found[name]))
        for name in others:
            ratios = [two.per_s / one.per_s for one, two in zip(found[first], found[name], strict=True)]
            ends = f"({min(ratios):.2f} to {max(ratios):.2f})"
            print(f"{f'{name} over {first}, {streams}':>44} {median(ratios):6.2f} {ends}", flush=True)


def measure(engine: Engine, port: int, name: str, rounds: int, tokens: int) -> None:
    generation = engine.resolve(name).generation
    assert generation is not None
    print(f"{name:>28} {'tokens/s':>9} (lowest to highest) {'TTFT ms':>7} {'ITL ms':>9}   load {getloadavg()[0]:.1f}")
    if isinstance(generation.engine, StepLoop):
        # nothing else uses the stepper, because no task runs
        print(f"{'16 rows over one':>28} {decode_ratio(generation.engine._stepper, rounds):9.2f}")
    first_ms, part = prefix_ratio(generation, rounds)
    print(f"{'first token of 1000':>28} {first_ms:9.1f} ms, {part:.3f} of it when the prompt was seen")
    freed_ms, step_ms = cancel_ms(generation, rounds)
    print(f"{'cancelled row is free after':>28} {freed_ms:9.2f} ms; a step takes {step_ms:.2f} ms", flush=True)
    compare(
        {
            "step loop": lambda streams, turn: in_process(generation, streams, tokens, turn),
            "HTTP events": lambda streams, turn: over_http(port, name, streams, tokens, turn),
        },
        rounds,
    )


def main(folder: str = "", rounds: str = str(ROUNDS), tokens: str = str(TOKENS)) -> None:
    with tempfile.TemporaryDirectory() as made:
        if not folder:
            tiny(Path(made))
        engine = Engine(Path(folder or made))
        with running(Host(), engine) as ports:
            for model in engine.models():
                measure(engine, ports.http, model.name, int(rounds), int(tokens))


if __name__ == "__main__":
    main(*sys.argv[1:])
