"""Azure ML: trials by header, shares, mirrored traffic, and the return to an earlier version."""

from __future__ import annotations

from typing import Any

import pytest

from deploy_clouds.azure import ENDPOINT, WORKSPACE, FakeAzure
from deploy_clouds.journeys import Deployments
from remora_deploy.deploy.plan import find

PLACE = ["--subscription", "s", "--resource-group", "g", "--workspace", "w"]


@pytest.fixture
def stage() -> Deployments:
    def flags(version: str) -> list[str]:
        return ["--image", "w.azurecr.io/remora:1", "--model", f"azureml://datastores/d/paths/models/{version}"]

    return Deployments("azureml", FakeAzure(), flags, PLACE)


def deployments(azure: Any) -> list[str]:
    return [key.rpartition("/")[2] for key in azure.resources if key.startswith(f"{ENDPOINT}/deployments/")]


def test_a_new_deployment_is_asked_by_header_before_it_gets_traffic(stage: Deployments) -> None:
    azure: Any = stage.cloud
    assert stage.deploy("v1"), stage.text()
    azure.calls.clear()
    assert stage.deploy("v2"), stage.text()
    trial = next(at for at, call in enumerate(azure.calls) if call.target == "service")
    moved = [
        at for at, call in enumerate(azure.calls) if call.arguments.get("path") == ENDPOINT and "body" in call.arguments
    ]
    assert trial < moved[0]
    assert azure.calls[trial].arguments["headers"]["azureml-model-deployment"] in deployments(azure)
    assert len(deployments(azure)) == 1, "the version before is deleted"


def test_a_share_is_promoted_by_the_same_command_without_it(stage: Deployments) -> None:
    azure: Any = stage.cloud
    assert not stage.deploy("v1", "--traffic", "10")
    assert stage.deploy("v1"), stage.text()
    assert stage.deploy("v2", "--traffic", "10"), stage.text()
    assert sorted(find(azure.resources[ENDPOINT], "properties.traffic").values()) == [10, 90]
    assert stage.deploy("v2"), stage.text()
    assert (azure.serving(), len(deployments(azure))) == ({"v2": 100}, 1)


def test_a_mirror_gets_copies_and_a_rollback_removes_it(stage: Deployments) -> None:
    azure: Any = stage.cloud
    assert stage.deploy("v1"), stage.text()
    assert stage.deploy("v2", "--mirror", "20"), stage.text()
    assert list(find(azure.resources[ENDPOINT], "properties.mirrorTraffic").values()) == [20]
    assert azure.serving() == {"v1": 100}
    assert stage.rollback(), stage.text()
    assert (azure.serving(), len(deployments(azure))) == ({"v1": 100}, 1)
    assert find(azure.resources[ENDPOINT], "properties.mirrorTraffic") == {}


def test_the_shadow_of_a_release_is_a_mirror(stage: Deployments) -> None:
    azure: Any = stage.cloud
    assert stage.deploy("v1"), stage.text()
    assert stage.deploy("v2", "--release", "stable=1,shadow=2:20%"), stage.text()
    assert list(find(azure.resources[ENDPOINT], "properties.mirrorTraffic").values()) == [20]


def test_each_version_has_its_model_and_environment(stage: Deployments) -> None:
    azure: Any = stage.cloud
    assert stage.deploy("v1"), stage.text()
    (name,) = deployments(azure)
    environment = azure.resources[f"{WORKSPACE}/environments/digits/versions/{name.removeprefix('v-')}"]
    config = environment["properties"]["inferenceConfig"]
    assert config["scoringRoute"] == {"path": "/", "port": 5001}
    assert environment["properties"]["image"].startswith("w.azurecr.io/remora@sha256:")
    deployment = azure.resources[f"{ENDPOINT}/deployments/{name}"]
    assert find(deployment, "properties.requestSettings.requestTimeout") == "PT90S"
    assert stage.undeploy(), stage.text()
    assert azure.resources == {}


def test_a_gpu_is_required_of_the_server(stage: Deployments) -> None:
    azure: Any = stage.cloud
    image = azure.image
    azure.image = lambda name: {**image(name), "labels": {"remora.cuda": "12", "remora.platform": "azureml"}}
    assert stage.deploy("v1", "--instance-type", "Standard_NC4as_T4_v3"), stage.text()
    (name,) = deployments(azure)
    variables = find(azure.resources[f"{ENDPOINT}/deployments/{name}"], "properties.environmentVariables")
    assert variables == {"REMORA_REQUIRE_GPU": "true"}


def test_requests_and_answers_are_captured_by_a_new_version(stage: Deployments) -> None:
    azure: Any = stage.cloud
    assert stage.deploy("v1"), stage.text()
    (plain,) = deployments(azure)
    assert find(azure.resources[f"{ENDPOINT}/deployments/{plain}"], "properties.dataCollector") is None
    assert stage.deploy("v1", "--capture-percent", "20"), stage.text()
    (name,) = deployments(azure)
    assert name != plain
    captured = find(azure.resources[f"{ENDPOINT}/deployments/{name}"], "properties.dataCollector.collections")
    assert captured == {key: {"dataCollectionMode": "Enabled", "samplingRate": 0.2} for key in ("request", "response")}


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--capture-percent", "101"), "0 to 100 percent"),
        (("--mirror", "60"), "0 to 50 percent"),
        (("--instances", "0"), "at least one instance"),
        (("--model", "models"), "a location that the workspace reads"),
        (("--mirror", "10", "--traffic", "10"), "exclude each other"),
    ],
)
def test_a_value_that_the_platform_refuses_is_an_error_before_any_call(
    stage: Deployments, flags: tuple[str, ...], text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        stage.build("v1", *flags)
