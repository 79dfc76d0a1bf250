"""moto's server as a stand-in for AWS, with the few answers that it lacks; the law: it lives as long as its stdin.

Run by its path in an environment that has moto; prints its address. Nobody but FILLED answered what is listed there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from moto.applicationautoscaling.responses import ApplicationAutoScalingResponse
from moto.sagemaker.models import FakeEndpointConfig
from moto.server import ThreadedMotoServer

# Owner, attribute, what it becomes, and why.
FILLED: list[tuple[Any, str, Callable[..., Any], str]] = [
    (ApplicationAutoScalingResponse, "list_tags_for_resource", lambda self: '{"Tags": {}}', "not implemented"),
    (FakeEndpointConfig, "validate_instance_type", lambda self, instance_type: None, "its list ends with g4dn"),
    (
        FakeEndpointConfig,
        "cloudformation_name_type",
        staticmethod(lambda: "EndpointConfigName"),
        "names are passed over",
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
