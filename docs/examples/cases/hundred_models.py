"""Daily update of a hundred models while clients use them, without a lost request.

    python docs/examples/cases/hundred_models.py --models 100 --clients 4

Model number N multiplies by N; its second version adds 0.5. Clients send requests to all models without a pause while
each model is updated: the new version is written beside the old one and loaded, and the old one is unloaded after its
last answer. Each answer must be that of one of the two versions. Needs `pip install '.[onnx]' onnx`.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from serving import connect, percentile, post, report, serving

QUIET_S = 2.0


def write_version(repository: Path, number: int, version: int) -> None:
    """Write a version of model ``number`` under another name, and give it its own when it is complete."""
    constants = [
        numpy_helper.from_array(np.array([number], np.float32), "factor"),
        numpy_helper.from_array(np.array([0.5 if version == 2 else 0.0], np.float32), "more"),
    ]
    nodes = [helper.make_node("Mul", ["X", "factor"], ["XF"]), helper.make_node("Add", ["XF", "more"], ["Y"])]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 1]) for name in "XY")
    model = helper.make_model(
        helper.make_graph(nodes, "m", [x], [y], constants),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=9,
    )
    folder = repository / f"m{number}" / f".{version}"
    folder.mkdir(parents=True)
    onnx.save(model, folder / "model.onnx")
    folder.rename(folder.with_name(str(version)))


class Clients:
    """Threads that send requests to random models until they are stopped.

    Attributes:
        answers: time in seconds at which each answer came, its latency in milliseconds, and its version.
        lost: what was not a right answer.
    """

    def __init__(self, port: int, models: int, clients: int) -> None:
        self.answers: list[tuple[float, float, int]] = []
        self.lost: list[str] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._use, args=(port, models, each)) for each in range(clients)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let each client finish its request."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _use(self, port: int, models: int, seed: int) -> None:
        chance = random.Random(seed)
        with closing(connect(port)) as connection:
            while not self._stop.is_set():
                number, value = chance.randrange(1, models + 1), float(chance.randrange(100))
                status, answer, took_ms = post(connection, f"/models/m{number}", {"X": value})
                version = 0 if status != 200 else {value * number: 1, value * number + 0.5: 2}.get(answer["Y"], 0)
                if version:
                    self.answers.append((time.perf_counter(), took_ms, version))
                else:
                    self.lost.append(f"{status}: {answer}")


def update(port: int, repository: Path, models: int) -> None:
    """Update all models, one after another."""
    with closing(connect(port)) as connection:
        for number in range(1, models + 1):
            write_version(repository, number, 2)
            status, answer, _ = post(connection, f"/v2/repository/models/m{number}/load", {})
            if status != 200:
                raise SystemExit(answer["error"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", type=int, default=100)
    parser.add_argument("--clients", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(1, options.models + 1):
            write_version(Path(folder), number, 1)
        with serving(Path(folder), "--model-control-mode=explicit", "--load-model=*") as port:
            clients = Clients(port, options.models, options.clients)
            time.sleep(QUIET_S)
            begin = time.perf_counter()
            update(port, Path(folder), options.models)
            end = time.perf_counter()
            time.sleep(QUIET_S)
            clients.stop()
    before = [took_ms for at, took_ms, _ in clients.answers if at < begin]
    during = [took_ms for at, took_ms, _ in clients.answers if begin <= at < end]
    after = {version for at, _, version in clients.answers if at >= end + QUIET_S / 2}
    report(
        models_updated=options.models,
        update_of_all_s=end - begin,
        requests=len(clients.answers) + len(clients.lost),
        lost=len(clients.lost),
        first_lost=clients.lost[0] if clients.lost else "-",
        p99_before_ms=percentile(before, 0.99),
        p99_during_update_ms=percentile(during, 0.99),
        versions_after=", ".join(map(str, sorted(after))),
    )
    raise SystemExit(bool(clients.lost or after != {2}))
