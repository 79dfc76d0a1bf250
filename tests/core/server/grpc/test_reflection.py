"""Reflection on bytes: the protocol's own names, and the same answers as the service of gRPC's own package."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool

from remora.errors import MalformedError
from remora.server.grpc.reflection import Reflection, public_files

judge = pytest.importorskip(
    "grpc_reflection.v1alpha.reflection", reason="grpcio-reflection is not installed: pip install '.[dev]'"
)
from grpc_reflection.v1alpha import reflection_pb2 as messages  # noqa: E402 - only where the tests can run

SERVICES = ("inference.GRPCInferenceService", "grpc.health.v1.Health")
Extension = messages.ExtensionRequest


def answers_to(*requests: Any) -> list[Any]:
    sent = iter([each.SerializeToString() for each in requests])
    return [messages.ServerReflectionResponse.FromString(each) for each in map(Reflection(SERVICES).answer, sent)]


def file_names(response: Any) -> list[str]:
    files = response.file_descriptor_response.file_descriptor_proto
    return sorted(FileDescriptorProto.FromString(each).name for each in files)


@pytest.mark.parametrize(
    "request_",
    [
        messages.ServerReflectionRequest(host="h", file_containing_symbol="inference.GRPCInferenceService"),
        messages.ServerReflectionRequest(file_containing_symbol="inference.ModelInferRequest"),
        messages.ServerReflectionRequest(file_containing_symbol="grpc.health.v1.Health.Check"),
        messages.ServerReflectionRequest(file_containing_symbol="grpc.reflection.v1.ServerReflection"),
        messages.ServerReflectionRequest(file_containing_symbol="grpc.reflection.v1alpha.ServerReflection"),
        messages.ServerReflectionRequest(file_containing_symbol="remora.Nothing"),
        messages.ServerReflectionRequest(file_by_filename="grpc_service.proto"),
        messages.ServerReflectionRequest(file_by_filename="nothing.proto"),
        messages.ServerReflectionRequest(all_extension_numbers_of_type="inference.ModelConfig"),
        messages.ServerReflectionRequest(all_extension_numbers_of_type="inference.Nothing"),
        messages.ServerReflectionRequest(
            file_containing_extension=Extension(containing_type="inference.ModelConfig", extension_number=1)
        ),
    ],
)
def test_an_answer_is_that_of_grpcs_own_package(request_: Any) -> None:
    pool = DescriptorPool()
    for file in public_files():
        pool.AddSerializedFile(file.SerializeToString())
    servicer = judge.ReflectionServicer(SERVICES, pool=pool)
    (expected,) = servicer.ServerReflectionInfo(iter([request_]), None)
    (found,) = answers_to(request_)
    assert file_names(found) == file_names(expected)
    assert found.valid_host == request_.host
    expected.valid_host = request_.host  # which that package leaves out
    for each in (found, expected):
        del each.file_descriptor_response.file_descriptor_proto[:]
    assert found == expected


def test_all_services_are_listed_in_order() -> None:
    (found,) = answers_to(messages.ServerReflectionRequest(list_services="*"))
    assert [each.name for each in found.list_services_response.service] == [
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
        "inference.GRPCInferenceService",
    ]


def test_each_request_of_a_stream_is_answered_and_one_that_asks_nothing_is_an_error() -> None:
    nothing, listed = answers_to(messages.ServerReflectionRequest(), messages.ServerReflectionRequest(list_services=""))
    assert nothing.error_response.error_code == 3
    assert listed.list_services_response.service


def test_damaged_bytes_are_malformed() -> None:
    with pytest.raises(MalformedError, match="ServerReflectionRequest"):
        Reflection(SERVICES).answer(b"\xff\xff")


def test_other_paths_are_not_reflections() -> None:
    reflection = Reflection(SERVICES)
    for version in ("v1", "v1alpha"):
        assert reflection.find(f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo") is not None
    assert reflection.find("/grpc.reflection.v1.ServerReflection/Other") is None


def test_no_name_of_ours_is_left_in_the_public_files() -> None:
    assert not [file.name for file in public_files() if b"remora" in file.SerializeToString()]


def test_neither_grpcio_nor_its_packages_are_imported() -> None:
    code = (
        "import sys\n"
        "from remora.server.grpc.reflection import Reflection\n"
        "import remora.server.grpc.listener\n"
        "assert Reflection(('a.B',)).answer(b':\\x00')\n"  # list_services
        "print([name for name in sys.modules if name.startswith('grpc')])\n"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
