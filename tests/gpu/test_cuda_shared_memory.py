"""Regions of a GPU's memory through tritonclient: made by the client, opened by the server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import RunningServer, Serving
from support.models.device_models import X, add_onnx

SIZE = X.nbytes


@pytest.fixture(scope="module")
def server(serving: Serving, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """`double` on the GPU, of a server that lets clients share memory."""
    models: Path = tmp_path_factory.mktemp("shared")
    add_onnx(models, "double", "instance_group { kind: KIND_GPU }")
    with serving(models, "--allow-client-shm=true") as running:
        yield running


@pytest.mark.parametrize("wire", ["http", "grpc"])
def test_tensors_come_from_and_go_to_the_clients_gpu_memory(server: RunningServer, wire: str) -> None:
    module: Any = pytest.importorskip(f"tritonclient.{wire}", reason="needs tritonclient[all,cuda]")
    shm: Any = pytest.importorskip("tritonclient.utils.cuda_shared_memory", reason="needs tritonclient[all,cuda]")
    handle = shm.create_shared_memory_region("both", 2 * SIZE, 0)
    try:
        with module.InferenceServerClient(f"127.0.0.1:{getattr(server, wire)}") as client:
            client.register_cuda_shared_memory("both", shm.get_raw_handle(handle), 0, 2 * SIZE)
            sent = module.InferInput("x", list(X.shape), "FP32")
            sent.set_shared_memory("both", SIZE)
            wanted = module.InferRequestedOutput("y")
            wanted.set_shared_memory("both", SIZE, offset=SIZE)
            for factor in (1, 3):
                shm.set_shared_memory_region(handle, [X * factor])
                client.infer("double", [sent], outputs=[wanted])
                whole = shm.get_contents_as_numpy(handle, np.float32, [2, *X.shape])
                np.testing.assert_allclose(whole[1], X * factor * 2)
            assert "both" in str(client.get_cuda_shared_memory_status())
            with pytest.raises(module.InferenceServerException, match="already in manager"):
                client.register_cuda_shared_memory("both", shm.get_raw_handle(handle), 0, 2 * SIZE)
            with pytest.raises(module.InferenceServerException, match="failed to register CUDA shared memory region"):
                client.register_cuda_shared_memory("more", shm.get_raw_handle(handle), 0, 1 << 34)
            client.unregister_cuda_shared_memory("both")
            with pytest.raises(module.InferenceServerException, match="Unable to find shared memory region"):
                client.infer("double", [sent], outputs=[wanted])
    finally:
        shm.destroy_shared_memory_region(handle)
