"""SageMaker's port in this process, and models of its tests."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from remora.server.host import Host
from support.servers.hosting import Got, ask, running

V2 = json.dumps({"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}).encode()
"""A request that the model `scale` answers well."""

SEQUENCES = """
backend: "python" max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: 1 }
output { name: "y" data_type: TYPE_FP32 dims: 1 }
sequence_batching {
  max_sequence_idle_microseconds: 60000000
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [0, 1] } }
}
parameters { key: "ISOLATION" value { string_value: "thread" } }
"""
SUMS = '''
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    """Adds up the numbers of a sequence."""

    def initialize(self, args):
        self.sum = 0.0

    def execute(self, requests):
        answers = []
        for request in requests:
            start = pb_utils.get_input_tensor_by_name(request, "START").as_numpy().item()
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            self.sum = x.item() + (0.0 if start else self.sum)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", x * 0 + self.sum)]))
        return answers
'''
COUNTER = '''
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    """Answers with three numbers, one after the other; fails or runs out of memory when told."""

    def execute(self, requests):
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            sender = request.get_response_sender()
            for number in range(3):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", x + number)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
'''
COUNTS = """
backend: "python"
input { name: "x" data_type: TYPE_FP32 dims: 1 }
output { name: "y" data_type: TYPE_FP32 dims: 1 }
model_transaction_policy { decoupled: true }
parameters { key: "ISOLATION" value { string_value: "thread" } }
"""


def python_model(folder: Path, config: str, code: str) -> None:
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(config)
    (folder / "1" / "model.py").write_text(code)


@contextmanager
def runtime_client(port: int) -> Iterator[Any]:
    """Yield boto3's client of a runtime API at a port, which sends each request once."""
    import boto3  # imported here, because most tests of the platform need no client

    client = boto3.client(
        "sagemaker-runtime",
        endpoint_url=f"http://127.0.0.1:{port}",
        region_name="us-east-1",
        aws_access_key_id="x",
        aws_secret_access_key="y",
        config=boto3.session.Config(retries={"total_max_attempts": 1}, read_timeout=70),
    )
    with closing(client):
        yield client


class Door:
    """Platform's port of a server in this process."""

    def __init__(self, port: int) -> None:
        self.port = port

    def ask(self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None) -> Got:
        """Send one request on a new connection."""
        return ask(self.port, method, path, body, headers)


@contextmanager
def opened(host: Host) -> Iterator[Door]:
    """Yield the host's ready server, stopped at the end."""
    with running(host) as ports:
        yield Door(ports.http)
