"""Registration of shared memory over REST and gRPC, and servers with shared memory disabled."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from remora.errors import InvalidArgumentError, UnsupportedError
from remora.proto import inference_pb2 as pb
from remora.protocols.rest.routes import Route
from remora.protocols.shared_memory import REGION_RPCS, answer_region
from remora.tensors.shared_memory import DISABLED, SHARED_MEMORY_OFF, SharedMemory
from support.models.cuda_stand_in import StandIn


@pytest.mark.parametrize("action", ["system_shm", "cuda_shm"])
def test_without_shared_memory_there_is_nothing_to_list_and_nothing_is_registered(action: str) -> None:
    status = answer_region(Route(action, verb="status"), b"", DISABLED)
    assert (status.status, status.body) == (200, [b"[]"])
    unknown = answer_region(Route(action, verb="status", region="r"), b"", DISABLED)
    kind = action.removesuffix("_shm").encode()
    assert (unknown.status, unknown.body[0]) == (
        404,
        b'{"error":"Unable to find %b shared memory region: \'r\'"}' % kind,
    )
    for verb in ("register", "unregister"):
        refused = answer_region(Route(action, verb=verb, region="r"), b"{bad", DISABLED)
        assert refused.status == 501
        assert SHARED_MEMORY_OFF.encode() in b"".join(bytes(piece) for piece in refused.body)


@pytest.mark.parametrize("rpc", ["SystemSharedMemoryRegister", "CudaSharedMemoryRegister"])
def test_over_grpc_too(rpc: str) -> None:
    with pytest.raises(UnsupportedError, match="Client shared memory is disabled"):
        REGION_RPCS[rpc](b"", DISABLED)
    assert REGION_RPCS["SystemSharedMemoryStatus"](b"", DISABLED) == b""


HANDLE = {"b64": base64.b64encode(bytes(64)).decode()}
BAD_HANDLE = "'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t"


NO_MEMBER = "attempt to access non-existing object member"
NO_UINT = "attempt to access JSON non-unsigned-integer as unsigned-integer"
NO_TEXT = "attempt to access JSON non-string as string"


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ({}, 400, "Shared memory register request has no 'raw_handle' field"),
        ({"raw_handle": {"b64": "AA=="}, "device_id": 0, "byte_size": 4}, 400, BAD_HANDLE),
        ({"raw_handle": {"b64": "?"}, "device_id": 0, "byte_size": 4}, 400, BAD_HANDLE),
        ({"raw_handle": {}, "device_id": 0, "byte_size": 4}, 500, f"{NO_MEMBER} 'b64'"),
        ({"raw_handle": [HANDLE], "device_id": 0, "byte_size": 4}, 500, f"{NO_MEMBER} 'b64'"),
        ({"raw_handle": {"b64": 5}}, 500, NO_TEXT),
        ({"raw_handle": HANDLE, "byte_size": 4}, 500, f"{NO_MEMBER} 'device_id'"),
        ({"raw_handle": HANDLE, "device_id": "x"}, 500, f"{NO_MEMBER} 'byte_size'"),
        ({"raw_handle": HANDLE, "byte_size": "x"}, 500, NO_UINT),
        (
            {"raw_handle": HANDLE, "device_id": 1 << 40, "byte_size": 4},
            400,
            "failed to register CUDA shared memory region 'c': there is no device 1099511627776",
        ),
    ],
)
def test_an_incomplete_cuda_region_is_refused(
    tmp_path: Path, body: Mapping[str, object], status: int, text: str
) -> None:
    assert registering("cuda_shm", tmp_path, body) == (status, {"error": text})


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ({"byte_size": []}, 400, "Shared memory register request has no 'key' field"),
        ({"key": [True]}, 500, NO_TEXT),
        ({"key": 5, "offset": "x"}, 500, NO_TEXT),
        ({"key": "/a", "offset": "x"}, 500, NO_UINT),
        ({"key": "/a"}, 400, "Shared memory register request has no 'byte_size' field"),
        ({"key": "/a", "byte_size": -1}, 500, NO_UINT),
    ],
)
def test_a_regions_description_is_read_in_tritons_order(
    tmp_path: Path, body: Mapping[str, object], status: int, text: str
) -> None:
    assert registering("system_shm", tmp_path, body) == (status, {"error": text})


@pytest.mark.parametrize(("action", "kind"), [("system_shm", "system"), ("cuda_shm", "cuda")])
def test_a_region_needs_a_name_before_all_else(tmp_path: Path, action: str, kind: str) -> None:
    refused = answer_region(Route(action, verb="register"), b"{bad", SharedMemory(tmp_path))
    text = f"'region name' is necessary to register {kind} shared memory region"
    assert (refused.status, json.loads(refused.body[0])) == (400, {"error": text})


def registering(action: str, folder: Path, body: Mapping[str, object]) -> tuple[int, object]:
    """What registering the region c is answered."""
    answer = answer_region(Route(action, verb="register", region="c"), json.dumps(body).encode(), SharedMemory(folder))
    return answer.status, json.loads(b"".join(bytes(piece) for piece in answer.body))


def test_a_cuda_region_comes_and_goes_over_both_wires(tmp_path: Path, stand_in: StandIn) -> None:
    runtime = stand_in.runtime
    regions = SharedMemory(tmp_path, lambda: runtime)
    address = runtime.take(64)
    handle = runtime.handle_of(address)
    body = {"raw_handle": {"b64": base64.b64encode(handle).decode()}, "device_id": 0, "byte_size": 64}

    def ask(verb: str, region: str = "", sent: bytes = b"") -> tuple[int, bytes]:
        answer = answer_region(Route("cuda_shm", verb=verb, region=region), sent, regions)
        return answer.status, b"".join(bytes(piece) for piece in answer.body)

    assert ask("register", "c", json.dumps(body).encode()) == (200, b"")
    request = pb.CudaSharedMemoryRegisterRequest(name="d", raw_handle=handle, device_id=0, byte_size=32)
    assert REGION_RPCS["CudaSharedMemoryRegister"](request.SerializeToString(), regions) == b""
    assert ask("status") == (
        200, b'[{"name":"c","device_id":0,"byte_size":64},{"name":"d","device_id":0,"byte_size":32}]'
    )  # fmt: skip
    assert ask("status", "none") == (404, b'{"error":"Unable to find cuda shared memory region: \'none\'"}')
    asked = pb.CudaSharedMemoryStatusRequest(name="d").SerializeToString()
    told = pb.CudaSharedMemoryStatusResponse.FromString(REGION_RPCS["CudaSharedMemoryStatus"](asked, regions))
    assert [(row.name, row.device_id, row.byte_size) for row in told.regions.values()] == [("d", 0, 32)]
    assert REGION_RPCS["CudaSharedMemoryUnregister"](b"", regions) == b""
    assert ask("unregister", "c") == (200, b"")
    assert ask("status") == (200, b"[]")
    runtime.free(address)


def test_a_handle_of_another_length_is_refused_over_grpc(tmp_path: Path) -> None:
    request = pb.CudaSharedMemoryRegisterRequest(name="d", raw_handle=b"short", byte_size=4).SerializeToString()
    with pytest.raises(InvalidArgumentError, match="failed to register shared memory region: invalid args"):
        REGION_RPCS["CudaSharedMemoryRegister"](request, SharedMemory(tmp_path))
