"""A Terraform provider that knows what exists and does nothing: schemas in, `terraform validate` and mocked tests out.

usage: stub_provider.py SCHEMAS.json NAME

Serves plugin protocol 6 on a socket, and prints one line for TF_REATTACH_PROVIDERS; ends with its standard
input. Runs in an environment with `grpcio` and the protocol's generated messages (make test-infra makes it).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
from tf.gen import tfplugin_pb2 as pb
from tf.gen import tfplugin_pb2_grpc as rpc

# What the blocks of the providers hold that the modules and examples have.
PROVIDER: dict[str, Any] = {
    "attributes": {"subscription_id": {"type": "string"}},
    "blocks": {"features": {"attributes": {}, "blocks": {}}},
}


def main() -> int:
    schemas = json.loads(Path(sys.argv[1]).read_text())
    name = sys.argv[2]
    server = grpc.server(futures.ThreadPoolExecutor(4), options=[("grpc.max_receive_message_length", 256 << 20)])
    rpc.add_ProviderServicer_to_server(Stub(schemas), server)
    with tempfile.TemporaryDirectory() as place:
        socket = f"{place}/provider.sock"
        server.add_insecure_port(f"unix://{socket}")
        server.start()
        address = {"Network": "unix", "String": socket}
        print(json.dumps({name: reattach(address)}), flush=True)
        sys.stdin.read()
        server.stop(0)
    return 0


def reattach(address: dict[str, str]) -> dict[str, Any]:
    return {"Protocol": "grpc", "ProtocolVersion": 6, "Pid": os.getpid(), "Test": True, "Addr": address}


class Stub(rpc.ProviderServicer):  # type: ignore[misc]
    """Answers what Terraform asks before it makes anything. Plans and applies come from Terraform's own mocks."""

    def __init__(self, schemas: dict[str, Any]) -> None:
        self._schemas = schemas

    def GetMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.GetMetadata.Response(
            resources=[pb.GetMetadata.ResourceMetadata(type_name=name) for name in self._schemas["resources"]],
            data_sources=[pb.GetMetadata.DataSourceMetadata(type_name=name) for name in self._schemas["data"]],
        )

    def GetProviderSchema(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.GetProviderSchema.Response(
            provider=schema(PROVIDER),
            resource_schemas={name: schema(block) for name, block in self._schemas["resources"].items()},
            data_source_schemas={name: schema(block) for name, block in self._schemas["data"].items()},
        )

    def ValidateProviderConfig(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.ValidateProviderConfig.Response()

    def ValidateResourceConfig(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.ValidateResourceConfig.Response()

    def ValidateDataResourceConfig(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.ValidateDataResourceConfig.Response()

    def ConfigureProvider(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.ConfigureProvider.Response()

    def StopProvider(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.StopProvider.Response()


def schema(block: dict[str, Any]) -> Any:
    return pb.Schema(version=0, block=encoded(block))


def encoded(block: dict[str, Any]) -> Any:
    return pb.Schema.Block(
        attributes=[
            pb.Schema.Attribute(
                name=name,
                type=json.dumps(described["type"]).encode(),
                required=bool(described.get("required")),
                # What the provider may fill in and the caller may say cannot be told apart by the bindings.
                optional=not described.get("required") and not described.get("computed"),
                computed=bool(described.get("computed")),
            )
            for name, described in sorted(block["attributes"].items())
        ],
        block_types=[
            pb.Schema.NestedBlock(type_name=name, block=encoded(nested), nesting=pb.Schema.NestedBlock.LIST)
            for name, nested in sorted(block["blocks"].items())
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
