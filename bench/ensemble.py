"""What an ensemble adds to its steps: three ONNX steps on one tensor, as an ensemble and one after another by hand.

    PYTHONPATH=core python bench/ensemble.py [--rounds 200]

Prints microseconds; asserts nothing. "by hand" is a program that asks the steps in turn from outside, "on a loop" a
front end's event loop that asks the ensemble and may run quick steps itself.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from remora.engine import Engine
from remora.messages import Array, InferForm, InputSpec, Outcome, Ticket
from remora.server.loop import LoopMailbox

STEPS = 3
SIZES = {"256 B": 64, "4 MiB": 1 << 20}
INSTANCE = """
instance_group { kind: KIND_CPU count: 1 }
parameters { key: "intra_op_thread_count" value: { string_value: "1" } }
"""


def repository(root: Path) -> Path:
    """The models step_0 to step_2, each y = x + 1, and the ensemble chain of them."""
    tensors = " ".join(
        f'{kind} {{ name: "{name}" data_type: TYPE_FP32 dims: -1 }}' for kind, name in (("input", "x"), ("output", "y"))
    )
    for number in range(STEPS):
        one = helper.make_tensor("one", TensorProto.FLOAT, [1], [1.0])
        ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]) for name in "xy"]
        graph = helper.make_graph([helper.make_node("Add", ["x", "one"], ["y"])], "g", ends[:1], ends[1:], [one])
        folder = root / f"step_{number}"
        (folder / "1").mkdir(parents=True)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
        onnx.save(model, folder / "1" / "model.onnx")
        (folder / "config.pbtxt").write_text(f'backend: "onnxruntime" {tensors} {INSTANCE}')
    names = ["x", "t0", "t1", "y"]
    steps = "".join(
        f'step {{ model_name: "step_{number}" model_version: -1 input_map {{ key: "x" value: "{names[number]}" }} '
        f'output_map {{ key: "y" value: "{names[number + 1]}" }} }}'
        for number in range(STEPS)
    )
    (root / "chain" / "1").mkdir(parents=True)
    (root / "chain" / "config.pbtxt").write_text(f'platform: "ensemble" {tensors} ensemble_scheduling {{ {steps} }}')
    return root


def measure(ask: Callable[[], object], rounds: int) -> list[float]:
    for _ in range(rounds // 5 + 5):
        ask()
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        ask()
        times.append((time.perf_counter() - begin) * 1e6)
    return times


async def on_a_loop(engine: Engine, data: Array, rounds: int) -> list[float]:
    """Ask the ensemble from an event loop, as a front end does."""
    loop = asyncio.get_running_loop()
    mailbox = LoopMailbox(loop)
    chain = engine.resolve("chain")
    form = InferForm((InputSpec("x", "FP32", data.shape),))
    times = []
    for _ in range(rounds + rounds // 5 + 5):
        done: asyncio.Future[Outcome] = loop.create_future()

        def reply(_ticket: Ticket, outcome: Outcome, done: asyncio.Future[Outcome] = done) -> None:
            done.set_result(outcome)

        begin = time.perf_counter()
        chain.submit(form, [data], reply, mailbox=mailbox)
        await done
        times.append((time.perf_counter() - begin) * 1e6)
    return times[-rounds:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder, Engine(repository(Path(folder))) as engine:
        print(f"{'tensor':>8} {'by hand':>9} {'ensemble':>9} {'on a loop':>9} {'added, per step':>16}   (us, median)")
        for label, count in SIZES.items():
            data = np.ones(count, np.float32)

            def by_hand(data: Array = data) -> None:
                array = data
                for number in range(STEPS):
                    array = engine.infer(f"step_{number}", {"x": array})["y"]

            def ensemble(data: Array = data) -> None:
                engine.infer("chain", {"x": data})

            apart, together = (statistics.median(measure(ask, rounds)) for ask in (by_hand, ensemble))
            looped = statistics.median(asyncio.run(on_a_loop(engine, data, rounds)))
            added = (together - apart) / STEPS
            print(f"{label:>8} {apart:9.0f} {together:9.0f} {looped:9.0f} {added:16.1f}")


if __name__ == "__main__":
    main()
