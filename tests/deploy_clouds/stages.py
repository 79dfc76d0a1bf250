"""One stage for each platform: its stand-in, and the flags of a version."""

from __future__ import annotations

from collections.abc import Callable

from deploy_clouds.aws import FakeAws
from deploy_clouds.azure import FakeAzure
from deploy_clouds.cluster import FakeCluster
from deploy_clouds.docker import FakeDocker
from deploy_clouds.google import FakeGoogle
from deploy_clouds.helm import FakeHelm
from deploy_clouds.journeys import Deployments


def sagemaker() -> Deployments:
    image = "123456789012.dkr.ecr.eu-west-1.amazonaws.com/remora:1"

    def flags(version: str) -> list[str]:
        return ["--image", image, "--model", f"s3://bucket/models/{version}/"]

    return Deployments("sagemaker", FakeAws(), flags, ["--region", "eu-west-1"])


def aws_lambda() -> Deployments:
    stage = sagemaker()
    return Deployments("lambda", stage.cloud, stage.flags, stage.place)


def knative() -> Deployments:
    def flags(version: str) -> list[str]:
        return ["--image", "registry.example/remora:1", "--model", f"s3://bucket/models/{version}/"]

    return Deployments("knative", FakeCluster(), flags)


def kserve() -> Deployments:
    stage = knative()
    return Deployments("kserve", stage.cloud, stage.flags)


def helm() -> Deployments:
    return Deployments("helm", FakeHelm(), knative().flags)


def compose() -> Deployments:
    return Deployments("compose", FakeDocker(), knative().flags)


def cloud_run() -> Deployments:
    def flags(version: str) -> list[str]:
        return ["--image", "europe-west4-docker.pkg.dev/p/ml/remora:1", "--model", f"gs://bucket/models/{version}/"]

    return Deployments("cloud-run", FakeGoogle(), flags, ["--project", "p", "--region", "europe-west4"])


def vertex() -> Deployments:
    stage = cloud_run()
    return Deployments("vertex", stage.cloud, stage.flags, stage.place)


def azureml() -> Deployments:
    def flags(version: str) -> list[str]:
        return ["--image", "w.azurecr.io/remora:1", "--model", f"azureml://datastores/d/paths/models/{version}"]

    place = ["--subscription", "s", "--resource-group", "g", "--workspace", "w"]
    return Deployments("azureml", FakeAzure(), flags, place)


STAGES: dict[str, Callable[[], Deployments]] = {
    "sagemaker": sagemaker,
    "lambda": aws_lambda,
    "knative": knative,
    "kserve": kserve,
    "helm": helm,
    "compose": compose,
    "cloud-run": cloud_run,
    "vertex": vertex,
    "azureml": azureml,
}
