"""KServe: trials without traffic, shares, the mode Standard, and the objects that are applied."""

from __future__ import annotations

from typing import Any

import pytest

from deploy_clouds.cluster import ISVC, RUNTIME, FakeCluster
from deploy_clouds.journeys import Deployments


@pytest.fixture
def stage() -> Deployments:
    def flags(version: str) -> list[str]:
        return ["--image", "registry.example/remora:1", "--model", f"s3://bucket/models/{version}/"]

    return Deployments("kserve", FakeCluster(), flags)


def predictor(cluster: Any) -> Any:
    return cluster.objects[ISVC, "digits"]["spec"]["predictor"]


def test_a_rollback_waits_as_long_as_a_deployment_for_a_node_with_a_gpu(stage: Deployments) -> None:
    for version in ("v1", "v2"):
        assert stage.deploy(version), stage.text()
    service = stage.service()
    assert service.rollback(stage.runner().read(service))[-1].limit_s == 900


def test_a_new_version_is_asked_at_its_tag_without_traffic(stage: Deployments) -> None:
    cluster: Any = stage.cloud
    assert stage.deploy("v1"), stage.text()
    cluster.calls.clear()
    assert stage.deploy("v2"), stage.text()
    (asked,) = [call.arguments["url"] for call in cluster.calls if call.target == "http"]
    assert asked == "http://latest-digits-predictor.default.example.com/v2/models/digits/infer"
    assert "canaryTrafficPercent" not in predictor(cluster), "all of the traffic in the end"


def test_a_share_is_promoted_by_the_same_command_without_it(stage: Deployments) -> None:
    cluster: Any = stage.cloud
    assert not stage.deploy("v1", "--traffic", "10")
    assert stage.deploy("v1"), stage.text()
    assert stage.deploy("v2", "--traffic", "10"), stage.text()
    assert predictor(cluster)["canaryTrafficPercent"] == 10
    assert cluster.serving() == {"v1": 90, "v2": 10}
    assert stage.deploy("v2"), stage.text()
    assert cluster.serving() == {"v2": 100}


def test_the_predictor_names_its_runtime_account_and_storage(stage: Deployments) -> None:
    cluster: Any = stage.cloud
    assert stage.deploy("v1", "--service-account", "reader"), stage.text()
    (runtime,) = [each for (kind, _), each in cluster.objects.items() if kind == RUNTIME]
    assert predictor(cluster)["model"]["runtime"] == runtime["metadata"]["name"]
    assert predictor(cluster)["serviceAccountName"] == "reader"
    assert predictor(cluster)["model"]["storageUri"] == "s3://bucket/models/v1"
    (container,) = runtime["spec"]["containers"]
    assert (container["name"], container["readinessProbe"]["httpGet"]["port"]) == ("kserve-container", 8080)
    assert stage.undeploy(), stage.text()
    assert cluster.objects == {}


def test_the_mode_standard_has_no_trial_and_refuses_shares(stage: Deployments) -> None:
    cluster: Any = stage.cloud
    assert stage.deploy("v1", "--mode", "Standard"), stage.text()
    annotations = cluster.objects[ISVC, "digits"]["metadata"]["annotations"]
    assert annotations["serving.kserve.io/deploymentMode"] == "Standard"
    assert predictor(cluster)["minReplicas"] == 1
    assert not stage.deploy("v2", "--mode", "Standard", "--traffic", "10")
    assert "needs the mode Knative" in stage.text()


def test_a_storage_secret_belongs_to_the_account(stage: Deployments) -> None:
    with pytest.raises(ValueError, match="storage initializer reads the secrets of the service account"):
        stage.build("v1", "--storage-secret", "keys")
