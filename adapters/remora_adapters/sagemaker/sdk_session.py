"""A deployment's calls made by the session of SageMaker's own SDK (version 3); the law: it adds, it changes nothing.

What an organisation keeps in that SDK's configuration file (VPC, KMS key, tags, network isolation) is added to a model
and an endpoint configuration. Needs `sagemaker-core`, the part of `sagemaker` that has the session.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from remora_adapters.sagemaker.deploying import ApiCall


def maker(boto_session: Any) -> Callable[[ApiCall], None]:
    """What makes a call of SageMaker's. Raises ImportError where the SDK is not installed."""
    session = import_module("sagemaker.core.helper.session_helper").Session(boto_session)

    def make(call: ApiCall) -> None:
        given = call.arguments
        if call.operation == "create_model":
            session.create_model(given["ModelName"], given["ExecutionRoleArn"], given["PrimaryContainer"])
        elif call.operation == "create_endpoint_config":
            session.create_endpoint_config(
                given["EndpointConfigName"],
                given["ProductionVariants"],
                async_inference_config_dict=given.get("AsyncInferenceConfig"),
            )
        elif call.operation == "create_endpoint":
            session.create_endpoint(given["EndpointName"], given["EndpointConfigName"], wait=False)
        else:  # of which it knows half the arguments, and to which it adds nothing
            session.sagemaker_client.update_endpoint(**given)

    return make
