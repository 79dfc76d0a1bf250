"""gRPC server reflection for clients such as grpcurl, on message bytes.

remora's messages are in separate protobuf packages, so that client copies of the protocol can be imported into the same
process. Reflection shows the same files under the protocol's names, from a separate descriptor pool that is built at
the first request. The module needs only protobuf.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from remora.errors import MalformedError
from remora.proto import inference_pb2, model_config_pb2

_VERSIONS = ("v1", "v1alpha")
"""Versions with the same content: clients request the first, and older clients know only the second."""
REFLECTION_SERVICES = tuple(f"grpc.reflection.{version}.ServerReflection" for version in _VERSIONS)
REFLECTION_METHOD = "ServerReflectionInfo"
_PATHS = frozenset(f"/{service}/{REFLECTION_METHOD}" for service in REFLECTION_SERVICES)
_INVALID_ARGUMENT, _NOT_FOUND = 3, 5


class Reflection:
    """Behaviour of the reflection RPCs. Thread-safe.

    Args:
        services: full names of the services to list, besides reflection itself.
    """

    def __init__(self, services: Sequence[str]) -> None:
        self._services = sorted((*services, *REFLECTION_SERVICES))

    def find(self, path: str) -> Callable[[bytes], bytes] | None:
        """Return what answers a message of the RPC at ``path``, or None if it does not belong to reflection."""
        return self.answer if path in _PATHS else None

    def answer(self, message: bytes) -> bytes:
        """Answer a ServerReflectionRequest with a ServerReflectionResponse.

        Raises MalformedError.
        """
        try:
            request = self._protocol.request.FromString(message)
        except DecodeError as error:
            raise MalformedError("the bytes are damaged or no ServerReflectionRequest") from error
        response = self._protocol.response(valid_host=request.host, original_request=request)
        try:
            self._answer(request, response)
        except KeyError:
            response.error_response.error_code = _NOT_FOUND
            response.error_response.error_message = "not found"
        answer: bytes = response.SerializeToString()
        return answer

    def _answer(self, request: Any, response: Any) -> None:
        """Fill in ``response``. Raises KeyError for a name that is missing in the pool."""
        pool = self._protocol.pool
        match request.WhichOneof("message_request"):
            case "list_services":
                for name in self._services:
                    response.list_services_response.service.add(name=name)
            case "file_by_filename":
                _add_files(response, pool.FindFileByName(request.file_by_filename))
            case "file_containing_symbol":
                _add_files(response, pool.FindFileContainingSymbol(request.file_containing_symbol))
            case "file_containing_extension":
                raise KeyError(request.file_containing_extension.containing_type)  # no file has extensions
            case "all_extension_numbers_of_type":
                found = pool.FindMessageTypeByName(request.all_extension_numbers_of_type)
                response.all_extension_numbers_response.base_type_name = found.full_name
            case _:
                response.error_response.error_code = _INVALID_ARGUMENT
                response.error_response.error_message = "invalid argument: the request asks for nothing"

    @cached_property
    def _protocol(self) -> _Protocol:
        pool = DescriptorPool()
        for file in public_files():
            pool.AddSerializedFile(file.SerializeToString())
        package = REFLECTION_SERVICES[0].rpartition(".")[0]
        request, response = (
            GetMessageClass(pool.FindMessageTypeByName(f"{package}.ServerReflection{kind}"))
            for kind in ("Request", "Response")
        )
        return _Protocol(pool, request, response)


class _Protocol(NamedTuple):
    """Descriptor pool of the public files and the classes of the reflection messages."""

    pool: Any
    request: Any
    response: Any


def _add_files(response: Any, file: Any) -> None:
    """Add a file and all files that it imports, each once."""
    pending, names = [file], set()
    while pending:
        found = pending.pop()
        if found.name in names:
            continue
        names.add(found.name)
        pending += found.dependencies
        response.file_descriptor_response.file_descriptor_proto.append(found.serialized_pb)


def public_files() -> list[FileDescriptorProto]:
    """Return the protocol's files under their public names, each after its imports."""
    return [
        _renamed(model_config_pb2.DESCRIPTOR, "model_config.proto"),
        _renamed(inference_pb2.DESCRIPTOR, "grpc_service.proto"),
        _health_file(),
        *(_reflection_file(version) for version in _VERSIONS),
    ]


_PUBLIC_PACKAGE = "inference"


