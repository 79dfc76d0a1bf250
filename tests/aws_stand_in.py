"""moto's server as a stand-in for AWS, with the few answers that it lacks; the law: it lives as long as its stdin.

Run by its path in an environment that has moto; prints its address. Nobody but FILLED answered what is listed there.
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
    """As AWS: an endpoint that is there, a configuration that is there, at once in service with the new one."""
    backend, name = self.sagemaker_backend, self._get_param("EndpointName")
    backend.describe_endpoint(name)
    before = backend.endpoints[name]
    after = backend.create_endpoint(name, self._get_param("EndpointConfigName"), before.tags)
    if self._get_param("RetainAllVariantProperties"):
        after.production_variants = before.production_variants
    return ActionResult({"EndpointArn": after.arn})


def without_empty_capture(moto: property) -> property:
    """An endpoint as AWS shows one that captures no data: without a word of it."""

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
