"""Registering shared memory over V2, both wires; the law: regions are asked for by what is handed in, never found.

CUDA shared memory is known to clients and not offered: there are no regions of it (spec X03).
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping

from remora.errors import InvalidArgumentError, MalformedError, RemoraError, UnsupportedError
from remora.proto import inference_pb2 as pb
from remora.protocols import json_access as access
from remora.protocols.http_answer import JSON, HttpAnswer, encode_error
from remora.protocols.json_print import quoted
from remora.protocols.v2_grpc_form import parsed
from remora.protocols.v2_routes import Route
from remora.regions import SHARED_MEMORY_OFF, Disabled, Region, Regions, missing

_HANDLE_BYTES = 64
_NO_CUDA = "CUDA shared memory is not offered by this server: register system shared memory instead"


def answer_region(route: Route, body: bytes, regions: Regions) -> HttpAnswer:
    """The answer to a request of the actions "system_shm" and "cuda_shm"."""
    try:
        if route.action == "cuda_shm":
            return _cuda_answer(route, body, regions)
        if route.verb == "register":
            regions.register(_region(route.region, body, regions))
        elif route.verb == "unregister":
            regions.unregister(route.region)
        else:
            rows = [
                b'{"name":%b,"key":%b,"offset":%d,"byte_size":%d}'
                % (quoted(each.name), quoted(each.key), each.offset, each.byte_size)
                for each in regions.status(route.region)
            ]
            return HttpAnswer(200, (JSON,), [b"[%b]" % b",".join(rows)])
    except RemoraError as error:
        return encode_error(error, plain=False)
    return HttpAnswer(200, (JSON,), [])


def _region(name: str, body: bytes, regions: Regions) -> Region:
    _check_enabled(regions)  # before anything is read
    request = access.document(body)
    found: dict[str, int] = {"offset": 0}
    for field in ("key", "byte_size"):
        if not access.find(request, field)[0]:
            raise InvalidArgumentError(f"Shared memory register request has no '{field}' field")
    for field in ("offset", "byte_size"):
        present, value = access.find(request, field)
        if present:
            if not access.is_uint(value):
                raise MalformedError(access.NOT_UINT)
            found[field] = value
    key = request["key"]
    if not isinstance(key, str):
        raise MalformedError(access.NOT_TEXT)
    return Region(name, key, found["offset"], found["byte_size"])


def _cuda_answer(route: Route, body: bytes, regions: Regions) -> HttpAnswer:
    if route.verb == "status":
        _cuda_status_of(route.region, regions)
        return HttpAnswer(200, (JSON,), [b"[]"])
    _check_enabled(regions)
    if route.verb == "register":
        _, handle = access.find(access.document(body), "raw_handle")
        text = access.find(handle, "b64")[1]
        try:
            raw = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
        except ValueError:
            raw = b""
        raise _cuda_refusal(raw)
    return HttpAnswer(200, (JSON,), [])


def _cuda_status_of(name: str, regions: Regions) -> None:
    if name and not isinstance(regions, Disabled):
        raise missing(name, "cuda ")


def _cuda_refusal(handle: bytes) -> RemoraError:
    """Why a region of CUDA memory is not registered (spec X03)."""
    if len(handle) != _HANDLE_BYTES:
        return InvalidArgumentError("'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t")
    return UnsupportedError(_NO_CUDA)


def _check_enabled(regions: Regions) -> None:
    if isinstance(regions, Disabled):
        raise UnsupportedError(SHARED_MEMORY_OFF)


# -- gRPC -----------------------------------------------------------------------------------------------------------


def _register(message: bytes, regions: Regions) -> bytes:
    request = parsed(pb.SystemSharedMemoryRegisterRequest, message)
    regions.register(Region(request.name, request.key, request.offset, request.byte_size))
    return b""


def _unregister(message: bytes, regions: Regions) -> bytes:
    regions.unregister(parsed(pb.SystemSharedMemoryUnregisterRequest, message).name)
    return b""


def _status(message: bytes, regions: Regions) -> bytes:
    row = pb.SystemSharedMemoryStatusResponse.RegionStatus
    found = regions.status(parsed(pb.SystemSharedMemoryStatusRequest, message).name)
    rows = {each.name: row(**each._asdict()) for each in found}
    return pb.SystemSharedMemoryStatusResponse(regions=rows).SerializeToString()


def _cuda_status(message: bytes, regions: Regions) -> bytes:
    _cuda_status_of(parsed(pb.CudaSharedMemoryStatusRequest, message).name, regions)
    return b""


def _cuda_register(message: bytes, regions: Regions) -> bytes:
    request = parsed(pb.CudaSharedMemoryRegisterRequest, message)
    _check_enabled(regions)
    raise _cuda_refusal(request.raw_handle)


def _cuda_unregister(message: bytes, regions: Regions) -> bytes:
    parsed(pb.CudaSharedMemoryUnregisterRequest, message)
    _check_enabled(regions)
    return b""


REGION_RPCS: Mapping[str, Callable[[bytes, Regions], bytes]] = {
    "SystemSharedMemoryStatus": _status,
    "SystemSharedMemoryRegister": _register,
    "SystemSharedMemoryUnregister": _unregister,
    "CudaSharedMemoryStatus": _cuda_status,
    "CudaSharedMemoryRegister": _cuda_register,
    "CudaSharedMemoryUnregister": _cuda_unregister,
}
"""The RPCs about shared memory by method name: request bytes and regions to response bytes; they raise RemoraError."""
