"""The stand-in of AWS whose SageMaker refuses and undoes updates as SageMaker does.

An update to an image whose digest is all `f` ends as a rollback: the endpoint is in service again by its earlier
configuration. An update to another instance type is refused while the endpoint's variant is a scalable target. What an
endpoint serves by cannot be told from the calls that succeeded, which is the point.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from moto.applicationautoscaling.models import applicationautoscaling_backends
from moto.core.exceptions import JsonRESTError
from moto.core.responses import ActionResult
from moto.sagemaker.responses import SageMakerResponse

from support.servers import aws_stand_in

MOTOS_MODEL = SageMakerResponse.create_model
MOTOS_CREATION = SageMakerResponse.create_endpoint
BROKEN = f"@sha256:{'f' * 64}"


def update_endpoint(self: Any) -> ActionResult:
    backend, name = self.sagemaker_backend, self._get_param("EndpointName")
    backend.describe_endpoint(name)
    endpoint = backend.endpoints[name]
    wanted = self._get_param("EndpointConfigName")
    (before,), (after,) = (
        backend.describe_endpoint_config(each)["ProductionVariants"] for each in (endpoint.endpoint_config_name, wanted)
    )
    targets = applicationautoscaling_backends[self.current_account][self.region].targets
    scaled = [key for per_dimension in targets.values() for key in per_dimension if key.startswith(f"endpoint/{name}/")]
    if scaled and before.get("InstanceType") != after.get("InstanceType"):
        raise JsonRESTError("ValidationException", "The instance type cannot change: deregister the scalable target.")
    if backend.describe_model(after["ModelName"]).response_object["PrimaryContainer"]["Image"].endswith(BROKEN):
        return ActionResult({"EndpointArn": endpoint.arn})
    return remembered(self, aws_stand_in.update_endpoint(self))


def create_model(self: Any) -> ActionResult:
    """Keep the isolation and show no empty VPC: the provider replaces a model that has lost either."""
    answer = MOTOS_MODEL(self)
    model = self.sagemaker_backend.describe_model(self._get_param("ModelName"))
    model.enable_network_isolation = self._get_param("EnableNetworkIsolation", False)
    model.vpc_config = model.vpc_config or None
    return answer


def create_endpoint(self: Any) -> ActionResult:
    return remembered(self, MOTOS_CREATION(self))


def remembered(self: Any, answer: ActionResult) -> ActionResult:
    """Keep the deployment configuration: the provider replaces an endpoint that has lost its alarms."""
    endpoint = self.sagemaker_backend.endpoints[self._get_param("EndpointName")]
    endpoint.last_deployment_config = self._get_param("DeploymentConfig")
    return answer


if __name__ == "__main__":
    aws_stand_in.FILLED.append((SageMakerResponse, "create_model", create_model, "forgets its network"))
    aws_stand_in.FILLED.append((SageMakerResponse, "create_endpoint", create_endpoint, "forgets its deployment"))
    aws_stand_in.FILLED.append((SageMakerResponse, "update_endpoint", update_endpoint, "as SageMaker undoes it"))
    aws_stand_in.main()
