"""Engines that schedule by themselves, through remora and in a bare loop in the same process.

PYTHON generation_loops.py FOLDER [ROUNDS [TOKENS]]: a repository with models of vLLM or OpenVINO GenAI, in an
environment that has the library and remora. The loop submits all prompts to the library's object that the model has
open, and reads its tokens as they come; remora does so through its engine, and over HTTP with a client in another
process.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from os import getloadavg
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
import numpy as np

from generation import ROUNDS, TOKENS, compare, in_process
from generation_client import Times, over_http, prompt_of
from generation_vllm import VLLM_ENVIRONMENT
from remora.engine import Engine
from remora.server.host import Host
from remora_llm.backends.openvino_genai.engine import OpenVinoEngine, generation_config
from remora_llm.backends.vllm.engine import VllmEngine
from remora_llm.generation import Generation
from remora_llm.generation.tasks import Sampling, Task
from support.servers import hosting

hosting.PATIENCE_S = 600.0  # for vLLM's start
for name, value in VLLM_ENVIRONMENT.items():
    os.environ.setdefault(name, value)


def own_loop(generation: Generation, streams: int, tokens: int, turn: int) -> Times:
    """Measure one round of the library without remora."""
    prompts = [generation.tokens.encode(prompt_of(turn, place)) for place in range(streams)]
    times: list[list[float]] = [[] for _ in prompts]
    begin = time.perf_counter()
    if isinstance(generation.engine, OpenVinoEngine):
        run_openvino(generation.engine, prompts, tokens, times)
    elif isinstance(generation.engine, VllmEngine):
        generation.engine._thread.run(run_vllm(generation.engine._llm, prompts, tokens, times, turn))
    else:
        raise TypeError(f"{type(generation.engine).__name__} has no loop here")
    spent = time.perf_counter() - begin
    first = [(each[0] - begin) * 1e3 for each in times]
    between = [(each[-1] - each[0]) * 1e3 / (tokens - 1) for each in times]
    return Times(streams * tokens / spent, median(first), median(between))


def run_openvino(engine: OpenVinoEngine, prompts: list[tuple[int, ...]], tokens: int, times: list[list[float]]) -> None:
    """Run steps until all answers are complete. The engine's thread waits meanwhile."""
    pipeline, library = engine._pipeline, engine._library
    handles = []
    for number, prompt in enumerate(prompts):
        task = Task(prompt, tokens, Sampling(temperature=0), ignore_end=True)
        config = generation_config(library.genai, task, 0, engine.facts)
        tensor = library.tensor(np.asarray([prompt], np.int64))
        handles.append(pipeline.add_request((1 << 32) + number, tensor, config))
    counts = [0] * len(handles)
    while pipeline.has_non_finished_requests():
        pipeline.step()
        now = time.perf_counter()
        for place, handle in enumerate(handles):
            while handle.can_read():
                counts[place] += sum(len(output.generated_ids) for output in handle.read().values())
                times[place].append(now)
    if counts != [tokens] * len(handles):
        raise RuntimeError(f"the library wrote {counts} tokens")


async def run_vllm(llm: Any, prompts: list[tuple[int, ...]], tokens: int, times: list[list[float]], turn: int) -> None:
    """Read all answers at once, as text, which is vLLM's default."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    async def read(place: int) -> int:
        parameters = SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        written = 0
        prompt = {"prompt_token_ids": list(prompts[place])}
        async for output in llm.generate(prompt, parameters, f"own-{turn}-{place}"):
            written += len(output.outputs[0].token_ids)
            times[place].append(time.perf_counter())
        return written

    counts = await asyncio.gather(*(read(place) for place in range(len(prompts))))
    if counts != [tokens] * len(prompts):
        raise RuntimeError(f"the library wrote {counts} tokens")


def main(folder: str, rounds: str = str(ROUNDS), tokens: str = str(TOKENS)) -> None:
    count = int(tokens)
    engine = Engine(Path(folder))
    with hosting.running(Host(), engine) as ports:
        for model in engine.models():
            generation = model.generation
            assert generation is not None
            print(f"{model.name}: {type(generation.engine).__name__}, load {getloadavg()[0]:.1f}", flush=True)
            ways = {
                "own loop": lambda streams, turn, it=generation: own_loop(it, streams, count, turn),
                "engine": lambda streams, turn, it=generation: in_process(it, streams, count, turn),
                "HTTP": lambda streams, turn, it=model.name: over_http(ports.http, it, streams, count, turn),
            }
            compare(ways, int(rounds))


if __name__ == "__main__":
    main(*sys.argv[1:])
