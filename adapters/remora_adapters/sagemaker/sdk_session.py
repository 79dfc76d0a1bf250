"""Calls of a deployment through the session of SageMaker's SDK (version 3).

The session adds the values of the SDK's configuration file (VPC, KMS key, tags, network isolation) to a model and an
endpoint configuration. Needs `sagemaker-core`, the part of `sagemaker` with the session.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from remora_adapters.sagemaker.deploying import ApiCall


def make_caller(boto_session: Any) -> Callable[[ApiCall], None]:
    """Return the function that makes SageMaker's calls. Raises ImportError without the SDK."""
    session = import_module("sagemaker.core.helper.session_helper").Session(boto_session)

    def make(call: ApiCall) -> None:
        arguments = call.arguments
        if call.operation == "create_model":
            session.create_model(arguments["ModelName"], arguments["ExecutionRoleArn"], arguments["PrimaryContainer"])
        elif call.operation == "create_endpoint_config":
            session.create_endpoint_config(
                arguments["EndpointConfigName"],
                arguments["ProductionVariants"],
                async_inference_config_dict=arguments.get("AsyncInferenceConfig"),
            )
        elif call.operation == "create_endpoint":
            session.create_endpoint(arguments["EndpointName"], arguments["EndpointConfigName"], wait=False)
        else:  # because the session lacks half of its arguments and adds nothing
            session.sagemaker_client.update_endpoint(**arguments)

    return make
