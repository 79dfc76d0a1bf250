"""gRPC server reflection for clients such as grpcurl; the law: built when the first of them asks, and names no package
of ours.

Our messages live in protobuf packages of our own, so that clients' copies of the protocol can share the process. What
reflection shows is the same files under the names of the protocol, in a descriptor pool of their own.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import grpc
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto

from remora.proto import inference_pb2, model_config_pb2

_log = logging.getLogger(__name__)

# Version 1 has the same messages; clients ask for it first.
_METHODS = frozenset(
    f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo" for version in ("v1", "v1alpha")
)


class Reflection:
    """A generic handler for grpcio; without the package grpcio-reflection it answers nothing (UNIMPLEMENTED).

    Args:
        services: full names of the services to list, besides reflection itself.
    """

    def __init__(self, services: Sequence[str]) -> None:
        self._services = services
        self._handler: Any = None

    def service(self, details: Any) -> Any:
        """The handler of a method, None for those of others. grpcio asks from one thread."""
        if details.method not in _METHODS:
            return None
        if self._handler is None:
            try:
                self._handler = self._build()
            except ImportError:
                _log.warning("gRPC reflection is off: it needs the package grpcio-reflection")
        return self._handler

    def _build(self) -> Any:
        from google.protobuf.descriptor_pool import DescriptorPool
        from grpc_reflection.v1alpha import reflection, reflection_pb2

        pool = DescriptorPool()
        for file in public_files():
            pool.AddSerializedFile(file.SerializeToString())
        servicer = reflection.ReflectionServicer((*self._services, reflection.SERVICE_NAME), pool=pool)
        return grpc.stream_stream_rpc_method_handler(
            servicer.ServerReflectionInfo,
            request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
            response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
        )


def public_files() -> list[FileDescriptorProto]:
    """The protocol's files as its clients know them, each after those it imports."""
    return [
        _renamed(model_config_pb2.DESCRIPTOR, "model_config.proto"),
        _renamed(inference_pb2.DESCRIPTOR, "grpc_service.proto"),
        _health_file(),
    ]


_PUBLIC_PACKAGE = "inference"


def _renamed(descriptor: Any, name: str) -> FileDescriptorProto:
    """A file of ours with the protocol's own package and file names."""
    file = FileDescriptorProto()
    descriptor.CopyToProto(file)
    old, new = f".{file.package}.", f".{_PUBLIC_PACKAGE}."
    file.name, file.package = name, _PUBLIC_PACKAGE
    file.dependency[:] = [dependency.rpartition("/")[2] for dependency in file.dependency]
    pending = list(file.message_type)
    while pending:
        message = pending.pop()
        pending.extend(message.nested_type)
        for field in (each for each in message.field if each.type_name):
            field.type_name = field.type_name.replace(old, new, 1)
    for service in file.service:
        for method in service.method:
            method.input_type = method.input_type.replace(old, new, 1)
            method.output_type = method.output_type.replace(old, new, 1)
    return file


def _health_file() -> FileDescriptorProto:
    """grpc.health.v1 as far as it is served: Check [R02]."""
    file = FileDescriptorProto(name="grpc/health/v1/health.proto", package="grpc.health.v1", syntax="proto3")
    optional = FieldDescriptorProto.LABEL_OPTIONAL
    request = file.message_type.add(name="HealthCheckRequest")
    request.field.add(name="service", number=1, label=optional, type=FieldDescriptorProto.TYPE_STRING)
    response = file.message_type.add(name="HealthCheckResponse")
    states = response.enum_type.add(name="ServingStatus")
    for number, state in enumerate(("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")):
        states.value.add(name=state, number=number)
    response.field.add(
        name="status",
        number=1,
        label=optional,
        type=FieldDescriptorProto.TYPE_ENUM,
        type_name=".grpc.health.v1.HealthCheckResponse.ServingStatus",
    )
    health = file.service.add(name="Health")
    health.method.add(
        name="Check",
        input_type=".grpc.health.v1.HealthCheckRequest",
        output_type=".grpc.health.v1.HealthCheckResponse",
    )
    return file
