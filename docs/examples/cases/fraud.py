"""Fraud detection on streams of card payments: a GRU whose state per card the server keeps.

    python docs/examples/cases/fraud.py --seconds 10 --rate 200

Each card is a sequence: a request has one payment, and the state of the card's earlier payments stays in the server.
The network is untrained, so the scores mean nothing; its size is that of a real one (16 features, 128 units). Needs
`pip install '.[onnx]' onnx`.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from serving import connect, percentile, post, report, serving

FEATURES, UNITS, CARDS = 16, 128, 1000
WARM = 200
CONFIG = f"""
name: "fraud" platform: "onnxruntime_onnx" max_batch_size: 64
input {{ name: "PAYMENT" data_type: TYPE_FP32 dims: {FEATURES} }}
output {{ name: "SCORE" data_type: TYPE_FP32 dims: 1 }}
sequence_batching {{
  max_sequence_idle_microseconds: 3600000000
  oldest {{ max_candidate_sequences: {CARDS} }}
  state {{ input_name: "STATE" output_name: "STATE_NOW" data_type: TYPE_FP32 dims: {UNITS} }}
}}
"""


def write_model(repository: Path) -> None:
    """Write the repository with the model `fraud`."""
    chance = np.random.default_rng(7)

    def weight(name: str, *shape: int) -> onnx.TensorProto:
        return numpy_helper.from_array((chance.standard_normal(shape) / 10).astype(np.float32), name)

    gates = 3 * UNITS
    constants = [
        weight("W", 1, gates, FEATURES),
        weight("R", 1, gates, UNITS),
        weight("B", 1, 2 * gates),
        weight("OUT", UNITS, 1),
        numpy_helper.from_array(np.array([0], np.int64), "first"),
    ]
    nodes = [
        helper.make_node("Unsqueeze", ["PAYMENT", "first"], ["steps"]),
        helper.make_node("Unsqueeze", ["STATE", "first"], ["before"]),
        helper.make_node("GRU", ["steps", "W", "R", "B", "", "before"], ["", "after"], hidden_size=UNITS),
        helper.make_node("Squeeze", ["after", "first"], ["STATE_NOW"]),
        helper.make_node("MatMul", ["STATE_NOW", "OUT"], ["logit"]),
        helper.make_node("Sigmoid", ["logit"], ["SCORE"]),
    ]

    def tensor(name: str, size: int) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", size])

    graph = helper.make_graph(
        nodes,
        "fraud",
        [tensor("PAYMENT", FEATURES), tensor("STATE", UNITS)],
        [tensor("SCORE", 1), tensor("STATE_NOW", UNITS)],
        constants,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    folder = repository / "fraud" / "1"
    folder.mkdir(parents=True)
    onnx.save(model, folder / "model.onnx")
    (repository / "fraud" / "config.pbtxt").write_text(CONFIG)


def measure(port: int, seconds: float, rate: float) -> None:
    """Send payments at a rate, of cards in random order, and print the latencies."""
    chance, seen, times, scores = random.Random(7), set[int](), [], {}
    with closing(connect(port)) as connection:
        begin = time.perf_counter()
        while (now := time.perf_counter()) < begin + seconds or len(times) <= WARM:
            card = chance.randrange(1, CARDS + 1)
            payment = [round(chance.gauss(0, 1), 3) for _ in range(FEATURES)]
            request = {
                "parameters": {"sequence_id": card, "sequence_start": card not in seen, "sequence_end": False},
                "inputs": [{"name": "PAYMENT", "datatype": "FP32", "shape": [1, FEATURES], "data": payment}],
            }
            seen.add(card)
            status, answer, took_ms = post(connection, "/v2/models/fraud/infer", request)
            if status != 200:
                raise SystemExit(answer["error"])
            scores[card] = answer["outputs"][0]["data"][0]
            times.append(took_ms)
            if rate:
                time.sleep(max(now + 1 / rate - time.perf_counter(), 0))
    kept = times[WARM:]
    report(
        payments=len(kept),
        cards_with_state=len(seen),
        p50_ms=percentile(kept, 0.5),
        p99_ms=percentile(kept, 0.99),
        p99_9_ms=percentile(kept, 0.999),
        different_scores=len(set(scores.values())),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--rate", type=float, default=200, help="payments per second; 0 for as many as possible")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        with serving(Path(folder), "--exit-timeout-secs=1") as port:
            measure(port, options.seconds, options.rate)
