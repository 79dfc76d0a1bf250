"""Registration of shared memory over V2 REST and gRPC, as codecs around the given regions."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Any

from remora.errors import InvalidArgumentError, MalformedError, RemoraError, UnsupportedError
from remora.proto import inference_pb2 as pb
from remora.protocols.grpc.request import parsed
from remora.protocols.json import access
from remora.protocols.json.printer import quoted
from remora.protocols.rest.answer import JSON, HttpAnswer, encode_error
from remora.protocols.rest.routes import Route
from remora.tensors.shared_memory import SHARED_MEMORY_OFF, CudaRegion, Disabled, R, Region, Regions, refused

_HANDLE_BYTES = 64
_MOST_DEVICES = 1 << 16


def answer_region(route: Route, body: bytes, regions: Regions) -> HttpAnswer:
    """Answer a request of the actions "system_shm" and "cuda_shm"."""
    try:
        if route.action == "cuda_shm":
            return _answer(CudaRegion, _cuda_region, route, body, regions)
        return _answer(Region, _region, route, body, regions)
    except RemoraError as error:
        return encode_error(error, plain=False)


def _answer(kind: type[R], read: Callable[[str, Any], R], route: Route, body: bytes, regions: Regions) -> HttpAnswer:
    if route.verb == "status":
        rows = [_row(each) for each in regions.status(kind, route.region)]
        return HttpAnswer(200, (JSON,), [b"[%b]" % b",".join(rows)])
    if route.verb == "register":
        _check_enabled(regions)  # before the body is read
        if not route.region:
            kind_name = "system" if kind is Region else "cuda"
            raise InvalidArgumentError(f"'region name' is necessary to register {kind_name} shared memory region")
        regions.register(read(route.region, access.document(body)))
    else:
        regions.unregister(kind, route.region)
    return HttpAnswer(200, (JSON,), [])


def _row(region: Region | CudaRegion) -> bytes:
    name = quoted(region.name)
    if isinstance(region, CudaRegion):
        return b'{"name":%b,"device_id":%d,"byte_size":%d}' % (name, region.device_id, region.byte_size)
    return b'{"name":%b,"key":%b,"offset":%d,"byte_size":%d}' % (
        name, quoted(region.key), region.offset, region.byte_size
    )  # fmt: skip


def _region(name: str, request: Any) -> Region:
    _require(request, "key")
    key = _text(request["key"])
    offset = _number(request, "offset")
    _require(request, "byte_size")
    return Region(name, key, offset, _number(request, "byte_size"))


def _cuda_region(name: str, request: Any) -> CudaRegion:
    _require(request, "raw_handle")
    text = _text(_member(request["raw_handle"], "b64"))
    byte_size, device_id = (_uint(_member(request, field)) for field in ("byte_size", "device_id"))
    try:
        handle = base64.b64decode(text, validate=True)
    except ValueError:
        handle = b""
    return _checked(CudaRegion(name, handle, device_id, byte_size))


def _require(request: Any, *fields: str) -> None:
    for field in fields:
        if not access.find(request, field)[0]:
            raise InvalidArgumentError(f"Shared memory register request has no '{field}' field")


def _member(document: Any, field: str) -> Any:
    present, value = access.find(document, field)
    if not present:
        raise MalformedError(f"attempt to access non-existing object member '{field}'")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise MalformedError(access.NOT_TEXT)
    return value


def _number(request: Any, field: str) -> int:
    present, value = access.find(request, field)
    return _uint(value) if present else 0


def _uint(value: Any) -> int:
    if not access.is_uint(value):
        raise MalformedError(access.NOT_UINT)
    return int(value)


def _checked(region: CudaRegion) -> CudaRegion:
    if len(region.handle) != _HANDLE_BYTES:
        raise _no_handle()
    if not 0 <= region.device_id < _MOST_DEVICES:
        raise refused(region, f"there is no device {region.device_id}")
    return region


def _no_handle() -> InvalidArgumentError:
    return InvalidArgumentError("'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t")


def _check_enabled(regions: Regions) -> None:
    if isinstance(regions, Disabled):
        raise UnsupportedError(SHARED_MEMORY_OFF)


# -- gRPC -----------------------------------------------------------------------------------------------------------


def _register(message: bytes, regions: Regions) -> bytes:
    request = parsed(pb.SystemSharedMemoryRegisterRequest, message)
    regions.register(Region(request.name, request.key, request.offset, request.byte_size))
    return b""


def _unregister(message: bytes, regions: Regions) -> bytes:
    regions.unregister(Region, parsed(pb.SystemSharedMemoryUnregisterRequest, message).name)
    return b""


def _status(message: bytes, regions: Regions) -> bytes:
    row = pb.SystemSharedMemoryStatusResponse.RegionStatus
    found = regions.status(Region, parsed(pb.SystemSharedMemoryStatusRequest, message).name)
    rows = {each.name: row(**each._asdict()) for each in found}
    return pb.SystemSharedMemoryStatusResponse(regions=rows).SerializeToString()


def _cuda_status(message: bytes, regions: Regions) -> bytes:
    row = pb.CudaSharedMemoryStatusResponse.RegionStatus
    found = regions.status(CudaRegion, parsed(pb.CudaSharedMemoryStatusRequest, message).name)
    rows = {each.name: row(name=each.name, device_id=each.device_id, byte_size=each.byte_size) for each in found}
    return pb.CudaSharedMemoryStatusResponse(regions=rows).SerializeToString()


def _cuda_register(message: bytes, regions: Regions) -> bytes:
    request = parsed(pb.CudaSharedMemoryRegisterRequest, message)
    _check_enabled(regions)
    if len(request.raw_handle) != _HANDLE_BYTES:
        raise InvalidArgumentError("failed to register shared memory region: invalid args")
    regions.register(_checked(CudaRegion(request.name, request.raw_handle, request.device_id, request.byte_size)))
    return b""


def _cuda_unregister(message: bytes, regions: Regions) -> bytes:
    regions.unregister(CudaRegion, parsed(pb.CudaSharedMemoryUnregisterRequest, message).name)
    return b""


REGION_RPCS: Mapping[str, Callable[[bytes, Regions], bytes]] = {
    "SystemSharedMemoryStatus": _status,
    "SystemSharedMemoryRegister": _register,
    "SystemSharedMemoryUnregister": _unregister,
    "CudaSharedMemoryStatus": _cuda_status,
    "CudaSharedMemoryRegister": _cuda_register,
    "CudaSharedMemoryUnregister": _cuda_unregister,
}
"""RPCs about shared memory by method name: request bytes and regions to response bytes; they raise RemoraError."""
