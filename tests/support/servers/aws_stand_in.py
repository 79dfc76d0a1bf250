"""moto's server as a double of AWS, with the answers that moto lacks.

Run by its path in an environment that has moto; prints its address and exits when stdin closes. Only FILLED answers the
calls listed there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from moto.applicationautoscaling.responses import ApplicationAutoScalingResponse
from moto.core.responses import ActionResult
from moto.sagemaker.models import FakeEndpoint, FakeEndpointConfig
from moto.sagemaker.responses import SageMakerResponse
from moto.server import ThreadedMotoServer


def update_endpoint(self: Any) -> ActionResult:
    """Update an existing endpoint to an existing configuration, in service at once."""
    backend, name = self.sagemaker_backend, self._get_param("EndpointName")
    backend.describe_endpoint(name)
    before = backend.endpoints[name]
    after = backend.create_endpoint(name, self._get_param("EndpointConfigName"), before.tags)
    if self._get_param("RetainAllVariantProperties"):
        after.production_variants = before.production_variants
    return ActionResult({"EndpointArn": after.arn})


def without_empty_capture(moto: property) -> property:
    """Return an endpoint as AWS describes it without data capture, with the key omitted."""

    def shown(self: Any) -> dict[str, Any]:
        said = moto.__get__(self)
        return {name: value for name, value in said.items() if name != "DataCaptureConfig" or value}

    return property(shown)


# Owner, attribute, what it becomes, and why.
FILLED: list[tuple[Any, str, Callable[..., Any] | property, str]] = [
    (ApplicationAutoScalingResponse, "list_tags_for_resource", lambda self: '{"Tags": {}}', "not implemented"),
    (FakeEndpointConfig, "validate_instance_type", lambda self, instance_type: None, "its list ends with g4dn"),
    (
        FakeEndpointConfig,
        "cloudformation_name_type",
        staticmethod(lambda: "EndpointConfigName"),
        "names are passed over",
    ),
    (SageMakerResponse, "update_endpoint", update_endpoint, "not implemented"),
    (
        FakeEndpoint,
        "response_object",
        without_empty_capture(FakeEndpoint.response_object),
        "a DataCaptureConfig comes back that is empty",
    ),
]


def main() -> None:
    for owner, attribute, filled, _ in FILLED:
        setattr(owner, attribute, filled)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    print(f"http://{host}:{port}", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
