"""Calls of a SageMaker deployment through the session of SageMaker's SDK (version 3).

The session adds the values of the SDK's configuration file (VPC, KMS key, tags, network isolation) to a model and an
endpoint configuration. Needs `sagemaker-core`, the part of `sagemaker` with the session.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from remora.system.install_advice import install_command
from remora_deploy.deploy.aws import AwsCalls, error_of
from remora_deploy.deploy.plan import Call, RefusedError


class SdkCalls(AwsCalls):
    """Makes the creations of SageMaker by its SDK and all other calls by boto3."""

    def __init__(self, region: str | None) -> None:
        super().__init__(region)
        try:
            module = import_module("sagemaker.core.helper.session_helper")
        except ImportError:
            raise RefusedError(f"needs the SDK: {install_command('sagemaker-sdk')}") from None
        try:
            self._sdk = module.Session(self.session)
        except ValueError as error:  # no region
            raise RefusedError(str(error)) from error

    def __call__(self, call: Call) -> Any:
        """Make a call (see `Connection`)."""
        from botocore.exceptions import BotoCoreError, ClientError

        arguments = call.arguments
        try:
            if call.operation == "create_model":
                container = arguments["PrimaryContainer"]
                return self._sdk.create_model(arguments["ModelName"], arguments["ExecutionRoleArn"], container)
            if call.operation == "create_endpoint_config" and not {"ShadowProductionVariants", "DataCaptureConfig"} & {
                *arguments
            }:
                return self._sdk.create_endpoint_config(
                    arguments["EndpointConfigName"],
                    arguments["ProductionVariants"],
                    async_inference_config_dict=arguments.get("AsyncInferenceConfig"),
                )
            if call.operation == "create_endpoint":
                return self._sdk.create_endpoint(arguments["EndpointName"], arguments["EndpointConfigName"], wait=False)
        except (BotoCoreError, ClientError) as error:
            raise error_of(error) from error
        return super().__call__(call)
