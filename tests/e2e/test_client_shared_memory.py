"""tritonclient's shared memory against a real server: inputs and outputs that never travel."""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from conftest import RunningServer, Serving
from support.models.cuda_stand_in import StandIn

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="POSIX shared memory is looked for in /dev/shm")
ROWS = np.arange(8, dtype=np.float32).reshape(2, 4)
SIZE = ROWS.nbytes


@pytest.fixture(scope="module")
def server(serving: Serving, tmp_path_factory: pytest.TempPathFactory, stand_in: StandIn) -> Iterator[RunningServer]:
    """One model, `double` (FP32, batches), of a server that lets clients share memory and whose GPU is a stand-in."""
    onnx = pytest.importorskip("onnx", reason="the model of this test is made with onnx: pip install '.[dev]'")
    from onnx import helper

    folder = tmp_path_factory.mktemp("shared") / "double"
    kind = onnx.TensorProto.FLOAT
    ends = [helper.make_tensor_value_info(name, kind, ["batch", 4]) for name in ("INPUT", "OUTPUT")]
    graph = helper.make_graph([helper.make_node("Add", ["INPUT", "INPUT"], ["OUTPUT"])], "g", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    (folder / "1").mkdir(parents=True)
    onnx.save(model, str(folder / "1" / "model.onnx"))
    places = os.pathsep.join(filter(None, [str(stand_in.folder), os.environ.get("LD_LIBRARY_PATH")]))
    with serving(folder.parent, "--allow-client-shm=true", LD_LIBRARY_PATH=places) as running:
        yield running


@pytest.mark.parametrize("wire", ["http", "grpc"])
def test_tensors_come_from_and_go_to_shared_memory(server: RunningServer, wire: str) -> None:
    client_module: Any = pytest.importorskip(f"tritonclient.{wire}", reason="needs tritonclient[all]")
    shm: Any = pytest.importorskip("tritonclient.utils.shared_memory", reason="needs tritonclient[all]")
    key = f"/remora_test_{os.getpid()}_{wire}"
    handle = shm.create_shared_memory_region("both", key, 2 * SIZE)
    try:
        shm.set_shared_memory_region(handle, [ROWS])
        with client_module.InferenceServerClient(f"127.0.0.1:{getattr(server, wire)}") as client:
            client.register_system_shared_memory("both", key, 2 * SIZE)
            sent = client_module.InferInput("INPUT", [2, 4], "FP32")
            sent.set_shared_memory("both", SIZE)
            wanted = client_module.InferRequestedOutput("OUTPUT")
            wanted.set_shared_memory("both", SIZE, offset=SIZE)
            for factor in (1, 3):  # the second request is the first one's, byte for byte
                shm.set_shared_memory_region(handle, [ROWS * factor])
                client.infer("double", [sent], outputs=[wanted])
                found = shm.get_contents_as_numpy(handle, np.float32, [2, 4], offset=SIZE)
                np.testing.assert_array_equal(found, ROWS * factor * 2)
            client.unregister_system_shared_memory("both")
            with pytest.raises(client_module.InferenceServerException, match="Unable to find shared memory region"):
                client.infer("double", [sent], outputs=[wanted])
    finally:
        shm.destroy_shared_memory_region(handle)


@pytest.mark.parametrize("wire", ["http", "grpc"])
def test_tensors_come_from_and_go_to_a_gpus_memory(server: RunningServer, stand_in: StandIn, wire: str) -> None:
    """The client's calls are the real ones; device memory is a stand-in's, which both processes have loaded."""
    client_module: Any = pytest.importorskip(f"tritonclient.{wire}", reason="needs tritonclient[all]")
    cuda = stand_in.runtime
    address, found = cuda.take(2 * SIZE), np.empty_like(ROWS)
    handle = base64.b64encode(cuda.handle_of(address))
    with client_module.InferenceServerClient(f"127.0.0.1:{getattr(server, wire)}") as client:
        client.register_cuda_shared_memory("gpu", handle, 0, 2 * SIZE)
        sent = client_module.InferInput("INPUT", [2, 4], "FP32")
        sent.set_shared_memory("gpu", SIZE)
        wanted = client_module.InferRequestedOutput("OUTPUT")
        wanted.set_shared_memory("gpu", SIZE, offset=SIZE)
        for factor in (1, 3):
            given = ROWS * factor
            cuda.copy(address, given.ctypes.data, SIZE)
            client.infer("double", [sent], outputs=[wanted])
            cuda.copy(found.ctypes.data, address + SIZE, SIZE)
            np.testing.assert_array_equal(found, given * 2)
        assert "gpu" in str(client.get_cuda_shared_memory_status())
        wanted.set_shared_memory("gpu", SIZE, offset=SIZE + 4)
        with pytest.raises(client_module.InferenceServerException, match="Invalid offset"):
            client.infer("double", [sent], outputs=[wanted])
        with pytest.raises(client_module.InferenceServerException, match="invalid args"):
            client.register_cuda_shared_memory("more", handle, 0, 1 << 20)
        client.unregister_cuda_shared_memory("gpu")
        assert "gpu" not in str(client.get_cuda_shared_memory_status())
    cuda.free(address)
