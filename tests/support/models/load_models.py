"""Model that keeps sequences, for tests of loads."""

from __future__ import annotations

from pathlib import Path

COUNTER_CONFIG = """
backend: "python" max_batch_size: 8
input { name: "IN" data_type: TYPE_INT32 dims: 1 }
output { name: "OUT" data_type: TYPE_INT32 dims: 1 }
sequence_batching { direct { } }
instance_group { count: 1 kind: KIND_CPU }
"""
COUNTER = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.steps = {{}}

    def execute(self, requests):
        responses = []
        for request in requests:
            id_, start, end = request.correlation_id(), bool(request.flags() & 1), bool(request.flags() & 2)
            wrong = start == (id_ in self.steps)
            step = self.steps.pop(id_, 0) + 1
            if not end:
                self.steps[id_] = step
            array = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            error = pb_utils.TritonError("wrong") if wrong or end != (step == {length}) else None
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", array)], error))
        return responses
"""


def write_counter(repository: Path, name: str, *, length: int) -> None:
    """Write a model that fails for a sequence of another length, and for two requests that begin the same one."""
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(COUNTER_CONFIG)
    (repository / name / "1" / "model.py").write_text(COUNTER.format(length=length))