def _renamed(descriptor: Any, name: str) -> FileDescriptorProto:
    """Return one of remora's files under the protocol's package and file names."""
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
    """Return grpc.health.v1 with the only method that is served, Check [R02]."""
    file = FileDescriptorProto(name="grpc/health/v1/health.proto", package="grpc.health.v1", syntax="proto3")
    _add_message(file, "HealthCheckRequest", _Field("service", 1, _STRING))
    _add_message(file, "HealthCheckResponse", _Field("status", 1, "HealthCheckResponse.ServingStatus"))
    states = file.message_type[1].enum_type.add(name="ServingStatus")
    for number, state in enumerate(("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")):
        states.value.add(name=state, number=number)
    file.message_type[1].field[0].type = FieldDescriptorProto.TYPE_ENUM
    _add_method(file, "Health", "Check", "HealthCheckRequest", "HealthCheckResponse")
    return file


def _reflection_file(version: str) -> FileDescriptorProto:
    """Return the descriptor of grpc.reflection.

    It is defined in https://github.com/grpc/grpc/tree/master/src/proto/grpc/reflection.
    """
    name, package = f"grpc/reflection/{version}/reflection.proto", f"grpc.reflection.{version}"
    file = FileDescriptorProto(name=name, package=package, syntax="proto3")
    _add_message(
        file,
        "ServerReflectionRequest",
        _Field("host", 1, _STRING),
        _Field("file_by_filename", 3, _STRING, "message_request"),
        _Field("file_containing_symbol", 4, _STRING, "message_request"),
        _Field("file_containing_extension", 5, "ExtensionRequest", "message_request"),
        _Field("all_extension_numbers_of_type", 6, _STRING, "message_request"),
        _Field("list_services", 7, _STRING, "message_request"),
    )
    _add_message(
        file,
        "ExtensionRequest",
        _Field("containing_type", 1, _STRING),
        _Field("extension_number", 2, _INT32),
    )
    _add_message(
        file,
        "ServerReflectionResponse",
        _Field("valid_host", 1, _STRING),
        _Field("original_request", 2, "ServerReflectionRequest"),
        _Field("file_descriptor_response", 4, "FileDescriptorResponse", "message_response"),
        _Field("all_extension_numbers_response", 5, "ExtensionNumberResponse", "message_response"),
        _Field("list_services_response", 6, "ListServiceResponse", "message_response"),
        _Field("error_response", 7, "ErrorResponse", "message_response"),
    )
    _add_message(file, "FileDescriptorResponse", _Field("file_descriptor_proto", 1, _BYTES, repeated=True))
    _add_message(
        file,
        "ExtensionNumberResponse",
        _Field("base_type_name", 1, _STRING),
        _Field("extension_number", 2, _INT32, repeated=True),
    )
    _add_message(file, "ListServiceResponse", _Field("service", 1, "ServiceResponse", repeated=True))
    _add_message(file, "ServiceResponse", _Field("name", 1, _STRING))
    _add_message(file, "ErrorResponse", _Field("error_code", 1, _INT32), _Field("error_message", 2, _STRING))
    service = _add_method(
        file, "ServerReflection", REFLECTION_METHOD, "ServerReflectionRequest", "ServerReflectionResponse"
    )
    service.client_streaming = service.server_streaming = True
    return file


_STRING, _BYTES, _INT32 = (
    FieldDescriptorProto.TYPE_STRING,
    FieldDescriptorProto.TYPE_BYTES,
    FieldDescriptorProto.TYPE_INT32,
)


class _Field(NamedTuple):
    """Field of a message.

    ``kind`` is a scalar type, or the name of a message or enum of the same file.
    """

    name: str
    number: int
    kind: Any
    oneof: str = ""
    repeated: bool = False


def _add_message(file: FileDescriptorProto, name: str, *fields: _Field) -> None:
    message = file.message_type.add(name=name)
    for each in fields:
        label = FieldDescriptorProto.LABEL_REPEATED if each.repeated else FieldDescriptorProto.LABEL_OPTIONAL
        field = message.field.add(name=each.name, number=each.number, label=label)
        if isinstance(each.kind, str):
            field.type, field.type_name = FieldDescriptorProto.TYPE_MESSAGE, f".{file.package}.{each.kind}"
        else:
            field.type = each.kind
        if each.oneof:
            if not message.oneof_decl:
                message.oneof_decl.add(name=each.oneof)
            field.oneof_index = 0


def _add_method(file: FileDescriptorProto, service: str, name: str, takes: str, gives: str) -> Any:
    package = f".{file.package}"
    return file.service.add(name=service).method.add(
        name=name, input_type=f"{package}.{takes}", output_type=f"{package}.{gives}"
    )
