"""Hot swaps under Triton's own gRPC client, models in worker processes: no call fails, each answer is its version's."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from conftest import free_ports
from support.servers.live_server import PATIENCE_S, write_version
from support.servers.live_server import process as server_process

SWAPS = 3


def test_no_call_fails_while_versions_are_swapped(tmp_path: Path, child_environment: dict[str, str]) -> None:
    grpc = pytest.importorskip("tritonclient.grpc", reason="Triton's client: pip install tritonclient[grpc]")
    repository = tmp_path / "models"
    repository.mkdir()
    write_version(repository, 1)
    http_port, grpc_port = free_ports(2)
    flags = ("--model-control-mode=explicit", "--load-model=m", "--allow-grpc=true", f"--grpc-port={grpc_port}")
    isolated = "--backend-config=python,isolation=process"
    answered, end = threading.Semaphore(0), threading.Event()
    versions: Counter[int] = Counter()
    wrong: list[object] = []

    def call(value: int) -> None:
        tensor = grpc.InferInput("IN", [1, 1], "INT32")
        with grpc.InferenceServerClient(f"127.0.0.1:{grpc_port}") as triton:
            while not end.is_set() and not wrong:
                value += 1
                tensor.set_data_from_numpy(np.array([[value]], np.int32))
                try:
                    result = triton.infer("m", [tensor])
                    version = int(result.get_response().model_version)
                    versions[version] += 1
                    if result.as_numpy("OUT").tolist() != [[value * version]]:
                        wrong.append(result.get_response())
                except Exception as error:
                    wrong.append(error)
                answered.release()

    with server_process(repository, http_port, child_environment, *flags, isolated) as server:
        assert server.stderr is not None
        assert next(line for line in server.stderr if line.startswith("READY"))  # gRPC listens by then
        callers = [threading.Thread(target=call, args=(first,)) for first in (0, 1000)]
        for caller in callers:
            caller.start()
        try:
            with grpc.InferenceServerClient(f"127.0.0.1:{grpc_port}") as triton:
                for version in range(2, SWAPS + 2):
                    assert all(answered.acquire(timeout=PATIENCE_S) for _ in range(10)), wrong
                    write_version(repository, version)
                    triton.load_model("m")
            while not versions[SWAPS + 1] and not wrong:  # answers of older versions may still be uncounted
                assert answered.acquire(timeout=PATIENCE_S), "no answers arrive any more"
        finally:
            end.set()
            for caller in callers:
                caller.join(PATIENCE_S)
    assert not wrong
    assert versions[SWAPS + 1] > 0
